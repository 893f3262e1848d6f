// SPDX-License-Identifier: Apache-2.0
//! Waits of the recent past, from counters that only grow: it is noted once a second where they stood.

use std::collections::VecDeque;

use crate::acct::HIST_BUCKETS;
use crate::hist::WaitHist;

/// Waits are remembered for so many seconds, for quantiles over the recent past.
pub const WAIT_WINDOW_SECONDS: usize = 10;

/// Where the counters of one vCPU stood at the first reading in each second.
#[derive(Debug, Default)]
pub(crate) struct Marks(VecDeque<(u64, [u32; HIST_BUCKETS])>);

impl Marks {
    /// Whether counters have to be noted in this second still.
    pub(crate) fn is_due(&self, second: u64) -> bool {
        self.0.back().is_none_or(|(noted, _)| *noted != second)
    }

    /// Notes where the counters stand, and drops what is not needed to tell of the last [`WAIT_WINDOW_SECONDS`].
    pub(crate) fn note(&mut self, second: u64, counters: [u32; HIST_BUCKETS]) {
        self.0.push_back((second, counters));
        let is_enough = |(noted, _): &(u64, _)| noted + WAIT_WINDOW_SECONDS as u64 <= second + 1;
        while self.0.get(1).is_some_and(is_enough) {
            self.0.pop_front();
        }
    }

    /// What was counted since, with counters as they stand now (they wrap at 2^32).
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
    fn waits_older_than_ten_seconds_are_forgotten() {
        let mut marks = Marks::default();
        // one wait in each tenth of a second
        for tenth in 0..300_u32 {
            let second = u64::from(tenth) / 10;
            if marks.is_due(second) {
                marks.note(second, counted(tenth));
            }
            let count = marks.since(&counted(tenth)).count();
            let most = WAIT_WINDOW_SECONDS as u64 * 10;
            assert!(
                count <= most && count + 10 >= most.min(tenth.into()),
                "{tenth}: {count}"
            );
        }
        assert_eq!(marks.0.len(), WAIT_WINDOW_SECONDS);
    }

    #[test]
    fn what_came_while_nobody_looked_is_remembered_until_it_is_old() {
        let mut marks = Marks::default();
        marks.note(5, counted(u32::MAX));
        marks.note(50, counted(3));
        assert_eq!(
            marks.since(&counted(3)).count(),
            4,
            "a counter that wrapped counts on"
        );
        marks.note(51, counted(4));
        assert_eq!(marks.since(&counted(4)).count(), 5);
        marks.note(59, counted(4));
        assert_eq!(marks.since(&counted(6)).count(), 3);
        assert!(!marks.is_due(59) && marks.is_due(60));
    }

    #[test]
    fn before_the_first_note_there_are_none() {
        assert_eq!(Marks::default().since(&counted(9)).count(), 0);
    }
}
