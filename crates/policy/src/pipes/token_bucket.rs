// SPDX-License-Identifier: Apache-2.0
//! A token bucket: a given number of bytes per second on average, and at most what a tenth of a
//! second brings at once.

const SECOND: u64 = 1_000_000_000;

/// The bucket of one VM. Times are nanoseconds of any one clock that never goes back.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    /// Bytes per second, at least 1.
    rate: u64,
    /// Bytes that may be sent now; negative after more was sent than was available.
    tokens: i64,
    refilled_at_ns: u64,
    /// Part of a byte that the last refill could not credit, in bytes times nanoseconds.
    remainder: u64,
}

impl TokenBucket {
    /// A full bucket of `rate` bytes per second at `now_ns`.
    pub fn new(rate: u64, now_ns: u64) -> Self {
        let rate = rate.max(1);
        Self {
            rate,
            tokens: signed(Self::burst(rate)),
            refilled_at_ns: now_ns,
            remainder: 0,
        }
    }

    /// Size of the bucket: what a tenth of a second brings, at least 1 byte.
    fn burst(rate: u64) -> u64 {
        (rate / 10).max(1)
    }

    /// Bytes that may be sent now: `wanted`, or the size of the bucket if that is less.
    ///
    /// # Errors
    /// The time (ns) from which on that many may be sent.
    pub fn available(&mut self, now_ns: u64, wanted: u64) -> Result<u64, u64> {
        let passed = now_ns.saturating_sub(self.refilled_at_ns);
        let grown = u128::from(passed) * u128::from(self.rate) + u128::from(self.remainder);
        self.refilled_at_ns = self.refilled_at_ns.max(now_ns);
        let burst = Self::burst(self.rate);
        let tokens = i128::from(self.tokens) + (grown / u128::from(SECOND)) as i128;
        self.remainder = (grown % u128::from(SECOND)) as u64;
        self.tokens = tokens.min(i128::from(burst)) as i64;
        let needed = wanted.min(burst);
        let missing = i128::from(needed) - i128::from(self.tokens);
        if missing <= 0 {
            return Ok(needed);
        }
        let wait = (missing as u128 * u128::from(SECOND)).div_ceil(u128::from(self.rate));
        let wait = u64::try_from(wait).unwrap_or(u64::MAX);
        Err(self.refilled_at_ns.saturating_add(wait))
    }

    /// Records that `bytes` were sent. More than was available delays the next bytes.
    pub fn consume(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(signed(bytes));
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_rate_holds_for_a_sender_that_sends_more_than_is_available() {
        let rate = MIB;
        let mut bucket = TokenBucket::new(rate, 0);
        let (mut now, mut sent) = (0, 0);
        while sent < 10 * rate {
            match bucket.available(now, MIB) {
                // Such as one that always empties a pipe of 256 KiB.
                Ok(bytes) => {
                    bucket.consume(bytes + (256 << 10));
                    sent += bytes + (256 << 10);
                }
                Err(until) => now = until,
            }
        }
        let least = (sent - rate / 10 - (356 << 10)) as f64 / rate as f64;
        assert!(now as f64 >= least * SECOND as f64, "{now}, {least}");
    }

    #[test]
    fn a_sender_that_waits_as_told_gets_the_rate() {
        let mut bucket = TokenBucket::new(10 * MIB, 0);
        let (mut now, mut sent) = (0, 0);
        while sent < 50 * MIB {
            match bucket.available(now, MIB) {
                Ok(bytes) => {
                    bucket.consume(bytes);
                    sent += bytes;
                }
                Err(until) => {
                    assert!(until > now, "the time to wait for is past");
                    now = until;
                }
            }
        }
        assert!(now.abs_diff(5 * SECOND) <= SECOND / 5, "{now}");
    }

    proptest! {
        /// Over any time no more is sent than the rate and the size of the bucket allow.
        #[test]
        fn a_bucket_bounds_what_is_sent(
            rate in (64u64 << 10)..(1 << 34),
            steps in prop::collection::vec(0u64..SECOND / 5, 1..200),
        ) {
            let mut bucket = TokenBucket::new(rate, 0);
            let (mut now, mut sent) = (0, 0);
            for step in steps {
                now += step;
                while let Ok(bytes) = bucket.available(now, MIB) {
                    bucket.consume(bytes);
                    sent += bytes;
                }
                let allowed = u128::from(rate) * u128::from(now) / u128::from(SECOND) + u128::from(rate / 10);
                prop_assert!(u128::from(sent) <= allowed + 1, "{sent} of {allowed} at {now}");
            }
        }

        #[test]
        fn no_input_panics(steps in prop::collection::vec((any::<bool>(), any::<u64>()), 0..300), rate in any::<u64>()) {
            let mut bucket = TokenBucket::new(rate, 0);
            let mut now = 0u64;
            for (consume, number) in steps {
                if consume {
                    bucket.consume(number);
                } else {
                    now = now.saturating_add(number % SECOND);
                    let _ = bucket.available(now, number);
                }
            }
        }
    }
}
