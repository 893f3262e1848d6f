// SPDX-License-Identifier: Apache-2.0
//! A hard budget for real-time threads on a core that the host works on too: at most a part of any 10 ms.

use viola_policy::slices::{MS, Nanos};

/// Time that the budget is for.
pub const WINDOW: Nanos = 10 * MS;
/// Grain in which what was used is remembered. One more than a window is: what is used at the very end of one
/// counts until the whole window is over.
const GRAIN: Nanos = MS;
const GRAINS: usize = (WINDOW / GRAIN) as usize + 1;
/// Real-time threads come back when so much may be used again, not for a moment.
const WORTH: Nanos = MS / 2;

/// What may still be used. Fixed in size; the controller must not allocate.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Most in any [`WINDOW`], ns; `None`: no limit.
    most: Option<Nanos>,
    used: [Nanos; GRAINS],
    /// Number of the grain that now is in.
    grain: u64,
    spent: bool,
}

impl Budget {
    /// `permille` of the core (1..=1000), or all of it.
    pub fn new(permille: Option<u32>) -> Self {
        Self {
            most: permille.map(|p| WINDOW * u64::from(p.clamp(1, 1000)) / 1000),
            used: [0; GRAINS],
            grain: 0,
            spent: false,
        }
    }

    /// Changes the limit; what was used still counts.
    pub fn set(&mut self, permille: Option<u32>) {
        self.most = Self::new(permille).most;
    }

    /// Takes what real-time threads used up to `now` since the last call. Answers whether they may go on.
    pub fn spend(&mut self, now: Nanos, used: Nanos) -> bool {
        let Some(most) = self.most else {
            self.spent = false;
            return true;
        };
        let grain = now / GRAIN;
        let gone = grain.saturating_sub(self.grain).min(GRAINS as u64);
        for k in 0..gone {
            self.used[((grain - k) % GRAINS as u64) as usize] = 0;
        }
        self.grain = self.grain.max(grain);
        if !self.spent {
            self.note(now, used);
        }
        let all: Nanos = self.used.iter().sum();
        let left = most.saturating_sub(all);
        let needed = if self.spent { WORTH } else { 2 * LATE };
        self.spent = left < needed.min(most);
        !self.spent
    }

    /// Notes what was used up to `now`, as late as it can have been.
    fn note(&mut self, now: Nanos, used: Nanos) {
        let (mut left, mut room) = (used, now - self.grain.min(now / GRAIN) * GRAIN);
        for k in 0..(GRAINS as u64).min(self.grain + 1) {
            let grain = &mut self.used[((self.grain - k) % GRAINS as u64) as usize];
            let part = left.min(room.saturating_sub(*grain));
            *grain += part;
            left -= part;
            room = GRAIN;
        }
        // More than there was time for: several threads at once cannot be, so the clocks differ.
        self.used[(self.grain % GRAINS as u64) as usize] += left;
    }

    /// When to look again at the latest, while somebody of them wants to run.
    pub fn look_at(&self, now: Nanos) -> Nanos {
        match self.most {
            None => Nanos::MAX,
            Some(_) if self.spent => (now / GRAIN + 1) * GRAIN,
            Some(most) => {
                let all: Nanos = self.used.iter().sum();
                now + most.saturating_sub(all + LATE).max(LATE)
            }
        }
    }

    /// Whether there is a limit.
    pub fn is_limited(&self) -> bool {
        self.most.is_some()
    }
}

/// By how much a look may come late.
const LATE: Nanos = MS / 20;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Threads that always want to run, looked at when the budget says and `late` after that.
    fn drive(permille: u32, late: &[Nanos], end: Nanos) -> Vec<(Nanos, Nanos)> {
        let mut budget = Budget::new(Some(permille));
        let (mut now, mut runs, mut ran) = (0, true, Vec::new());
        let mut late = late.iter().cycle();
        while now < end {
            let next = budget.look_at(now) + late.next().copied().unwrap_or(0);
            if runs {
                ran.push((now, next));
            }
            runs = budget.spend(next, if runs { next - now } else { 0 });
            now = next;
        }
        ran
    }

    /// Most that was used in any window.
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
        fn no_ten_milliseconds_have_more_than_the_budget(
            permille in 50u32..=1000,
            late in proptest::collection::vec(0..LATE, 1..50),
        ) {
            let ran = drive(permille, &late, 300 * MS);
            let most = WINDOW * u64::from(permille) / 1000;
            prop_assert!(worst(&ran) <= most, "{} of {most}", worst(&ran));
        }
    }

    #[test]
    fn most_of_the_budget_can_be_used() {
        let ran: Nanos = drive(500, &[0], 1000 * MS).iter().map(|(a, b)| b - a).sum();
        assert!(ran > 420 * MS, "{ran} ns of a second");
    }

    #[test]
    fn without_a_limit_there_is_always_more() {
        let mut budget = Budget::new(None);
        assert!(budget.spend(5, 1000 * MS) && !budget.is_limited());
        assert_eq!(budget.look_at(7), Nanos::MAX);
    }

    #[test]
    fn a_pause_of_any_length_fills_it_again() {
        let mut budget = Budget::new(Some(500));
        assert!(!budget.spend(5 * MS, 5 * MS));
        assert!(!budget.spend(9 * MS, 0));
        assert!(budget.spend(3_600_000 * MS, 0));
        assert!(budget.spend(3_600_004 * MS, 4 * MS));
    }
}
