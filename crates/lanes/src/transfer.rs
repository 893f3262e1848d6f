// SPDX-License-Identifier: Apache-2.0
//! The order of steps in a grant and in a revocation. The guest has a path at every moment:
//!
//! - grant: the NIC's switch delivers the guest's packets to the VF, the VF is plugged, the guest
//!   sends by it;
//! - revocation: the guest fails over to its paravirtual path, the NIC's switch delivers there, the
//!   VF is unplugged; then it is free for another guest.
//!
//! The journal records each step before it is made. [`Transfer::recover`] completes what a killed
//! daemon left between two steps.

use std::time::{Duration, Instant};

use viola_netdev::Mac;

use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::eswitch::{Eswitch, VfSettings};
use crate::guest::GuestAccess;
use crate::journal::{Entry, Journal, Stage};
use crate::pool::VfDevice;
use crate::steps::StepTimes;

/// Time in which a guest's bond notices that a link is down: its usual `miimon` is 100 ms.
const BOND_MIIMON_WAIT: Duration = Duration::from_millis(150);

/// One VF and one guest, and what the steps need.
pub struct Transfer<'a> {
    /// The switch inside the NIC.
    pub eswitch: &'a dyn Eswitch,
    /// The VF.
    pub vf: &'a VfDevice,
    /// Identity of the guest.
    pub id: &'a str,
    /// How the daemon reaches the guest, for the journal.
    pub access: &'a GuestAccess,
    /// The guest.
    pub attachment: &'a mut dyn Attachment,
    /// Durations of the steps made so far.
    pub steps: StepTimes,
}

/// State of a VF after a recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovered {
    /// The guest has it.
    Held,
    /// No guest has it.
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

    /// Grants the VF to the guest.
    ///
    /// # Errors
    /// Any [`LaneError`]; no guest has the VF then.
    pub fn grant(&mut self, journal: &mut Journal, settings: VfSettings) -> Result<(), LaneError> {
        let mac = self.attachment.mac()?;
        journal.record(self.entry(mac, Stage::Granting))?;
        let (eswitch, vf) = (self.eswitch, self.vf);
        let steps = &mut self.steps;
        let granted = self
            .attachment
            .prepare(vf, mac, steps)
            .and_then(|()| steps.time("address", || eswitch.assign(vf.index, mac, settings)))
            .and_then(|()| self.attachment.plug(vf, steps));
        match granted {
            Ok(()) => {
                eswitch.forget_port(mac);
                journal.record(self.entry(mac, Stage::Held))
            }
            Err(e) => {
                // undo; the caller gets the first error
                let _ = eswitch.withdraw(vf.index, mac);
                let _ = eswitch.clear(vf.index);
                let _ = journal.remove(&vf.pf.name, vf.index);
                Err(e)
            }
        }
    }

    /// Revokes the VF, which was granted with this address and these settings.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest still has the VF then, and uses it.
    pub fn revoke(
        &mut self,
        journal: &mut Journal,
        mac: Mac,
        settings: VfSettings,
    ) -> Result<(), LaneError> {
        journal.record(self.entry(mac, Stage::Revoking))?;
        let (eswitch, vf) = (self.eswitch, self.vf);
        match self.unplug(mac) {
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
        let has_failed_over = match self.attachment.fail_over(vf)? {
            Failover::Done => true,
            Failover::OnLinkDown if eswitch.set_link(vf.index, false) => {
                std::thread::sleep(BOND_MIIMON_WAIT);
                true
            }
            Failover::OnLinkDown | Failover::OnUnplug => false,
        };
        self.steps.add("failover", begin.elapsed());
        // The NIC must deliver to the path on which the guest receives: change it at once, or at
        // the moment when the guest changes.
        let mut withdrawn = None;
        if has_failed_over {
            let withdraw = || eswitch.withdraw(vf.index, mac);
            withdrawn = Some(self.steps.time("address", withdraw));
        }
        let mut released = || {
            if !matches!(withdrawn, Some(Ok(()))) {
                withdrawn = Some(eswitch.withdraw(vf.index, mac));
            }
        };
        self.attachment.unplug(vf, &mut released, &mut self.steps)?;
        // The VF is unplugged, even if the NIC refuses to clear its address: no guest has that
        // address, and the next grant replaces it. If neither works, the PF and its VFs are gone.
        let _ = eswitch.clear(vf.index);
        Ok(())
    }

    /// Completes what the journal says of a VF and this guest: a VF that was being granted or
    /// revoked is revoked; one that the guest has and uses stays.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest has the VF then.
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
