// SPDX-License-Identifier: Apache-2.0
//! The part of its share that a VM keeps for its regular vCPUs. Without it a flood of interrupts would use up the whole
//! share, and the VM would never read what the interrupts bring (receive livelock).
//!
//! While regular vCPUs of a VM wait, its turbo vCPU may use only a part of what the VM is due on both pools (FS);
//! otherwise there is no limit. When the part is used up, the turbo vCPU is held. From then on its interrupts are
//! moderated, as network cards do: each time it runs out of work it is held for [`MODERATION_INTERVAL`]. What arrives
//! meanwhile is served in one batch, which costs less per packet, or is dropped before it costs anything. Moderation
//! ends when little arrives in an interval.

use super::{ACCOUNTING_INTERVAL, TURBO_SLOT};
use crate::slices::{Activity, MS, Nanos};

/// Maximum of the account, ns. It bridges the time until the regular cores have accounted what the
/// VM is due.
const MAX_SAVED: i64 = ACCOUNTING_INTERVAL as i64 / 2;
/// Budget while no regular vCPU waits but one may begin to.
const RECHECK_INTERVAL: Nanos = 2 * MS;
/// Lower bound of the account, ns: a turbo vCPU may run unobserved until the next decision.
const MIN_LEFT: i64 = -(20 * MS as i64);
/// Account from which a held turbo vCPU runs again, ns.
const RESUME_LEFT: i64 = TURBO_SLOT as i64;
/// Maximum hold, for a VM whose regular cores report nothing.
const HOLD_TIMEOUT: Nanos = 2 * ACCOUNTING_INTERVAL;
/// Hold of a moderated turbo vCPU that runs out of work.
pub(super) const MODERATION_INTERVAL: Nanos = 2 * MS;

/// The account of one turbo vCPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reserve {
    left: i64,
    /// Whether a regular vCPU of its VM waits.
    regular_waits: bool,
    /// Whether regular cores have reported anything that the VM was due.
    due_known: bool,
    held_since: Option<Nanos>,
    /// Whether its interrupts are moderated, and what it ran since the last hold, ns.
    moderated: bool,
    ran: Nanos,
}

impl Reserve {
    pub(super) fn new() -> Self {
        Self {
            left: MAX_SAVED,
            regular_waits: false,
            due_known: false,
            held_since: None,
            moderated: false,
            ran: 0,
        }
    }

    /// Adds what the VM was due since the last call (ns), of which `permille` thousandths are for its turbo vCPU.
    pub(super) fn add_due(&mut self, due: Nanos, waits: bool, permille: u32) {
        self.regular_waits = waits && permille < 1000;
        self.due_known |= due > 0 && permille < 1000;
        let part = u128::from(due) * u128::from(permille) / 1000;
        let part = i64::try_from(part)
            .unwrap_or(MAX_SAVED)
            .min(MAX_SAVED - MIN_LEFT);
        self.left = match self.regular_waits {
            true => self.left.saturating_add(part).min(MAX_SAVED),
            false => MAX_SAVED,
        };
    }

    /// Charges what the turbo vCPU ran, and begins or ends a hold.
    pub(super) fn charge(&mut self, now: Nanos, activity: Activity) {
        let used = i64::try_from(activity.used).unwrap_or(i64::MAX);
        self.left = self.left.saturating_sub(used).max(MIN_LEFT);
        self.ran = self.ran.saturating_add(activity.used);
        if !self.regular_waits {
            (self.held_since, self.moderated) = (None, false);
        } else if let Some(since) = self.held_since {
            let waited = now.saturating_sub(since);
            if (self.left >= RESUME_LEFT && waited >= MODERATION_INTERVAL) || waited >= HOLD_TIMEOUT
            {
                (self.held_since, self.ran) = (None, 0);
                self.left = self.left.max(RESUME_LEFT);
            }
        } else if self.left <= 0 {
            (self.held_since, self.moderated) = (Some(now), true);
        } else if self.moderated && !activity.runnable {
            self.moderated = self.left < MAX_SAVED / 2 || self.ran > TURBO_SLOT;
            self.held_since = self.moderated.then_some(now);
        }
    }

    /// Whether the turbo vCPU must wait.
    pub(super) fn is_held(&self) -> bool {
        self.held_since.is_some()
    }

    /// Whether the scheduler must learn of it when the turbo vCPU runs out of work.
    pub(super) fn is_moderated(&self) -> bool {
        self.moderated && !self.is_held()
    }

    /// How long it may run until the next decision, ns.
    pub(super) fn budget(&self) -> Nanos {
        match self.regular_waits {
            true => self.left.max(1) as Nanos,
            // Soon, if a VM may begin to want the regular cores.
            false if self.due_known => RECHECK_INTERVAL,
            false => ACCOUNTING_INTERVAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::US;

    /// Ran for `used` and wants to go on.
    fn ran(used: Nanos) -> Activity {
        Activity {
            used,
            runnable: true,
            ..Activity::default()
        }
    }

    /// Ran for `used` and has no more work.
    fn done(used: Nanos) -> Activity {
        Activity {
            used,
            ..Activity::default()
        }
    }

    #[test]
    fn nothing_is_held_while_no_regular_vcpu_waits() {
        let mut r = Reserve::new();
        for k in 1..100 {
            r.add_due(0, false, 500);
            r.charge(k * MS, ran(MS));
            assert!(!r.is_held() && !r.is_moderated() && r.budget() >= RECHECK_INTERVAL);
        }
    }

    #[test]
    fn the_account_recovers_with_what_the_vm_is_due() {
        let mut r = Reserve::new();
        r.add_due(0, true, 500);
        r.charge(MS, ran(16 * MS));
        assert!(r.is_held());
        // It owes 1 ms, which needs 2 ms due, and 0.2 ms more to go on.
        r.add_due(2 * MS, true, 500);
        r.charge(4 * MS, ran(0));
        assert!(r.is_held());
        r.add_due(200 * US, true, 500);
        r.charge(5 * MS, ran(0));
        assert!(!r.is_held());
        assert_eq!(r.budget(), 100 * US);
        r.charge(6 * MS, ran(100 * US));
        assert!(r.is_held());
        // The regular vCPU has no more work.
        r.add_due(0, false, 500);
        r.charge(7 * MS, ran(0));
        assert!(!r.is_held() && !r.is_moderated());
    }

    #[test]
    fn interrupts_are_moderated_until_little_arrives() {
        let mut r = Reserve::new();
        r.add_due(0, true, 500);
        // Before its part is used up it may sleep and wake freely.
        r.charge(MS, done(10 * US));
        assert!(!r.is_held() && !r.is_moderated());
        r.charge(2 * MS, ran(20 * MS));
        assert!(r.is_held());
        let mut now = 2 * MS;
        let mut go_on = |r: &mut Reserve, due: Nanos| {
            r.add_due(due, true, 500);
            now += 2 * MODERATION_INTERVAL;
            r.charge(now, ran(0));
            assert!(!r.is_held() && r.is_moderated());
            now
        };
        // Much arrives: it stays moderated, though its account is full.
        for _ in 0..10 {
            let now = go_on(&mut r, 40 * MS);
            r.charge(now + 300 * US, done(300 * US));
            assert!(r.is_held());
            r.charge(now + 300 * US + MODERATION_INTERVAL / 2, done(0));
            assert!(r.is_held());
        }
        let now = go_on(&mut r, 40 * MS);
        r.charge(now + 50 * US, done(50 * US));
        assert!(!r.is_held() && !r.is_moderated());
    }

    #[test]
    fn a_hold_times_out_without_news_of_the_regular_cores() {
        let mut r = Reserve::new();
        r.add_due(0, true, 0);
        r.charge(0, ran(30 * MS));
        assert!(r.is_held());
        r.charge(59 * MS, ran(0));
        assert!(r.is_held());
        r.charge(60 * MS, ran(0));
        assert!(!r.is_held());
        r.charge(61 * MS, ran(100 * US));
        assert!(r.is_held());
    }

    #[test]
    fn without_a_reserve_nothing_is_held() {
        let mut r = Reserve::new();
        r.add_due(0, true, 1000);
        r.charge(MS, ran(50 * MS));
        assert!(!r.is_held());
    }
}
