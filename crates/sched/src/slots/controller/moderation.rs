// SPDX-License-Identifier: Apache-2.0
//! Interrupt moderation: how soon a VM's service threads interrupt its vCPUs.

use viola_policy::slices::Nanos;

/// Longest time that service threads of the running VM wait for its vCPU, ns.
pub const INTERVAL: Nanos = 1_500_000;
/// Wake-ups within [`INTERVAL`] from which on they wait.
const MANY: u64 = 2;

/// Whether the service threads of a VM (vhost, I/O threads, the kernel of a UML guest) rank above its vCPUs.
///
/// Above, each packet interrupts the vCPU: an exit, two context switches and an entry. So where many come, the threads have the
/// vCPUs' rank. They run before the vCPU at the begin of each turn, when it idles, once each [`INTERVAL`], and for a moment after
/// its turn (`super::TRAIL`). The policy says for which VMs ([`viola_policy::slices::Decision::gathers`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moderation {
    on: bool,
    /// Wake-ups of the service threads at the last look, and when that was.
    wakes: u32,
    looked_at: Nanos,
}

impl Moderation {
    /// Learns of the number of wake-ups so far (wraps) while the VM runs. Returns whether the threads shall run before the vCPU
    /// once.
    pub fn step(&mut self, now: Nanos, wakes: u32) -> bool {
        let new = u64::from(wakes.wrapping_sub(self.wakes));
        let elapsed = now.saturating_sub(self.looked_at);
        if elapsed < INTERVAL && (self.on || new < MANY) {
            return false;
        }
        (self.wakes, self.looked_at) = (wakes, now);
        if self.on {
            self.on = new > 0;
            return self.on;
        }
        self.on = new * INTERVAL >= MANY * elapsed.max(INTERVAL);
        false
    }

    /// Whether the threads have the rank of the vCPUs.
    pub fn is_on(self) -> bool {
        self.on
    }

    /// When the next step is due while the VM runs.
    pub fn next_step(self) -> Option<Nanos> {
        self.on.then_some(self.looked_at + INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wake_ups_wait_and_few_do_not() {
        let mut moderation = Moderation::default();
        let begin = 10 * INTERVAL;
        assert!(!moderation.step(begin, 1));
        assert!(!moderation.is_on() && moderation.next_step().is_none());
        // One in each interval.
        for k in 1..10 {
            assert!(!moderation.step(begin + k * INTERVAL, 1 + k as u32));
            assert!(!moderation.is_on());
        }
        let now = begin + 9 * INTERVAL + INTERVAL / 4;
        assert!(!moderation.step(now, 12));
        assert_eq!(moderation.next_step(), Some(now + INTERVAL));
        // One is enough now.
        assert!(!moderation.step(now + INTERVAL / 2, 13));
        assert!(moderation.step(now + INTERVAL, 13));
        assert!(moderation.is_on());
        assert!(!moderation.step(now + 2 * INTERVAL, 13));
        assert!(!moderation.is_on());
    }

    #[test]
    fn the_count_wraps() {
        let mut moderation = Moderation::default();
        moderation.step(10 * INTERVAL, u32::MAX - 1);
        moderation.step(10 * INTERVAL + 1, 3);
        assert!(moderation.is_on());
    }
}
