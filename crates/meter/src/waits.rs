// SPDX-License-Identifier: Apache-2.0
//! Waits of the last seconds, from counters that only grow: a log of the counters, one entry a second.

use std::collections::VecDeque;

use crate::acct::HIST_BUCKETS;
use crate::hist::WaitHist;

/// Length of the window over which waits are counted, s.
pub const WAIT_WINDOW_SECONDS: usize = 10;

/// The counters of one vCPU at the first reading in each second.
#[derive(Debug, Default)]
pub(crate) struct WaitLog(VecDeque<(u64, [u32; HIST_BUCKETS])>);

impl WaitLog {
    /// Whether the log lacks an entry for this second.
    pub(crate) fn is_due(&self, second: u64) -> bool {
        self.0.back().is_none_or(|(noted, _)| *noted != second)
    }

    /// Adds an entry, and drops those that the window no longer needs.
    pub(crate) fn push(&mut self, second: u64, counters: [u32; HIST_BUCKETS]) {
        self.0.push_back((second, counters));
        let is_enough = |(noted, _): &(u64, _)| noted + WAIT_WINDOW_SECONDS as u64 <= second + 1;
        while self.0.get(1).is_some_and(is_enough) {
            self.0.pop_front();
        }
    }

    /// The waits in the window, given the present counters (which wrap at 2^32).
    pub(crate) fn since(&self, counters: &[u32; HIST_BUCKETS]) -> WaitHist {
        let mut waits = WaitHist::default();
        if let Some((_, before)) = self.0.front() {
            waits.add_difference(counters, before);
        }
        waits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(n: u32) -> [u32; HIST_BUCKETS] {
        let mut counters = [0; HIST_BUCKETS];
        counters[7] = n;
        counters
    }

    #[test]
    fn waits_leave_the_window_after_ten_seconds() {
        let mut wait_log = WaitLog::default();
        // one wait in each tenth of a second
        for tenth in 0..300_u32 {
            let second = u64::from(tenth) / 10;
            if wait_log.is_due(second) {
                wait_log.push(second, counted(tenth));
            }
            let count = wait_log.since(&counted(tenth)).count();
            let most = WAIT_WINDOW_SECONDS as u64 * 10;
            assert!(
                count <= most && count + 10 >= most.min(tenth.into()),
                "{tenth}: {count}"
            );
        }
        assert_eq!(wait_log.0.len(), WAIT_WINDOW_SECONDS);
    }

    #[test]
    fn waits_between_distant_readings_count_until_they_leave_the_window() {
        let mut wait_log = WaitLog::default();
        wait_log.push(5, counted(u32::MAX));
        wait_log.push(50, counted(3));
        assert_eq!(
            wait_log.since(&counted(3)).count(),
            4,
            "a counter that wrapped counts on"
        );
        wait_log.push(51, counted(4));
        assert_eq!(wait_log.since(&counted(4)).count(), 5);
        wait_log.push(59, counted(4));
        assert_eq!(wait_log.since(&counted(6)).count(), 3);
        assert!(!wait_log.is_due(59) && wait_log.is_due(60));
    }

    #[test]
    fn an_empty_log_has_no_waits() {
        assert_eq!(WaitLog::default().since(&counted(9)).count(), 0);
    }
}
