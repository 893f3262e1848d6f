// SPDX-License-Identifier: Apache-2.0
//! What a VM keeps of its share for its regular vCPUs: without that, interrupts that come in masses would use all of
//! it up, and nothing that they bring would ever be read (receive livelock).
//!
//! Of what a VM is due on both pools together (FS) its turbo vCPU may use a part while regular vCPUs of the VM wait;
//! while none waits there is no limit. When the part is used up the turbo vCPU waits. From then on it also waits for
//! [`GAP`] whenever it has nothing more to do, as network cards do that hold interrupts back: what comes meanwhile is
//! served in one go, which costs less for each packet, or is dropped before it costs anything. That ends when little
//! comes in a gap.

use super::{ACCOUNTING, TURBO_SLOT};
use crate::slices::{MS, Nanos, Seen};

/// Most that is saved up: what a VM is due is known when an accounting of its regular cores is over.
const SAVED: i64 = ACCOUNTING as i64 / 2;
/// How long it runs unseen while no regular vCPU waits and one may begin to.
const GLANCE: Nanos = 2 * MS;
/// Most that is owed: a turbo vCPU may run unseen until the next look.
const OWED: i64 = -(20 * MS as i64);
/// It goes on when it may run so long.
const RESUME: i64 = TURBO_SLOT as i64;
/// ...or after this wait, should nothing be heard of the regular cores.
const LONGEST: Nanos = 2 * ACCOUNTING;
/// How long it waits when it has nothing more to do.
pub(super) const GAP: Nanos = 2 * MS;

/// The account of one turbo vCPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reserve {
    left: i64,
    /// Whether a regular vCPU of its VM waits.
    short: bool,
    /// Whether anything was heard of regular cores.
    heard: bool,
    held_since: Option<Nanos>,
    /// Whether there are gaps, and what it ran since the last one.
    gaps: bool,
    ran: Nanos,
}

impl Reserve {
    pub(super) fn new() -> Self {
        Self {
            left: SAVED,
            short: false,
            heard: false,
            held_since: None,
            gaps: false,
            ran: 0,
        }
    }

    /// Takes what the VM was due since the last call, of which `permille` are for its turbo vCPU.
    pub(super) fn hear(&mut self, due: Nanos, waits: bool, permille: u32) {
        self.short = waits && permille < 1000;
        self.heard |= due > 0 && permille < 1000;
        let part = u128::from(due) * u128::from(permille) / 1000;
        let part = i64::try_from(part).unwrap_or(SAVED).min(SAVED - OWED);
        self.left = match self.short {
            true => self.left.saturating_add(part).min(SAVED),
            false => SAVED,
        };
    }

    /// Takes what was seen of the turbo vCPU.
    pub(super) fn charge(&mut self, now: Nanos, seen: Seen) {
        let used = i64::try_from(seen.used).unwrap_or(i64::MAX);
        self.left = self.left.saturating_sub(used).max(OWED);
        self.ran = self.ran.saturating_add(seen.used);
        if !self.short {
            (self.held_since, self.gaps) = (None, false);
        } else if let Some(since) = self.held_since {
            let waited = now.saturating_sub(since);
            if (self.left >= RESUME && waited >= GAP) || waited >= LONGEST {
                (self.held_since, self.ran) = (None, 0);
                self.left = self.left.max(RESUME);
            }
        } else if self.left <= 0 {
            (self.held_since, self.gaps) = (Some(now), true);
        } else if self.gaps && !seen.runnable {
            self.gaps = self.left < SAVED / 2 || self.ran > TURBO_SLOT;
            self.held_since = self.gaps.then_some(now);
        }
    }

    /// Whether the turbo vCPU has to wait.
    pub(super) fn holds(&self) -> bool {
        self.held_since.is_some()
    }

    /// Whether it matters that it has nothing more to do.
    pub(super) fn has_gaps(&self) -> bool {
        self.gaps && !self.holds()
    }

    /// How long it may run until it is looked at again.
    pub(super) fn budget(&self) -> Nanos {
        match self.short {
            true => self.left.max(1) as Nanos,
            // Soon where somebody may come to want the regular cores.
            false if self.heard => GLANCE,
            false => ACCOUNTING,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::US;

    /// It ran so long, and wants to go on.
    fn ran(used: Nanos) -> Seen {
        Seen {
            used,
            runnable: true,
            ..Seen::default()
        }
    }

    /// It ran so long, and has nothing more to do.
    fn done(used: Nanos) -> Seen {
        Seen {
            used,
            ..Seen::default()
        }
    }

    #[test]
    fn nothing_is_held_while_no_regular_vcpu_waits() {
        let mut r = Reserve::new();
        for k in 1..100 {
            r.hear(0, false, 500);
            r.charge(k * MS, ran(MS));
            assert!(!r.holds() && !r.has_gaps() && r.budget() >= GLANCE);
        }
    }

    #[test]
    fn what_is_used_up_comes_back_with_what_the_vm_is_due() {
        let mut r = Reserve::new();
        r.hear(0, true, 500);
        r.charge(MS, ran(16 * MS));
        assert!(r.holds());
        // 1 ms is owed: 2 ms due are needed for that, and 0.2 ms to go on.
        r.hear(2 * MS, true, 500);
        r.charge(4 * MS, ran(0));
        assert!(r.holds());
        r.hear(200 * US, true, 500);
        r.charge(5 * MS, ran(0));
        assert!(!r.holds());
        assert_eq!(r.budget(), 100 * US);
        r.charge(6 * MS, ran(100 * US));
        assert!(r.holds());
        // The regular vCPU has nothing more to do.
        r.hear(0, false, 500);
        r.charge(7 * MS, ran(0));
        assert!(!r.holds() && !r.has_gaps());
    }

    #[test]
    fn one_that_used_up_its_part_gathers_its_work_until_little_comes() {
        let mut r = Reserve::new();
        r.hear(0, true, 500);
        // As long as it has not, it may sleep and wake as it likes.
        r.charge(MS, done(10 * US));
        assert!(!r.holds() && !r.has_gaps());
        r.charge(2 * MS, ran(20 * MS));
        assert!(r.holds());
        let mut now = 2 * MS;
        let mut go_on = |r: &mut Reserve, due: Nanos| {
            r.hear(due, true, 500);
            now += 2 * GAP;
            r.charge(now, ran(0));
            assert!(!r.holds() && r.has_gaps());
            now
        };
        // Much comes: gaps, though it has share in hand.
        for _ in 0..10 {
            let now = go_on(&mut r, 40 * MS);
            r.charge(now + 300 * US, done(300 * US));
            assert!(r.holds());
            r.charge(now + 300 * US + GAP / 2, done(0));
            assert!(r.holds());
        }
        let now = go_on(&mut r, 40 * MS);
        r.charge(now + 50 * US, done(50 * US));
        assert!(!r.holds() && !r.has_gaps());
    }

    #[test]
    fn one_of_which_nothing_is_heard_goes_on_after_a_while() {
        let mut r = Reserve::new();
        r.hear(0, true, 0);
        r.charge(0, ran(30 * MS));
        assert!(r.holds());
        r.charge(59 * MS, ran(0));
        assert!(r.holds());
        r.charge(60 * MS, ran(0));
        assert!(!r.holds());
        r.charge(61 * MS, ran(100 * US));
        assert!(r.holds());
    }

    #[test]
    fn without_a_reserve_nothing_is_held() {
        let mut r = Reserve::new();
        r.hear(0, true, 1000);
        r.charge(MS, ran(50 * MS));
        assert!(!r.holds());
    }
}
