// SPDX-License-Identifier: Apache-2.0
//! When a held connection is polled while it is drained.

use std::time::{Duration, Instant};

/// Time limit for draining.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to the next poll after progress: the last poll moved bytes, or found none to move.
const MIN_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum time to the next poll. Without progress each poll doubles the time.
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// When a held connection is polled.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrainPoll {
    pub(super) until: Instant,
    pub(super) next: Instant,
    wait: Duration,
    /// The last poll found nothing.
    pub(super) quiet: bool,
}

impl DrainPoll {
    /// The first poll is due now.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            until: now + DRAIN_TIMEOUT,
            next: now,
            wait: MIN_POLL_INTERVAL,
            quiet: false,
        }
    }

    /// Sets the time of the next poll.
    pub(super) fn again(&mut self, now: Instant, moved: bool) {
        self.wait = match moved {
            true => MIN_POLL_INTERVAL,
            false => (self.wait * 2).min(MAX_POLL_INTERVAL),
        };
        self.next = now + self.wait;
    }
}
