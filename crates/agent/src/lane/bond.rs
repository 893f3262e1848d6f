// SPDX-License-Identifier: Apache-2.0
//! Makes the bond of the paravirtual NIC and its VFs, and takes it apart.
//!
//! A bond that an agent made has the alias [`BOND_ALIAS`], so that the next agent recognises it. The addresses are
//! always on at least one interface: the new owner gets them before the old one loses them. So an agent that is
//! killed at any step leaves a state that the next one can complete.

use std::fs;
use std::io;
use std::path::Path;

use viola_netdev::{
    IpConfig, Link, add_bond, delete_link, link, links, ports_of, set_active_port, set_alias,
    set_master, set_up,
};

use super::plan::{Pair, is_vf_of};
use super::settings::Settings;

/// Alias of a bond that an agent made.
pub const BOND_ALIAS: &str = "made by viola-agent";
/// Interval in which the bond checks its ports' links, in milliseconds.
const MIIMON_MS: u32 = 20;

fn context(what: &str) -> impl FnOnce(io::Error) -> String {
    let what = what.to_owned();
    move |e| format!("{what}: {e}")
}

/// The NIC of the settings, or the VM's only virtio NIC.
fn nic_of(settings: &Settings, all: &[Link], sys: &Path) -> Result<Link, String> {
    if !settings.nic.is_empty() {
        let found = all.iter().find(|l| l.name == settings.nic);
        return found
            .cloned()
            .ok_or_else(|| format!("there is no interface {}", settings.nic));
    }
    let is_virtio = |l: &&Link| {
        let driver = sys.join("class/net").join(&l.name).join("device/driver");
        let name = fs::read_link(driver).unwrap_or_default();
        l.kind.is_none() && name.file_name().is_some_and(|n| n == "virtio_net")
    };
    let mut found = all.iter().filter(is_virtio);
    match (found.next(), found.next()) {
        (Some(only), None) => Ok(only.clone()),
        (None, _) => Err("there is no virtio NIC; name it by `nic`".into()),
        (Some(one), Some(other)) => Err(format!(
            "there are {} and {}; name one by `nic`",
            one.name, other.name
        )),
    }
}

fn is_bond(link: &Link) -> bool {
    link.kind.as_deref() == Some("bond")
}

/// Finds the bond of the paravirtual NIC, or makes one.
///
/// # Errors
/// One sentence that names the failed step; everything is as before.
pub fn find_or_make(settings: &Settings) -> Result<Pair, String> {
    let all = links().map_err(context("interfaces"))?;
    let nic = nic_of(settings, &all, Path::new("/sys"))?;
    let mac = nic
        .mac
        .ok_or_else(|| format!("{} has no Ethernet address", nic.name))?;
    let master = all.iter().find(|l| Some(l.index) == nic.master);
    let bond = match master {
        Some(bond) if is_bond(bond) && bond.alias.as_deref() != Some(BOND_ALIAS) => {
            // a bond that the operator made
            let (bond, nic) = (bond.index, nic.index);
            return Ok(Pair { bond, nic, mac });
        }
        Some(bond) if is_bond(bond) => Some(bond),
        Some(other) => return Err(format!("{} is a port of {}", nic.name, other.name)),
        None => all.iter().find(|l| l.name == settings.bond),
    };
    if let Some(there) = bond.filter(|b| b.alias.as_deref() != Some(BOND_ALIAS)) {
        return Err(format!(
            "{} exists, and {} is not a port of it; set `bond` in [lane] to another name",
            there.name, nic.name
        ));
    }
    let bond = match bond {
        Some(half) => half.index,
        None => {
            let name = &settings.bond;
            add_bond(name, mac, nic.mtu, MIIMON_MS)
                .map_err(context(&format!("cannot make bond {name}")))?;
            let bond = link(name).map_err(context(name))?.index;
            set_alias(bond, BOND_ALIAS).map_err(context(name))?;
            bond
        }
    };
    let pair = Pair {
        bond,
        nic: nic.index,
        mac,
    };
    make(&pair, &nic).inspect_err(|_| {
        // the first error is the one to report
        let _ = dismantle(&pair);
    })?;
    Ok(pair)
}

/// The steps that make a bond, of which an earlier agent may have done some.
fn make(pair: &Pair, nic: &Link) -> Result<(), String> {
    let config = IpConfig::read(pair.nic).map_err(context("addresses"))?;
    set_up(pair.bond, true).map_err(context("cannot set the bond up"))?;
    config
        .add_to(pair.bond)
        .map_err(context("cannot move addresses and routes to the bond"))?;
    if nic.master.is_none() {
        set_up(pair.nic, false).map_err(context(&nic.name))?;
        let name = &nic.name;
        set_master(pair.nic, Some(pair.bond))
            .map_err(context(&format!("cannot add {name} to the bond")))?;
    }
    config
        .remove_from(pair.nic)
        .map_err(context("cannot remove the old addresses"))
}

/// Releases the VFs, and takes the bond apart if an agent made it.
///
/// # Errors
/// One sentence that names the failed step; the next call continues.
pub fn dismantle(pair: &Pair) -> Result<(), String> {
    let all = links().map_err(context("interfaces"))?;
    let Some(bond) = all.iter().find(|l| l.index == pair.bond) else {
        return Ok(());
    };
    if bond.active != Some(pair.nic) {
        // fails when the port is not in the bond, or has no link
        let _ = set_active_port(pair.bond, pair.nic);
    }
    for vf in ports_of(&all, pair.bond).filter(|l| is_vf_of(pair, l)) {
        release_vf(vf.index);
    }
    if bond.alias.as_deref() != Some(BOND_ALIAS) {
        return Ok(());
    }
    let config = IpConfig::read(pair.bond).map_err(context("addresses"))?;
    let is_port = |l: &Link| l.index == pair.nic && l.master == Some(pair.bond);
    if all.iter().any(is_port) {
        set_master(pair.nic, None).map_err(context("cannot remove the NIC from the bond"))?;
    }
    set_up(pair.nic, true).map_err(context("cannot set the NIC up"))?;
    config
        .add_to(pair.nic)
        .map_err(context("cannot move addresses and routes back to the NIC"))?;
    delete_link(pair.bond).map_err(context("cannot remove the bond"))
}

/// Removes a VF from the bond and takes it down. A VF that is gone meanwhile is fine.
pub fn release_vf(vf: u32) {
    let _ = set_master(vf, None);
    let _ = set_up(vf, false);
}

/// Takes the bond of a killed agent apart. Returns a sentence if there was one.
///
/// # Errors
/// One sentence that names the failed step.
pub fn restore_leftover(settings: &Settings) -> Result<Option<String>, String> {
    let all = links().map_err(context("interfaces"))?;
    let made = |l: &&Link| is_bond(l) && l.alias.as_deref() == Some(BOND_ALIAS);
    let Some(bond) = all.iter().find(made) else {
        return Ok(None);
    };
    let nic = nic_of(settings, &all, Path::new("/sys"))?;
    let mac = bond.mac.unwrap_or_default();
    dismantle(&Pair {
        bond: bond.index,
        nic: nic.index,
        mac,
    })?;
    Ok(Some(format!(
        "removed bond {}; {} is as before",
        bond.name, nic.name
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn named(name: &str) -> Link {
        Link {
            name: name.into(),
            ..Link::default()
        }
    }

    #[test]
    fn the_only_virtio_nic_is_found_and_two_are_refused() {
        let sys = tempfile::tempdir().unwrap();
        for (nic, driver) in [("a0", "virtio_net"), ("b0", "igbvf"), ("c0", "virtio_net")] {
            let drivers = sys.path().join("bus/pci/drivers").join(driver);
            fs::create_dir_all(&drivers).unwrap();
            let device = sys.path().join("class/net").join(nic).join("device");
            fs::create_dir_all(&device).unwrap();
            symlink(&drivers, device.join("driver")).unwrap();
        }
        let mut settings = Settings::default();
        let two = [named("lo"), named("a0"), named("b0")];
        let found = nic_of(&settings, &two, sys.path()).unwrap();
        assert_eq!(found.name, "a0");
        let three = [named("a0"), named("b0"), named("c0")];
        let error = nic_of(&settings, &three, sys.path()).unwrap_err();
        assert_eq!(error, "there are a0 and c0; name one by `nic`");
        assert!(nic_of(&settings, &[named("lo")], sys.path()).is_err());
        settings.nic = "b0".into();
        let found = nic_of(&settings, &three, sys.path()).unwrap();
        assert_eq!(found.name, "b0");
    }
}
