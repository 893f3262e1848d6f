// SPDX-License-Identifier: Apache-2.0
//! A guest that is a network namespace, for example a container. It has an active-backup bond. One
//! port of the bond is the inner end of its veth, the paravirtual path; the VF's interface is the
//! other port while the guest has a VF.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viola_netdev::{
    Link, Mac, in_netns, link, links, move_to, set_active_port, set_master, set_up,
};

use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::pool::VfDevice;
use crate::steps::StepTimes;
use crate::vf_interface::{self, find, name_of, own_netns};

/// Time limit for the link of the VF's interface to come up in the bond.
const LINK_UP_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A network namespace with a bond.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetnsGuest {
    /// The namespace (`/run/netns/n1`, `/proc/PID/ns/net`).
    pub netns: PathBuf,
    /// Name of its bond.
    pub bond: String,
    /// The bond's port for the paravirtual path.
    pub port: String,
}

impl NetnsGuest {
    fn open(&self) -> Result<OwnedFd, LaneError> {
        let file = File::open(&self.netns).map_err(LaneError::file(&self.netns))?;
        Ok(file.into())
    }

    /// Runs `work` in the namespace; `what` names it in errors.
    fn in_guest<T: Send>(
        &self,
        what: &str,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> Result<T, LaneError> {
        let netns = self.open()?;
        let name = format!("{}: {what}", self.netns.display());
        in_netns(netns.as_fd(), work)
            .and_then(|done| done)
            .map_err(LaneError::net(name))
    }

    /// All interfaces in the namespace.
    ///
    /// # Errors
    /// [`LaneError::File`] if the namespace is gone.
    pub fn links(&self) -> Result<Vec<Link>, LaneError> {
        self.in_guest("list interfaces", links)
    }

    /// Takes the VF's interface out of the bond and moves it to this process's namespace.
    fn remove_interface(&self, vf: &VfDevice, steps: &mut StepTimes) -> Result<(), LaneError> {
        let own = own_netns()?;
        let device = vf.address.clone();
        self.in_guest("release the VF", move || {
            let Some(found) = find(&device)? else {
                return Ok(());
            };
            if found.master.is_some() {
                // this takes the interface down too
                steps.time("out of the bond", || set_master(found.index, None))?;
            }
            steps.time("down", || set_up(found.index, false))?;
            let name = name_of(&device);
            steps.time("move", || move_to(found.index, own.as_fd(), &name))
        })
    }
}

impl Attachment for NetnsGuest {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        let bond = self.bond.clone();
        let bond = self.in_guest(&self.bond, move || link(&bond))?;
        let unfit = |what: &str| {
            let (netns, bond) = (self.netns.display(), &self.bond);
            LaneError::Unusable(format!("{bond} in {netns} {what}"))
        };
        if bond.kind.as_deref() != Some("bond") {
            return Err(unfit("is no bond"));
        }
        bond.mac.ok_or_else(|| unfit("has no Ethernet address"))
    }

    fn prepare(&mut self, vf: &VfDevice, mac: Mac, steps: &mut StepTimes) -> Result<(), LaneError> {
        vf_interface::prepare(vf, mac, steps)
    }

    fn plug(&mut self, vf: &VfDevice, steps: &mut StepTimes) -> Result<(), LaneError> {
        let mac = self.mac()?;
        let ours = vf_interface::acquire(vf, mac, steps)?;
        let netns = self.open()?;
        let moved = steps.time("move", || move_to(ours.index, netns.as_fd(), &ours.name));
        moved.map_err(LaneError::net(format!("{} moves", ours.name)))?;
        let (bond, device) = (self.bond.clone(), vf.address.clone());
        let times = &mut *steps;
        let plugged = self.in_guest("add the VF to the bond", move || {
            let (name, bond) = (&bond, link(&bond)?);
            let port = find(&device)?.ok_or(io::ErrorKind::NotFound)?;
            // a bond accepts only ports that are down, and takes them up itself
            times.time("into the bond", || set_master(port.index, Some(bond.index)))?;
            let begin = Instant::now();
            let end = begin + LINK_UP_TIMEOUT;
            loop {
                // EINVAL until the bond sees the port's link
                let set = set_active_port(bond.index, port.index);
                let active = link(name)?.active;
                match set {
                    _ if active == Some(port.index) => {
                        times.add("link", begin.elapsed());
                        return Ok(());
                    }
                    Err(e) if Instant::now() > end => return Err(e),
                    Ok(()) if Instant::now() > end => return Err(io::ErrorKind::TimedOut.into()),
                    _ => std::thread::sleep(POLL_INTERVAL),
                }
            }
        });
        plugged.inspect_err(|_| {
            // undo; the caller gets the first error
            let _ = self.fail_over(vf);
            let _ = self.remove_interface(vf, steps);
        })
    }

    fn fail_over(&mut self, _: &VfDevice) -> Result<Failover, LaneError> {
        if !self.netns.exists() {
            return Ok(Failover::Done);
        }
        let (bond, port) = (self.bond.clone(), self.port.clone());
        self.in_guest("fail over to the paravirtual path", move || {
            let (bond, port) = (link(&bond)?, link(&port)?);
            if bond.active != Some(port.index) {
                set_active_port(bond.index, port.index)?;
            }
            Ok(Failover::Done)
        })
    }

    fn unplug(
        &mut self,
        vf: &VfDevice,
        released: &mut dyn FnMut(),
        steps: &mut StepTimes,
    ) -> Result<(), LaneError> {
        match self.remove_interface(vf, steps) {
            // the kernel has taken the devices of a removed namespace back
            Err(LaneError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            done => done?,
        }
        released();
        Ok(())
    }

    fn resume(&mut self, vf: &VfDevice) -> Result<(), LaneError> {
        let (bond, device) = (self.bond.clone(), vf.address.clone());
        self.in_guest("use the VF again", move || {
            let (bond, port) = (link(&bond)?, find(&device)?);
            match port.filter(|p| p.running && p.master == Some(bond.index)) {
                Some(port) => set_active_port(bond.index, port.index),
                None => Ok(()),
            }
        })
    }

    fn presence(&mut self, vf: &VfDevice) -> Result<Presence, LaneError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_namespace_has_no_vf() {
        let mut guest = NetnsGuest {
            netns: "/run/netns/no-such-namespace".into(),
            bond: "bond0".into(),
            port: "eth0".into(),
        };
        let vf = VfDevice {
            pf: crate::Pf::new("p0"),
            index: 0,
            address: "0000:01:10.0".into(),
        };
        assert_eq!(guest.presence(&vf).unwrap(), Presence::Absent);
        let mut released = 0;
        guest
            .unplug(&vf, &mut || released += 1, &mut StepTimes::default())
            .unwrap();
        assert_eq!(released, 1);
        assert!(guest.mac().is_err());
    }
}
