// SPDX-License-Identifier: Apache-2.0
//! Moves VFs: grants them, takes them back, and records each switch.

use std::time::{Duration, Instant};

use viola_lanes::transfer::Transfer;
use viola_lanes::{Entry, LaneError, StepTimes, VfDevice};
use viola_policy::lanes::{self as policy, Vf};
use viola_proto::lanes as shown;

use super::manager::{MAX_SWITCHES, Manager};
use viola_cli::log::{self, Level};

impl Manager {
    /// Gives a VF to a guest.
    pub(super) fn grant(&mut self, vf: Vf, nic: policy::Nic, why: &str) -> Result<(), LaneError> {
        let id = self.name(nic.vm);
        let at = vf.pool as usize;
        let bridge = self.pools[at].config.bridge.clone();
        let found = self.nics.iter().find(|n| n.id == id && n.bridge == bridge);
        let place = self.pools[at].vfs.iter().find(|v| v.index == vf.index);
        let (Some(nic), Some(place)) = (found.cloned(), place.cloned()) else {
            return Err(LaneError::Unusable("it is gone".into()));
        };
        let (card, terms) = (self.pools[at].card_of(Some(&nic)), self.pools[at].terms());
        let begin = Instant::now();
        let mut guest = nic.access.clone();
        let mut switch = Transfer {
            eswitch: &card,
            vf: &place,
            id: &id,
            access: &nic.access,
            attachment: guest.attachment(),
            steps: StepTimes::default(),
        };
        let done = switch.grant(&mut self.journal, terms);
        let took = (begin.elapsed(), std::mem::take(&mut switch.steps));
        if let Some(count) = self
            .counts
            .get_mut(&(nic.id.clone(), nic.interface.clone()))
        {
            count.attach = took.0.as_nanos() as u64;
        }
        if done.is_ok() {
            self.totals.granted += 1;
            self.granted.push((begin, card, nic.mac));
        }
        self.record((&id, true), &place, why, &done, took);
        done
    }

    /// Takes a VF back from its guest.
    pub(super) fn revoke(&mut self, vf: Vf, why: &str) -> Result<(), LaneError> {
        let pf = match self.pools.get(vf.pool as usize) {
            Some(pool) => pool.config.pf.clone(),
            None => return Ok(()),
        };
        let mut entries = self.journal.entries().iter();
        let found = entries.find(|e| e.pf == pf && e.vf == vf.index);
        // Another program uses this VF.
        let Some(entry) = found.cloned() else {
            return Err(LaneError::Unusable("another program uses it".into()));
        };
        self.take(&entry, why)
    }

    fn take(&mut self, entry: &Entry, why: &str) -> Result<(), LaneError> {
        let Some((at, place)) = self.place_of(entry) else {
            return Ok(());
        };
        let card = self.pools[at].card_of(self.nic_of(at, &entry.guest));
        let terms = self.pools[at].terms();
        let begin = Instant::now();
        let mut guest = entry.access.clone();
        let mut switch = Transfer {
            eswitch: &card,
            vf: &place,
            id: &entry.guest,
            access: &entry.access,
            attachment: guest.attachment(),
            steps: StepTimes::default(),
        };
        let done = switch.revoke(&mut self.journal, entry.mac, terms);
        if done.is_ok() {
            self.totals.revoked += 1;
        }
        let took = (begin.elapsed(), std::mem::take(&mut switch.steps));
        self.record((&entry.guest, false), &place, why, &done, took);
        done
    }

    /// Logs a switch, and keeps it for `viola lanes`.
    fn record(
        &mut self,
        (guest, granted): (&str, bool),
        vf: &VfDevice,
        why: &str,
        done: &Result<(), LaneError>,
        (took, steps): (Duration, StepTimes),
    ) {
        self.totals.switching_ns += took.as_nanos() as u64;
        let seconds = took.as_secs_f64();
        let (pf, index) = (&vf.pf.name, vf.index);
        let word = if granted { "granted" } else { "taken back" };
        let (level, what, why) = match done {
            Ok(()) => {
                let what = format!("VF {index} of {pf} {word} in {seconds:.3} s ({steps}): {why}");
                (Level::Notice, what, why.to_owned())
            }
            Err(e) => {
                let what = format!("VF {index} of {pf} not {word} ({why}): {e}");
                (Level::Warning, what, e.to_string())
            }
        };
        log::about(level, guest, what);
        self.switches.truncate(MAX_SWITCHES - 1);
        let switch = shown::Switch {
            ago_ns: 0,
            pf: pf.clone(),
            vf: index,
            guest: guest.to_owned(),
            granted,
            why,
            done: done.is_ok(),
            took_ns: took.as_nanos() as u64,
        };
        self.switches.push_front((Instant::now(), switch));
    }

    /// Takes all VFs back.
    pub(super) fn take_all(&mut self, why: &str) {
        for entry in self.journal.entries().to_vec() {
            // Errors are logged.
            let _ = self.take(&entry, why);
        }
        let config = self.config.as_ref().map(|c| c.lanes.policy());
        self.policy = policy::VfScheduler::new(config.unwrap_or_default());
        let now = self.now();
        for entry in self.journal.entries().to_vec() {
            if let Some((at, vf)) = self.place_of(&entry) {
                let (pool, index) = (at as u32, vf.index);
                let network = self.network(&self.pools[at].config.bridge);
                let vm = self.number(&entry.guest);
                let nic = policy::Nic { vm, network };
                self.policy.adopt(now, Vf { pool, index }, nic);
            }
        }
    }
}
