// SPDX-License-Identifier: Apache-2.0
//! A core of the regular pool: ordinary slices, with what a VM ran on turbo cores counted in.

use super::fair_queue::{FairQueue, MAX_TURBO_DEBT, Position, QueueConfig};
use super::floor::Floor;
use super::{ACCOUNTING_INTERVAL, OtherCoreUsage, PoolScheduler, REGULAR_SLICE};
use crate::slices::{
    Activity, CoreScheduler, Decision, FOREVER, MAX_VMS, MS, Nanos, Params, Rank, US,
};

/// Settings of a [`RegularCore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Slice, 100 us ..= 1 s. 30 ms in the paper; 4 ms is the effective slice of stock EEVDF at HZ 250.
    pub slice: Nanos,
    /// Maximum lag of a sleeping VM, 100 us ..= 100 ms: for so long it preempts the others when it wakes.
    pub credit: Nanos,
    /// Run of a VM to which its share leaves nothing, in each [`Config::floor_interval`]; 0 (off, as in the paper) ..=
    /// 10 ms. The VM pays for it later.
    pub floor: Nanos,
    /// Longest wait of such a VM if it is the only one, 10 ms ..= 10 s; an accounting interval may come on top.
    pub floor_interval: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slice: REGULAR_SLICE,
            credit: MS,
            floor: MS,
            floor_interval: 150 * MS,
        }
    }
}

/// Minimum run of a VM that wakes with positive lag.
const MIN_PREEMPT_RUN: Nanos = 100 * US;

/// The scheduler of a regular core (paper section 3.1, "VM scheduling policy"). See the text of [`crate::turbo`].
#[derive(Debug, Clone)]
pub struct RegularCore {
    config: Config,
    queue: FairQueue,
}

impl Default for RegularCore {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl RegularCore {
    /// A scheduler without VMs. Settings out of range are clamped.
    pub fn new(config: Config) -> Self {
        let config = clamped(config);
        Self {
            config,
            queue: FairQueue::new(
                queue_config(config),
                Floor::new(config.floor, config.floor_interval),
            ),
        }
    }

    /// Changes the settings from the next [`CoreScheduler::configure`] on.
    pub fn set_config(&mut self, config: Config) {
        self.config = clamped(config);
        self.queue.set_config(queue_config(self.config));
        self.queue.floor.run = self.config.floor;
        self.queue.floor.interval = self.config.floor_interval;
    }
}

fn clamped(config: Config) -> Config {
    Config {
        slice: config.slice.clamp(100 * US, 1000 * MS),
        credit: config.credit.clamp(MIN_PREEMPT_RUN, 100 * MS),
        floor: config.floor.min(10 * MS),
        floor_interval: config.floor_interval.clamp(10 * MS, 10_000 * MS),
    }
}

fn queue_config(config: Config) -> QueueConfig {
    QueueConfig {
        credit: config.credit,
        min_run: MIN_PREEMPT_RUN,
        max_debt: MAX_TURBO_DEBT,
        save_quota: true,
    }
}

impl CoreScheduler for RegularCore {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        let slice = self.config.slice;
        let vms = vms.iter().take(MAX_VMS).enumerate();
        self.queue.configure(now, vms.map(|(i, p)| (i, p, slice)));
    }

    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision) {
        self.queue.decide(now, activity);
        let contended = self.queue.contenders() > 1;
        let mut until = if contended {
            now.saturating_add(ACCOUNTING_INTERVAL)
        } else {
            FOREVER
        };
        for a in self.queue.answers() {
            out.ranks[a.index] = match a.position {
                Position::Held => Rank::Capped,
                Position::Behind => Rank::Waiting,
                Position::Turn => Rank::Owner,
                Position::Ahead => Rank::Preempt,
            };
            out.budgets[a.index] = a.budget;
            if a.position == Position::Held {
                until = until.min(a.refill_at);
            }
        }
        out.until = until;
        out.notify_block = false;
        out.notify_wake = self.queue.needs_wake_notification();
    }
}

impl PoolScheduler for RegularCore {
    fn add_other_cores(&mut self, ran: &[OtherCoreUsage]) {
        self.queue.add_other_cores(ran, true);
    }

    fn due(&self, index: usize) -> (Nanos, bool) {
        self.queue.due(index)
    }
}
