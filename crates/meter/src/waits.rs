// SPDX-License-Identifier: Apache-2.0
//! What was counted in the last seconds, from counters that only grow: a log of what each second added.

use std::collections::VecDeque;

use crate::acct::HistCounters;
use crate::hist::{Histogram, Waits, differences};

/// Length of the window over which waits and delays are counted, s.
pub const WAIT_WINDOW_SECONDS: usize = 10;

const SECOND: u64 = 1_000_000_000;

/// What the counters of a histogram added from one entry to the next.
#[derive(Debug)]
struct Added {
    /// The second of the later entry.
    until: u64,
    /// Time from one to the other, ns.
    time: u64,
    /// Bucket, count and sum of each bucket that grew. Few do, so this is shorter than the counters.
    buckets: Box<[(u8, u32, u64)]>,
}

/// The counters of one histogram at the first reading in each second.
#[derive(Debug, Default)]
pub(crate) struct WaitLog {
    /// Time of the last entry, ns, and the counters then.
    last: Option<(u64, Box<HistCounters>)>,
    added: VecDeque<Added>,
}

impl WaitLog {
    /// Whether the log lacks an entry for the second of this time (ns).
    pub(crate) fn is_due(&self, at: u64) -> bool {
        self.last
            .as_ref()
            .is_none_or(|(last, _)| last / SECOND != at / SECOND)
    }

    /// Adds an entry, and drops what the window no longer needs.
    pub(crate) fn push(&mut self, at: u64, counters: &HistCounters) {
        let second = at / SECOND;
        match &mut self.last {
            None => self.last = Some((at, Box::new(*counters))),
            Some((last_at, last)) => {
                let grown = differences(counters, last);
                self.added.push_back(Added {
                    until: second,
                    time: at.saturating_sub(*last_at),
                    buckets: grown.map(|(b, n, sum)| (b as u8, n, sum)).collect(),
                });
                (*last_at, **last) = (at, *counters);
            }
        }
        let is_old = |added: &Added| added.until + WAIT_WINDOW_SECONDS as u64 <= second + 1;
        while self.added.front().is_some_and(is_old) {
            self.added.pop_front();
        }
    }

    /// What was counted in the window, given the counters at `at` (ns).
    pub(crate) fn since(&self, at: u64, counters: &HistCounters) -> Waits {
        let mut waits = Waits::default();
        let Some((last_at, last)) = &self.last else {
            return waits;
        };
        waits.time = at.saturating_sub(*last_at);
        waits.histogram.add_difference(counters, last);
        for added in &self.added {
            waits.time += added.time;
            for (bucket, count, sum) in &added.buckets {
                waits
                    .histogram
                    .add_to((*bucket).into(), (*count).into(), *sum);
            }
        }
        waits
    }

    /// What the last entry added.
    pub(crate) fn newest(&self) -> Histogram {
        let mut newest = Histogram::default();
        for (bucket, count, sum) in self.added.back().iter().flat_map(|added| &added.buckets) {
            newest.add_to((*bucket).into(), (*count).into(), *sum);
        }
        newest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(n: u32) -> HistCounters {
        let mut counters = HistCounters::ZERO;
        counters.counts[7] = n;
        // Wraps together with the count.
        counters.sums[7] = (i64::from(n as i32) * 4000) as u64;
        counters
    }

    #[test]
    fn waits_leave_the_window_after_ten_seconds() {
        let mut wait_log = WaitLog::default();
        // one wait in each tenth of a second
        for tenth in 0..300_u32 {
            let at = u64::from(tenth) * SECOND / 10;
            if wait_log.is_due(at) {
                wait_log.push(at, &counted(tenth));
            }
            let waits = wait_log.since(at, &counted(tenth));
            let count = waits.histogram.count();
            let most = WAIT_WINDOW_SECONDS as u64 * 10;
            assert!(
                count <= most && count + 10 >= most.min(tenth.into()),
                "{tenth}: {count}"
            );
            assert_eq!(waits.time, count * SECOND / 10, "one wait in each tenth");
            assert_eq!(waits.histogram.sum(), count * 4000);
        }
        assert_eq!(wait_log.added.len(), WAIT_WINDOW_SECONDS - 1);
    }

    #[test]
    fn waits_between_distant_readings_count_until_they_leave_the_window() {
        let mut wait_log = WaitLog::default();
        let count = |log: &WaitLog, second: u64, n| {
            let waits = log.since(second * SECOND, &counted(n));
            waits.histogram.count()
        };
        wait_log.push(5 * SECOND, &counted(u32::MAX));
        wait_log.push(50 * SECOND, &counted(3));
        assert_eq!(
            count(&wait_log, 50, 3),
            4,
            "a counter that wrapped counts on"
        );
        assert_eq!(wait_log.newest().count(), 4);
        wait_log.push(51 * SECOND, &counted(4));
        assert_eq!(count(&wait_log, 51, 4), 5);
        assert_eq!(wait_log.newest().count(), 1);
        wait_log.push(59 * SECOND, &counted(4));
        assert_eq!(count(&wait_log, 59, 6), 3);
        assert!(!wait_log.is_due(59 * SECOND + 1) && wait_log.is_due(60 * SECOND));
    }

    #[test]
    fn an_empty_log_has_no_waits() {
        let waits = WaitLog::default().since(SECOND, &counted(9));
        assert_eq!((waits.histogram.count(), waits.time), (0, 0));
        assert_eq!(WaitLog::default().newest().count(), 0);
    }
}
