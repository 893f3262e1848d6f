// SPDX-License-Identifier: Apache-2.0
//! Any machine of `policy` as the scheduler of a core, driven as the slot controller of a real host drives it: it sets
//! ranks, and the kernel runs the highest-ranked vCPU that wants to run, equal ones first come first served.

use viola_policy::slices::{
    Decision, FOREVER, Io, MAX_VMS, Machine, Nanos, Params, Rank, Seen, US,
};
use viola_policy::turbo::{Elsewhere, Pooled};

use super::{Pick, Scheduler, View};

/// What can be driven.
pub enum Driver {
    /// A machine of one core.
    Alone(Box<dyn Machine + Send>),
    /// A machine of a core of a pool.
    Pooled(Box<dyn Pooled + Send>),
}

#[derive(Debug, Clone, Copy)]
struct Row {
    rank: Rank,
    /// Of those that may run the highest one does: the rank, and among equals the place, of which a lower one runs first.
    order: i64,
    budget: Nanos,
    seen: Seen,
    awake: bool,
}

/// A machine of `policy` on a core.
pub struct Slots {
    driver: Driver,
    /// Core time of a decision.
    cost: Nanos,
    sees_io: bool,
    rows: Vec<Row>,
    seen: Vec<Seen>,
    decision: Decision,
    running: Option<usize>,
    until: Nanos,
    fresh: bool,
    first: i64,
    last: i64,
    overhead: Nanos,
    decisions: u64,
}

impl Row {
    /// Sets the order by the rank and this place; there are fewer than 2^49 places to either side.
    fn put(&mut self, place: i64) {
        self.order = ((self.rank as i64) << 50) - place;
    }

    /// Whether nothing is to be noted of it.
    fn is_as_before(&self, view: &View, io: Io) -> bool {
        view.used == 0 && !view.blocked && view.runnable == self.awake && io == self.seen.io
    }
}

impl Slots {
    /// Drives `driver`, whose decisions take `cost` ns of the core each. With `sees_io` it is told of waiting interrupts.
    pub fn new(driver: Driver, cost: Nanos, sees_io: bool) -> Self {
        Self {
            driver,
            cost,
            sees_io,
            rows: Vec::new(),
            seen: Vec::new(),
            decision: Decision::default(),
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
    fn note(&mut self, now: Nanos, views: &[View]) -> bool {
        let mut ask = self.fresh || now >= self.until;
        for (i, (row, view)) in self.rows.iter_mut().zip(views).enumerate() {
            let io = match (self.sees_io, view.io) {
                (false, _) => Io::Unseen,
                (true, false) => Io::Quiet,
                (true, true) => Io::Pending,
            };
            let runs = self.running == Some(i);
            // most are, at most moments
            if !runs && row.is_as_before(view, io) {
                continue;
            }
            row.seen.used += view.used;
            row.seen.blocked |= view.blocked;
            if row.budget != FOREVER {
                row.budget = row.budget.saturating_sub(view.used);
            }
            if view.runnable && !row.awake {
                self.last += 1;
                row.put(self.last);
                ask |= self.decision.notify_wake;
            }
            row.awake = view.runnable;
            row.seen.runnable = view.runnable;
            ask |= io == Io::Pending && row.seen.io == Io::Quiet;
            row.seen.io = io;
            if runs {
                ask |= match view.blocked {
                    true => self.decision.notify_block,
                    false => row.budget == 0,
                };
            }
        }
        ask
    }

    fn ask(&mut self, now: Nanos) {
        self.fresh = false;
        self.seen.clear();
        for row in &mut self.rows {
            self.seen.push(row.seen);
            row.seen.used = 0;
            row.seen.blocked = false;
        }
        match &mut self.driver {
            Driver::Alone(m) => m.decide(now, &self.seen, &mut self.decision),
            Driver::Pooled(m) => m.decide(now, &self.seen, &mut self.decision),
        }
        self.decisions += 1;
        self.overhead += self.cost;
        // A machine that wants to be asked again at once is asked a little later, as a timer would.
        self.until = self.decision.until.max(now + US);
        for (i, row) in self.rows.iter_mut().enumerate() {
            let (rank, was) = (self.decision.ranks[i], row.rank);
            row.rank = rank;
            if rank > was {
                self.last += 1;
                row.put(self.last);
            } else if rank < was {
                self.first -= 1;
                row.put(self.first);
            }
            row.budget = self.decision.budgets[i].max(1);
        }
    }
}

impl Scheduler for Slots {
    fn configure(&mut self, now: Nanos, vcpus: &[Params]) {
        let mut row = Row {
            rank: Rank::Waiting,
            order: 0,
            budget: FOREVER,
            seen: Seen::default(),
            awake: false,
        };
        row.put(0);
        self.rows.resize(vcpus.len().min(MAX_VMS), row);
        match &mut self.driver {
            Driver::Alone(m) => m.configure(now, vcpus),
            Driver::Pooled(m) => m.configure(now, vcpus),
        }
        self.fresh = true;
    }

    fn pick(&mut self, now: Nanos, views: &[View]) -> Pick {
        if self.note(now, views) {
            self.ask(now);
        }
        let (mut best, mut order) = (None, i64::MIN);
        for (i, row) in self.rows.iter().enumerate() {
            if row.awake && row.rank != Rank::Capped && row.order >= order {
                (best, order) = (Some(i), row.order);
            }
        }
        self.running = best;
        let budget = best.map_or(FOREVER, |i| self.rows[i].budget);
        Pick {
            who: best,
            until: self.until.min(now.saturating_add(budget)),
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
