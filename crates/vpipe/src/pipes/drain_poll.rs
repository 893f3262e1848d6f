// SPDX-License-Identifier: Apache-2.0
//! Times at which the host polls whether the peer has acknowledged all bytes of a pipe.

use std::time::{Duration, Instant};

/// Shortest and longest time between two polls of the unacknowledged bytes.
const MIN_DRAIN_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A poll of the unacknowledged bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct DrainPoll {
    /// Times of the first poll and of this one.
    first: Instant,
    at: Instant,
    left: usize,
    pub(super) pause: Duration,
}

impl DrainPoll {
    /// The poll after `last`, with `left` unacknowledged bytes. The next poll is due when the peer
    /// has acknowledged all bytes, if it goes on at the rate since the last poll. While the peer
    /// acknowledges nothing the pause doubles, up to a quarter of the time since the first poll: so
    /// the next poll comes soon after a short stall of the peer.
    pub(super) fn after(last: Option<Self>, at: Instant, left: usize) -> Self {
        let pause = match last {
            None => MIN_DRAIN_POLL_INTERVAL,
            Some(last) if left < last.left => {
                let time = at.saturating_duration_since(last.at);
                time.mul_f64(left as f64 / (last.left - left) as f64)
            }
            Some(last) => last.pause * 2,
        };
        let first = last.map_or(at, |last| last.first);
        let longest = (at.saturating_duration_since(first) / 4)
            .clamp(MIN_DRAIN_POLL_INTERVAL, MAX_DRAIN_POLL_INTERVAL);
        Self {
            first,
            at,
            left,
            pause: pause.clamp(MIN_DRAIN_POLL_INTERVAL, longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_poll_is_when_all_bytes_should_be_acknowledged() {
        let started = Instant::now();
        let at = |us| started + Duration::from_micros(us);
        let pause = |look: DrainPoll| look.pause.as_micros();
        let first = DrainPoll::after(None, at(0), 3_000_000);
        assert_eq!(pause(first), 50);
        // half in 2 ms, then at twice the pace
        let second = DrainPoll::after(Some(first), at(2000), 1_500_000);
        assert_eq!(pause(second), 500, "a quarter of the time so far");
        let third = DrainPoll::after(Some(second), at(2500), 500_000);
        assert_eq!(pause(third), 250);
        // nearly there, and not looked at all the time
        let fourth = DrainPoll::after(Some(third), at(2750), 1000);
        assert_eq!(pause(fourth), 50);
        let mut look = fourth;
        let mut now = 2750;
        let mut pauses = Vec::new();
        while now < 60_000 {
            now += look.pause.as_micros() as u64;
            look = DrainPoll::after(Some(look), at(now), 1000);
            pauses.push(pause(look));
        }
        assert_eq!(pauses[..4], [100, 200, 400, 800]);
        // a quarter more each time, and never more than 5 ms
        let quarter = |pair: &[u128]| pair[1] == 5000 || pair[1].abs_diff(pair[0] * 5 / 4) < 2;
        assert!(pauses[4..].windows(2).all(quarter), "{pauses:?}");
        assert_eq!(pauses.last(), Some(&5000));
        let slow = DrainPoll::after(Some(look), at(now + 5000), 999);
        assert_eq!(pause(slow), 5000);
    }
}
