// SPDX-License-Identifier: Apache-2.0
//! When to try again after a mechanism has failed, and when to leave it.

use std::time::{Duration, Instant};

/// Waits before the first, second and any further attempt.
const DELAYS: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
];
/// So many failures...
const TOO_MANY: usize = 3;
/// ...within this time are too many.
const WITHIN: Duration = Duration::from_secs(60);
/// A failure is forgotten after this time.
const MEMORY: Duration = Duration::from_secs(300);

/// Failures of a mechanism.
#[derive(Debug, Default)]
pub struct Trouble {
    failures: Vec<Instant>,
    why: String,
    retry_at: Option<Instant>,
    off: bool,
    total: u32,
}

/// What is to be done about the last failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Try again after this time.
    Retry(Duration),
    /// Leave it.
    GiveUp,
}

impl Trouble {
    /// Notes a failure.
    pub fn fail(&mut self, now: Instant, why: String) -> Verdict {
        self.failures
            .retain(|t| now.saturating_duration_since(*t) < MEMORY);
        self.failures.push(now);
        self.total += 1;
        self.why = why;
        let recent = self
            .failures
            .iter()
            .filter(|t| now.saturating_duration_since(**t) < WITHIN)
            .count();
        if recent >= TOO_MANY {
            self.off = true;
            self.retry_at = None;
            return Verdict::GiveUp;
        }
        let delay = DELAYS[(self.failures.len() - 1).min(DELAYS.len() - 1)];
        self.retry_at = Some(now + delay);
        Verdict::Retry(delay)
    }

    /// Whether nothing may be tried now.
    pub fn holds_back(&self, now: Instant) -> bool {
        self.off || self.retry_at.is_some_and(|t| now < t)
    }

    /// Whether the last failure waits to be tried again, or is about to be.
    pub fn is_pending(&self) -> bool {
        self.retry_at.is_some()
    }

    /// It works again.
    pub fn overcome(&mut self) {
        self.retry_at = None;
    }

    /// Whether it was left for good.
    pub fn is_off(&self) -> bool {
        self.off
    }

    /// The last failure.
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Failures since the daemon started.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Starts anew: somebody has changed something.
    pub fn forgive(&mut self) {
        self.failures.clear();
        self.retry_at = None;
        self.off = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn the_third_failure_in_a_minute_is_the_last() {
        let (mut t, start) = (Trouble::default(), Instant::now());
        assert_eq!(t.fail(start, "a".into()), Verdict::Retry(s(1)));
        assert!(t.holds_back(start) && !t.holds_back(start + s(1)));
        assert!(t.is_pending());
        t.overcome();
        assert!(!t.is_pending());
        assert_eq!(t.fail(start + s(2), "b".into()), Verdict::Retry(s(5)));
        assert!(t.holds_back(start + s(6)) && !t.holds_back(start + s(7)));
        assert_eq!(t.fail(start + s(9), "c".into()), Verdict::GiveUp);
        assert!(t.is_off() && t.holds_back(start + s(10_000)));
        assert_eq!((t.why(), t.total()), ("c", 3));
        t.forgive();
        assert!(!t.holds_back(start + s(9)));
    }

    #[test]
    fn failures_far_apart_are_tried_again_after_30_s_and_old_ones_are_forgotten() {
        let (mut t, start) = (Trouble::default(), Instant::now());
        t.fail(start, String::new());
        t.fail(start + s(40), String::new());
        assert_eq!(t.fail(start + s(90), String::new()), Verdict::Retry(s(30)));
        assert_eq!(t.fail(start + s(1000), String::new()), Verdict::Retry(s(1)));
    }
}
