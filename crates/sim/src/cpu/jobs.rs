// SPDX-License-Identifier: Apache-2.0
//! The work of a vCPU, in levels that interrupt each other.

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

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

/// Work of a vCPU in order of execution: by level, then first come first served.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    queue: VecDeque<Job>,
}

impl Jobs {
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
        let left = cost.max(1);
        let job = Job { left, done, level };
        if self.queue.back().is_none_or(|last| last.level <= level) {
            self.queue.push_back(job);
        } else {
            let place = self.queue.partition_point(|other| other.level <= level);
            self.queue.insert(place, job);
        }
    }

    /// Rest of the first piece of work, ns.
    pub(super) fn next_end(&self) -> Option<Nanos> {
        self.queue.front().map(|job| job.left)
    }

    /// Runs the first piece of work.
    pub(super) fn run(&mut self, passed: Nanos) {
        if let Some(job) = self.queue.front_mut() {
            job.left = job.left.saturating_sub(passed);
        }
    }

    /// Removes the first piece of work if it is complete.
    pub(super) fn pop_ended(&mut self) -> Option<Completion> {
        if self.queue.front()?.left > 0 {
            return None;
        }
        self.queue.pop_front().map(|job| job.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_level_goes_first_and_the_lower_one_goes_on_afterwards() {
        let done = |tag| Completion { owner: 0, tag };
        let mut jobs = Jobs::default();
        assert!(jobs.is_empty() && jobs.next_end().is_none() && jobs.pop_ended().is_none());
        jobs.push(Level::Compute, 10, done(1));
        jobs.run(4);
        jobs.push(Level::Irq, 0, done(2));
        jobs.push(Level::Irq, 3, done(3));
        assert_eq!((jobs.next_end(), jobs.has_irq()), (Some(1), true));
        jobs.run(1);
        assert_eq!(jobs.pop_ended(), Some(done(2)));
        assert_eq!((jobs.pop_ended(), jobs.next_end()), (None, Some(3)));
        jobs.run(3);
        assert_eq!(jobs.pop_ended(), Some(done(3)));
        assert!(!jobs.has_irq() && !jobs.is_empty());
        jobs.push(Level::App, 2, done(4));
        jobs.push(Level::Compute, 2, done(5));
        jobs.run(2);
        assert_eq!(jobs.pop_ended(), Some(done(4)));
        jobs.run(6);
        assert_eq!(jobs.pop_ended(), Some(done(1)));
        assert_eq!((jobs.pop_ended(), jobs.next_end()), (None, Some(2)));
    }
}
