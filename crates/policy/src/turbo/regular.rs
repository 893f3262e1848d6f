// SPDX-License-Identifier: Apache-2.0
//! A core of the regular pool: ordinary slices, and what a VM ran on turbo cores counts.

use super::floor::Floor;
use super::turns::{LUMP, Place, Rules, Turns};
use super::{ACCOUNTING, Elsewhere, Pooled, REGULAR_SLICE};
use crate::slices::{Decision, FOREVER, MAX_VMS, MS, Machine, Nanos, Params, Rank, Seen, US};

/// Settings of a [`RegularCore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Slice, 100 us ..= 1 s. The paper's 30 ms; 4 ms is what stock EEVDF comes to at HZ 250.
    pub slice: Nanos,
    /// Most service a sleeping VM is owed, 100 us ..= 100 ms: for so long it goes before the others when it wakes.
    pub credit: Nanos,
    /// What a VM runs that the shares leave nothing, 0 (not in the paper: off) ..= 10 ms in each
    /// [`Config::floor_every`]. It goes on the VM's account.
    pub floor: Nanos,
    /// Longest wait of such a VM, if it is the only one, 10 ms ..= 10 s; an accounting period may come on top.
    pub floor_every: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slice: REGULAR_SLICE,
            credit: MS,
            floor: MS,
            floor_every: 150 * MS,
        }
    }
}

/// Shortest run of a VM that wakes with lag in hand.
const EAGER_LEAST: Nanos = 100 * US;

/// The machine of a regular core (section 3.1, "VM scheduling policy"). See the text of [`crate::turbo`].
#[derive(Debug, Clone)]
pub struct RegularCore {
    config: Config,
    turns: Turns,
}

impl Default for RegularCore {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl RegularCore {
    /// A machine without VMs. Settings out of range are moved to the nearest that is in it.
    pub fn new(config: Config) -> Self {
        let config = within(config);
        Self {
            config,
            turns: Turns::new(rules(config), Floor::new(config.floor, config.floor_every)),
        }
    }

    /// Changes the settings. Takes effect with the next [`Machine::configure`].
    pub fn set_config(&mut self, config: Config) {
        self.config = within(config);
        self.turns.set_rules(rules(self.config));
        self.turns.floor.run = self.config.floor;
        self.turns.floor.every = self.config.floor_every;
    }
}

fn within(config: Config) -> Config {
    Config {
        slice: config.slice.clamp(100 * US, 1000 * MS),
        credit: config.credit.clamp(EAGER_LEAST, 100 * MS),
        floor: config.floor.min(10 * MS),
        floor_every: config.floor_every.clamp(10 * MS, 10_000 * MS),
    }
}

fn rules(config: Config) -> Rules {
    Rules {
        credit: config.credit,
        least: EAGER_LEAST,
        debt: LUMP,
        quotas: true,
    }
}

impl Machine for RegularCore {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        let slice = self.config.slice;
        let vms = vms.iter().take(MAX_VMS).enumerate();
        self.turns.configure(now, vms.map(|(i, p)| (i, p, slice)));
    }

    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision) {
        self.turns.decide(now, seen);
        let contended = self.turns.contenders() > 1;
        let mut until = if contended {
            now.saturating_add(ACCOUNTING)
        } else {
            FOREVER
        };
        for a in self.turns.answers() {
            out.ranks[a.index] = match a.place {
                Place::Capped => Rank::Capped,
                Place::Waits => Rank::Waiting,
                Place::Turn => Rank::Owner,
                Place::First => Rank::Eager,
            };
            out.budgets[a.index] = a.budget;
            if a.place == Place::Capped {
                until = until.min(a.refill);
            }
        }
        out.until = until;
        out.notify_block = false;
        out.notify_wake = self.turns.must_hear_of_wakes();
    }
}

impl Pooled for RegularCore {
    fn elsewhere(&mut self, ran: &[Elsewhere]) {
        self.turns.elsewhere(ran, true);
    }

    fn due(&self, index: usize) -> (Nanos, bool) {
        self.turns.due(index)
    }
}
