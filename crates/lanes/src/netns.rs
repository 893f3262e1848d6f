// SPDX-License-Identifier: Apache-2.0
//! A guest that is a network namespace: a container, say. Its bond (active-backup) has the inner end of its veth as one
//! port, which is its paravirtual path; a VF's interface becomes the other one for as long as the guest has it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viola_netdev::{
    Link, Mac, inside, link, links, move_to, set_active_port, set_address_of, set_master, set_up,
};

use crate::attach::{Attachment, GoesOver, Presence, VfAt};
use crate::error::LaneError;
use crate::steps::Steps;

/// How long an interface may take to come up.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time between two looks at it.
const STEP: Duration = Duration::from_millis(5);

/// Such a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetnsGuest {
    /// The namespace (`/run/netns/n1`, `/proc/PID/ns/net`).
    pub netns: PathBuf,
    /// Its bond.
    pub bond: String,
    /// The bond's port on the paravirtual path.
    pub port: String,
}

impl NetnsGuest {
    fn open(&self) -> Result<OwnedFd, LaneError> {
        let file = File::open(&self.netns).map_err(LaneError::file(&self.netns))?;
        Ok(file.into())
    }

    /// Does something in the namespace.
    fn there<T: Send>(
        &self,
        what: &str,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> Result<T, LaneError> {
        let netns = self.open()?;
        let name = format!("{}: {what}", self.netns.display());
        inside(netns.as_fd(), work)
            .and_then(|done| done)
            .map_err(LaneError::net(name))
    }

    /// All interfaces in it.
    ///
    /// # Errors
    /// [`LaneError::File`] where the namespace is gone.
    pub fn links(&self) -> Result<Vec<Link>, LaneError> {
        self.there("its interfaces", links)
    }

    /// Takes the VF's interface out of the bond and the namespace.
    fn take_out(&self, vf: &VfAt, steps: &mut Steps) -> Result<(), LaneError> {
        let home = home()?;
        let device = vf.address.clone();
        self.there("gives its VF back", move || {
            let Some(found) = find(&device)? else {
                return Ok(());
            };
            if found.master.is_some() {
                // which takes it down as well
                steps.time("out of the bond", || set_master(found.index, None))?;
            }
            steps.time("down", || set_up(found.index, false))?;
            let name = name_of(&device);
            steps.time("move", || move_to(found.index, home.as_fd(), &name))
        })
    }
}

impl Attachment for NetnsGuest {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        let bond = self.bond.clone();
        let bond = self.there(&self.bond, move || link(&bond))?;
        let unfit = |what: &str| {
            let (netns, bond) = (self.netns.display(), &self.bond);
            LaneError::Unfit(format!("{bond} in {netns} {what}"))
        };
        if bond.kind.as_deref() != Some("bond") {
            return Err(unfit("is no bond"));
        }
        bond.mac.ok_or_else(|| unfit("has no Ethernet address"))
    }

    fn prepare(&mut self, vf: &VfAt, mac: Mac, steps: &mut Steps) -> Result<(), LaneError> {
        prepare(vf, mac, steps)
    }

    fn plug(&mut self, vf: &VfAt, steps: &mut Steps) -> Result<(), LaneError> {
        let mac = self.mac()?;
        let ours = ready(vf, mac, steps)?;
        let netns = self.open()?;
        let moved = steps.time("move", || move_to(ours.index, netns.as_fd(), &ours.name));
        moved.map_err(LaneError::net(format!("{} moves", ours.name)))?;
        let (bond, device) = (self.bond.clone(), vf.address.clone());
        let there = &mut *steps;
        let plugged = self.there("takes the VF", move || {
            let (name, bond) = (&bond, link(&bond)?);
            let port = find(&device)?.ok_or(io::ErrorKind::NotFound)?;
            // a bond takes ports that are down, and takes them up itself
            there.time("into the bond", || set_master(port.index, Some(bond.index)))?;
            let begin = Instant::now();
            let end = begin + PATIENCE;
            loop {
                // EINVAL until the bond has seen its link
                let set = set_active_port(bond.index, port.index);
                let active = link(name)?.active;
                match set {
                    _ if active == Some(port.index) => {
                        there.add("link", begin.elapsed());
                        return Ok(());
                    }
                    Err(e) if Instant::now() > end => return Err(e),
                    Ok(()) if Instant::now() > end => return Err(io::ErrorKind::TimedOut.into()),
                    _ => std::thread::sleep(STEP),
                }
            }
        });
        plugged.inspect_err(|_| {
            // what went wrong is what is told
            let _ = self.fail_over(vf);
            let _ = self.take_out(vf, steps);
        })
    }

    fn fail_over(&mut self, _: &VfAt) -> Result<GoesOver, LaneError> {
        if !self.netns.exists() {
            return Ok(GoesOver::Now);
        }
        let (bond, port) = (self.bond.clone(), self.port.clone());
        self.there("goes over to its paravirtual path", move || {
            let (bond, port) = (link(&bond)?, link(&port)?);
            if bond.active != Some(port.index) {
                set_active_port(bond.index, port.index)?;
            }
            Ok(GoesOver::Now)
        })
    }

    fn unplug(
        &mut self,
        vf: &VfAt,
        released: &mut dyn FnMut(),
        steps: &mut Steps,
    ) -> Result<(), LaneError> {
        match self.take_out(vf, steps) {
            // a namespace that is gone has given its devices back
            Err(LaneError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            done => done?,
        }
        released();
        Ok(())
    }

    fn resume(&mut self, vf: &VfAt) -> Result<(), LaneError> {
        let (bond, device) = (self.bond.clone(), vf.address.clone());
        self.there("uses its VF again", move || {
            let (bond, port) = (link(&bond)?, find(&device)?);
            match port.filter(|p| p.running && p.master == Some(bond.index)) {
                Some(port) => set_active_port(bond.index, port.index),
                None => Ok(()),
            }
        })
    }

    fn presence(&mut self, vf: &VfAt) -> Result<Presence, LaneError> {
        let links = match self.links() {
            Err(LaneError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(Presence::Absent);
            }
            links => links?,
        };
        let bond = links.iter().find(|l| l.name == self.bond);
        let has = |l: &&Link| l.device.as_deref() == Some(&vf.address);
        Ok(match links.iter().find(has) {
            None => Presence::Absent,
            Some(port) if bond.is_some_and(|b| b.active == Some(port.index)) => Presence::InUse,
            Some(_) => Presence::Idle,
        })
    }
}

/// The interface of a device in the calling thread's namespace. Kernels before 5.14 do not tell the device; there it is the
/// one with the name that it has from here.
pub(crate) fn find(device: &str) -> io::Result<Option<Link>> {
    let name = name_of(device);
    let has = |l: &Link| match &l.device {
        Some(own) => own == device,
        None => l.name == name,
    };
    // the list of all takes long where there are many
    match link(&name) {
        Ok(found) if has(&found) => Ok(Some(found)),
        _ => Ok(links()?.into_iter().find(has)),
    }
}

/// The VF's interface here gets the guest's address from its own driver, where that takes it while the PF has none for the VF:
/// it need not be reset to learn it then.
pub(crate) fn prepare(vf: &VfAt, mac: Mac, steps: &mut Steps) -> Result<(), LaneError> {
    steps.time("driver", || vf.pf.bind(&vf.address, None, false))?;
    let found = find(&vf.address).map_err(LaneError::net(&vf.address))?;
    if let Some(found) = found.filter(|l| l.mac != Some(mac)) {
        // where it does not, there are other ways
        let _ = steps.time("own address", || set_address_of(found.index, mac));
    }
    Ok(())
}

/// What a VF's interface is called while viola has it: `vf` and what its address says, so that two never have one name.
pub(crate) fn name_of(address: &str) -> String {
    let short = address.strip_prefix("0000:").unwrap_or(address);
    let word: String = short.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("vf{word}")
}

/// The namespace of this program.
fn home() -> Result<OwnedFd, LaneError> {
    let path = PathBuf::from("/proc/self/ns/net");
    let file = File::open(&path).map_err(LaneError::file(&path))?;
    Ok(file.into())
}

/// The VF's interface here, with the address that the PF has set. Some drivers take that at once, some when the VF is
/// reset, which a VF that goes down is, and some when they are bound.
pub(crate) fn ready(vf: &VfAt, mac: Mac, steps: &mut Steps) -> Result<Link, LaneError> {
    steps.time("driver", || vf.pf.bind(&vf.address, None, false))?;
    let wait = |for_long: Duration| -> Result<Option<Link>, LaneError> {
        let end = Instant::now() + for_long;
        loop {
            let found = find(&vf.address).map_err(LaneError::net(&vf.address))?;
            if found.is_some() || Instant::now() > end {
                return Ok(found);
            }
            std::thread::sleep(STEP);
        }
    };
    let gone = || LaneError::Unfit(format!("{} has no interface here", vf.address));
    let changed = |what| LaneError::net(format!("{}: {what}", vf.address));
    let mut found = wait(PATIENCE)?.ok_or_else(gone)?;
    if found.mac != Some(mac) {
        let up = steps.time("up", || set_up(found.index, true));
        up.map_err(changed("up"))?;
        let down = steps.time("down", || set_up(found.index, false));
        down.map_err(changed("down"))?;
        found = wait(PATIENCE)?.ok_or_else(gone)?;
    }
    if found.mac != Some(mac) {
        steps.time("driver", || vf.pf.bind(&vf.address, None, true))?;
        found = wait(PATIENCE)?.ok_or_else(gone)?;
    }
    if found.up {
        set_up(found.index, false).map_err(changed("down"))?;
    }
    let name = name_of(&vf.address);
    if found.name != name {
        let here = home()?;
        // into its own namespace: another name
        let renamed = steps.time("name", || move_to(found.index, here.as_fd(), &name));
        renamed.map_err(changed("another name"))?;
        found.name = name;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vf_has_a_name_that_an_interface_may_have() {
        assert_eq!(name_of("0000:01:10.2"), "vf01102");
        assert_eq!(name_of("10000:e1:10.2"), "vf10000e1102");
        assert!(name_of("10000:e1:1f.7").len() <= viola_netdev::MAX_NAME);
    }

    #[test]
    fn a_namespace_that_is_gone_has_no_vf_and_gives_it_back() {
        let mut guest = NetnsGuest {
            netns: "/run/netns/no-such-namespace".into(),
            bond: "bond0".into(),
            port: "eth0".into(),
        };
        let vf = VfAt {
            pf: crate::Pf::new("p0"),
            index: 0,
            address: "0000:01:10.0".into(),
        };
        assert_eq!(guest.presence(&vf).unwrap(), Presence::Absent);
        let mut released = 0;
        guest
            .unplug(&vf, &mut || released += 1, &mut Steps::default())
            .unwrap();
        assert_eq!(released, 1);
        assert!(guest.mac().is_err());
    }
}
