// SPDX-License-Identifier: Apache-2.0
//! How many turbo cores there are.
//!
//! The paper leaves the number to the operator and hopes for one that follows the demand (section 3.1). Here it is 0
//! while no VM has use for one, else as many as keep each at a load at which slots come soon. Taking a core for turbo
//! costs the regular pool little, as regular vCPUs placed on it run in the gaps ([`super::TurboCore`]); moving vCPUs
//! to and fro is what costs, hence the hysteresis.

use std::fmt;

use super::settle::{Settled, Step};
use crate::slices::classify::Span;
use crate::slices::{MS, Nanos};

/// What was seen in a window (100 ms and more).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// VMs that are to have a turbo vCPU ([`super::choose`]).
    pub vms: u32,
    /// Cores that turbo vCPUs with their VMs' service threads ran on turbo cores, not negative; 0 while there are
    /// none.
    pub run: f64,
    /// Cores that viola may use, both pools together.
    pub cores: u32,
}

/// Settings of a [`Counter`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Most turbo cores. One core is always left regular.
    pub most: u32,
    /// Load per turbo core (0.0 ..= 1.0) above which there are too few, and below which fewer are enough.
    pub load: (f64, f64),
    /// Windows in a row until there are more, and until there are fewer.
    pub windows: (u32, u32),
    /// Shortest time (ns) between two changes, but for the first core.
    pub hold: Nanos,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            most: u32::MAX,
            load: (0.7, 0.4),
            windows: (5, 100),
            hold: 10_000 * MS,
        }
    }
}

/// Why there are so many. The text is meant for the journal and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// No VM has use for a turbo core.
    NoUse,
    /// All cores but one are turbo cores, or as many as are allowed, or there is only one core.
    NoMore {
        /// Most there may be.
        most: u32,
    },
    /// They suffice.
    Enough {
        /// Load of them all, cores.
        run: f64,
    },
    /// So many VMs have use for the first one.
    First {
        /// Number of VMs.
        vms: u32,
    },
    /// Too few for the load.
    Crowded {
        /// Load of them all, cores.
        run: f64,
    },
    /// More than the load needs.
    Spare {
        /// Load of them all, cores.
        run: f64,
    },
    /// Another number looks right; not for long enough yet.
    Confirming {
        /// That number.
        to: u32,
        /// Windows in a row so far.
        seen: u32,
        /// Windows needed.
        of: u32,
    },
    /// The number should change, but the last change is too recent.
    Held {
        /// To what.
        to: u32,
        /// Time left, ns.
        left: Nanos,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Why::NoUse => f.write_str("no VM has use for a turbo core"),
            Why::NoMore { most: 0 } => f.write_str("there is no core to spare for turbo"),
            Why::NoMore { most } => write!(f, "{most} is the most there may be"),
            Why::Enough { run } => write!(f, "a load of {run:.2} cores"),
            Why::First { vms } => write!(
                f,
                "{vms} VM{} with I/O worth it",
                if vms == 1 { "" } else { "s" }
            ),
            Why::Crowded { run } => write!(f, "a load of {run:.2} cores is too much for fewer"),
            Why::Spare { run } => write!(f, "a load of {run:.2} cores needs no more"),
            Why::Confirming { to, seen, of } => {
                write!(f, "{to} look right for {seen} of {of} windows")
            }
            Why::Held { to, left } => {
                write!(
                    f,
                    "{to} look right, but the last change was too recent: {} left",
                    Span(left)
                )
            }
        }
    }
}

/// What the counter says after a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Turbo cores from now on.
    pub cores: u32,
    /// Whether that changed with this window.
    pub changed: bool,
    /// Why.
    pub why: Why,
}

/// Says, window by window, how many turbo cores there are.
#[derive(Debug, Clone)]
pub struct Counter {
    limits: Limits,
    cores: Settled<u32>,
}

impl Counter {
    /// Begins with none.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            cores: Settled::new(0),
        }
    }

    /// The present number.
    pub fn cores(&self) -> u32 {
        self.cores.value()
    }

    /// Takes a window that ended at `now` (ns, never goes back).
    pub fn observe(&mut self, now: Nanos, load: &Load) -> Verdict {
        let was = self.cores.value();
        let most = load.cores.saturating_sub(1).min(self.limits.most);
        let (to, why) = self.wanted(was, most, load);
        let why = if was > most {
            // A core went away: one must be left for everything else.
            self.cores.set(now, most);
            Why::NoMore { most }
        } else {
            let Limits { windows, hold, .. } = self.limits;
            let (of, hold) = match (was, to) {
                // That VMs have use for it was confirmed, and held, when they were chosen.
                (0, _) => (1, 0),
                _ if to > was => (windows.0, hold),
                _ => (windows.1, hold),
            };
            match self.cores.observe(now, to, of, hold) {
                Step::Same | Step::Changed => why,
                Step::Confirming(seen) => Why::Confirming { to, seen, of },
                Step::Held(left) => Why::Held { to, left },
            }
        };
        let cores = self.cores.value();
        Verdict {
            cores,
            changed: cores != was,
            why,
        }
    }

    /// The number that the window asks for.
    fn wanted(&self, was: u32, most: u32, load: &Load) -> (u32, Why) {
        let Load { vms, .. } = *load;
        let run = load.run.max(0.0);
        if vms == 0 {
            return (0, Why::NoUse);
        }
        if most == 0 {
            return (0, Why::NoMore { most });
        }
        // More turbo cores than turbo vCPUs are of no use.
        let needed = |load: f64| {
            (run / load.clamp(0.01, 1.0))
                .ceil()
                .clamp(1.0, f64::from(vms)) as u32
        };
        let (more, fewer) = (needed(self.limits.load.0), needed(self.limits.load.1));
        if was == 0 {
            (more.min(most), Why::First { vms })
        } else if more > was && was == most {
            (most, Why::NoMore { most })
        } else if more > was {
            (more.min(most), Why::Crowded { run })
        } else if fewer < was {
            (fewer, Why::Spare { run })
        } else {
            (was, Why::Enough { run })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(c: &mut Counter, at: &mut Nanos, n: u32, vms: u32, run: f64) -> Verdict {
        let mut last = None;
        for _ in 0..n {
            *at += 100 * MS;
            last = Some(c.observe(*at, &Load { vms, run, cores: 8 }));
        }
        last.unwrap()
    }

    #[test]
    fn there_is_none_until_a_vm_has_use_for_one_and_none_after_that() {
        let (mut c, mut at) = (Counter::new(Limits::default()), 0);
        assert_eq!(windows(&mut c, &mut at, 50, 0, 0.0).why, Why::NoUse);
        let v = windows(&mut c, &mut at, 1, 1, 0.0);
        assert_eq!(
            (v.cores, v.changed, v.why),
            (1, true, Why::First { vms: 1 })
        );
        assert_eq!(windows(&mut c, &mut at, 200, 1, 0.01).cores, 1);
        assert_eq!(windows(&mut c, &mut at, 99, 0, 0.0).cores, 1);
        assert_eq!(windows(&mut c, &mut at, 1, 0, 0.0).cores, 0);
    }

    #[test]
    fn the_number_follows_the_load_slowly_downwards() {
        let (mut c, mut at) = (Counter::new(Limits::default()), 0);
        windows(&mut c, &mut at, 200, 6, 0.3);
        assert_eq!(windows(&mut c, &mut at, 4, 6, 1.0).cores, 1);
        assert_eq!(windows(&mut c, &mut at, 1, 6, 1.0).cores, 2);
        // Between the two bounds nothing changes.
        assert_eq!(windows(&mut c, &mut at, 500, 6, 0.5).cores, 2);
        assert_eq!(windows(&mut c, &mut at, 500, 6, 1.3).cores, 2);
        assert_eq!(windows(&mut c, &mut at, 5, 6, 1.9).cores, 3);
        let v = windows(&mut c, &mut at, 50, 6, 0.3);
        assert!(
            v.cores == 3 && v.why.to_string().contains("50 of 100"),
            "{v:?}"
        );
        assert_eq!(windows(&mut c, &mut at, 50, 6, 0.3).cores, 1);
    }

    #[test]
    fn one_core_stays_regular_and_a_limit_is_kept() {
        let mut c = Counter::new(Limits::default());
        let load = |cores, run| Load { vms: 9, run, cores };
        assert_eq!(c.observe(1, &load(1, 0.0)).cores, 0);
        assert_eq!(c.observe(2, &load(0, 0.0)).cores, 0);
        assert_eq!(c.observe(3, &load(2, 0.0)).cores, 1);
        let mut at = 3;
        for _ in 0..200 {
            at += 100 * MS;
            let v = c.observe(at, &load(2, 1.0));
            assert_eq!((v.cores, v.why), (1, Why::NoMore { most: 1 }));
        }
        // The second core is taken offline.
        let v = c.observe(at + 1, &load(1, 1.0));
        assert!(v.cores == 0 && v.changed);
        assert!(v.why.to_string().contains("no core to spare"));
    }

    #[test]
    fn there_are_no_more_turbo_cores_than_vms_that_use_them() {
        let (mut c, mut at) = (Counter::new(Limits::default()), 0);
        assert_eq!(windows(&mut c, &mut at, 300, 1, 1.0).cores, 1);
    }
}
