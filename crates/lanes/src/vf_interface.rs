// SPDX-License-Identifier: Apache-2.0
//! The network interface that a VF has on the host, for guests that get the interface rather than
//! the PCI device.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use viola_netdev::{Link, Mac, link, links, move_to, set_mac, set_up};

use crate::error::LaneError;
use crate::pool::VfDevice;
use crate::steps::StepTimes;

/// Time limit for an interface to appear after its driver was bound.
const INTERFACE_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Finds the interface of a PCI device in the calling thread's namespace. Kernels before 5.14 do not
/// report the device of an interface; there it is the one with the name that [`acquire`] gives.
pub(crate) fn find(device: &str) -> io::Result<Option<Link>> {
    let name = name_of(device);
    let has = |l: &Link| match &l.device {
        Some(own) => own == device,
        None => l.name == name,
    };
    // listing all interfaces is slow where there are many: try the name first
    match link(&name) {
        Ok(found) if has(&found) => Ok(Some(found)),
        _ => Ok(links()?.into_iter().find(has)),
    }
}

/// Gives the VF's interface the guest's address by the VF's own driver, if the driver accepts it
/// while the PF has none for the VF. The VF then needs no reset to learn the address.
pub(crate) fn prepare(vf: &VfDevice, mac: Mac, steps: &mut StepTimes) -> Result<(), LaneError> {
    steps.time("driver", || vf.pf.bind(&vf.address, None, false))?;
    let found = find(&vf.address).map_err(LaneError::net(&vf.address))?;
    if let Some(found) = found.filter(|l| l.mac != Some(mac)) {
        // if the driver refuses, `acquire` resets the VF instead
        let _ = steps.time("own address", || set_mac(found.index, mac));
    }
    Ok(())
}

/// Name of a VF's interface while viola has it: `vf` and the letters and digits of its PCI address,
/// which makes it unique.
pub(crate) fn name_of(address: &str) -> String {
    let short = address.strip_prefix("0000:").unwrap_or(address);
    let word: String = short.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("vf{word}")
}

/// The network namespace of this process.
pub(crate) fn own_netns() -> Result<OwnedFd, LaneError> {
    let path = PathBuf::from("/proc/self/ns/net");
    let file = File::open(&path).map_err(LaneError::file(&path))?;
    Ok(file.into())
}

/// Returns the VF's interface in this namespace: down, named by [`name_of`], with the address that
/// the PF has set. Some drivers take that address at once, some when the VF is reset, which taking
/// it down does, and some only when they are bound.
pub(crate) fn acquire(vf: &VfDevice, mac: Mac, steps: &mut StepTimes) -> Result<Link, LaneError> {
    steps.time("driver", || vf.pf.bind(&vf.address, None, false))?;
    let changed = |what| LaneError::net(format!("{}: {what}", vf.address));
    let mut found = wait_for(vf)?;
    if found.mac != Some(mac) {
        let up = steps.time("up", || set_up(found.index, true));
        up.map_err(changed("up"))?;
        let down = steps.time("down", || set_up(found.index, false));
        down.map_err(changed("down"))?;
        found = wait_for(vf)?;
    }
    if found.mac != Some(mac) {
        steps.time("driver", || vf.pf.bind(&vf.address, None, true))?;
        found = wait_for(vf)?;
    }
    if found.up {
        set_up(found.index, false).map_err(changed("down"))?;
    }
    let name = name_of(&vf.address);
    if found.name != name {
        let here = own_netns()?;
        // moving it into its own namespace renames it
        let renamed = steps.time("name", || move_to(found.index, here.as_fd(), &name));
        renamed.map_err(changed("another name"))?;
        found.name = name;
    }
    Ok(found)
}

fn wait_for(vf: &VfDevice) -> Result<Link, LaneError> {
    let end = Instant::now() + INTERFACE_TIMEOUT;
    loop {
        match find(&vf.address).map_err(LaneError::net(&vf.address))? {
            Some(found) => return Ok(found),
            None if Instant::now() > end => {
                let what = format!("{} has no interface here", vf.address);
                return Err(LaneError::Unusable(what));
            }
            None => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_vfs_are_unique_and_short_enough_for_an_interface() {
        assert_eq!(name_of("0000:01:10.2"), "vf01102");
        assert_eq!(name_of("10000:e1:10.2"), "vf10000e1102");
        assert!(name_of("10000:e1:1f.7").len() <= viola_netdev::MAX_IFNAME_BYTES);
    }
}
