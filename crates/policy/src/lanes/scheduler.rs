// SPDX-License-Identifier: Apache-2.0
//! The VF scheduler (section 3.6): promotion, demotion, exchange.

use std::collections::{BTreeMap, BTreeSet};

use super::classify::{Kind, classify};
use super::decision::{Action, Decision, NicStatus, Reason};
use super::queues::{Gq, Pq, Priority};
use super::{Config, Nic, NicObservation, Pool, Setting, Vf};
use crate::slices::Nanos;

#[derive(Debug, Clone, Copy)]
struct Holding {
    nic: Nic,
    since: Nanos,
    /// Time before which it must not be revoked.
    not_before: Nanos,
}

/// Assigns VFs to NICs. See the text of [`crate::lanes`].
///
/// It assumes that actions succeed. The caller reports failures with [`VfScheduler::revoke_failed`] and
/// [`VfScheduler::grant_failed`].
#[derive(Debug, Clone)]
pub struct VfScheduler {
    config: Config,
    held: BTreeMap<Vf, Holding>,
    /// By NIC: time before which it gets no VF.
    retry_at: BTreeMap<Nic, Nanos>,
    /// By holder: time since when it is not network-bound.
    quiet: BTreeMap<Nic, Nanos>,
}

impl VfScheduler {
    /// A scheduler whose VFs are all free.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            held: BTreeMap::new(),
            retry_at: BTreeMap::new(),
            quiet: BTreeMap::new(),
        }
    }

    /// Changes the settings from the next decision on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// The holder of a VF.
    pub fn holder(&self, vf: Vf) -> Option<Nic> {
        self.held.get(&vf).map(|held| held.nic)
    }

    /// All VFs that are held with their holders, in order of VFs.
    pub fn holders(&self) -> impl Iterator<Item = (Vf, Nic)> {
        self.held.iter().map(|(&vf, held)| (vf, held.nic))
    }

    /// Records a VF that a NIC already holds.
    pub fn adopt(&mut self, now: Nanos, vf: Vf, nic: Nic) {
        let held = Holding {
            nic,
            since: now,
            not_before: 0,
        };
        self.held.insert(vf, held);
    }

    /// Records that a VM did not give its VF back: it keeps the VF, and the NIC that was to get it has none.
    pub fn revoke_failed(&mut self, now: Nanos, vf: Vf, nic: Nic) {
        let not_before = now.saturating_add(self.config.retry);
        let since = now;
        self.held.insert(
            vf,
            Holding {
                nic,
                since,
                not_before,
            },
        );
    }

    /// Records that a VM did not take the VF that it was granted: the VF is free.
    pub fn grant_failed(&mut self, now: Nanos, vf: Vf) {
        if let Some(held) = self.held.remove(&vf) {
            let until = now.saturating_add(self.config.retry);
            self.retry_at.insert(held.nic, until);
        }
    }

    /// Decides which NICs hold VFs from now on. `now` (ns) never goes back; each NIC and each pool occurs once.
    /// O(n log n) in the number of NICs.
    pub fn decide(&mut self, now: Nanos, pools: &[Pool], nics: &[NicObservation]) -> Decision {
        let mut round = Round::new(&self.config, now, nics);
        self.retry_at.retain(|_, until| *until > now);
        self.revoke_unneeded(&mut round, pools, nics);
        let networks: BTreeSet<u32> = nics.iter().map(|n| n.nic.network).collect();
        for network in networks {
            self.assign(&mut round, network, pools, nics);
        }
        self.finish(round, nics)
    }

    /// Revokes VFs whatever other NICs want: of VMs that are gone, that may have none, or that have been quiet for too
    /// long.
    fn revoke_unneeded(&mut self, round: &mut Round, pools: &[Pool], nics: &[NicObservation]) {
        let now = round.now;
        let bound: BTreeSet<Nic> = round.bound(nics).collect();
        let holders: BTreeSet<Nic> = self.held.values().map(|held| held.nic).collect();
        self.quiet
            .retain(|nic, _| holders.contains(nic) && !bound.contains(nic));
        let (quiet, release) = (&mut self.quiet, self.config.release);
        self.held.retain(|&vf, held| {
            let Some(pool) = pools.iter().find(|p| p.id == vf.pool) else {
                // The physical NIC is gone, and its VFs with it.
                return false;
            };
            let nic = held.nic;
            let observed = round.index.get(&nic).map(|&i| &nics[i]);
            let why = match observed {
                None => Reason::Gone,
                Some(_) if held.not_before > now => return true,
                Some(_) if vf.index >= pool.vfs || nic.network != pool.network => Reason::Withdrawn,
                Some(observed) if observed.setting == Setting::Never => Reason::Setting,
                Some(_) if bound.contains(&nic) => return true,
                Some(_) => {
                    let since = *quiet.entry(nic).or_insert(now);
                    match release {
                        Some(release) if now - since >= release => Reason::Quiet,
                        _ => return true,
                    }
                }
            };
            round.actions.push(Action::Revoke { vf, nic, why });
            false
        });
    }

    /// The free VFs of one network, the last one first.
    fn free_vfs(&self, network: u32, pools: &[Pool]) -> Vec<Vf> {
        let mut free: Vec<Vf> = pools
            .iter()
            .filter(|p| p.network == network)
            .flat_map(|p| (0..p.vfs).map(|index| Vf { pool: p.id, index }))
            .filter(|vf| !self.held.contains_key(vf))
            .collect();
        free.reverse();
        free
    }

    /// PQ of one network, and the time until the first of the other holders may lose its VF (`None`: there are no others).
    fn queue_holders(
        &self,
        round: &mut Round,
        network: u32,
        nics: &[NicObservation],
    ) -> (Pq, Option<Nanos>) {
        let now = round.now;
        // In the order of grants, so that a VM's last VF has the lowest priority.
        let mut held: Vec<(Nanos, Vf, Nic)> = self
            .held
            .iter()
            .filter(|(_, held)| held.nic.network == network)
            .map(|(&vf, held)| (held.since, vf, held.nic))
            .collect();
        held.sort_unstable();
        let (mut pq, mut soonest) = (Pq::default(), None::<Nanos>);
        for (since, vf, nic) in held {
            let Some(&i) = round.index.get(&nic) else {
                continue;
            };
            let candidate = &mut round.candidates[i];
            candidate.holds += 1;
            let priority = candidate.priority(candidate.holds);
            let attach_time = nics[i].attach_time;
            let attached = u64::from(self.config.hold_per_attach).saturating_mul(attach_time);
            let hold = self.config.hold.max(attached);
            let until = since.saturating_add(hold).max(self.held[&vf].not_before);
            if until <= now {
                pq.insert(priority, nic, vf);
            } else {
                soonest = Some(soonest.map_or(until - now, |s| s.min(until - now)));
                // The operator's setting overrides a hold, but not the time until a failed revocation is tried again.
                if self.held[&vf].not_before <= now && !priority.pinned {
                    round.within_hold.insert((priority, nic, vf));
                }
            }
        }
        (pq, soonest)
    }

    /// GQ of one network: an entry for each VF that a NIC wants beyond those it holds.
    fn queue_others(&self, round: &Round, network: u32, nics: &[NicObservation]) -> Gq {
        let mut gq = Gq::default();
        for nic in nics.iter().map(|n| n.nic).filter(|n| n.network == network) {
            if self.retry_at.contains_key(&nic) {
                continue;
            }
            let candidate = round.candidates[round.index[&nic]];
            for k in candidate.holds + 1..=candidate.wants {
                gq.push(candidate.priority(k), nic);
            }
        }
        gq
    }

    /// Promotion and exchange in one network.
    fn assign(&mut self, round: &mut Round, network: u32, pools: &[Pool], nics: &[NicObservation]) {
        let mut free = self.free_vfs(network, pools);
        let any = !free.is_empty() || self.held.values().any(|h| h.nic.network == network);
        let (mut pq, soonest) = self.queue_holders(round, network, nics);
        let mut gq = self.queue_others(round, network, nics);
        while let Some((priority, nic)) = gq.pop_highest() {
            let candidate = round.index[&nic];
            if !any {
                round.candidates[candidate].why = Some(Reason::NoPool);
                continue;
            }
            if round.moves == 0 {
                round.candidates[candidate].why = Some(Reason::Deferred);
                continue;
            }
            if let Some(vf) = free.pop() {
                let intensity = priority.intensity;
                let why = if priority.pinned {
                    Reason::Setting
                } else {
                    Reason::Promoted { intensity }
                };
                self.grant(round, vf, nic, why);
                continue;
            }
            let lowest = pq.lowest();
            if let Some((lowest, from, vf)) = lowest
                && priority.beats(lowest, self.config.margin)
            {
                pq.pop_lowest();
                self.exchange(round, (priority, nic), (lowest, from, vf));
            } else if priority.pinned
                && let Some((lowest, from, vf)) = round.within_hold.pop_first()
            {
                self.exchange(round, (priority, nic), (lowest, from, vf));
            } else if round.candidates[candidate].holds == 0 {
                let lowest = lowest.map(|(lowest, ..)| lowest.intensity);
                round.candidates[candidate].why = Some(match (lowest, soonest) {
                    (None, Some(left)) => Reason::Held { left },
                    (lowest, _) => Reason::Outbid {
                        lowest: lowest.unwrap_or(-1.0),
                    },
                });
            }
        }
        round.within_hold.clear();
    }

    fn exchange(&mut self, round: &mut Round, to: (Priority, Nic), from: (Priority, Nic, Vf)) {
        let (priority, nic) = to;
        let (lowest, loser, vf) = from;
        let why = Reason::GaveWay { to: nic.vm };
        let revoke = Action::Revoke {
            vf,
            nic: loser,
            why,
        };
        round.actions.push(revoke);
        let candidate = &mut round.candidates[round.index[&loser]];
        candidate.holds -= 1;
        candidate.why = Some(why);
        let why = if priority.pinned && !lowest.pinned {
            Reason::Setting
        } else {
            Reason::Exchanged {
                intensity: priority.intensity,
                from: loser.vm,
                lowest: lowest.intensity,
            }
        };
        self.grant(round, vf, nic, why);
    }

    fn grant(&mut self, round: &mut Round, vf: Vf, nic: Nic, why: Reason) {
        round.moves -= 1;
        round.actions.push(Action::Grant { vf, nic, why });
        let candidate = &mut round.candidates[round.index[&nic]];
        candidate.holds += 1;
        candidate.why = Some(why);
        self.adopt(round.now, vf, nic);
    }

    fn finish(&self, round: Round, nics: &[NicObservation]) -> Decision {
        let standing = |(observed, candidate): (&NicObservation, &Candidate)| {
            let why = match candidate.why {
                Some(why) if candidate.holds > 0 || !matches!(why, Reason::Holds) => why,
                _ if candidate.holds > 0 => Reason::Holds,
                _ if observed.setting == Setting::Never => Reason::Setting,
                _ => match self.retry_at.get(&observed.nic) {
                    Some(&until) if candidate.wants > 0 => Reason::RetryLater {
                        left: until - round.now,
                    },
                    _ => Reason::NotNetworkBound(candidate.kind),
                },
            };
            NicStatus {
                nic: observed.nic,
                kind: candidate.kind,
                intensity: candidate.intensity,
                holds: candidate.holds,
                why,
            }
        };
        Decision {
            nics: nics.iter().zip(&round.candidates).map(standing).collect(),
            actions: round.actions,
        }
    }
}

/// One NIC in one decision.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    kind: Kind,
    intensity: f64,
    pinned: bool,
    wants: u32,
    holds: u32,
    why: Option<Reason>,
}

impl Candidate {
    /// Priority of its k-th VF. Only the first is pinned.
    fn priority(&self, k: u32) -> Priority {
        let intensity = if k <= self.wants {
            self.intensity / f64::from(k)
        } else {
            return Priority::NONE;
        };
        Priority {
            pinned: self.pinned && k == 1,
            intensity,
        }
    }
}

/// The state of one decision.
struct Round {
    now: Nanos,
    moves: usize,
    index: BTreeMap<Nic, usize>,
    candidates: Vec<Candidate>,
    /// Holders within their hold; only a pinned NIC may take their VFs.
    within_hold: BTreeSet<(Priority, Nic, Vf)>,
    actions: Vec<Action>,
}

impl Round {
    fn new(config: &Config, now: Nanos, nics: &[NicObservation]) -> Self {
        let candidate = |observed: &NicObservation| {
            let kind = classify(config, observed.di2, observed.traffic);
            let wants = match (observed.setting, kind) {
                (Setting::Never, _) => 0,
                (_, Kind::NetHeavy) => observed.max_vfs.max(1),
                (_, Kind::Net) | (Setting::Pin, _) => 1,
                (Setting::Auto, _) => 0,
            };
            Candidate {
                kind,
                intensity: observed.traffic.intensity(config.alpha),
                pinned: observed.setting == Setting::Pin,
                wants,
                holds: 0,
                why: None,
            }
        };
        Self {
            now,
            moves: config.moves,
            index: nics.iter().zip(0..).map(|(n, i)| (n.nic, i)).collect(),
            candidates: nics.iter().map(candidate).collect(),
            within_hold: BTreeSet::new(),
            actions: Vec::new(),
        }
    }

    /// NICs that want at least one VF.
    fn bound<'a>(&'a self, nics: &'a [NicObservation]) -> impl Iterator<Item = Nic> + 'a {
        let candidates = self.candidates.iter().zip(nics);
        candidates.filter(|(s, _)| s.wants > 0).map(|(_, n)| n.nic)
    }
}
