// SPDX-License-Identifier: Apache-2.0
//! A token bucket: so many bytes a second, and a tenth of a second's at once.

const SECOND: u64 = 1_000_000_000;

/// A cap and what is left of it.
#[derive(Debug, Clone)]
pub struct Cap {
    rate: u64,
    /// Below nothing where more was sent than there was leave for.
    tokens: i64,
    since_ns: u64,
    /// Parts of a byte, in bytes times nanoseconds.
    rest: u64,
}

impl Cap {
    /// `rate` bytes a second, from now on.
    pub fn new(rate: u64, now_ns: u64) -> Self {
        let rate = rate.max(1);
        Self {
            rate,
            tokens: signed(Self::most(rate)),
            since_ns: now_ns,
            rest: 0,
        }
    }

    /// Bytes a second.
    pub fn rate(&self) -> u64 {
        self.rate
    }

    fn most(rate: u64) -> u64 {
        (rate / 10).max(1)
    }

    /// How many bytes may be sent now, `wanted` at most; or from when on that many may, or a tenth of a second's if that is less.
    pub fn ready(&mut self, now_ns: u64, wanted: u64) -> Result<u64, u64> {
        let passed = now_ns.saturating_sub(self.since_ns);
        let grown = u128::from(passed) * u128::from(self.rate) + u128::from(self.rest);
        self.since_ns = self.since_ns.max(now_ns);
        let most = Self::most(self.rate);
        let tokens = i128::from(self.tokens) + (grown / u128::from(SECOND)) as i128;
        self.rest = (grown % u128::from(SECOND)) as u64;
        self.tokens = tokens.min(i128::from(most)) as i64;
        let needed = wanted.min(most);
        let missing = i128::from(needed) - i128::from(self.tokens);
        if missing <= 0 {
            return Ok(needed);
        }
        let wait = (missing as u128 * u128::from(SECOND)).div_ceil(u128::from(self.rate));
        let wait = u64::try_from(wait).unwrap_or(u64::MAX);
        Err(self.since_ns.saturating_add(wait))
    }

    /// So many are sent. What is more than there was leave for is waited for afterwards.
    pub fn take(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(signed(bytes));
    }

    /// So many were not sent after all.
    pub fn give_back(&mut self, bytes: u64) {
        let tokens = self.tokens.saturating_add(signed(bytes));
        self.tokens = tokens.min(signed(Self::most(self.rate)));
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
