// SPDX-License-Identifier: Apache-2.0
//! The bond of a VF and its paravirtual NIC: found, made, and taken apart again.
//!
//! What an agent made has a word beside it ([`MADE`]), so that the next one knows it whatever became of the first. At no
//! moment does nobody have the addresses: who gets them has them before who had them gives them up, so that an agent that is
//! killed at any step leaves what the next one can finish.

use std::fs;
use std::io;
use std::path::Path;

use viola_netdev::{
    IpConfig, Link, add_bond, delete_link, link, links, ports_of, set_active_port, set_alias,
    set_master, set_up,
};

use super::plan::{Pair, could_be};
use super::settings::Settings;

/// Beside a bond that an agent made.
pub const MADE: &str = "made by viola-agent";
/// How often a bond looks at the links of its ports, ms.
const MIIMON: u32 = 20;

fn told(what: &str) -> impl FnOnce(io::Error) -> String {
    let what = what.to_owned();
    move |e| format!("{what}: {e}")
}

/// The interface of the settings, or the only one with the driver of virtio NICs.
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

/// Finds the bond with the paravirtual NIC in it, or makes one of that.
///
/// # Errors
/// One sentence; then everything is as before.
pub fn begin(settings: &Settings) -> Result<Pair, String> {
    let all = links().map_err(told("interfaces"))?;
    let nic = nic_of(settings, &all, Path::new("/sys"))?;
    let mac = nic
        .mac
        .ok_or_else(|| format!("{} has no Ethernet address", nic.name))?;
    let master = all.iter().find(|l| Some(l.index) == nic.master);
    let bond = match master {
        Some(bond) if is_bond(bond) && bond.alias.as_deref() != Some(MADE) => {
            // a bond by somebody else
            let (bond, nic) = (bond.index, nic.index);
            return Ok(Pair { bond, nic, mac });
        }
        Some(bond) if is_bond(bond) => Some(bond),
        Some(other) => return Err(format!("{} is a port of {}", nic.name, other.name)),
        None => all.iter().find(|l| l.name == settings.bond),
    };
    if let Some(there) = bond.filter(|b| b.alias.as_deref() != Some(MADE)) {
        return Err(format!(
            "{} is there, and {} is no port of it",
            there.name, nic.name
        ));
    }
    let bond = match bond {
        Some(half) => half.index,
        None => {
            let name = &settings.bond;
            add_bond(name, mac, nic.mtu, MIIMON).map_err(told(&format!("no bond {name}")))?;
            let bond = link(name).map_err(told(name))?.index;
            set_alias(bond, MADE).map_err(told(name))?;
            bond
        }
    };
    let pair = Pair {
        bond,
        nic: nic.index,
        mac,
    };
    make(&pair, &nic).inspect_err(|_| {
        // what went wrong first is what is told
        let _ = end(&pair);
    })?;
    Ok(pair)
}

/// The steps of making one, of which some may have been made.
fn make(pair: &Pair, nic: &Link) -> Result<(), String> {
    let had = IpConfig::read(pair.nic).map_err(told("addresses"))?;
    set_up(pair.bond, true).map_err(told("the bond does not go up"))?;
    had.add_to(pair.bond)
        .map_err(told("addresses and routes do not go over"))?;
    if nic.master.is_none() {
        set_up(pair.nic, false).map_err(told(&nic.name))?;
        let name = &nic.name;
        set_master(pair.nic, Some(pair.bond))
            .map_err(told(&format!("{name} goes into no bond")))?;
    }
    had.remove_from(pair.nic).map_err(told("old addresses"))
}

/// Lets VFs go, and takes the bond apart if an agent made it.
///
/// # Errors
/// One sentence; what is left is put back by the next call.
pub fn end(pair: &Pair) -> Result<(), String> {
    let all = links().map_err(told("interfaces"))?;
    let Some(bond) = all.iter().find(|l| l.index == pair.bond) else {
        return Ok(());
    };
    if bond.active != Some(pair.nic) {
        // a bond without this port refuses, and one whose port has no link
        let _ = set_active_port(pair.bond, pair.nic);
    }
    for vf in ports_of(&all, pair.bond).filter(|l| could_be(pair, l)) {
        release(vf.index);
    }
    if bond.alias.as_deref() != Some(MADE) {
        return Ok(());
    }
    let had = IpConfig::read(pair.bond).map_err(told("addresses"))?;
    let is_port = |l: &Link| l.index == pair.nic && l.master == Some(pair.bond);
    if all.iter().any(is_port) {
        set_master(pair.nic, None).map_err(told("the bond keeps its port"))?;
    }
    set_up(pair.nic, true).map_err(told("the NIC does not go up"))?;
    let back = had.add_to(pair.nic);
    back.map_err(told("addresses and routes do not go back"))?;
    delete_link(pair.bond).map_err(told("the bond stays"))
}

/// Lets a VF go: it is no port any more, and down. One that is gone meanwhile is as good.
pub fn release(vf: u32) {
    let _ = set_master(vf, None);
    let _ = set_up(vf, false);
}

/// Puts back what an agent that was killed has left; a sentence where there was something.
///
/// # Errors
/// One sentence.
pub fn leftovers(settings: &Settings) -> Result<Option<String>, String> {
    let all = links().map_err(told("interfaces"))?;
    let made = |l: &&Link| is_bond(l) && l.alias.as_deref() == Some(MADE);
    let Some(bond) = all.iter().find(made) else {
        return Ok(None);
    };
    let nic = nic_of(settings, &all, Path::new("/sys"))?;
    let mac = bond.mac.unwrap_or_default();
    end(&Pair {
        bond: bond.index,
        nic: nic.index,
        mac,
    })?;
    Ok(Some(format!(
        "the bond {} is gone, and {} as it was",
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
    fn the_only_virtio_nic_is_found_and_of_two_none() {
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
        let said = nic_of(&settings, &three, sys.path()).unwrap_err();
        assert_eq!(said, "there are a0 and c0; name one by `nic`");
        assert!(nic_of(&settings, &[named("lo")], sys.path()).is_err());
        settings.nic = "b0".into();
        let found = nic_of(&settings, &three, sys.path()).unwrap();
        assert_eq!(found.name, "b0");
    }
}
