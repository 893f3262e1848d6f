// SPDX-License-Identifier: Apache-2.0
//! The work that a vCPU is given, by levels that interrupt each other.

use std::collections::VecDeque;

use viola_policy::slices::Nanos;

/// Precedence of work in a guest. A higher one interrupts a lower one on the same vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Interrupts, softirqs, kernel threads that serve I/O.
    Irq = 0,
    /// A process that sleeps most of the time: the guest's scheduler lets it go before one that computes.
    App = 1,
    /// One that computes.
    Compute = 2,
}

/// A piece of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Job {
    left: Nanos,
    done: Done,
}

/// Work that came to its end: who asked for it, and the mark that was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// Who submitted it.
    pub owner: usize,
    /// Its mark.
    pub tag: u64,
}

/// What a vCPU has to do, by level.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    queues: [VecDeque<Job>; 3],
    /// One bit for each level at which there is something: asked far more often than it changes.
    filled: u8,
}

impl Jobs {
    pub(super) fn is_empty(&self) -> bool {
        self.filled == 0
    }

    pub(super) fn has(&self, level: Level) -> bool {
        self.filled & 1 << level as u8 != 0
    }

    /// Adds one of `cost` ns, at least 1.
    pub(super) fn push(&mut self, level: Level, cost: Nanos, done: Done) {
        let left = cost.max(1);
        self.filled |= 1 << level as u8;
        self.queues[level as usize].push_back(Job { left, done });
    }

    /// What is left of the one that goes on when the vCPU runs: the first of the highest level.
    pub(super) fn next_end(&self) -> Option<Nanos> {
        let queue = self.queues.get(self.filled.trailing_zeros() as usize)?;
        queue.front().map(|job| job.left)
    }

    /// That one ran so long.
    pub(super) fn run(&mut self, passed: Nanos) {
        let level = self.filled.trailing_zeros() as usize;
        if let Some(job) = self.queues.get_mut(level).and_then(VecDeque::front_mut) {
            job.left = job.left.saturating_sub(passed);
        }
    }

    /// Takes that one out, if nothing of it is left. Those of a lower level cannot have ended.
    pub(super) fn pop_ended(&mut self) -> Option<Done> {
        let level = self.filled.trailing_zeros();
        let queue = self.queues.get_mut(level as usize)?;
        if queue.front()?.left > 0 {
            return None;
        }
        let job = queue.pop_front();
        if queue.is_empty() {
            self.filled &= !(1 << level);
        }
        job.map(|job| job.done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_higher_level_goes_first_and_the_lower_one_goes_on_afterwards() {
        let done = |tag| Done { owner: 0, tag };
        let mut jobs = Jobs::default();
        assert!(jobs.is_empty() && jobs.next_end().is_none() && jobs.pop_ended().is_none());
        jobs.push(Level::Compute, 10, done(1));
        jobs.run(4);
        jobs.push(Level::Irq, 0, done(2));
        jobs.push(Level::Irq, 3, done(3));
        assert_eq!((jobs.next_end(), jobs.has(Level::App)), (Some(1), false));
        jobs.run(1);
        assert_eq!(jobs.pop_ended(), Some(done(2)));
        assert_eq!((jobs.pop_ended(), jobs.next_end()), (None, Some(3)));
        jobs.run(3);
        assert_eq!(jobs.pop_ended(), Some(done(3)));
        assert!(!jobs.has(Level::Irq) && jobs.has(Level::Compute));
        jobs.run(6);
        assert_eq!(jobs.pop_ended(), Some(done(1)));
        assert!(jobs.is_empty());
    }
}
