// SPDX-License-Identifier: Apache-2.0
//! A token bucket: limits an average rate and allows bursts.

use std::time::{Duration, Instant};

/// A bucket that gains `per_s` tokens per second, up to its capacity.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    per_s: f64,
    capacity: f64,
    level: f64,
    updated: Instant,
}

impl TokenBucket {
    /// Starts with a full bucket.
    pub fn new(now: Instant, per_s: f64, capacity: f64) -> Self {
        Self {
            per_s,
            capacity,
            level: capacity,
            updated: now,
        }
    }

    /// Takes `n` tokens if the bucket has that many.
    pub fn try_take(&mut self, now: Instant, n: f64) -> bool {
        self.fill(now);
        let enough = self.level >= n;
        if enough {
            self.level -= n;
        }
        enough
    }

    /// Takes `n` tokens in any case; the level may become negative.
    pub fn charge(&mut self, now: Instant, n: f64) {
        self.fill(now);
        self.level -= n;
    }

    /// Time until the level is no longer negative.
    pub fn delay(&mut self, now: Instant) -> Duration {
        self.fill(now);
        if self.level >= 0.0 {
            Duration::ZERO
        } else {
            Duration::from_secs_f64(-self.level / self.per_s)
        }
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.updated).as_secs_f64();
        self.level = (self.level + passed * self.per_s).min(self.capacity);
        self.updated = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let start = Instant::now();
        let mut rate = TokenBucket::new(start, 10.0, 20.0);
        assert_eq!((0..100).filter(|_| rate.try_take(start, 1.0)).count(), 20);
        let later = start + Duration::from_secs(1);
        assert_eq!((0..100).filter(|_| rate.try_take(later, 1.0)).count(), 10);
    }

    #[test]
    fn a_debt_is_waited_for() {
        let start = Instant::now();
        let mut rate = TokenBucket::new(start, 100.0, 50.0);
        rate.charge(start, 150.0);
        assert_eq!(rate.delay(start), Duration::from_secs(1));
        assert_eq!(rate.delay(start + Duration::from_secs(2)), Duration::ZERO);
    }
}
