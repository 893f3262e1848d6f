// SPDX-License-Identifier: Apache-2.0
//! The work of a vCPU, in levels that interrupt each other.

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

use crate::sched::{BASE_SLICE, TICK};

/// Precedence of work in a guest: a higher level interrupts a lower one on the same vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Interrupts, softirqs, kernel threads that serve I/O.
    Irq = 0,
    /// A process that sleeps most of the time: the guest's scheduler prefers it to one that computes.
    App = 1,
    /// A process that computes.
    Compute = 2,
}

/// A completed piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Its workload.
    pub owner: usize,
    /// The tag it was submitted with.
    pub tag: u64,
}

/// A piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Job {
    left: Nanos,
    done: Completion,
    level: Level,
}

/// Most by which one of two vCPUs leads when the other one wakes, ns: the lag of that one, to the mean of both, is at most a slice and a
/// tick.
const MAX_LEAD: i64 = 2 * (BASE_SLICE + TICK) as i64;

/// Work of a vCPU in order of execution: by level, then first come first served. Or of two vCPUs on a core, see [`Jobs::apart`].
#[derive(Debug, Default)]
pub(super) struct Jobs {
    queue: VecDeque<Job>,
    turns: Option<Turns>,
}

/// How two vCPUs of a VM share its time: as two tasks of a control group do under EEVDF ([`crate::sched::Eevdf`]). The one that has
/// run less is due; of two that have run as long, the one that runs goes on for a slice. The kernel looks when one wakes, at a tick,
/// and when the VM gets its core.
#[derive(Debug, Default)]
struct Turns {
    /// What the vCPU of the interrupts has run more than the other one, ns.
    lead: i64,
    /// Whether that of the interrupts is to run, if both want to.
    irq_runs: bool,
    /// How long the one that runs has run, ns.
    ran: Nanos,
    /// Time until the next tick, ns.
    rest: Nanos,
    /// Cost of a switch from one to the other, ns.
    switch: Nanos,
    /// What is left of the present switch, ns.
    switching: Nanos,
    /// Whether that of the interrupts had the core last.
    irq_ran: bool,
}

/// What of a VM's work runs.
struct Running {
    /// The piece of work, by its place; `None`: the computing load, or nothing.
    place: Option<usize>,
    /// Of two vCPUs: whether that of the interrupts runs.
    irq: bool,
    /// Of two vCPUs: whether the other one has nothing to do.
    alone: bool,
}

impl Turns {
    fn look(&mut self) {
        self.irq_runs = match self.lead {
            0 => self.irq_runs ^ (self.ran >= BASE_SLICE),
            lead => lead < 0,
        };
        self.rest = TICK;
    }

    /// Charges the vCPU that ran. `alone`: the other one had nothing to do.
    fn charge(&mut self, irq: bool, alone: bool, passed: Nanos) {
        let passed_ns = i64::try_from(passed).unwrap_or(i64::MAX);
        let mut lead = if irq { self.lead } else { -self.lead };
        if !alone {
            lead = lead.saturating_add(passed_ns);
            self.rest = self.rest.saturating_sub(passed);
        } else if lead < 0 {
            // One that was ahead before it slept owes nothing once the other one has reached it.
            lead = lead.saturating_add(passed_ns).min(0);
        } else {
            lead = lead.min(MAX_LEAD);
        }
        self.lead = if irq { lead } else { -lead };
        self.ran = passed + if self.irq_runs == irq { self.ran } else { 0 };
        self.irq_runs = irq;
    }
}

impl Jobs {
    /// Interrupts and softirqs run on one vCPU, all else on another one of the VM, on the same core. `switch`: cost of a switch from one
    /// to the other, ns.
    pub(super) fn apart(switch: Nanos) -> Self {
        Self {
            queue: VecDeque::new(),
            turns: Some(Turns {
                rest: TICK,
                switch,
                ..Turns::default()
            }),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether interrupts are pending.
    pub(super) fn has_irq(&self) -> bool {
        let first = self.queue.front();
        first.is_some_and(|job| job.level == Level::Irq)
    }

    /// Adds work of `cost` ns, at least 1.
    pub(super) fn push(&mut self, level: Level, cost: Nanos, done: Completion) {
        if let Some(turns) = &mut self.turns
            && level != Level::Compute
            && !self.queue.iter().any(|other| other.level == level)
        {
            // One of the two wakes.
            turns.look();
        }
        let left = cost.max(1);
        let job = Job { left, done, level };
        if self.queue.back().is_none_or(|last| last.level <= level) {
            self.queue.push_back(job);
        } else {
            let place = self.queue.partition_point(|other| other.level <= level);
            self.queue.insert(place, job);
        }
    }

    /// The VM gets its core.
    pub(super) fn look(&mut self) {
        if let Some(turns) = &mut self.turns {
            turns.look();
        }
    }

    /// Number of pieces of work for interrupts; they are the first ones.
    fn irqs(&self) -> usize {
        self.queue.partition_point(|job| job.level == Level::Irq)
    }

    /// What runs. `loaded`: there is a computing load.
    fn running(&self, loaded: bool) -> Running {
        let first = |place: usize| (place < self.queue.len()).then_some(place);
        let Some(turns) = &self.turns else {
            return Running {
                place: first(0),
                irq: false,
                alone: true,
            };
        };
        let irqs = self.irqs();
        let (irq, app) = (irqs > 0, irqs < self.queue.len() || loaded);
        let runs = irq && (turns.irq_runs || !app);
        Running {
            place: first(if runs { 0 } else { irqs }),
            irq: runs,
            alone: !(irq && app),
        }
    }

    /// Time until the piece of work that runs ends, or the other vCPU may be due, ns. `load`: what is left of the computing load, ns.
    pub(super) fn next_end(&mut self, load: Nanos) -> Nanos {
        let Running { place, irq, alone } = self.running(load > 0);
        let end = place.map_or(load, |place| self.queue[place].left);
        let Some(turns) = &mut self.turns else {
            return end;
        };
        if turns.irq_ran != irq && end > 0 {
            (turns.irq_ran, turns.switching) = (irq, turns.switch);
        }
        let end = end.saturating_add(turns.switching);
        if alone { end } else { end.min(turns.rest) }
    }

    /// Runs for a time, ns, and returns how much of it was the computing load.
    pub(super) fn run(&mut self, passed: Nanos, loaded: bool) -> Nanos {
        let Running { place, irq, alone } = self.running(loaded);
        let mut rest = passed;
        if let Some(turns) = &mut self.turns {
            turns.charge(irq, alone, passed);
            rest -= turns.switching.min(passed);
            turns.switching = turns.switching.saturating_sub(passed);
        }
        let Some(job) = place.and_then(|place| self.queue.get_mut(place)) else {
            return rest;
        };
        job.left = job.left.saturating_sub(rest);
        0
    }

    /// Removes a piece of work that is complete, and lets the other vCPU run if it is due.
    pub(super) fn pop_ended(&mut self) -> Option<Completion> {
        let has_ended = |place: &usize| self.queue.get(*place).is_some_and(|job| job.left == 0);
        let ended = match &self.turns {
            None => Some(0).filter(has_ended),
            Some(_) => [0, self.irqs()].into_iter().find(has_ended),
        };
        let done = ended.and_then(|place| self.queue.remove(place));
        if let Some(turns) = &mut self.turns
            && turns.rest == 0
        {
            turns.look();
        }
        done.map(|job| job.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_level_goes_first_and_the_lower_one_goes_on_afterwards() {
        let done = |tag| Completion { owner: 0, tag };
        let mut jobs = Jobs::default();
        assert!(jobs.is_empty() && jobs.next_end(7) == 7 && jobs.pop_ended().is_none());
        jobs.push(Level::Compute, 10, done(1));
        jobs.run(4, false);
        jobs.push(Level::Irq, 0, done(2));
        jobs.push(Level::Irq, 3, done(3));
        assert_eq!((jobs.next_end(0), jobs.has_irq()), (1, true));
        jobs.run(1, false);
        assert_eq!(jobs.pop_ended(), Some(done(2)));
        assert_eq!((jobs.pop_ended(), jobs.next_end(0)), (None, 3));
        jobs.run(3, false);
        assert_eq!(jobs.pop_ended(), Some(done(3)));
        assert!(!jobs.has_irq() && !jobs.is_empty());
        jobs.push(Level::App, 2, done(4));
        jobs.push(Level::Compute, 2, done(5));
        jobs.run(2, false);
        assert_eq!(jobs.pop_ended(), Some(done(4)));
        jobs.run(6, false);
        assert_eq!(jobs.pop_ended(), Some(done(1)));
        assert_eq!((jobs.pop_ended(), jobs.next_end(0)), (None, 2));
    }
    #[test]
    fn two_vcpus_on_a_core_get_the_same_time_while_both_want_it() {
        let done = |tag| Completion { owner: 0, tag };
        let mut jobs = Jobs::apart(0);
        let (mut irq, mut load) = (0, 0);
        for _ in 0..100 {
            if !jobs.has_irq() {
                jobs.push(Level::Irq, 10 * TICK, done(1));
            }
            let end = jobs.next_end(Nanos::MAX);
            assert!(end <= TICK);
            let computed = jobs.run(end, true);
            (irq, load) = (irq + end - computed, load + computed);
            jobs.pop_ended();
        }
        assert!(irq.abs_diff(load) <= TICK, "{irq} {load}");
    }

    #[test]
    fn a_process_that_wakes_runs_at_once_if_the_interrupts_have_run_more() {
        let done = |tag| Completion { owner: 0, tag };
        let mut jobs = Jobs::apart(10);
        jobs.push(Level::Irq, 1_000, done(1));
        assert_eq!(jobs.next_end(0), 10 + 1_000);
        jobs.run(10, false);
        // Before a load of its own wants the core, the process slept.
        jobs.run(300, false);
        jobs.push(Level::App, 50, done(2));
        // It is owed nothing, so the interrupts go on until the next look.
        assert_eq!(jobs.next_end(0), 700);
        jobs.run(100, false);
        jobs.look();
        // A switch, and the process.
        assert_eq!(jobs.next_end(0), 10 + 50);
        jobs.run(60, false);
        assert_eq!(
            (jobs.pop_ended(), jobs.next_end(0)),
            (Some(done(2)), 10 + 600)
        );
    }
}
