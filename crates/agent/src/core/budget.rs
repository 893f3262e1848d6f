// SPDX-License-Identifier: Apache-2.0
//! How many links and names may be made now.

use super::block::Millis;

/// Fills up with time, to one second's worth at most.
#[derive(Debug, Default)]
pub struct Budget {
    names: f64,
    links: f64,
    per_s: f64,
    at: Millis,
}

impl Budget {
    /// An empty one of so many links and names in a second.
    pub fn new(now: Millis, per_s: u32) -> Self {
        Self {
            names: 1.0,
            links: 1.0,
            per_s: f64::from(per_s.max(1)),
            at: now,
        }
    }

    /// Time has passed.
    pub fn refill(&mut self, now: Millis) {
        let more = self.per_s * now.saturating_sub(self.at) as f64 / 1000.0;
        self.names = (self.names + more).min(self.per_s);
        self.links = (self.links + more).min(self.per_s);
        self.at = now;
    }

    /// Takes a name, if there is one.
    pub fn name(&mut self) -> bool {
        take(&mut self.names)
    }

    /// Takes a link, if there is one.
    pub fn link(&mut self) -> bool {
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
    fn no_second_has_more_than_its_rate() {
        let mut budget = Budget::new(0, 10);
        budget.refill(60_000);
        assert_eq!((0..100).filter(|_| budget.name()).count(), 10);
        budget.refill(60_100);
        assert_eq!((0..100).filter(|_| budget.name()).count(), 1);
        assert!(budget.link());
    }
}
