// SPDX-License-Identifier: Apache-2.0
//! How many turbo cores there are.
//!
//! The paper leaves the number to the operator and proposes to let it follow the demand (section 3.1). Here it is 0
//! while no VM needs one, and otherwise the number that keeps the load of each low enough for slots to come soon. A
//! turbo core costs the regular pool little, because regular vCPUs placed on it run in the gaps ([`super::TurboCore`]).
//! Moving vCPUs back and forth costs more, hence the hysteresis.

use std::fmt;

use crate::hysteresis::{Hysteresis, Step};

use crate::slices::{MS, Nanos};
use crate::text::HumanTime;

/// What was measured in a window (100 ms or more).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Number of VMs that should have a turbo vCPU ([`super::choose`]).
    pub vms: u32,
    /// Load of the turbo cores by turbo vCPUs and their VMs' service threads, in cores; 0 without turbo cores.
    pub run: f64,
    /// Cores of both pools together.
    pub cores: u32,
}

/// Settings of a [`PoolSizer`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Maximum number of turbo cores. One core always stays regular.
    pub max_cores: u32,
    /// Load per turbo core (0.0 ..= 1.0) above which more are needed, and below which fewer suffice.
    pub load: (f64, f64),
    /// Number of windows in a row until there are more, and until there are fewer.
    pub windows: (u32, u32),
    /// Minimum time between two changes, ns; the first core comes at once.
    pub hold: Nanos,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_cores: u32::MAX,
            load: (0.7, 0.4),
            windows: (5, 100),
            hold: 10_000 * MS,
        }
    }
}

/// Why there are this many. The text goes to the journal and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// No VM needs a turbo core.
    NoUse,
    /// There are as many as the limit and the number of cores allow.
    NoMore {
        /// Maximum number.
        max: u32,
    },
    /// They suffice.
    Enough {
        /// Total load, cores.
        run: f64,
    },
    /// VMs need the first one.
    First {
        /// Number of VMs.
        vms: u32,
    },
    /// There are too few for the load.
    Crowded {
        /// Total load, cores.
        run: f64,
    },
    /// There are more than the load needs.
    Spare {
        /// Total load, cores.
        run: f64,
    },
    /// The load asks for another number, but not for enough windows yet.
    Confirming {
        /// That number.
        to: u32,
        /// Windows in a row so far.
        windows: u32,
        /// Windows needed.
        needed: u32,
    },
    /// The number should change, but the last change is too recent.
    Held {
        /// The number that the load asks for.
        to: u32,
        /// Time left until it may change, ns.
        left: Nanos,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::NoUse => f.write_str("no VM needs a turbo core"),
            Reason::NoMore { max: 0 } => f.write_str("there is no core to spare for turbo"),
            Reason::NoMore { max } => write!(f, "{max} is the maximum"),
            Reason::Enough { run } => write!(f, "a load of {run:.2} cores"),
            Reason::First { vms } => write!(
                f,
                "{vms} VM{} with steady I/O",
                if vms == 1 { "" } else { "s" }
            ),
            Reason::Crowded { run } => write!(f, "a load of {run:.2} cores is too much for fewer"),
            Reason::Spare { run } => write!(f, "a load of {run:.2} cores needs no more"),
            Reason::Confirming {
                to,
                windows,
                needed,
            } => {
                write!(
                    f,
                    "the load has asked for {to} for {windows} of {needed} windows"
                )
            }
            Reason::Held { to, left } => {
                write!(
                    f,
                    "the load asks for {to}, but the last change is too recent: {} left",
                    HumanTime(left)
                )
            }
        }
    }
}

/// The number after a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Turbo cores from now on.
    pub cores: u32,
    /// Whether that changed with this window.
    pub changed: bool,
    /// The reason.
    pub why: Reason,
}

/// Sizes the turbo pool, window by window.
#[derive(Debug, Clone)]
pub struct PoolSizer {
    limits: Limits,
    cores: Hysteresis<u32>,
}

impl PoolSizer {
    /// Begins with no turbo core.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            cores: Hysteresis::new(0),
        }
    }

    /// The present number.
    pub fn cores(&self) -> u32 {
        self.cores.value()
    }

    /// Takes a window that ended at `now` (ns, never goes back).
    pub fn observe(&mut self, now: Nanos, load: &Load) -> Verdict {
        let was = self.cores.value();
        let max = load.cores.saturating_sub(1).min(self.limits.max_cores);
        let (to, why) = self.wanted(was, max, load);
        let why = if was > max {
            // A core went offline: one must stay regular.
            self.cores.set(now, max);
            Reason::NoMore { max }
        } else {
            let Limits { windows, hold, .. } = self.limits;
            let (needed, hold) = match (was, to) {
                // `choose` has already applied its hysteresis to the VMs that need the first one.
                (0, _) => (1, 0),
                _ if to > was => (windows.0, hold),
                _ => (windows.1, hold),
            };
            match self.cores.observe(now, to, needed, hold) {
                Step::Same | Step::Changed => why,
                Step::Confirming(windows) => Reason::Confirming {
                    to,
                    windows,
                    needed,
                },
                Step::Held(left) => Reason::Held { to, left },
            }
        };
        let cores = self.cores.value();
        Verdict {
            cores,
            changed: cores != was,
            why,
        }
    }

    /// The number that the window asks for, and why.
    fn wanted(&self, was: u32, max: u32, load: &Load) -> (u32, Reason) {
        let Load { vms, .. } = *load;
        let run = load.run.max(0.0);
        if vms == 0 {
            return (0, Reason::NoUse);
        }
        if max == 0 {
            return (0, Reason::NoMore { max });
        }
        // More turbo cores than turbo vCPUs are of no use.
        let needed = |load: f64| {
            (run / load.clamp(0.01, 1.0))
                .ceil()
                .clamp(1.0, f64::from(vms)) as u32
        };
        let (more, fewer) = (needed(self.limits.load.0), needed(self.limits.load.1));
        if was == 0 {
            (more.min(max), Reason::First { vms })
        } else if more > was && was == max {
            (max, Reason::NoMore { max })
        } else if more > was {
            (more.min(max), Reason::Crowded { run })
        } else if fewer < was {
            (fewer, Reason::Spare { run })
        } else {
            (was, Reason::Enough { run })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(c: &mut PoolSizer, at: &mut Nanos, n: u32, vms: u32, run: f64) -> Verdict {
        let mut last = None;
        for _ in 0..n {
            *at += 100 * MS;
            last = Some(c.observe(*at, &Load { vms, run, cores: 8 }));
        }
        last.unwrap()
    }

    #[test]
    fn there_are_turbo_cores_only_while_a_vm_needs_one() {
        let (mut c, mut at) = (PoolSizer::new(Limits::default()), 0);
        assert_eq!(windows(&mut c, &mut at, 50, 0, 0.0).why, Reason::NoUse);
        let v = windows(&mut c, &mut at, 1, 1, 0.0);
        assert_eq!(
            (v.cores, v.changed, v.why),
            (1, true, Reason::First { vms: 1 })
        );
        assert_eq!(windows(&mut c, &mut at, 200, 1, 0.01).cores, 1);
        assert_eq!(windows(&mut c, &mut at, 99, 0, 0.0).cores, 1);
        assert_eq!(windows(&mut c, &mut at, 1, 0, 0.0).cores, 0);
    }

    #[test]
    fn the_number_follows_the_load_and_falls_slowly() {
        let (mut c, mut at) = (PoolSizer::new(Limits::default()), 0);
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
        let mut c = PoolSizer::new(Limits::default());
        let load = |cores, run| Load { vms: 9, run, cores };
        assert_eq!(c.observe(1, &load(1, 0.0)).cores, 0);
        assert_eq!(c.observe(2, &load(0, 0.0)).cores, 0);
        assert_eq!(c.observe(3, &load(2, 0.0)).cores, 1);
        let mut at = 3;
        for _ in 0..200 {
            at += 100 * MS;
            let v = c.observe(at, &load(2, 1.0));
            assert_eq!((v.cores, v.why), (1, Reason::NoMore { max: 1 }));
        }
        // The second core is taken offline.
        let v = c.observe(at + 1, &load(1, 1.0));
        assert!(v.cores == 0 && v.changed);
        assert!(v.why.to_string().contains("no core to spare"));
    }

    #[test]
    fn there_are_no_more_turbo_cores_than_vms_that_use_them() {
        let (mut c, mut at) = (PoolSizer::new(Limits::default()), 0);
        assert_eq!(windows(&mut c, &mut at, 300, 1, 1.0).cores, 1);
    }
}
