// SPDX-License-Identifier: Apache-2.0
//! A token bucket: so many bytes a second, and a tenth of a second's at once.

const SECOND: u64 = 1_000_000_000;

/// A cap and what is left of it.
#[derive(Debug, Clone)]
pub struct Cap {
    rate: u64,
    tokens: u64,
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
            tokens: Self::most(rate),
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
        let tokens = u128::from(self.tokens) + grown / u128::from(SECOND);
        self.rest = (grown % u128::from(SECOND)) as u64;
        self.tokens = tokens.min(u128::from(most)) as u64;
        let needed = wanted.min(most);
        match needed.checked_sub(self.tokens) {
            None | Some(0) => Ok(needed),
            Some(missing) => {
                let wait =
                    (u128::from(missing) * u128::from(SECOND)).div_ceil(u128::from(self.rate));
                Err(self
                    .since_ns
                    .saturating_add(u64::try_from(wait).unwrap_or(u64::MAX)))
            }
        }
    }

    /// So many are sent.
    pub fn take(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(bytes);
    }

    /// So many were not sent after all.
    pub fn give_back(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_add(bytes).min(Self::most(self.rate));
    }
}
