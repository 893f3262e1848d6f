// SPDX-License-Identifier: Apache-2.0
//! A core of the turbo pool: turbo vCPUs run in slots of 0.1 ms, regular vCPUs in the gaps.
//!
//! Ranks here mean precedence only:
//!
//! | rank | VM |
//! |---|---|
//! | Boost | a turbo vCPU that wakes with positive lag; a regular vCPU in a run of the floor |
//! | Preempt | the turbo vCPU whose slot it is |
//! | Owner | a turbo vCPU that waits for its slot |
//! | Waiting | the regular vCPU whose turn the gaps are |
//! | Background | the other regular vCPUs |
//!
//! A turbo vCPU without work has no slots; it only outranks the others when it wakes.

use super::fair_queue::{FairQueue, MAX_TURBO_DEBT, Position, QueueConfig};
use super::floor::Floor;
use super::reserve::{self, Reserve};
use super::{ACCOUNTING_INTERVAL, OtherCoreUsage, PoolScheduler, TURBO_SLOT};
use crate::slices::{
    Activity, Class, CoreScheduler, Decision, FOREVER, MAX_VMS, MS, Nanos, Params, Rank, US,
    activity_of,
};

/// Settings of a [`TurboCore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Maximum lag of a sleeping turbo vCPU, 20 us ..= 1 ms: for so long it goes before the others when it wakes. With
    /// one slot a VM waits at most for a slot of each other VM.
    pub credit: Nanos,
    /// Slice of regular vCPUs in the gaps, 100 us ..= 1 s.
    pub slice: Nanos,
    /// Run of a regular vCPU in each 30 ms while turbo vCPUs leave no gap, 0 (off) ..= 1 ms.
    pub floor: Nanos,
    /// Part of its fair share that a VM keeps for its regular vCPUs while they wait, thousandths, 0 (off) ..= 1000.
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

/// Minimum and maximum slot.
const SLOT_RANGE: (Nanos, Nanos) = (20 * US, 10 * MS);
/// Minimum run of a turbo vCPU, and of a regular one, that wakes with positive lag.
const MIN_PREEMPT_RUN: (Nanos, Nanos) = (20 * US, 100 * US);
/// Interval at which a held turbo vCPU is decided anew.
const HELD_RECHECK_INTERVAL: Nanos = reserve::MODERATION_INTERVAL / 2;
/// Maximum lag of a sleeping regular vCPU in the gaps.
const GAP_VCPU_CREDIT: Nanos = MS;

/// The scheduler of a turbo core (paper section 3.1). See the module's text and that of [`crate::turbo`].
#[derive(Debug, Clone)]
pub struct TurboCore {
    config: Config,
    turbo: FairQueue,
    gap_vcpus: FairQueue,
    floor: Floor,
    /// By index: when the wait of a regular vCPU began, and the rest of the run that the floor granted it, ns.
    gap_states: Vec<(Nanos, Nanos)>,
    /// By index.
    reserves: Vec<Reserve>,
}

impl Default for TurboCore {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl TurboCore {
    /// A scheduler without VMs. Settings out of range are clamped.
    pub fn new(config: Config) -> Self {
        let config = clamped(config);
        let (turbo, gap_vcpus) = queue_config(config);
        Self {
            config,
            turbo: FairQueue::new(turbo, Floor::new(0, 0)),
            gap_vcpus: FairQueue::new(gap_vcpus, Floor::new(0, 0)),
            floor: Floor::new(config.floor, ACCOUNTING_INTERVAL),
            gap_states: Vec::with_capacity(MAX_VMS),
            reserves: Vec::with_capacity(MAX_VMS),
        }
    }

    /// Changes the settings from the next [`CoreScheduler::configure`] on.
    pub fn set_config(&mut self, config: Config) {
        self.config = clamped(config);
        let (turbo, gap_vcpus) = queue_config(self.config);
        self.turbo.set_config(turbo);
        self.gap_vcpus.set_config(gap_vcpus);
        self.floor.run = self.config.floor;
    }

    /// Whether the reserve holds the turbo vCPU of a VM (by its index in [`CoreScheduler::configure`]).
    pub fn is_held(&self, index: usize) -> bool {
        self.reserves.get(index).is_some_and(Reserve::is_held)
    }

    /// Grants a regular vCPU a run while turbo vCPUs leave no gap.
    fn grant_floor(&mut self, now: Nanos, activity: &[Activity]) {
        let crowded = self.turbo.contenders() > 0;
        for a in self.gap_vcpus.answers() {
            let (since, left) = &mut self.gap_states[a.index];
            let used = activity.get(a.index).map_or(0, |activity| activity.used);
            *left = left.saturating_sub(used);
            if used > 0 || !a.ready || !crowded {
                *since = now;
            }
            if !a.ready || !crowded {
                *left = 0;
            }
        }
        let waits = &self.gap_states;
        let waiting = self.gap_vcpus.answers().filter(|a| a.ready);
        if let Some(i) = self
            .floor
            .grant(now, waiting.map(|a| (a.index, waits[a.index].0)))
        {
            self.gap_states[i].1 = self.floor.run;
        }
    }
}

fn clamped(config: Config) -> Config {
    Config {
        credit: config.credit.clamp(MIN_PREEMPT_RUN.0, MS),
        slice: config.slice.clamp(100 * US, 1000 * MS),
        floor: config.floor.min(MS),
        reserve: config.reserve.min(1000),
    }
}

fn queue_config(config: Config) -> (QueueConfig, QueueConfig) {
    let turbo = QueueConfig {
        credit: config.credit,
        min_run: MIN_PREEMPT_RUN.0,
        max_debt: 0,
        save_quota: false,
    };
    let gap_vcpus = QueueConfig {
        credit: GAP_VCPU_CREDIT,
        min_run: MIN_PREEMPT_RUN.1,
        max_debt: MAX_TURBO_DEBT,
        save_quota: true,
    };
    (turbo, gap_vcpus)
}

impl CoreScheduler for TurboCore {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        let slice = self.config.slice;
        let of = |class: Class| {
            let vms = vms.iter().take(MAX_VMS).enumerate();
            vms.filter(move |(_, p)| p.class == class)
                .map(move |(i, p)| match class {
                    Class::Ls => (i, p, p.microslice.clamp(SLOT_RANGE.0, SLOT_RANGE.1)),
                    Class::Batch => (i, p, slice),
                })
        };
        self.turbo.configure(now, of(Class::Ls));
        self.gap_vcpus.configure(now, of(Class::Batch));
        self.gap_states.clear();
        self.gap_states.resize(vms.len().min(MAX_VMS), (now, 0));
        self.reserves.clear();
        self.reserves.resize(vms.len().min(MAX_VMS), Reserve::new());
    }

    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision) {
        for (k, reserve) in self.reserves.iter_mut().enumerate() {
            reserve.charge(now, activity_of(activity, k));
        }
        let reserves = &self.reserves;
        self.turbo.set_held(|k| reserves[k].is_held());
        self.turbo.decide(now, activity);
        self.gap_vcpus.decide(now, activity);
        self.grant_floor(now, activity);
        let mut until = FOREVER;
        // A turbo vCPU that is alone keeps its rank, but not against a run that the floor grants.
        let granted = self.gap_states.iter().any(|&(_, left)| left > 0);
        for a in self.turbo.answers() {
            out.ranks[a.index] = match a.position {
                Position::Held => Rank::Capped,
                Position::Behind => Rank::Owner,
                Position::Ahead if !(granted && a.ready) => Rank::Boost,
                Position::Turn | Position::Ahead => Rank::Preempt,
            };
            let reserve = &self.reserves[a.index];
            out.budgets[a.index] = match self.config.reserve {
                0 => a.budget,
                _ => a.budget.min(reserve.budget()),
            };
            if reserve.is_held() {
                until = until.min(now.saturating_add(HELD_RECHECK_INTERVAL));
            } else if a.position == Position::Held {
                until = until.min(a.refill_at);
            }
        }
        for a in self.gap_vcpus.answers() {
            let granted = self.gap_states[a.index].1;
            out.ranks[a.index] = match a.position {
                Position::Held => Rank::Capped,
                _ if granted > 0 => Rank::Boost,
                Position::Behind => Rank::Background,
                Position::Turn | Position::Ahead => Rank::Waiting,
            };
            out.budgets[a.index] = match granted {
                0 => a.budget,
                _ => a.budget.min(granted),
            };
            if a.position == Position::Held {
                until = until.min(a.refill_at);
            }
        }
        if self.turbo.contenders() > 0 && !self.gap_vcpus.is_empty() {
            // The next decision finds out whether turbo vCPUs leave gaps.
            until = until.min(now.saturating_add(ACCOUNTING_INTERVAL));
        }
        out.until = until;
        out.notify_block = self.reserves.iter().any(Reserve::is_moderated);
        out.notify_wake = if self.turbo.contenders() > 0 {
            self.turbo.needs_wake_notification()
        } else {
            self.gap_vcpus.needs_wake_notification()
        };
    }
}

impl PoolScheduler for TurboCore {
    fn add_other_cores(&mut self, ran: &[OtherCoreUsage]) {
        let part = 1000 - self.config.reserve;
        for (k, reserve) in self.reserves.iter_mut().enumerate() {
            let OtherCoreUsage { due, waits, .. } = ran.get(k).copied().unwrap_or_default();
            reserve.add_due(due, waits, part);
        }
        self.turbo.add_other_cores(ran, false);
        self.gap_vcpus.add_other_cores(ran, true);
    }
}
