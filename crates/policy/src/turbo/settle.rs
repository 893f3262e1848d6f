// SPDX-License-Identifier: Apache-2.0
//! Hysteresis in time: a choice changes when it looked different for several windows in a row, and not too soon after
//! the last change.

use crate::slices::Nanos;

/// What became of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It looks as it is.
    Same,
    /// It looks different for so many windows in a row; not for enough.
    Confirming(u32),
    /// It should change, but not before so long, ns.
    Held(Nanos),
    /// It changed.
    Changed,
}

/// A choice that does not flap.
#[derive(Debug, Clone)]
pub(super) struct Settled<T> {
    value: T,
    looks: T,
    streak: u32,
    changed_at: Option<Nanos>,
}

impl<T: Copy + PartialEq> Settled<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            value,
            looks: value,
            streak: 0,
            changed_at: None,
        }
    }

    pub(super) fn value(&self) -> T {
        self.value
    }

    /// Takes a window that ended at `now` and looks like `to`, which becomes the value after `of` such windows in a
    /// row and `hold` ns after the last change.
    pub(super) fn observe(&mut self, now: Nanos, to: T, of: u32, hold: Nanos) -> Step {
        if to == self.value {
            self.streak = 0;
            return Step::Same;
        }
        if to != self.looks {
            (self.looks, self.streak) = (to, 0);
        }
        self.streak = self.streak.saturating_add(1);
        if self.streak < of {
            return Step::Confirming(self.streak);
        }
        let until = self.changed_at.map_or(0, |at| at.saturating_add(hold));
        if now < until {
            return Step::Held(until - now);
        }
        self.set(now, to);
        Step::Changed
    }

    /// Changes it at once.
    pub(super) fn set(&mut self, now: Nanos, to: T) {
        if to != self.value {
            self.changed_at = Some(now);
        }
        (self.value, self.looks, self.streak) = (to, to, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_changes_after_enough_windows_and_enough_time() {
        let mut s = Settled::new(0);
        assert_eq!(s.observe(1, 0, 2, 100), Step::Same);
        assert_eq!(s.observe(2, 1, 2, 100), Step::Confirming(1));
        assert_eq!(s.observe(3, 0, 2, 100), Step::Same);
        assert_eq!(s.observe(4, 1, 2, 100), Step::Confirming(1));
        // Another value begins anew.
        assert_eq!(s.observe(5, 2, 2, 100), Step::Confirming(1));
        assert_eq!(s.observe(6, 2, 2, 100), Step::Changed);
        assert_eq!(s.value(), 2);
        assert_eq!(s.observe(7, 0, 2, 100), Step::Confirming(1));
        assert_eq!(s.observe(8, 0, 2, 100), Step::Held(98));
        assert_eq!(s.observe(106, 0, 2, 100), Step::Changed);
        s.set(107, 5);
        assert_eq!(s.observe(108, 5, 2, 100), Step::Same);
    }
}
