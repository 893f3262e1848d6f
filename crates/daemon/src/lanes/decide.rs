// SPDX-License-Identifier: Apache-2.0
//! Asks the policy which guests get a VF, and turns its decisions into moves.

use std::collections::BTreeSet;

use viola_lanes::LaneError;
use viola_policy::lanes::{self as policy, Action, NicObservation, Reason};
use viola_proto::lanes::LaneSetting;

use super::manager::{DI2_UNKNOWN, FOREIGN, Manager};

impl Manager {
    /// What the policy knows of each NIC.
    fn observed(&mut self) -> Vec<NicObservation> {
        let mut observed = Vec::new();
        for nic in self.nics.clone() {
            let vm = self.number(&nic.id);
            let key = (nic.id.clone(), nic.interface.clone());
            let Some(count) = self.counts.get(&key) else {
                continue;
            };
            observed.push(NicObservation {
                nic: policy::Nic {
                    vm,
                    network: self.network(&nic.bridge),
                },
                di2: nic.di2.unwrap_or(DI2_UNKNOWN),
                traffic: count.samples.traffic(),
                setting: match self.setting(&nic).0 {
                    LaneSetting::Auto => policy::Setting::Auto,
                    LaneSetting::Pin => policy::Setting::Pin,
                    LaneSetting::Never => policy::Setting::Never,
                },
                // A failover pair holds one VF.
                max_vfs: 1,
                attach_time: count.attach,
            });
        }
        let foreign = self
            .policy
            .holders()
            .filter(|(_, nic)| nic.vm > FOREIGN - 1000);
        observed.extend(foreign.map(|(_, nic)| NicObservation {
            nic,
            di2: 0.0,
            traffic: policy::Traffic::default(),
            setting: policy::Setting::Pin,
            max_vfs: 1,
            attach_time: 0,
        }));
        observed
    }

    /// Asks the policy which VFs move, and moves them.
    pub(super) fn decide(&mut self) {
        let pools: Vec<policy::Pool> = (0..)
            .zip(&self.pools)
            .filter(|(_, p)| !p.vfs.is_empty())
            .map(|(id, p)| policy::Pool {
                id,
                network: self.network(&p.config.bridge),
                vfs: p.usable(),
            })
            .collect();
        let observed = self.observed();
        self.decision = self.policy.decide(self.now(), &pools, &observed);
        let mut stuck = BTreeSet::new();
        for action in self.decision.actions.clone() {
            match action {
                Action::Revoke { vf, nic, why } => {
                    if let Err(e) = self.revoke(vf, &self.reason_text(why)) {
                        stuck.insert(vf);
                        self.policy.revoke_failed(self.now(), vf, nic);
                        if matches!(e, LaneError::ReleaseTimeout { .. }) {
                            self.totals.kept += 1;
                        }
                    }
                }
                Action::Grant { vf, .. } if stuck.contains(&vf) => {}
                Action::Grant { vf, nic, why } => {
                    if self.grant(vf, nic, &self.reason_text(why)).is_err() {
                        self.totals.failed += 1;
                        self.policy.grant_failed(self.now(), vf);
                    }
                }
            }
        }
    }

    /// The reason of the policy, with names in place of numbers.
    pub(super) fn reason_text(&self, why: Reason) -> String {
        match why {
            Reason::Exchanged {
                intensity,
                from,
                lowest,
            } if lowest >= 0.0 => {
                let from = self.name(from);
                format!("IF {intensity:.0} against {lowest:.0} of {from}")
            }
            Reason::Exchanged {
                intensity, from, ..
            } => {
                let from = self.name(from);
                format!("IF {intensity:.0}, and {from} had no use for its VF")
            }
            Reason::GaveWay { to } => format!("{} gains more from it", self.name(to)),
            why => why.to_string(),
        }
    }
}
