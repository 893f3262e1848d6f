// SPDX-License-Identifier: Apache-2.0
//! Rate limit of a VM: its cap in bytes per second over all pipes and copies.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_policy::pipes::TokenBucket;

/// A rate limit that several threads share.
#[derive(Debug)]
pub(super) struct RateLimit {
    since: Instant,
    cap: Option<Mutex<TokenBucket>>,
}

impl RateLimit {
    /// A limit of `rate` bytes per second; `None` for no limit.
    pub(super) fn new(rate: Option<u64>) -> Self {
        Self {
            since: Instant::now(),
            cap: rate.map(|rate| Mutex::new(TokenBucket::new(rate, 0))),
        }
    }

    /// How many of `wanted` bytes the caller may move now.
    ///
    /// # Errors
    /// How long to wait first.
    pub(super) fn available(&self, now: Instant, wanted: u64) -> Result<u64, Duration> {
        let Some(cap) = &self.cap else {
            return Ok(wanted);
        };
        let elapsed = now.saturating_duration_since(self.since).as_nanos();
        let now_ns = u64::try_from(elapsed).unwrap_or(u64::MAX);
        let mut cap = cap.lock().unwrap_or_else(PoisonError::into_inner);
        cap.available(now_ns, wanted)
            .map_err(|until| Duration::from_nanos(until.saturating_sub(now_ns).max(1000)))
    }

    /// Counts moved bytes.
    pub(super) fn consume(&self, bytes: u64) {
        if let Some(cap) = &self.cap {
            let mut cap = cap.lock().unwrap_or_else(PoisonError::into_inner);
            cap.consume(bytes);
        }
    }
}
