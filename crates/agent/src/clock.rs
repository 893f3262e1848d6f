// SPDX-License-Identifier: Apache-2.0
//! The agent's clock: monotonic milliseconds. Decisions take the time as an argument, so that tests set it.

use std::sync::OnceLock;
use std::time::Instant;

/// Milliseconds of a monotonic clock.
pub type Millis = u64;

/// Milliseconds since the first call in this process.
pub fn now() -> Millis {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}
