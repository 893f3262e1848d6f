// SPDX-License-Identifier: Apache-2.0
//! Token buckets that limit links and names per second.

use crate::clock::Millis;

/// Two token buckets, one for links and one for names. Each holds at most one second's tokens.
#[derive(Debug, Default)]
pub struct RateLimiter {
    names: f64,
    links: f64,
    per_s: f64,
    at: Millis,
}

impl RateLimiter {
    /// Starts with one token each and refills at `per_s` per second.
    pub fn new(now: Millis, per_s: u32) -> Self {
        Self {
            names: 1.0,
            links: 1.0,
            per_s: f64::from(per_s.max(1)),
            at: now,
        }
    }

    /// Adds the tokens for the time that has passed.
    pub fn refill(&mut self, now: Millis) {
        let more = self.per_s * now.saturating_sub(self.at) as f64 / 1000.0;
        self.names = (self.names + more).min(self.per_s);
        self.links = (self.links + more).min(self.per_s);
        self.at = now;
    }

    /// Takes a token for a name; `false` when the bucket is empty.
    pub fn take_name(&mut self) -> bool {
        take(&mut self.names)
    }

    /// Takes a token for a link; `false` when the bucket is empty.
    pub fn take_link(&mut self) -> bool {
        take(&mut self.links)
    }
}

fn take(from: &mut f64) -> bool {
    let there = *from >= 1.0;
    if there {
        *from -= 1.0;
    }
    there
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_tokens_than_the_rate_in_any_second() {
        let mut rate = RateLimiter::new(0, 10);
        rate.refill(60_000);
        assert_eq!((0..100).filter(|_| rate.take_name()).count(), 10);
        rate.refill(60_100);
        assert_eq!((0..100).filter(|_| rate.take_name()).count(), 1);
        assert!(rate.take_link());
    }
}
