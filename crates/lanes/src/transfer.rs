// SPDX-License-Identifier: Apache-2.0
//! The steps of a grant and of a revocation, in an order in which the guest always has a path:
//!
//! - grant: the NIC's switch learns the guest's address, the guest gets the VF, and only then sends by it;
//! - revocation: the guest goes back to its paravirtual path, the switch forgets its address, the VF is taken out, and
//!   only then is free for another guest.
//!
//! Each step is noted before it is made. [`settle`] brings what a daemon left that was killed between two of them to
//! one end.

use std::time::{Duration, Instant};

use viola_netdev::Mac;

use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::eswitch::{Eswitch, VfSettings};
use crate::guest::GuestAccess;
use crate::journal::{Entry, Journal, Stage};
use crate::pool::VfDevice;
use crate::steps::StepTimes;

/// By then a guest's bond has noticed that a link is down, by the usual `miimon` of 100 ms.
const BOND_MIIMON_WAIT: Duration = Duration::from_millis(150);

/// What is needed for each step.
pub struct Transfer<'a> {
    /// The NIC's switch.
    pub eswitch: &'a dyn Eswitch,
    /// The VF.
    pub vf: &'a VfDevice,
    /// Identity of the guest.
    pub id: &'a str,
    /// How it is reached, for the journal.
    pub access: &'a GuestAccess,
    /// The guest.
    pub attachment: &'a mut dyn Attachment,
    /// How long what was done took.
    pub steps: StepTimes,
}

/// What became of a VF that was found after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovered {
    /// The guest has it.
    Held,
    /// Nobody has it.
    Free,
}

impl Transfer<'_> {
    fn entry(&self, mac: Mac, stage: Stage) -> Entry {
        Entry {
            pf: self.vf.pf.name.clone(),
            vf: self.vf.index,
            address: self.vf.address.clone(),
            guest: self.id.to_owned(),
            access: self.access.clone(),
            mac,
            stage,
        }
    }

    /// Gives the VF to the guest.
    ///
    /// # Errors
    /// Any [`LaneError`]; the VF is free then.
    pub fn grant(&mut self, journal: &mut Journal, settings: VfSettings) -> Result<(), LaneError> {
        let mac = self.attachment.mac()?;
        journal.record(self.entry(mac, Stage::Granting))?;
        let (eswitch, vf) = (self.eswitch, self.vf);
        let steps = &mut self.steps;
        let given = self
            .attachment
            .prepare(vf, mac, steps)
            .and_then(|()| steps.time("address", || eswitch.assign(vf.index, mac, settings)))
            .and_then(|()| self.attachment.plug(vf, steps));
        match given {
            Ok(()) => {
                eswitch.forget_port(mac);
                journal.record(self.entry(mac, Stage::Held))
            }
            Err(e) => {
                // what went wrong first is what is told
                let _ = eswitch.withdraw(vf.index, mac);
                let _ = eswitch.clear(vf.index);
                let _ = journal.remove(&vf.pf.name, vf.index);
                Err(e)
            }
        }
    }

    /// Takes the VF from the guest, which had it with this address and settings.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest still has it then, and uses it.
    pub fn revoke(
        &mut self,
        journal: &mut Journal,
        mac: Mac,
        settings: VfSettings,
    ) -> Result<(), LaneError> {
        journal.record(self.entry(mac, Stage::Revoking))?;
        let (eswitch, vf) = (self.eswitch, self.vf);
        let taken = self.unplug(mac);
        match taken {
            Ok(()) => journal.remove(&vf.pf.name, vf.index),
            Err(e) => {
                let _ = eswitch.set_link(vf.index, true);
                let _ = eswitch.assign(vf.index, mac, settings);
                let _ = self.attachment.resume(vf);
                eswitch.forget_port(mac);
                let _ = journal.record(self.entry(mac, Stage::Held));
                Err(e)
            }
        }
    }

    fn unplug(&mut self, mac: Mac) -> Result<(), LaneError> {
        let (eswitch, vf) = (self.eswitch, self.vf);
        let begin = Instant::now();
        let has_gone_over = match self.attachment.fail_over(vf)? {
            Failover::Done => true,
            Failover::OnLinkDown if eswitch.set_link(vf.index, false) => {
                std::thread::sleep(BOND_MIIMON_WAIT);
                true
            }
            Failover::OnLinkDown | Failover::OnUnplug => false,
        };
        self.steps.add("failover", begin.elapsed());
        // Packets go where the guest looks for them: at once, or at the moment when it looks elsewhere.
        let mut withdrawn = None;
        if has_gone_over {
            let withdraw = || eswitch.withdraw(vf.index, mac);
            withdrawn = Some(self.steps.time("address", withdraw));
        }
        let mut released = || {
            if !matches!(withdrawn, Some(Ok(()))) {
                withdrawn = Some(eswitch.withdraw(vf.index, mac));
            }
        };
        self.attachment.unplug(vf, &mut released, &mut self.steps)?;
        // It is out, whatever the NIC says: where its address cannot be cleared it is nobody's, and the next guest's takes
        // its place; where neither can be done the PF is gone, and its VFs with it.
        let _ = eswitch.clear(vf.index);
        Ok(())
    }

    /// Looks where a VF is that was noted with this guest, and finishes what was begun: what was being given or taken is
    /// taken, what the guest had and uses stays.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest has it then.
    pub fn recover(
        &mut self,
        journal: &mut Journal,
        entry: &Entry,
        settings: VfSettings,
    ) -> Result<Recovered, LaneError> {
        let presence = self.attachment.presence(self.vf)?;
        match (presence, entry.stage) {
            (Presence::Absent, _) => {
                self.eswitch.withdraw(self.vf.index, entry.mac)?;
                self.eswitch.clear(self.vf.index)?;
                journal.remove(&entry.pf, entry.vf)?;
                Ok(Recovered::Free)
            }
            (Presence::InUse, Stage::Held) => Ok(Recovered::Held),
            _ => {
                self.revoke(journal, entry.mac, settings)?;
                Ok(Recovered::Free)
            }
        }
    }
}

#[cfg(test)]
mod tests;
