// SPDX-License-Identifier: Apache-2.0
//! Where requests come from: the plan of an open loop, or the clients of a closed one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::load::Intervals;

/// Pause of a client of a closed loop after an error, in nanoseconds, so that the clients do not
/// flood a server that is down.
const PAUSE_AFTER_ERROR: u64 = 10_000_000;

/// A request: its moment, in nanoseconds of the run, and its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Due {
    pub(super) at: u64,
    pub(super) client: usize,
}

/// The source of a run's requests.
pub(super) enum Source {
    /// Moments in order, and the number of those taken.
    Open { plan: Vec<u64>, next: usize },
    /// Clients.
    Closed {
        /// Moment and number of each client that is not waiting for an answer.
        due: BinaryHeap<Reverse<(u64, usize)>>,
        pauses: Vec<Intervals>,
        /// Requests left.
        left: usize,
        /// No request after this moment.
        until: u64,
    },
}

impl Source {
    pub(super) fn open(plan: Vec<u64>) -> Self {
        Self::Open { plan, next: 0 }
    }

    pub(super) fn closed(
        clients: usize,
        requests: usize,
        limit: Duration,
        pause: (Duration, Duration),
        seed: u64,
    ) -> Self {
        let mut pauses: Vec<Intervals> = (0..clients)
            .map(|client| Intervals::new(seed.wrapping_add(client as u64), pause))
            .collect();
        let first = |(client, pause): (usize, &mut Intervals)| {
            Reverse((pause.next().as_nanos() as u64, client))
        };
        Self::Closed {
            due: pauses.iter_mut().enumerate().map(first).collect(),
            pauses,
            left: requests,
            until: limit.as_nanos() as u64,
        }
    }

    /// Whether requests are due at moments that do not depend on answers.
    pub(super) fn is_open(&self) -> bool {
        matches!(self, Self::Open { .. })
    }

    /// Moment of the next request; `None` when there is none, or none before an answer comes.
    pub(super) fn next_at(&self) -> Option<u64> {
        match self {
            Self::Open { plan, next } => plan.get(*next).copied(),
            Self::Closed {
                due, left, until, ..
            } => {
                let Reverse((at, _)) = due.peek()?;
                (*left > 0 && at < until).then_some(*at)
            }
        }
    }

    /// Takes the next request if it is due.
    pub(super) fn take(&mut self, now: u64) -> Option<Due> {
        let at = self.next_at().filter(|at| *at <= now)?;
        match self {
            Self::Open { next, .. } => {
                *next += 1;
                Some(Due { at, client: 0 })
            }
            Self::Closed { due, left, .. } => {
                *left -= 1;
                let Reverse((at, client)) = due.pop()?;
                Some(Due { at, client })
            }
        }
    }

    /// A client has its answer, or an error.
    pub(super) fn done(&mut self, client: usize, now: u64, is_good: bool) {
        if let Self::Closed { due, pauses, .. } = self {
            let mut pause = pauses[client].next().as_nanos() as u64;
            if !is_good {
                pause = pause.max(PAUSE_AFTER_ERROR);
            }
            due.push(Reverse((now + pause, client)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn an_open_loop_does_not_wait_for_answers() {
        let mut source = Source::open(vec![1, 2, 2, 9]);
        assert_eq!(source.take(0), None);
        let taken: Vec<u64> = std::iter::from_fn(|| source.take(5))
            .map(|d| d.at)
            .collect();
        assert_eq!(taken, [1, 2, 2]);
        assert_eq!(source.next_at(), Some(9));
        assert_eq!(source.take(9).map(|d| d.at), Some(9));
        assert_eq!(source.next_at(), None);
    }

    #[test]
    fn a_client_of_a_closed_loop_waits_for_its_answer() {
        let pause = (Duration::from_millis(2), Duration::from_millis(2));
        let mut source = Source::closed(1, 3, Duration::from_millis(100), pause, 1);
        assert_eq!(source.next_at(), Some(2 * MS));
        assert!(source.take(2 * MS).is_some());
        assert_eq!(source.next_at(), None, "it waits");
        source.done(0, 50 * MS, true);
        assert_eq!(source.next_at(), Some(52 * MS));
        assert!(source.take(60 * MS).is_some());
        source.done(0, 61 * MS, false);
        assert_eq!(source.next_at(), Some(71 * MS), "an error makes a pause");
        assert!(source.take(71 * MS).is_some());
        source.done(0, 72 * MS, true);
        assert_eq!(source.next_at(), None, "three requests were asked for");
    }

    #[test]
    fn no_request_of_a_closed_loop_starts_after_the_limit() {
        let pause = (Duration::ZERO, Duration::ZERO);
        let mut source = Source::closed(2, 100, Duration::from_millis(10), pause, 1);
        let taken: Vec<usize> = std::iter::from_fn(|| source.take(0))
            .map(|d| d.client)
            .collect();
        assert_eq!(taken, [0, 1]);
        source.done(1, 9 * MS, true);
        assert_eq!(source.take(9 * MS).map(|d| d.client), Some(1));
        source.done(0, 10 * MS, true);
        assert_eq!(source.next_at(), None);
    }
}
