// SPDX-License-Identifier: Apache-2.0
//! The VF scheduler (section 3.6): promotion, demotion, exchange.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::classify::{Kind, classify};
use super::queues::{Gq, Pq, Worth};
use super::{Config, Nic, Observed, Pool, Setting, Vf};
use crate::slices::Nanos;
use crate::slices::classify::Span;

/// What has to be done with one VF. Those of one decision are to be done in their order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// Take it from this NIC, which goes on with its paravirtual path.
    Revoke {
        /// Which VF.
        vf: Vf,
        /// From whom.
        nic: Nic,
        /// Why.
        why: Why,
    },
    /// Give it to this NIC.
    Grant {
        /// Which VF.
        vf: Vf,
        /// To whom.
        nic: Nic,
        /// Why.
        why: Why,
    },
}

/// Why a VF changes hands or a NIC has none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// As the operator says.
    Setting,
    /// Network-bound, and a VF was free.
    Promoted {
        /// Its IF.
        intensity: f64,
    },
    /// Higher IF than the lowest that held one.
    Exchanged {
        /// Its IF (of its k-th VF, IF/k).
        intensity: f64,
        /// Whose place it took.
        from: u32,
        /// The IF there; negative: that VM was not network-bound.
        lowest: f64,
    },
    /// Another VM takes its place.
    GaveWay {
        /// Who.
        to: u32,
    },
    /// It was not network-bound for long.
    Quiet,
    /// Its VM or its NIC is gone.
    Gone,
    /// The VF is no longer one of those that may be granted.
    Withdrawn,
    /// It holds one and keeps it.
    Holds,
    /// Not network-bound.
    NotBound(Kind),
    /// All VFs of its network are held by VMs of higher IF.
    Outbid {
        /// The lowest IF among them; negative: none of them could be taken.
        lowest: f64,
    },
    /// A VM with a lower IF got its VF only recently.
    Held {
        /// How long it still keeps it.
        left: Nanos,
    },
    /// Its network has no VFs.
    NoPool,
    /// Granting or revoking failed with it, and is not tried again for so long.
    Barred {
        /// How long.
        left: Nanos,
    },
    /// Enough VFs change hands at this time.
    Later,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Why::Setting => f.write_str("as set"),
            Why::Promoted { intensity } => write!(f, "IF {intensity:.0}, and a VF was free"),
            Why::Exchanged {
                intensity,
                from,
                lowest,
            } if lowest >= 0.0 => {
                write!(f, "IF {intensity:.0} against {lowest:.0} of VM {from}")
            }
            Why::Exchanged {
                intensity, from, ..
            } => write!(f, "IF {intensity:.0}, and VM {from} had no use for its VF"),
            Why::GaveWay { to } => write!(f, "VM {to} gains more from it"),
            Why::Quiet => f.write_str("it was not network-bound for long"),
            Why::Gone => f.write_str("it is gone"),
            Why::Withdrawn => f.write_str("this VF may no longer be granted"),
            Why::Holds => f.write_str("it holds a VF"),
            Why::NotBound(Kind::Cpu) => f.write_str("it computes and hardly waits for I/O"),
            Why::NotBound(_) => f.write_str("its NIC is quiet"),
            Why::Outbid { lowest } if lowest >= 0.0 => {
                write!(f, "all VFs are held by VMs with an IF from {lowest:.0} up")
            }
            Why::Outbid { .. } => f.write_str("all VFs are held by VMs that keep theirs"),
            Why::Held { left } => write!(f, "the VF it would get is held for {} yet", Span(left)),
            Why::NoPool => f.write_str("there are no VFs in its network"),
            Why::Barred { left } => {
                write!(f, "the last try failed; the next one is in {}", Span(left))
            }
            Why::Later => f.write_str("other VFs change hands first"),
        }
    }
}

/// How one NIC stands after a decision.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standing {
    /// Which NIC.
    pub nic: Nic,
    /// What its VM does.
    pub kind: Kind,
    /// IF (eq 2).
    pub intensity: f64,
    /// VFs it holds from now on.
    pub holds: u32,
    /// Why it has none, or why it has them.
    pub why: Why,
}

/// Answer of [`Lanes::decide`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// What to do, in this order.
    pub actions: Vec<Action>,
    /// All NICs, in the order they were given.
    pub standings: Vec<Standing>,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    nic: Nic,
    since: Nanos,
    /// Not to be taken before.
    stuck: Nanos,
}

/// Who holds which VF. See the text of [`crate::lanes`].
///
/// Takes for granted that actions succeed; [`Lanes::refused`] and [`Lanes::failed`] are for those that did not.
#[derive(Debug, Clone)]
pub struct Lanes {
    config: Config,
    held: BTreeMap<Vf, Held>,
    /// By NIC: until when nothing is granted to it.
    barred: BTreeMap<Nic, Nanos>,
    /// By holder: since when it is not network-bound.
    quiet: BTreeMap<Nic, Nanos>,
}

impl Lanes {
    /// Nobody holds a VF.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            held: BTreeMap::new(),
            barred: BTreeMap::new(),
            quiet: BTreeMap::new(),
        }
    }

    /// Changes the settings from the next decision on.
    pub fn set_config(&mut self, config: Config) {
        self.config = config;
    }

    /// Who holds a VF.
    pub fn holder(&self, vf: Vf) -> Option<Nic> {
        self.held.get(&vf).map(|held| held.nic)
    }

    /// All VFs that are held, in order, with their holders.
    pub fn holders(&self) -> impl Iterator<Item = (Vf, Nic)> {
        self.held.iter().map(|(&vf, held)| (vf, held.nic))
    }

    /// Takes over a VF that a NIC was found to hold.
    pub fn adopt(&mut self, now: Nanos, vf: Vf, nic: Nic) {
        let held = Held {
            nic,
            since: now,
            stuck: 0,
        };
        self.held.insert(vf, held);
    }

    /// A VM did not give its VF back: it stays with it, and whoever was to get it has none.
    pub fn refused(&mut self, now: Nanos, vf: Vf, nic: Nic) {
        let stuck = now.saturating_add(self.config.retry);
        let since = now;
        self.held.insert(vf, Held { nic, since, stuck });
    }

    /// A VM did not take the VF that it was granted: the VF is free.
    pub fn failed(&mut self, now: Nanos, vf: Vf) {
        if let Some(held) = self.held.remove(&vf) {
            let until = now.saturating_add(self.config.retry);
            self.barred.insert(held.nic, until);
        }
    }

    /// Decides who holds a VF from now on. `now` (ns) never goes back; NICs and pools are named once each. O(n log n) in
    /// the number of NICs.
    pub fn decide(&mut self, now: Nanos, pools: &[Pool], nics: &[Observed]) -> Decision {
        let mut round = Round::new(&self.config, now, nics);
        self.barred.retain(|_, until| *until > now);
        self.take_back(&mut round, pools, nics);
        let networks: BTreeSet<u32> = nics.iter().map(|n| n.nic.network).collect();
        for network in networks {
            self.share_out(&mut round, network, pools, nics);
        }
        self.finish(round, nics)
    }

    /// What is taken whatever others want: from VMs that are gone, that are never to have one, and that have been quiet
    /// for too long.
    fn take_back(&mut self, round: &mut Round, pools: &[Pool], nics: &[Observed]) {
        let now = round.now;
        let bound: BTreeSet<Nic> = round.bound(nics).collect();
        let holders: BTreeSet<Nic> = self.held.values().map(|held| held.nic).collect();
        self.quiet
            .retain(|nic, _| holders.contains(nic) && !bound.contains(nic));
        let (quiet, release) = (&mut self.quiet, self.config.release);
        self.held.retain(|&vf, held| {
            let Some(pool) = pools.iter().find(|p| p.id == vf.pool) else {
                // The whole NIC is gone: nothing can be taken from anybody.
                return false;
            };
            let nic = held.nic;
            let seen = round.index.get(&nic).map(|&i| &nics[i]);
            let why = match seen {
                None => Why::Gone,
                Some(_) if held.stuck > now => return true,
                Some(_) if vf.index >= pool.vfs || nic.network != pool.network => Why::Withdrawn,
                Some(seen) if seen.setting == Setting::Never => Why::Setting,
                Some(_) if bound.contains(&nic) => return true,
                Some(_) => {
                    let since = *quiet.entry(nic).or_insert(now);
                    match release {
                        Some(release) if now - since >= release => Why::Quiet,
                        _ => return true,
                    }
                }
            };
            round.actions.push(Action::Revoke { vf, nic, why });
            false
        });
    }

    /// Promotion and exchange in one network.
    fn share_out(&mut self, round: &mut Round, network: u32, pools: &[Pool], nics: &[Observed]) {
        let now = round.now;
        let mut free: Vec<Vf> = pools
            .iter()
            .filter(|p| p.network == network)
            .flat_map(|p| (0..p.vfs).map(|index| Vf { pool: p.id, index }))
            .filter(|vf| !self.held.contains_key(vf))
            .collect();
        free.reverse();
        // In the order they were granted, so that the last one is worth least.
        let mut held: Vec<(Nanos, Vf, Nic)> = self
            .held
            .iter()
            .filter(|(_, held)| held.nic.network == network)
            .map(|(&vf, held)| (held.since, vf, held.nic))
            .collect();
        held.sort_unstable();
        let any = !held.is_empty() || !free.is_empty();
        let (mut pq, mut soonest) = (Pq::default(), None::<Nanos>);
        for (since, vf, nic) in held {
            let seen = round
                .index
                .get(&nic)
                .map(|&i| (&nics[i], &mut round.seats[i]));
            let Some((seen, seat)) = seen else { continue };
            seat.holds += 1;
            let worth = seat.worth(seat.holds);
            let attached = u64::from(self.config.hold_per_attach).saturating_mul(seen.attach);
            let hold = self.config.hold.max(attached);
            let until = since.saturating_add(hold).max(self.held[&vf].stuck);
            if until <= now {
                pq.insert(worth, nic, vf);
            } else {
                soonest = Some(soonest.map_or(until - now, |s| s.min(until - now)));
                // The operator's word goes before the hold, not before what a VM refuses.
                if self.held[&vf].stuck <= now && !worth.pinned {
                    round.fresh.insert((worth, nic, vf));
                }
            }
        }
        let mut gq = Gq::default();
        for seen in nics.iter().filter(|n| n.nic.network == network) {
            let seat = round.seats[round.index[&seen.nic]];
            for k in seat.holds + 1..=seat.wants {
                if self.barred.contains_key(&seen.nic) {
                    break;
                }
                gq.push(seat.worth(k), seen.nic);
            }
        }
        while let Some((worth, nic)) = gq.pop_highest() {
            let seat = round.index[&nic];
            if !any {
                round.seats[seat].why = Some(Why::NoPool);
                continue;
            }
            if round.moves == 0 {
                round.seats[seat].why = Some(Why::Later);
                continue;
            }
            if let Some(vf) = free.pop() {
                let intensity = worth.intensity;
                let why = if worth.pinned {
                    Why::Setting
                } else {
                    Why::Promoted { intensity }
                };
                self.grant(round, vf, nic, why);
                continue;
            }
            let lowest = pq.lowest();
            if let Some((lowest, from, vf)) = lowest
                && worth.beats(lowest, self.config.margin)
            {
                pq.pop_lowest();
                self.exchange(round, (worth, nic), (lowest, from, vf));
            } else if worth.pinned
                && let Some((lowest, from, vf)) = round.fresh.pop_first()
            {
                self.exchange(round, (worth, nic), (lowest, from, vf));
            } else if round.seats[seat].holds == 0 {
                let lowest = lowest.map(|(lowest, ..)| lowest.intensity);
                round.seats[seat].why = Some(match (lowest, soonest) {
                    (None, Some(left)) => Why::Held { left },
                    (lowest, _) => Why::Outbid {
                        lowest: lowest.unwrap_or(-1.0),
                    },
                });
            }
        }
        round.fresh.clear();
    }

    fn exchange(&mut self, round: &mut Round, to: (Worth, Nic), from: (Worth, Nic, Vf)) {
        let (worth, nic) = to;
        let (lowest, loser, vf) = from;
        let why = Why::GaveWay { to: nic.vm };
        let revoke = Action::Revoke {
            vf,
            nic: loser,
            why,
        };
        round.actions.push(revoke);
        let seat = &mut round.seats[round.index[&loser]];
        seat.holds -= 1;
        seat.why = Some(why);
        let why = if worth.pinned && !lowest.pinned {
            Why::Setting
        } else {
            Why::Exchanged {
                intensity: worth.intensity,
                from: loser.vm,
                lowest: lowest.intensity,
            }
        };
        self.grant(round, vf, nic, why);
    }

    fn grant(&mut self, round: &mut Round, vf: Vf, nic: Nic, why: Why) {
        round.moves -= 1;
        round.actions.push(Action::Grant { vf, nic, why });
        let seat = &mut round.seats[round.index[&nic]];
        seat.holds += 1;
        seat.why = Some(why);
        self.adopt(round.now, vf, nic);
    }

    fn finish(&self, round: Round, nics: &[Observed]) -> Decision {
        let standing = |(seen, seat): (&Observed, &Seat)| {
            let why = match seat.why {
                Some(why) if seat.holds > 0 || !matches!(why, Why::Holds) => why,
                _ if seat.holds > 0 => Why::Holds,
                _ if seen.setting == Setting::Never => Why::Setting,
                _ => match self.barred.get(&seen.nic) {
                    Some(&until) if seat.wants > 0 => Why::Barred {
                        left: until - round.now,
                    },
                    _ => Why::NotBound(seat.kind),
                },
            };
            Standing {
                nic: seen.nic,
                kind: seat.kind,
                intensity: seat.intensity,
                holds: seat.holds,
                why,
            }
        };
        Decision {
            standings: nics.iter().zip(&round.seats).map(standing).collect(),
            actions: round.actions,
        }
    }
}

/// One NIC in one decision.
#[derive(Debug, Clone, Copy)]
struct Seat {
    kind: Kind,
    intensity: f64,
    pinned: bool,
    wants: u32,
    holds: u32,
    why: Option<Why>,
}

impl Seat {
    /// What its k-th VF is worth. Only the first is pinned.
    fn worth(&self, k: u32) -> Worth {
        let intensity = if k <= self.wants {
            self.intensity / f64::from(k)
        } else {
            return Worth::NONE;
        };
        Worth {
            pinned: self.pinned && k == 1,
            intensity,
        }
    }
}

/// What a decision works with.
struct Round {
    now: Nanos,
    moves: usize,
    index: BTreeMap<Nic, usize>,
    seats: Vec<Seat>,
    /// Holders within their hold, which only a pinned NIC may displace.
    fresh: BTreeSet<(Worth, Nic, Vf)>,
    actions: Vec<Action>,
}

impl Round {
    fn new(config: &Config, now: Nanos, nics: &[Observed]) -> Self {
        let seat = |seen: &Observed| {
            let kind = classify(config, seen.di2, seen.traffic);
            let wants = match (seen.setting, kind) {
                (Setting::Never, _) => 0,
                (_, Kind::NetHeavy) => seen.most.max(1),
                (_, Kind::Net) | (Setting::Pin, _) => 1,
                (Setting::Auto, _) => 0,
            };
            Seat {
                kind,
                intensity: seen.traffic.intensity(config.alpha),
                pinned: seen.setting == Setting::Pin,
                wants,
                holds: 0,
                why: None,
            }
        };
        Self {
            now,
            moves: config.moves,
            index: nics.iter().zip(0..).map(|(n, i)| (n.nic, i)).collect(),
            seats: nics.iter().map(seat).collect(),
            fresh: BTreeSet::new(),
            actions: Vec::new(),
        }
    }

    /// NICs that want at least one VF.
    fn bound<'a>(&'a self, nics: &'a [Observed]) -> impl Iterator<Item = Nic> + 'a {
        let seats = self.seats.iter().zip(nics);
        seats.filter(|(s, _)| s.wants > 0).map(|(_, n)| n.nic)
    }
}
