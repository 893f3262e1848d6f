// SPDX-License-Identifier: Apache-2.0
//! A hard limit for real-time threads on a core that the host uses too: a part of any 10 ms.

use viola_policy::slices::{MS, Nanos};

/// The window of the limit, ns.
pub const WINDOW: Nanos = 10 * MS;
/// Resolution of the record of used time. It has one entry more than a window: time used at the end of an entry counts until the
/// whole window is over.
const BIN: Nanos = MS;
const BINS: usize = (WINDOW / BIN) as usize + 1;
/// Time that must be available before real-time threads resume, so that they do not resume for a moment only.
const MIN_RESUME: Nanos = MS / 2;

/// The record of used time. Of fixed size, since the controller must not allocate.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Most time in any [`WINDOW`], ns; `None`: no limit.
    limit: Option<Nanos>,
    used: [Nanos; BINS],
    /// Number of the present entry.
    bin: u64,
    spent: bool,
}

impl Budget {
    /// A limit of `permille` of the core (1..=1000), or none.
    pub fn new(permille: Option<u32>) -> Self {
        Self {
            limit: permille.map(|p| WINDOW * u64::from(p.clamp(1, 1000)) / 1000),
            used: [0; BINS],
            bin: 0,
            spent: false,
        }
    }

    /// Changes the limit; the record stays.
    pub fn set(&mut self, permille: Option<u32>) {
        self.limit = Self::new(permille).limit;
    }

    /// Adds the time that real-time threads used since the last call, up to `now`. Returns whether they may go on.
    pub fn spend(&mut self, now: Nanos, used: Nanos) -> bool {
        let Some(limit) = self.limit else {
            self.spent = false;
            return true;
        };
        let bin = now / BIN;
        let gone = bin.saturating_sub(self.bin).min(BINS as u64);
        for k in 0..gone {
            self.used[((bin - k) % BINS as u64) as usize] = 0;
        }
        self.bin = self.bin.max(bin);
        if !self.spent {
            self.record(now, used);
        }
        let all: Nanos = self.used.iter().sum();
        let left = limit.saturating_sub(all);
        let needed = if self.spent {
            MIN_RESUME
        } else {
            2 * MAX_LATENESS
        };
        self.spent = left < needed.min(limit);
        !self.spent
    }

    /// Records time used up to `now`, as late as it can have been.
    fn record(&mut self, now: Nanos, used: Nanos) {
        let (mut left, mut room) = (used, now - self.bin.min(now / BIN) * BIN);
        for k in 0..(BINS as u64).min(self.bin + 1) {
            let bin = &mut self.used[((self.bin - k) % BINS as u64) as usize];
            let part = left.min(room.saturating_sub(*bin));
            *bin += part;
            left -= part;
            room = BIN;
        }
        // More than there was time for: one core cannot run several threads at once, so the clocks differ.
        self.used[(self.bin % BINS as u64) as usize] += left;
    }

    /// The time of the next check, while one of the threads is runnable.
    pub fn next_check(&self, now: Nanos) -> Nanos {
        match self.limit {
            None => Nanos::MAX,
            Some(_) if self.spent => (now / BIN + 1) * BIN,
            Some(limit) => {
                let all: Nanos = self.used.iter().sum();
                now + limit.saturating_sub(all + MAX_LATENESS).max(MAX_LATENESS)
            }
        }
    }

    /// Whether there is a limit.
    pub fn is_limited(&self) -> bool {
        self.limit.is_some()
    }
}

/// Most lateness of a check, ns.
const MAX_LATENESS: Nanos = MS / 20;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs threads that are always runnable, checked when the budget says and `late` after that.
    fn drive(permille: u32, late: &[Nanos], end: Nanos) -> Vec<(Nanos, Nanos)> {
        let mut budget = Budget::new(Some(permille));
        let (mut now, mut runs, mut ran) = (0, true, Vec::new());
        let mut late = late.iter().cycle();
        while now < end {
            let next = budget.next_check(now) + late.next().copied().unwrap_or(0);
            if runs {
                ran.push((now, next));
            }
            runs = budget.spend(next, if runs { next - now } else { 0 });
            now = next;
        }
        ran
    }

    /// Most time that was used in any window.
    fn worst(ran: &[(Nanos, Nanos)]) -> Nanos {
        let within = |from: Nanos| {
            let of = |&(a, b): &(Nanos, Nanos)| b.min(from + WINDOW).saturating_sub(a.max(from));
            ran.iter().map(of).sum::<Nanos>()
        };
        let starts = ran.iter().flat_map(|&(a, b)| [a, b.saturating_sub(WINDOW)]);
        starts.map(within).max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn no_window_exceeds_the_budget(
            permille in 50u32..=1000,
            late in proptest::collection::vec(0..MAX_LATENESS, 1..50),
        ) {
            let ran = drive(permille, &late, 300 * MS);
            let limit = WINDOW * u64::from(permille) / 1000;
            prop_assert!(worst(&ran) <= limit, "{} of {limit}", worst(&ran));
        }
    }

    #[test]
    fn most_of_the_budget_can_be_used() {
        let ran: Nanos = drive(500, &[0], 1000 * MS).iter().map(|(a, b)| b - a).sum();
        assert!(ran > 420 * MS, "{ran} ns of a second");
    }

    #[test]
    fn without_a_limit_nothing_is_spent() {
        let mut budget = Budget::new(None);
        assert!(budget.spend(5, 1000 * MS) && !budget.is_limited());
        assert_eq!(budget.next_check(7), Nanos::MAX);
    }

    #[test]
    fn a_pause_refills_the_budget() {
        let mut budget = Budget::new(Some(500));
        assert!(!budget.spend(5 * MS, 5 * MS));
        assert!(!budget.spend(9 * MS, 0));
        assert!(budget.spend(3_600_000 * MS, 0));
        assert!(budget.spend(3_600_004 * MS, 4 * MS));
    }
}
