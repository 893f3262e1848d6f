// SPDX-License-Identifier: Apache-2.0
//! A core of the turbo pool: turbo vCPUs in slots of 0.1 ms, regular ones in the gaps.
//!
//! Ranks are used for precedence only: Boost is a turbo vCPU that wakes with share in hand, Eager the one whose slot it
//! is, Owner one that waits for its slot, Waiting the regular vCPU whose turn the gaps are, Out the other regular
//! ones. A turbo vCPU without work has no slots: none is planned for it, it only outranks the others when it wakes.

use super::floor::Floor;
use super::reserve::{self, Reserve};
use super::turns::{LUMP, Place, Rules, Turns};
use super::{ACCOUNTING, Elsewhere, Pooled, TURBO_SLOT};
use crate::slices::{
    Class, Decision, FOREVER, MAX_VMS, MS, Machine, Nanos, Params, Rank, Seen, US, seen_at,
};

/// Settings of a [`TurboCore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Most service a sleeping turbo vCPU is owed, 20 us ..= 1 ms: for so long it goes before the others when it
    /// wakes. With one slot nobody waits longer than for a slot of each other.
    pub credit: Nanos,
    /// Slice of regular vCPUs in the gaps, 100 us ..= 1 s.
    pub slice: Nanos,
    /// What a regular vCPU gets while turbo vCPUs leave no gap, 0 (off) ..= 1 ms in each 30 ms.
    pub floor: Nanos,
    /// What a VM keeps of its fair share for its regular vCPUs while they wait, 0 (off) ..= 1000 thousandths.
    pub reserve: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            credit: TURBO_SLOT,
            slice: 4 * MS,
            floor: TURBO_SLOT,
            reserve: 400,
        }
    }
}

/// Slots are within these.
const SLOTS: (Nanos, Nanos) = (20 * US, 10 * MS);
/// Shortest run of a turbo vCPU, and of a regular one, that wakes with lag in hand.
const EAGER_LEAST: (Nanos, Nanos) = (20 * US, 100 * US);
/// How often a turbo vCPU that waits for its VM's share is looked at.
const HEARING: Nanos = reserve::GAP / 2;
/// Credit of a sleeping regular vCPU.
const LODGER_CREDIT: Nanos = MS;

/// The machine of a turbo core (section 3.1). See the module's text and that of [`crate::turbo`].
#[derive(Debug, Clone)]
pub struct TurboCore {
    config: Config,
    turbo: Turns,
    lodgers: Turns,
    floor: Floor,
    /// By index: since when a regular vCPU waits, what is left of a run that the floor granted it.
    waits: Vec<(Nanos, Nanos)>,
    /// By index.
    reserves: Vec<Reserve>,
}

impl Default for TurboCore {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl TurboCore {
    /// A machine without VMs. Settings out of range are moved to the nearest that is in it.
    pub fn new(config: Config) -> Self {
        let config = within(config);
        let (turbo, lodgers) = rules(config);
        Self {
            config,
            turbo: Turns::new(turbo, Floor::new(0, 0)),
            lodgers: Turns::new(lodgers, Floor::new(0, 0)),
            floor: Floor::new(config.floor, ACCOUNTING),
            waits: Vec::with_capacity(MAX_VMS),
            reserves: Vec::with_capacity(MAX_VMS),
        }
    }

    /// Changes the settings. Takes effect with the next [`Machine::configure`].
    pub fn set_config(&mut self, config: Config) {
        self.config = within(config);
        let (turbo, lodgers) = rules(self.config);
        self.turbo.set_rules(turbo);
        self.lodgers.set_rules(lodgers);
        self.floor.run = self.config.floor;
    }

    /// Whether the turbo vCPU of a VM (by its place in [`Machine::configure`]) has to wait, because its VM's regular
    /// vCPUs are due the rest.
    pub fn holds(&self, index: usize) -> bool {
        self.reserves.get(index).is_some_and(Reserve::holds)
    }

    /// Grants a regular vCPU a run that the turbo vCPUs would never leave it.
    fn keep_floor(&mut self, now: Nanos, seen: &[Seen]) {
        let crowded = self.turbo.contenders() > 0;
        for a in self.lodgers.answers() {
            let (since, left) = &mut self.waits[a.index];
            let used = seen.get(a.index).map_or(0, |seen| seen.used);
            *left = left.saturating_sub(used);
            if used > 0 || !a.ready || !crowded {
                *since = now;
            }
            if !a.ready || !crowded {
                *left = 0;
            }
        }
        let waits = &self.waits;
        let waiting = self.lodgers.answers().filter(|a| a.ready);
        if let Some(i) = self
            .floor
            .grant(now, waiting.map(|a| (a.index, waits[a.index].0)))
        {
            self.waits[i].1 = self.floor.run;
        }
    }
}

fn within(config: Config) -> Config {
    Config {
        credit: config.credit.clamp(EAGER_LEAST.0, MS),
        slice: config.slice.clamp(100 * US, 1000 * MS),
        floor: config.floor.min(MS),
        reserve: config.reserve.min(1000),
    }
}

fn rules(config: Config) -> (Rules, Rules) {
    let turbo = Rules {
        credit: config.credit,
        least: EAGER_LEAST.0,
        debt: 0,
        quotas: false,
    };
    let lodgers = Rules {
        credit: LODGER_CREDIT,
        least: EAGER_LEAST.1,
        debt: LUMP,
        quotas: true,
    };
    (turbo, lodgers)
}

impl Machine for TurboCore {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        let slice = self.config.slice;
        let of = |class: Class| {
            let vms = vms.iter().take(MAX_VMS).enumerate();
            vms.filter(move |(_, p)| p.class == class)
                .map(move |(i, p)| match class {
                    Class::Ls => (i, p, p.microslice.clamp(SLOTS.0, SLOTS.1)),
                    Class::Batch => (i, p, slice),
                })
        };
        self.turbo.configure(now, of(Class::Ls));
        self.lodgers.configure(now, of(Class::Batch));
        self.waits.clear();
        self.waits.resize(vms.len().min(MAX_VMS), (now, 0));
        self.reserves.clear();
        self.reserves.resize(vms.len().min(MAX_VMS), Reserve::new());
    }

    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision) {
        for (k, reserve) in self.reserves.iter_mut().enumerate() {
            reserve.charge(now, seen_at(seen, k));
        }
        let reserves = &self.reserves;
        self.turbo.hold(|k| reserves[k].holds());
        self.turbo.decide(now, seen);
        self.lodgers.decide(now, seen);
        self.keep_floor(now, seen);
        let mut until = FOREVER;
        // One that runs alone keeps its rank, but not against a run that the floor grants.
        let granted = self.waits.iter().any(|&(_, left)| left > 0);
        for a in self.turbo.answers() {
            out.ranks[a.index] = match a.place {
                Place::Capped => Rank::Capped,
                Place::Waits => Rank::Owner,
                Place::First if !(granted && a.ready) => Rank::Boost,
                Place::Turn | Place::First => Rank::Eager,
            };
            let reserve = &self.reserves[a.index];
            out.budgets[a.index] = match self.config.reserve {
                0 => a.budget,
                _ => a.budget.min(reserve.budget()),
            };
            if reserve.holds() {
                until = until.min(now.saturating_add(HEARING));
            } else if a.place == Place::Capped {
                until = until.min(a.refill);
            }
        }
        for a in self.lodgers.answers() {
            let granted = self.waits[a.index].1;
            out.ranks[a.index] = match a.place {
                Place::Capped => Rank::Capped,
                _ if granted > 0 => Rank::Boost,
                Place::Waits => Rank::Out,
                Place::Turn | Place::First => Rank::Waiting,
            };
            out.budgets[a.index] = match granted {
                0 => a.budget,
                _ => a.budget.min(granted),
            };
            if a.place == Place::Capped {
                until = until.min(a.refill);
            }
        }
        if self.turbo.contenders() > 0 && !self.lodgers.is_empty() {
            // To see whether turbo vCPUs leave gaps.
            until = until.min(now.saturating_add(ACCOUNTING));
        }
        out.until = until;
        out.notify_block = self.reserves.iter().any(Reserve::has_gaps);
        out.notify_wake = if self.turbo.contenders() > 0 {
            self.turbo.must_hear_of_wakes()
        } else {
            self.lodgers.must_hear_of_wakes()
        };
    }
}

impl Pooled for TurboCore {
    fn elsewhere(&mut self, ran: &[Elsewhere]) {
        let part = 1000 - self.config.reserve;
        for (k, reserve) in self.reserves.iter_mut().enumerate() {
            let Elsewhere { due, waits, .. } = ran.get(k).copied().unwrap_or_default();
            reserve.hear(due, waits, part);
        }
        self.turbo.elsewhere(ran, false);
        self.lodgers.elsewhere(ran, true);
    }
}
