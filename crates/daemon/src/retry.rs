// SPDX-License-Identifier: Apache-2.0
//! When to start something again that failed: a mechanism or a worker. Three failures in a minute switch it off.

use std::time::{Duration, Instant};

/// Delays before the first, second and any further attempt.
const RETRY_DELAYS: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
];
/// This many failures within [`FAILURE_WINDOW`] switch it off.
const MAX_FAILURES: usize = 3;
/// Time in which [`MAX_FAILURES`] are counted.
const FAILURE_WINDOW: Duration = Duration::from_secs(60);
/// A failure makes the delays of later failures longer for this time.
const FAILURE_MEMORY: Duration = Duration::from_secs(300);

/// Failures of one thing, and when it is tried again.
#[derive(Debug, Default)]
pub struct Retry {
    recent: Vec<Instant>,
    why: String,
    retry_at: Option<Instant>,
    off: bool,
    total: u32,
}

/// What follows from a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextTry {
    /// Try again after this time.
    After(Duration),
    /// Do not try again before [`Retry::reset`].
    Never,
}

impl NextTry {
    /// The end of a log line: when a new worker starts, or `never` when none does.
    pub fn worker_text(self, never: &str) -> String {
        match self {
            Self::After(delay) => format!("a new one starts in {} s", delay.as_secs()),
            Self::Never => format!("{never}; viola start tries again"),
        }
    }
}

impl Retry {
    /// Records a failure. Returns when to try again.
    pub fn failed(&mut self, now: Instant, why: String) -> NextTry {
        self.recent
            .retain(|t| now.saturating_duration_since(*t) < FAILURE_MEMORY);
        self.recent.push(now);
        self.total += 1;
        self.why = why;
        let recent = self
            .recent
            .iter()
            .filter(|t| now.saturating_duration_since(**t) < FAILURE_WINDOW)
            .count();
        if recent >= MAX_FAILURES {
            self.off = true;
            self.retry_at = None;
            return NextTry::Never;
        }
        let delay = RETRY_DELAYS[(self.recent.len() - 1).min(RETRY_DELAYS.len() - 1)];
        self.retry_at = Some(now + delay);
        NextTry::After(delay)
    }

    /// Whether the next attempt has to wait: it is switched off, or its delay is not over.
    pub fn must_wait(&self, now: Instant) -> bool {
        self.off || self.retry_at.is_some_and(|t| now < t)
    }

    /// Whether it failed and is going to be tried again.
    pub fn is_pending(&self) -> bool {
        self.retry_at.is_some()
    }

    /// Records that the attempt succeeded.
    pub fn succeeded(&mut self) {
        self.retry_at = None;
    }

    /// Whether it is switched off.
    pub fn is_off(&self) -> bool {
        self.off
    }

    /// The last failure.
    pub fn last_failure(&self) -> &str {
        &self.why
    }

    /// Failures since the daemon started.
    pub fn failures(&self) -> u32 {
        self.total
    }

    /// Forgets all failures: the operator has changed something.
    pub fn reset(&mut self) {
        self.recent.clear();
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
    fn the_third_failure_in_a_minute_switches_it_off() {
        let (mut t, start) = (Retry::default(), Instant::now());
        assert_eq!(t.failed(start, "a".into()), NextTry::After(s(1)));
        assert!(t.must_wait(start) && !t.must_wait(start + s(1)));
        assert!(t.is_pending());
        t.succeeded();
        assert!(!t.is_pending());
        assert_eq!(t.failed(start + s(2), "b".into()), NextTry::After(s(5)));
        assert!(t.must_wait(start + s(6)) && !t.must_wait(start + s(7)));
        assert_eq!(t.failed(start + s(9), "c".into()), NextTry::Never);
        assert!(t.is_off() && t.must_wait(start + s(10_000)));
        assert_eq!((t.last_failure(), t.failures()), ("c", 3));
        t.reset();
        assert!(!t.must_wait(start + s(9)));
    }

    #[test]
    fn failures_far_apart_are_tried_again_after_30_s_and_old_ones_are_forgotten() {
        let (mut t, start) = (Retry::default(), Instant::now());
        t.failed(start, String::new());
        t.failed(start + s(40), String::new());
        assert_eq!(
            t.failed(start + s(90), String::new()),
            NextTry::After(s(30))
        );
        assert_eq!(
            t.failed(start + s(1000), String::new()),
            NextTry::After(s(1))
        );
    }
}
