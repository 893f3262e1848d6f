// SPDX-License-Identifier: Apache-2.0
//! How much the host may move for a VM: its cap in bytes a second, shared by all that is done for it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_policy::pipes::TokenBucket;

/// See the module.
#[derive(Debug)]
pub(super) struct RateLimit {
    since: Instant,
    cap: Option<Mutex<TokenBucket>>,
}

impl RateLimit {
    /// `rate` in bytes a second; without one there is no cap.
    pub(super) fn new(rate: Option<u64>) -> Self {
        Self {
            since: Instant::now(),
            cap: rate.map(|rate| Mutex::new(TokenBucket::new(rate, 0))),
        }
    }

    /// How many of `wanted` bytes may be moved now, or how long to wait first.
    pub(super) fn available(&self, now: Instant, wanted: u64) -> Result<u64, Duration> {
        let Some(cap) = &self.cap else {
            return Ok(wanted);
        };
        let passed = now.saturating_duration_since(self.since).as_nanos();
        let now_ns = u64::try_from(passed).unwrap_or(u64::MAX);
        let mut cap = cap.lock().unwrap_or_else(PoisonError::into_inner);
        cap.available(now_ns, wanted)
            .map_err(|until| Duration::from_nanos(until.saturating_sub(now_ns).max(1000)))
    }

    /// So many were moved.
    pub(super) fn consume(&self, bytes: u64) {
        if let Some(cap) = &self.cap {
            let mut cap = cap.lock().unwrap_or_else(PoisonError::into_inner);
            cap.consume(bytes);
        }
    }
}
