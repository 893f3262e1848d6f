// SPDX-License-Identifier: Apache-2.0
//! Adopts VFs that guests already have when a NIC starts to work, and gives up the VFs of a NIC that is gone.

use std::time::{Duration, Instant};

use viola_lanes::transfer::{Recovered, Transfer};
use viola_lanes::{Entry, Eswitch, Presence, Stage, StepTimes, VfDevice};
use viola_policy::lanes::{self as policy, Vf};

use crate::lanes::manager::{FOREIGN, Manager};
use viola_cli::log::{self, Level};

/// The interface of a new VF appears within this time.
const INTERFACE_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether another network namespace has the interface of a VF: it has a network driver, and no interface here.
fn is_elsewhere(vf: &VfDevice) -> bool {
    let end = Instant::now() + INTERFACE_TIMEOUT;
    loop {
        let links = viola_netdev::links().unwrap_or_default();
        let is_here = links
            .iter()
            .any(|l| l.device.as_deref() == Some(&vf.address));
        let driver = vf.pf.driver(&vf.address);
        if is_here || driver.is_none_or(|d| d == "vfio-pci") {
            return false;
        }
        if Instant::now() > end {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Manager {
    /// Adopts the VFs that guests already have, when a NIC starts to work.
    pub(in crate::lanes) fn adopt(&mut self, at: usize) {
        let network = self.network(&self.pools[at].config.bridge);
        let noted: Vec<Entry> = self.journal.entries().to_vec();
        for vf in self.pools[at].vfs.clone() {
            let is_it = |e: &&Entry| e.pf == vf.pf.name && e.vf == vf.index;
            let entry = match noted.iter().find(is_it) {
                Some(entry) => Some(entry.clone()),
                None => self.found_with(at, &vf),
            };
            let now = self.now();
            let place = Vf {
                pool: at as u32,
                index: vf.index,
            };
            if let Some(entry) = entry {
                if self.settle(at, &vf, &entry) == Recovered::Held {
                    let vm = self.number(&entry.guest);
                    self.policy.adopt(now, place, policy::Nic { vm, network });
                }
                continue;
            }
            if is_elsewhere(&vf) {
                let vm = FOREIGN - vf.index;
                self.policy.adopt(now, place, policy::Nic { vm, network });
                let (pf, index) = (&vf.pf.name, vf.index);
                self.log_once(format!(
                    "VF {index} of {pf} is used by another program, and stays there"
                ));
            }
        }
    }

    /// An entry for a VF that is not in the journal, when a guest has it.
    fn found_with(&self, at: usize, vf: &VfDevice) -> Option<Entry> {
        let bridge = &self.pools[at].config.bridge;
        for nic in self.nics.iter().filter(|n| n.bridge == *bridge) {
            let mut how = nic.access.clone();
            if matches!(
                how.attachment().presence(vf),
                Ok(Presence::Idle | Presence::InUse)
            ) {
                return Some(Entry {
                    pf: vf.pf.name.clone(),
                    vf: vf.index,
                    address: vf.address.clone(),
                    guest: nic.id.clone(),
                    access: how,
                    mac: nic.mac,
                    stage: Stage::Held,
                });
            }
        }
        None
    }

    /// Finishes a switch that an earlier daemon began, or adopts the VF.
    pub(in crate::lanes) fn settle(
        &mut self,
        at: usize,
        vf: &VfDevice,
        entry: &Entry,
    ) -> Recovered {
        let card = self.pools[at].card_of(self.nic_of(at, &entry.guest));
        let terms = self.pools[at].terms();
        let mut guest = entry.access.clone();
        let mut switch = Transfer {
            eswitch: &card,
            vf,
            id: &entry.guest,
            access: &entry.access,
            attachment: guest.attachment(),
            steps: StepTimes::default(),
        };
        let settled = switch.recover(&mut self.journal, entry, terms);
        let (pf, index) = (&vf.pf.name, vf.index);
        let what = match &settled {
            Ok(Recovered::Held) => {
                self.totals.adopted += 1;
                format!("has VF {index} of {pf} already")
            }
            Ok(Recovered::Free) => {
                self.totals.recovered += 1;
                format!(
                    "an earlier daemon did not finish a switch of VF {index} of {pf}, which is free now"
                )
            }
            Err(e) => format!("it keeps VF {index} of {pf}: {e}"),
        };
        log::about(Level::Notice, &entry.guest, what);
        if let Ok(Recovered::Held) = settled {
            // A VF that was not in the journal gets an entry.
            if let Err(e) = self.journal.record(entry.clone()) {
                self.log_once(e.to_string());
            }
        }
        settled.unwrap_or(Recovered::Held)
    }

    /// Takes the guest's address off a VF that disappeared from it, and forgets the VF.
    pub(in crate::lanes) fn lost(&mut self, at: usize, vf: &VfDevice, entry: &Entry) {
        self.totals.lost += 1;
        let what = format!("VF {} of {} disappeared from it", vf.index, vf.pf.name);
        log::about(Level::Warning, &entry.guest, what);
        let card = self.pools[at].card_of(self.nic_of(at, &entry.guest));
        let done = card.withdraw(vf.index, entry.mac);
        let done = done.and_then(|()| card.clear(vf.index));
        let done = done.and_then(|()| self.journal.remove(&entry.pf, entry.vf));
        if let Err(e) = done {
            self.log_once(e.to_string());
        }
    }

    /// Releases and forgets the VFs of a NIC that is gone.
    pub(in crate::lanes) fn give_up(&mut self, at: usize) {
        let pf = self.pools[at].config.pf.clone();
        let entries: Vec<Entry> = self.journal.entries().to_vec();
        for entry in entries.iter().filter(|e| e.pf == pf) {
            self.pools[at].release(entry.vf, entry.mac);
            self.totals.lost += 1;
            let what = format!("VF {} of {pf} is gone with its NIC", entry.vf);
            log::about(Level::Warning, &entry.guest, what);
            if let Err(e) = self.journal.remove(&pf, entry.vf) {
                self.log_once(e.to_string());
            }
        }
    }
}
