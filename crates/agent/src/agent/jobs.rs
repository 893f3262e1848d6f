// SPDX-License-Identifier: Apache-2.0
//! Carries out the ledger's decisions, and hands the workers' results to it.

use std::collections::BTreeMap;

use viola_proto::agent::{Lease, WithdrawReason};

use super::volume::Volume;
use super::{Agent, Millis};
use crate::blocks::block::Disposition;
use crate::blocks::types::{Action, EntryId, Fingerprint, Location};
use crate::blocks::worker::{Job, Outcome};

impl Agent {
    /// Handles the results of the workers.
    pub(super) fn handle_outcomes(&mut self, now: Millis) {
        while let Some(outcome) = self.outcomes.try_recv() {
            match outcome {
                Outcome::Linked(id, result) => {
                    if result.as_ref().is_err_and(|e| e.leftover) {
                        self.send_job(id, |_, location| Some(Job::Unlink(id, location)));
                    }
                    self.ledger.link_done(now, id, result.map_err(|e| e.then));
                }
                Outcome::Unlinked(id, done) => self.ledger.unlink_done(now, id, done),
                Outcome::Mapped(id, attempt, result) => {
                    if let Err((Disposition::Refuse, why)) = &result
                        && let Some(volume) = self.volume_of_entry(id)
                    {
                        volume.refusal = Some(why.clone());
                    }
                    let result = result.map_err(|(then, _)| then);
                    self.ledger.map_done(now, id, attempt, result);
                }
                Outcome::EarlierLinks(fs, bytes) => self.ledger.set_earlier_bytes(fs, bytes),
                Outcome::Probed(probe) => self.handle_probe(now, probe),
                Outcome::Proof(fs, challenge, result) => {
                    self.send_proof(now, fs, challenge, result);
                }
                Outcome::ScanBatch(locations) => {
                    for location in locations {
                        if self.volumes.get(&location.fs).is_some_and(|v| !v.retiring) {
                            self.ledger.scanned(now, location);
                        }
                    }
                }
                Outcome::ScanDone(fs) => {
                    self.ledger.count_scan();
                    let all = self.ledger.entries_of_fs(fs);
                    if let Some(volume) = self.volumes.get_mut(&fs) {
                        volume.scanning = false;
                        volume.recheck = all.into();
                    }
                }
            }
        }
    }

    pub(super) fn volume_of_entry(&mut self, id: EntryId) -> Option<&mut Volume> {
        let fs = self.ledger.entry(id)?.location.fs;
        self.volumes.get_mut(&fs)
    }

    /// Carries out the ledger's decisions.
    pub(super) fn dispatch_actions(&mut self, now: Millis) {
        let mut withdrawals: BTreeMap<WithdrawReason, Vec<Lease>> = BTreeMap::new();
        for action in self.ledger.take_actions() {
            match action {
                Action::Name(id, lease) => self.send_name(now, id, lease),
                Action::Withdraw(lease, why) => withdrawals.entry(why).or_default().push(lease),
                Action::Link(id) => self.send_job(id, |_, location| Some(Job::Link(id, location))),
                Action::Unlink(id) => {
                    self.send_job(id, |_, location| Some(Job::Unlink(id, location)))
                }
                Action::Map(id, attempt) => self.send_job(id, |fingerprint, location| {
                    Some(Job::Map(id, attempt, location, fingerprint?))
                }),
            }
        }
        for (why, leases) in withdrawals {
            self.send_withdrawals(&leases, why);
        }
    }

    pub(super) fn send_job(
        &mut self,
        id: EntryId,
        job: impl FnOnce(Option<Fingerprint>, Location) -> Option<Job>,
    ) {
        if let Some(entry) = self.ledger.entry(id)
            && let Some(volume) = self.volumes.get(&entry.location.fs)
            && let Some(job) = job(entry.fingerprint, entry.location.clone())
        {
            volume.workers.send(job);
        }
    }
}
