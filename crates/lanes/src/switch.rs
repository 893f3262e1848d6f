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

use crate::attach::{Attachment, GoesOver, Presence, VfAt};
use crate::card::{Card, Terms};
use crate::error::LaneError;
use crate::guest::Guest;
use crate::journal::{Entry, Journal, Stage};
use crate::steps::Steps;

/// By then a guest's bond has noticed that a link is down, by the usual `miimon` of 100 ms.
const NOTICED: Duration = Duration::from_millis(150);

/// What is needed for each step.
pub struct Switch<'a> {
    /// The NIC's switch.
    pub card: &'a dyn Card,
    /// The VF.
    pub vf: &'a VfAt,
    /// Identity of the guest.
    pub id: &'a str,
    /// How it is reached, for the journal.
    pub how: &'a Guest,
    /// The guest.
    pub attachment: &'a mut dyn Attachment,
    /// How long what was done took.
    pub steps: Steps,
}

/// What became of a VF that was found after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// The guest has it.
    Held,
    /// Nobody has it.
    Free,
}

impl Switch<'_> {
    fn entry(&self, mac: Mac, stage: Stage) -> Entry {
        Entry {
            pf: self.vf.pf.name.clone(),
            vf: self.vf.index,
            address: self.vf.address.clone(),
            guest: self.id.to_owned(),
            how: self.how.clone(),
            mac,
            stage,
        }
    }

    /// Gives the VF to the guest.
    ///
    /// # Errors
    /// Any [`LaneError`]; the VF is free then.
    pub fn grant(&mut self, journal: &mut Journal, terms: Terms) -> Result<(), LaneError> {
        let mac = self.attachment.mac()?;
        journal.note(self.entry(mac, Stage::Granting))?;
        let (card, vf) = (self.card, self.vf);
        let steps = &mut self.steps;
        let given = self
            .attachment
            .prepare(vf, mac, steps)
            .and_then(|()| steps.time("address", || card.admit(vf.index, mac, terms)))
            .and_then(|()| self.attachment.plug(vf, steps));
        match given {
            Ok(()) => {
                card.went(mac);
                journal.note(self.entry(mac, Stage::Held))
            }
            Err(e) => {
                // what went wrong first is what is told
                let _ = card.withdraw(vf.index, mac);
                let _ = card.clear(vf.index);
                let _ = journal.forget(&vf.pf.name, vf.index);
                Err(e)
            }
        }
    }

    /// Takes the VF from the guest, which had it with this address and terms.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest still has it then, and uses it.
    pub fn revoke(
        &mut self,
        journal: &mut Journal,
        mac: Mac,
        terms: Terms,
    ) -> Result<(), LaneError> {
        journal.note(self.entry(mac, Stage::Revoking))?;
        let (card, vf) = (self.card, self.vf);
        let taken = self.take(mac);
        match taken {
            Ok(()) => journal.forget(&vf.pf.name, vf.index),
            Err(e) => {
                let _ = card.link(vf.index, true);
                let _ = card.admit(vf.index, mac, terms);
                let _ = self.attachment.resume(vf);
                card.went(mac);
                let _ = journal.note(self.entry(mac, Stage::Held));
                Err(e)
            }
        }
    }

    fn take(&mut self, mac: Mac) -> Result<(), LaneError> {
        let (card, vf) = (self.card, self.vf);
        let begin = Instant::now();
        let has_gone_over = match self.attachment.fail_over(vf)? {
            GoesOver::Now => true,
            GoesOver::WithTheLink if card.link(vf.index, false) => {
                std::thread::sleep(NOTICED);
                true
            }
            GoesOver::WithTheLink | GoesOver::WithTheVf => false,
        };
        self.steps.add("failover", begin.elapsed());
        // Packets go where the guest looks for them: at once, or at the moment when it looks elsewhere.
        let mut withdrawn = None;
        if has_gone_over {
            let withdraw = || card.withdraw(vf.index, mac);
            withdrawn = Some(self.steps.time("address", withdraw));
        }
        let mut released = || {
            if !matches!(withdrawn, Some(Ok(()))) {
                withdrawn = Some(card.withdraw(vf.index, mac));
            }
        };
        self.attachment.unplug(vf, &mut released, &mut self.steps)?;
        // It is out, whatever the NIC says: where its address cannot be cleared it is nobody's, and the next guest's takes
        // its place; where neither can be done the PF is gone, and its VFs with it.
        let _ = card.clear(vf.index);
        Ok(())
    }

    /// Looks where a VF is that was noted with this guest, and finishes what was begun: what was being given or taken is
    /// taken, what the guest had and uses stays.
    ///
    /// # Errors
    /// Any [`LaneError`]; the guest has it then.
    pub fn settle(
        &mut self,
        journal: &mut Journal,
        entry: &Entry,
        terms: Terms,
    ) -> Result<Found, LaneError> {
        let presence = self.attachment.presence(self.vf)?;
        match (presence, entry.stage) {
            (Presence::Absent, _) => {
                self.card.withdraw(self.vf.index, entry.mac)?;
                self.card.clear(self.vf.index)?;
                journal.forget(&entry.pf, entry.vf)?;
                Ok(Found::Free)
            }
            (Presence::InUse, Stage::Held) => Ok(Found::Held),
            _ => {
                self.revoke(journal, entry.mac, terms)?;
                Ok(Found::Free)
            }
        }
    }
}

#[cfg(test)]
mod tests;
