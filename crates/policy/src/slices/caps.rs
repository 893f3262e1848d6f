// SPDX-License-Identifier: Apache-2.0
//! Caps: the maximum part of a core that a VM may use even while the core would idle.
//!
//! Time is divided into windows. Each window gives a capped VM its quota (cap times window). A VM that has used up its
//! quota is [`super::Rank::Capped`] until a window refills it. At most two unused quotas are carried over, so that a VM
//! that could not run in two windows catches up in the next ones. Overuse is paid back in full.

use super::{FOREVER, Nanos, US};

/// Minimum run of a capped VM: a shorter quota is saved up over several windows.
const MIN_CAPPED_RUN: i64 = 200 * US as i64;

/// Unused quotas that a window gets beside its own. With one, a batch VM that is due its cap stays up to a tenth below it where
/// a slice of another VM, which microslices interrupt, lasts for more than a window.
const CARRIED_QUOTAS: i64 = 2;

/// The accounting windows of one core.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Windows {
    length: Nanos,
    next: Option<Nanos>,
}

impl Windows {
    pub(crate) fn new(length: Nanos) -> Self {
        Self { length, next: None }
    }

    /// Number of windows that began since the last call.
    pub(crate) fn roll(&mut self, now: Nanos) -> u64 {
        let next = *self.next.get_or_insert(now.saturating_add(self.length));
        if now < next {
            return 0;
        }
        let begun = 1 + (now - next) / self.length;
        self.next = Some(next.saturating_add(begun.saturating_mul(self.length)));
        begun
    }

    /// When the `k`-th window from now begins (1 = the next).
    pub(crate) fn begin_of(&self, k: u64) -> Nanos {
        self.next.map_or(FOREVER, |next| {
            next.saturating_add((k - 1).saturating_mul(self.length))
        })
    }
}

/// The cap of one VM.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cap {
    /// Thousandths of a core; 0: no cap.
    permille: u32,
    /// Quota, ns per window; 0: no cap.
    quota: i64,
    left: i64,
    capped: bool,
}

impl Cap {
    pub(crate) fn new(permille: Option<u32>, windows: &Windows) -> Self {
        let mut cap = Self {
            permille: 0,
            quota: 0,
            left: 0,
            capped: false,
        };
        cap.set(permille, windows);
        cap
    }

    /// Sets a cap on one core (thousandths of it; 1000 and more: none). A debt under the old cap stays.
    pub(crate) fn set(&mut self, permille: Option<u32>, windows: &Windows) {
        self.set_across_cores(permille.filter(|&p| p < 1000), windows);
    }

    /// As [`Cap::set`], for a VM's use of several cores together: 1000 is one whole core.
    pub(crate) fn set_across_cores(&mut self, permille: Option<u32>, windows: &Windows) {
        let permille = permille.map_or(0, |p| p.clamp(1, 1_000_000));
        if permille == self.permille {
            return;
        }
        self.permille = permille;
        if permille == 0 {
            (self.quota, self.left, self.capped) = (0, 0, false);
            return;
        }
        let first = self.quota == 0;
        self.quota = (windows.length * u64::from(permille) / 1000).max(1) as i64;
        self.left = if first {
            self.quota
        } else {
            self.left.min(self.max_left())
        };
    }

    fn max_left(&self) -> i64 {
        (1 + CARRIED_QUOTAS) * self.quota.max(MIN_CAPPED_RUN)
    }

    /// Quota that must be left before a capped VM runs again, ns.
    fn resume_quota(&self) -> i64 {
        (self.quota / 2).max(MIN_CAPPED_RUN)
    }

    /// Charges what the VM ran, and refills the quota of the windows that began since the last call.
    pub(crate) fn charge(&mut self, used: Nanos, begun: u64) {
        if self.quota == 0 {
            return;
        }
        self.left = self.left.saturating_sub(used.min(i64::MAX as u64) as i64);
        if begun > 0 {
            let refill = self.quota.saturating_mul(begun.min(1 << 20) as i64);
            self.left = self.left.saturating_add(refill).min(self.max_left());
        }
        // A rest too short to be worth two changes of rank waits for the next window.
        self.capped = if self.capped {
            self.left < self.resume_quota()
        } else {
            self.left <= self.quota / 64
        };
    }

    /// Quota, ns per window; 0: no cap.
    pub(crate) fn quota(&self) -> i64 {
        self.quota
    }

    /// Whether the VM is over its cap and must not run.
    pub(crate) fn is_capped(&self) -> bool {
        self.capped
    }

    /// How long the VM may run from now, ns ([`FOREVER`] without a cap).
    pub(crate) fn budget(&self) -> Nanos {
        if self.quota == 0 {
            FOREVER
        } else {
            self.left.max(0) as Nanos
        }
    }

    /// How long the VM may run from now if it keeps half a quota for later, ns ([`FOREVER`] without
    /// a cap). The next windows add to that half.
    pub(crate) fn budget_above_reserve(&self) -> Nanos {
        if self.quota == 0 {
            FOREVER
        } else {
            (self.left - self.quota / 2).max(0) as Nanos
        }
    }

    /// Time at which a capped VM may run again, ns; [`FOREVER`] if the VM is not capped.
    pub(crate) fn refill_at(&self, windows: &Windows) -> Nanos {
        if !self.capped {
            return FOREVER;
        }
        let missing = self.resume_quota().saturating_sub(self.left);
        windows.begin_of((missing.max(1) as u64).div_ceil(self.quota as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::super::MS;
    use super::*;

    fn capped(permille: u32) -> (Windows, Cap) {
        let mut windows = Windows::new(10 * MS);
        windows.roll(0);
        let cap = Cap::new(Some(permille), &windows);
        (windows, cap)
    }

    #[test]
    fn a_vm_that_used_its_quota_waits_for_the_next_window() {
        let (mut windows, mut cap) = capped(200);
        assert_eq!(cap.budget(), 2 * MS);
        cap.charge(2 * MS, windows.roll(5 * MS));
        assert!(cap.is_capped());
        assert_eq!(cap.refill_at(&windows), 10 * MS);
        cap.charge(0, windows.roll(10 * MS));
        assert!(!cap.is_capped());
        assert_eq!(cap.budget(), 2 * MS);
    }

    #[test]
    fn two_unused_windows_are_carried_over_and_no_more() {
        let (mut windows, mut cap) = capped(200);
        cap.charge(0, windows.roll(20 * MS));
        assert_eq!(cap.budget(), 6 * MS);
        cap.charge(0, windows.roll(500 * MS));
        assert_eq!(cap.budget(), 6 * MS);
    }

    #[test]
    fn over_use_is_paid_back() {
        let (mut windows, mut cap) = capped(100);
        cap.charge(3 * MS, windows.roll(5 * MS));
        assert_eq!(cap.refill_at(&windows), 30 * MS);
        cap.charge(0, windows.roll(20 * MS));
        assert!(cap.is_capped());
        cap.charge(0, windows.roll(30 * MS));
        assert!(!cap.is_capped());
    }

    #[test]
    fn a_tiny_cap_is_saved_up_to_a_run_that_is_worth_it() {
        let (mut windows, mut cap) = capped(1);
        cap.charge(10 * US, windows.roll(MS));
        assert!(cap.is_capped());
        assert_eq!(cap.refill_at(&windows), 200 * MS);
        cap.charge(0, windows.roll(200 * MS));
        assert!(!cap.is_capped());
        assert_eq!(cap.budget(), 200 * US);
    }

    #[test]
    fn without_a_cap_nothing_is_limited() {
        let windows = Windows::new(10 * MS);
        for none in [None, Some(1000)] {
            let mut cap = Cap::new(none, &windows);
            cap.charge(500 * MS, 3);
            assert!(!cap.is_capped());
            assert_eq!((cap.budget(), cap.refill_at(&windows)), (FOREVER, FOREVER));
        }
    }

    #[test]
    fn a_cap_over_several_cores_may_be_more_than_one() {
        let mut windows = Windows::new(10 * MS);
        windows.roll(0);
        let mut cap = Cap::new(None, &windows);
        cap.set_across_cores(Some(1500), &windows);
        cap.charge(14 * MS, 0);
        assert!(!cap.is_capped());
        cap.charge(MS, 0);
        assert!(cap.is_capped());
        cap.set_across_cores(None, &windows);
        assert!(!cap.is_capped());
    }

    #[test]
    fn a_lower_cap_keeps_what_is_owed() {
        let (windows, mut cap) = capped(500);
        cap.charge(8 * MS, 0);
        cap.set(Some(100), &windows);
        cap.charge(0, 1);
        assert!(cap.is_capped());
    }
}
