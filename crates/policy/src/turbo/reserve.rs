// SPDX-License-Identifier: Apache-2.0
//! What a VM keeps of its share for its regular vCPUs: without that, interrupts that come in masses would use all of
//! it up, and nothing that they bring would ever be read (receive livelock).
//!
//! Of what a VM is due on both pools together (FS) its turbo vCPU may use a part while regular vCPUs of the VM wait;
//! while none waits there is no limit. When the part is used up the turbo vCPU waits, and what comes meanwhile is
//! served in one go later, which costs less for each packet, or is dropped before it costs anything.

use super::ACCOUNTING;
use crate::slices::{MS, Nanos, US};

/// Most that is saved up: what a VM is due is known when an accounting of its regular cores is over.
const SAVED: i64 = ACCOUNTING as i64 / 2;
/// How long it runs unseen while no regular vCPU waits and one may begin to.
const GLANCE: Nanos = 2 * MS;
/// Most that is owed: a turbo vCPU may run unseen until the next look.
const OWED: i64 = -(20 * MS as i64);
/// It goes on when it may run so long.
const RESUME: i64 = 200 * US as i64;
/// ...or after this wait, should nothing be heard of the regular cores.
const LONGEST: Nanos = 2 * ACCOUNTING;

/// The account of one turbo vCPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reserve {
    left: i64,
    /// Whether a regular vCPU of its VM waits.
    short: bool,
    /// Whether anything was heard of regular cores.
    heard: bool,
    held_since: Option<Nanos>,
}

impl Reserve {
    pub(super) fn new() -> Self {
        Self {
            left: SAVED,
            short: false,
            heard: false,
            held_since: None,
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

    /// Takes what the turbo vCPU ran.
    pub(super) fn charge(&mut self, now: Nanos, used: Nanos) {
        let used = i64::try_from(used).unwrap_or(i64::MAX);
        self.left = self.left.saturating_sub(used).max(OWED);
        let waited = self.held_since.map(|at| now.saturating_sub(at));
        match waited {
            _ if !self.short => self.held_since = None,
            Some(waited) if self.left >= RESUME || waited >= LONGEST => {
                self.held_since = None;
                self.left = self.left.max(RESUME);
            }
            Some(_) => {}
            None if self.left <= 0 => self.held_since = Some(now),
            None => {}
        }
    }

    /// Whether the turbo vCPU has to wait.
    pub(super) fn holds(&self) -> bool {
        self.held_since.is_some()
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

    #[test]
    fn nothing_is_held_while_no_regular_vcpu_waits() {
        let mut r = Reserve::new();
        for k in 1..100 {
            r.hear(0, false, 500);
            r.charge(k * MS, MS);
            assert!(!r.holds() && r.budget() >= GLANCE);
        }
    }

    #[test]
    fn what_is_used_up_comes_back_with_what_the_vm_is_due() {
        let mut r = Reserve::new();
        r.hear(0, true, 500);
        r.charge(MS, 16 * MS);
        assert!(r.holds());
        // 1 ms is owed: 2 ms due are needed for that, and 0.4 ms to go on.
        r.hear(2 * MS, true, 500);
        r.charge(2 * MS, 0);
        assert!(r.holds());
        r.hear(400 * US, true, 500);
        r.charge(3 * MS, 0);
        assert!(!r.holds());
        assert_eq!(r.budget(), 200 * US);
        r.charge(4 * MS, 200 * US);
        assert!(r.holds());
        // The regular vCPU has nothing more to do.
        r.hear(0, false, 500);
        r.charge(5 * MS, 0);
        assert!(!r.holds());
    }

    #[test]
    fn one_of_which_nothing_is_heard_goes_on_after_a_while() {
        let mut r = Reserve::new();
        r.hear(0, true, 0);
        r.charge(0, 30 * MS);
        assert!(r.holds());
        r.charge(59 * MS, 0);
        assert!(r.holds());
        r.charge(60 * MS, 0);
        assert!(!r.holds());
        r.charge(61 * MS, 200 * US);
        assert!(r.holds());
    }

    #[test]
    fn without_a_reserve_nothing_is_held() {
        let mut r = Reserve::new();
        r.hear(0, true, 1000);
        r.charge(MS, 50 * MS);
        assert!(!r.holds());
    }
}
