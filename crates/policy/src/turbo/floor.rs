// SPDX-License-Identifier: Apache-2.0
//! A minimum for VMs to which their shares leave nothing.

use crate::slices::Nanos;

/// Grants the VM that has waited longest a short run, once per `interval` at most.
#[derive(Debug, Clone, Copy)]
pub(super) struct Floor {
    /// Length of the run, ns; 0: no runs are granted.
    pub(super) run: Nanos,
    /// Minimum wait before a run, and minimum time between two runs, ns.
    pub(super) interval: Nanos,
    next: Nanos,
}

impl Floor {
    pub(super) fn new(run: Nanos, interval: Nanos) -> Self {
        Self {
            run,
            interval,
            next: 0,
        }
    }

    /// Of `waiting` (index, since when) the one that has waited longest, if it is due a run now.
    pub(super) fn grant(
        &mut self,
        now: Nanos,
        waiting: impl Iterator<Item = (usize, Nanos)>,
    ) -> Option<usize> {
        if self.run == 0 || now < self.next {
            return None;
        }
        let (i, since) = waiting.min_by_key(|&(_, since)| since)?;
        if now.saturating_sub(since) < self.interval {
            return None;
        }
        self.next = now.saturating_add(self.interval);
        Some(i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_is_granted_a_run_once_per_interval() {
        let mut floor = Floor::new(10, 100);
        let waiting = [(0, 50), (1, 20), (2, 90)];
        assert_eq!(floor.grant(110, waiting.into_iter()), None);
        assert_eq!(floor.grant(130, waiting.into_iter()), Some(1));
        assert_eq!(floor.grant(229, waiting.into_iter()), None);
        assert_eq!(floor.grant(230, waiting.into_iter()), Some(1));
        assert_eq!(floor.grant(900, std::iter::empty()), None);
        assert_eq!(Floor::new(0, 100).grant(900, waiting.into_iter()), None);
    }
}
