// SPDX-License-Identifier: Apache-2.0
//! Runs any scheduler of `viola-policy` on a simulated core, as the slot controller does on a real host: it sets ranks,
//! and the kernel runs the highest-ranked vCPU that wants to run, equal ranks first come first served.

use viola_policy::slices::{
    Activity, CoreScheduler, Decision, FOREVER, MAX_VMS, Nanos, OpenRequests, Params, Rank, US,
};
use viola_policy::turbo::{OtherCoreUsage, PoolScheduler};

use super::{Pick, Scheduler, Views};

/// A scheduler of `viola-policy`.
pub enum PolicyCore {
    /// For a core outside of the pools.
    Single(Box<dyn CoreScheduler + Send>),
    /// For a core of a pool.
    Pooled(Box<dyn PoolScheduler + Send>),
}

/// Drives a scheduler of `viola-policy` on one core.
pub struct PolicyDriver {
    driver: PolicyCore,
    /// Core time per decision, ns.
    cost: Nanos,
    sees_io: bool,
    /// Input of the next decision, without the packets.
    seen: Vec<Activity>,
    /// Time of the last decision, ns.
    asked_at: Nanos,
    /// The last decision; its budgets are counted down.
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

/// Rank and place of a vCPU.
#[derive(Debug, Clone, Copy)]
struct Row {
    /// Of runnable vCPUs the one with the highest order runs: rank and place, or [`NEVER`] if it must not run.
    order: i64,
    /// Place among equal ranks: the lowest runs first.
    place: i64,
    rank: Rank,
    requests: OpenRequests,
}

/// Order of a vCPU that does not run even on an idle core.
const NEVER: i64 = i64::MIN;

/// Order by rank, then by place; there are fewer than 2^49 places on either side.
fn order(runnable: bool, rank: Rank, place: i64) -> i64 {
    if runnable && rank != Rank::Capped {
        ((rank as i64) << 50) - place
    } else {
        NEVER
    }
}

impl PolicyDriver {
    /// Drives `driver`. Each decision takes `cost` ns of the core. With `sees_io` it reports waiting interrupts.
    pub fn new(driver: PolicyCore, cost: Nanos, sees_io: bool) -> Self {
        Self {
            driver,
            cost,
            sees_io,
            seen: Vec::new(),
            asked_at: 0,
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

    /// Number of decisions so far.
    pub fn decisions(&self) -> u64 {
        self.decisions
    }

    /// Records what changed since the last call. Returns whether a decision is needed.
    fn note(&mut self, now: Nanos, views: &Views) -> bool {
        let mut ask = self.fresh || now >= self.until;
        let contended = self.sees_io && self.seen.iter().filter(|seen| seen.runnable).count() > 1;
        for (i, view) in views.changed() {
            let Some(seen) = self.seen.get_mut(i) else {
                continue;
            };
            seen.used += view.used;
            seen.blocked |= view.blocked;
            let budget = &mut self.decision.budgets[i];
            if *budget != FOREVER {
                *budget = budget.saturating_sub(view.used);
            }
            // A VM that sleeps needs no decision: its rank gets it the core when it wakes.
            let waited = contended && seen.runnable && view.runnable;
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
            let row = &mut self.rows[i];
            row.requests.observe(view.packets, view.used);
            if !view.runnable {
                row.requests.rest();
            }
            let is_open = row.requests.io(0).is_open();
            ask |= waited && row.rank != Rank::Boost && is_open && !seen.io.is_open();
            ask |= self.decision.notify_reply[i] && !is_open;
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
        if self.sees_io {
            for (seen, row) in self.seen.iter_mut().zip(&self.rows) {
                seen.io = row.requests.io(self.asked_at);
                seen.requests = row.requests.counts();
            }
        }
        self.asked_at = now;
        match &mut self.driver {
            PolicyCore::Single(m) => m.decide(now, &self.seen, &mut self.decision),
            PolicyCore::Pooled(m) => m.decide(now, &self.seen, &mut self.decision),
        }
        self.decisions += 1;
        self.overhead += self.cost;
        // A scheduler that wants to be asked at once is asked 1 us later, as by a timer.
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

impl Scheduler for PolicyDriver {
    fn configure(&mut self, now: Nanos, vcpus: &[Params]) {
        let vms = vcpus.len().min(MAX_VMS);
        self.seen.resize(vms, Activity::default());
        let row = Row {
            order: NEVER,
            place: 0,
            rank: Rank::Waiting,
            requests: OpenRequests::default(),
        };
        self.rows.resize(vms, row);
        match &mut self.driver {
            PolicyCore::Single(m) => m.configure(now, vcpus),
            PolicyCore::Pooled(m) => m.configure(now, vcpus),
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

    fn add_other_cores(&mut self, ran: &[OtherCoreUsage]) {
        if let PolicyCore::Pooled(m) = &mut self.driver {
            m.add_other_cores(ran);
        }
    }

    fn due(&self, index: usize) -> (Nanos, bool) {
        match &self.driver {
            PolicyCore::Single(_) => (0, false),
            PolicyCore::Pooled(m) => m.due(index),
        }
    }

    fn wants_io_events(&self) -> bool {
        self.sees_io
    }

    fn overhead(&mut self) -> Nanos {
        std::mem::take(&mut self.overhead)
    }
}
