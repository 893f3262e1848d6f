// SPDX-License-Identifier: Apache-2.0
//! Hysteresis in time: a choice changes after several windows in a row asked for the change, and not too soon after the
//! last change.
//!
//! [`Sustained`] is a sign that begins by one rule and lasts by a weaker one.

use crate::slices::Nanos;

/// Effect of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The window asks for the present value.
    Same,
    /// This many windows in a row have asked for another value; more are needed.
    Confirming(u32),
    /// The value should change, but not before this time has passed, ns.
    Held(Nanos),
    /// The value changed.
    Changed,
}

/// A value that changes only after several windows in a row have asked for the same change.
#[derive(Debug, Clone)]
pub(crate) struct Hysteresis<T> {
    value: T,
    candidate: T,
    streak: u32,
    changed_at: Option<Nanos>,
}

impl<T: Copy + PartialEq> Hysteresis<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value,
            candidate: value,
            streak: 0,
            changed_at: None,
        }
    }

    pub(crate) fn value(&self) -> T {
        self.value
    }

    /// Takes a window that ended at `now` and asks for `to`. The value changes after that many `windows` in a row, and
    /// `min_hold` ns after the last change at the earliest.
    pub(crate) fn observe(&mut self, now: Nanos, to: T, windows: u32, min_hold: Nanos) -> Step {
        if to == self.value {
            self.streak = 0;
            return Step::Same;
        }
        if to != self.candidate {
            (self.candidate, self.streak) = (to, 0);
        }
        self.streak = self.streak.saturating_add(1);
        if self.streak < windows {
            return Step::Confirming(self.streak);
        }
        let until = self.changed_at.map_or(0, |at| at.saturating_add(min_hold));
        if now < until {
            return Step::Held(until - now);
        }
        self.set(now, to);
        Step::Changed
    }

    /// Changes the value at once.
    pub(crate) fn set(&mut self, now: Nanos, to: T) {
        if to != self.value {
            self.changed_at = Some(now);
        }
        (self.value, self.candidate, self.streak) = (to, to, 0);
    }
}

/// A sign that a VM shows over several windows.
#[derive(Debug, Clone)]
pub(crate) struct Sustained(Hysteresis<bool>);

/// How long a [`Sustained`] sign takes to begin and to end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Patience {
    /// Number of windows in a row until it is there, and until it no longer is.
    pub windows: (u32, u32),
    /// Minimum time between two changes, ns.
    pub hold: Nanos,
}

impl Sustained {
    /// A sign that is not there yet.
    pub(crate) fn new() -> Self {
        Self(Hysteresis::new(false))
    }

    pub(crate) fn is_there(&self) -> bool {
        self.0.value()
    }

    /// Takes a window that ended at `now`: whether the sign may begin by it, and whether one that is there lasts. Returns whether
    /// [`Sustained::is_there`] has changed.
    pub(crate) fn observe(&mut self, now: Nanos, begins: bool, lasts: bool, p: &Patience) -> bool {
        let (to, windows) = match self.is_there() {
            false => (begins, p.windows.0),
            true => (lasts, p.windows.1),
        };
        self.0.observe(now, to, windows, p.hold) == Step::Changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_changes_after_enough_windows_and_enough_time() {
        let mut s = Hysteresis::new(0);
        assert_eq!(s.observe(1, 0, 2, 100), Step::Same);
        assert_eq!(s.observe(2, 1, 2, 100), Step::Confirming(1));
        assert_eq!(s.observe(3, 0, 2, 100), Step::Same);
        assert_eq!(s.observe(4, 1, 2, 100), Step::Confirming(1));
        // A third value starts the count again.
        assert_eq!(s.observe(5, 2, 2, 100), Step::Confirming(1));
        assert_eq!(s.observe(6, 2, 2, 100), Step::Changed);
        assert_eq!(s.value(), 2);
        assert_eq!(s.observe(7, 0, 2, 100), Step::Confirming(1));
        assert_eq!(s.observe(8, 0, 2, 100), Step::Held(98));
        assert_eq!(s.observe(106, 0, 2, 100), Step::Changed);
        s.set(107, 5);
        assert_eq!(s.observe(108, 5, 2, 100), Step::Same);
    }

    #[test]
    fn a_sign_that_is_there_lasts_by_the_weaker_rule() {
        let patience = Patience {
            windows: (2, 3),
            hold: 0,
        };
        let mut sign = Sustained::new();
        // (begins, lasts) of each window, and whether the sign is there after it
        let windows = [
            (true, true, false),
            (false, true, false),
            (true, true, false),
            (true, true, true),
            (false, true, true),
            (false, false, true),
            (false, false, true),
            (false, true, true),
            (false, false, true),
            (false, false, true),
            (true, false, false),
        ];
        for (i, (begins, lasts, there)) in windows.into_iter().enumerate() {
            let changed = sign.observe(i as Nanos, begins, lasts, &patience);
            assert_eq!(sign.is_there(), there, "window {i}");
            assert_eq!(changed, [3, 10].contains(&i), "window {i}");
        }
    }
}
