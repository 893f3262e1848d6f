// SPDX-License-Identifier: Apache-2.0
//! Any machine of `policy` as the scheduler of a core, driven as the slot controller of a real host drives it: it sets
//! ranks, and the kernel runs the highest-ranked vCPU that wants to run, equal ones first come first served.

use viola_policy::slices::{
    Decision, FOREVER, Io, MAX_VMS, Machine, Nanos, Params, Rank, Seen, US,
};
use viola_policy::turbo::{Elsewhere, Pooled};

use super::{Pick, Scheduler, Views};

/// What can be driven.
pub enum Driver {
    /// A machine of one core.
    Alone(Box<dyn Machine + Send>),
    /// A machine of a core of a pool.
    Pooled(Box<dyn Pooled + Send>),
}

/// A machine of `policy` on a core.
pub struct Slots {
    driver: Driver,
    /// Core time of a decision.
    cost: Nanos,
    sees_io: bool,
    /// What the machine is told at the next decision.
    seen: Vec<Seen>,
    /// Of the last decision; budgets are counted down.
    decision: Decision,
    rows: Vec<Row>,
    running: Option<usize>,
    until: Nanos,
    fresh: bool,
    first: i64,
    last: i64,
    overhead: Nanos,
    decisions: u64,
}

/// What is known of a vCPU besides.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Who runs has the highest: rank and place of those that want to run and may, [`NEVER`] of the others.
    order: i64,
    /// Of equal ones that want to run the lower place runs first.
    place: i64,
    rank: Rank,
}

/// Order of one that does not run even if nobody else wants to.
const NEVER: i64 = i64::MIN;

/// Order by rank, and by place among equals; there are fewer than 2^49 places to either side.
fn order(runnable: bool, rank: Rank, place: i64) -> i64 {
    if runnable && rank != Rank::Capped {
        ((rank as i64) << 50) - place
    } else {
        NEVER
    }
}

impl Slots {
    /// Drives `driver`, whose decisions take `cost` ns of the core each. With `sees_io` it is told of waiting interrupts.
    pub fn new(driver: Driver, cost: Nanos, sees_io: bool) -> Self {
        Self {
            driver,
            cost,
            sees_io,
            seen: Vec::new(),
            decision: Decision::default(),
            rows: Vec::new(),
            running: None,
            until: 0,
            fresh: true,
            first: 0,
            last: 0,
            overhead: 0,
            decisions: 0,
        }
    }

    /// Decisions made so far.
    pub fn decisions(&self) -> u64 {
        self.decisions
    }

    /// Takes what happened since the last call. Returns whether the machine wants to hear of it now.
    fn note(&mut self, now: Nanos, views: &Views) -> bool {
        let mut ask = self.fresh || now >= self.until;
        for (i, view) in views.changed() {
            let Some(seen) = self.seen.get_mut(i) else {
                continue;
            };
            let io = match (self.sees_io, view.io) {
                (false, _) => Io::Unseen,
                (true, false) => Io::Quiet,
                (true, true) => Io::Pending,
            };
            seen.used += view.used;
            seen.blocked |= view.blocked;
            let budget = &mut self.decision.budgets[i];
            if *budget != FOREVER {
                *budget = budget.saturating_sub(view.used);
            }
            if view.runnable != seen.runnable {
                let row = &mut self.rows[i];
                if view.runnable {
                    self.last += 1;
                    row.place = self.last;
                    ask |= self.decision.notify_wake;
                }
                seen.runnable = view.runnable;
                row.order = order(view.runnable, row.rank, row.place);
            }
            ask |= io == Io::Pending && seen.io == Io::Quiet;
            seen.io = io;
            if self.running == Some(i) {
                ask |= match view.blocked {
                    true => self.decision.notify_block,
                    false => *budget == 0,
                };
            }
        }
        ask
    }

    fn ask(&mut self, now: Nanos) {
        self.fresh = false;
        match &mut self.driver {
            Driver::Alone(m) => m.decide(now, &self.seen, &mut self.decision),
            Driver::Pooled(m) => m.decide(now, &self.seen, &mut self.decision),
        }
        self.decisions += 1;
        self.overhead += self.cost;
        // A machine that wants to be asked again at once is asked a little later, as a timer would.
        self.until = self.decision.until.max(now + US);
        for (i, (seen, row)) in self.seen.iter_mut().zip(&mut self.rows).enumerate() {
            (seen.used, seen.blocked) = (0, false);
            let (rank, was) = (self.decision.ranks[i], row.rank);
            if rank > was {
                self.last += 1;
                row.place = self.last;
            } else if rank < was {
                self.first -= 1;
                row.place = self.first;
            }
            row.rank = rank;
            row.order = order(seen.runnable, rank, row.place);
            let budget = &mut self.decision.budgets[i];
            *budget = (*budget).max(1);
        }
    }
}

impl Scheduler for Slots {
    fn configure(&mut self, now: Nanos, vcpus: &[Params]) {
        let vms = vcpus.len().min(MAX_VMS);
        self.seen.resize(vms, Seen::default());
        let row = Row {
            order: NEVER,
            place: 0,
            rank: Rank::Waiting,
        };
        self.rows.resize(vms, row);
        match &mut self.driver {
            Driver::Alone(m) => m.configure(now, vcpus),
            Driver::Pooled(m) => m.configure(now, vcpus),
        }
        self.fresh = true;
    }

    fn pick(&mut self, now: Nanos, views: &Views) -> Pick {
        if self.note(now, views) {
            self.ask(now);
        }
        let mut best = (NEVER, 0);
        for (i, row) in self.rows.iter().enumerate() {
            best = if row.order >= best.0 {
                (row.order, i)
            } else {
                best
            };
        }
        self.running = (best.0 != NEVER).then_some(best.1);
        let budget = (self.running).map_or(FOREVER, |i| self.decision.budgets[i]);
        Pick {
            who: self.running,
            until: self.until,
            budget,
        }
    }

    fn elsewhere(&mut self, ran: &[Elsewhere]) {
        if let Driver::Pooled(m) = &mut self.driver {
            m.elsewhere(ran);
        }
    }

    fn due(&self, index: usize) -> (Nanos, bool) {
        match &self.driver {
            Driver::Alone(_) => (0, false),
            Driver::Pooled(m) => m.due(index),
        }
    }

    fn hears_io(&self) -> bool {
        self.sees_io
    }

    fn overhead(&mut self) -> Nanos {
        std::mem::take(&mut self.overhead)
    }
}
