// SPDX-License-Identifier: Apache-2.0
//! Class "auto": whether a VM is latency sensitive, and what class ls would gain.
//!
//! A VM counts as latency sensitive when it answers packets, or wakes often for short runs, **and** waits for its core:
//! without a wait there is nothing to gain. It stays so until its I/O ends. That it no longer waits is no reason to
//! change back, because class ls takes the wait away. Both changes need several windows in a row, and a class is kept
//! for a minimum time, so classes do not flap. The dissertation leaves the choice to the operator and names virtual
//! interrupts and pending packets as indicators (section 2.4).

use std::fmt;

use super::model::interleaved_wait;
use super::{Class, MS, Nanos};
use crate::hysteresis::{Hysteresis, Step};
use crate::text::{HumanTime, percent};

/// What the meter measured of one VM in one window. Parts are of the time of its vCPUs, 0.0 ..= 1.0 each.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// Part of the time in which it ran.
    pub run: f64,
    /// Part of the time in which it wanted to run and did not.
    pub wait: f64,
    /// Part of the time in which it slept.
    pub blocked: f64,
    /// Wake-ups per second.
    pub wakes: f64,
    /// Packets received and sent, per second.
    pub packets: f64,
}

/// Settings of a [`Classifier`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Packets/s from which a VM counts as answering packets, and below which it no longer does.
    pub packets: (f64, f64),
    /// Wake-ups/s from which a VM counts as waking often, and below which it no longer does. The timer of an idle guest
    /// makes up to 100.
    pub wakes: (f64, f64),
    /// Maximum mean run per wake-up (ns) for frequent wake-ups to count.
    pub longest_run: f64,
    /// Minimum part of the time asleep for frequent wake-ups to count.
    pub blocked: f64,
    /// Minimum part of the time waiting for a VM to become latency sensitive.
    pub wait: f64,
    /// Number of windows in a row until a VM becomes latency sensitive, and until it no longer is.
    pub windows: (u32, u32),
    /// Minimum time between two changes of class, ns.
    pub hold: Nanos,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            packets: (40.0, 10.0),
            wakes: (250.0, 120.0),
            longest_run: 2.0 * MS as f64,
            blocked: 0.1,
            wait: 0.02,
            windows: (5, 50),
            hold: 10_000 * MS,
        }
    }
}

/// Why a VM has its class. The text goes to the journal and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// It answers packets and waits for its core.
    Packets {
        /// Packets per second.
        packets: f64,
        /// Part of the time in which it waits.
        wait: f64,
    },
    /// It wakes often for short runs and waits for its core.
    Wakes {
        /// Wake-ups per second.
        wakes: f64,
        /// Mean run per wake-up, ns.
        run: f64,
        /// Part of the time in which it waits.
        wait: f64,
    },
    /// It does latency-sensitive I/O but hardly waits.
    HardlyWaits {
        /// Part of the time in which it waits.
        wait: f64,
    },
    /// It computes and does little I/O.
    Computes {
        /// Part of the time in which it wants to run.
        wants: f64,
    },
    /// It neither computes nor does I/O.
    Quiet,
    /// It is latency sensitive, and its I/O continues.
    StillBusy,
    /// The measurements ask for another class, but not for enough windows yet.
    Confirming {
        /// The class they ask for.
        to: Class,
        /// Windows in a row so far.
        windows: u32,
        /// Windows needed.
        needed: u32,
    },
    /// The class should change, but the last change is too recent.
    Held {
        /// The class that the measurements ask for.
        to: Class,
        /// Time left until it may change, ns.
        left: Nanos,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Packets { packets, wait } => {
                write!(
                    f,
                    "{packets:.0} packets/s, and it waits {} of the time",
                    percent(wait)
                )
            }
            Reason::Wakes { wakes, run, wait } => write!(
                f,
                "{wakes:.0} wake-ups/s for {} each, and it waits {} of the time",
                HumanTime(run as Nanos),
                percent(wait)
            ),
            Reason::HardlyWaits { wait } => {
                write!(f, "it waits only {} of the time", percent(wait))
            }
            Reason::Computes { wants } => {
                write!(
                    f,
                    "it computes ({} of the time) and does little I/O",
                    percent(wants)
                )
            }
            Reason::Quiet => f.write_str("it neither computes nor does I/O"),
            Reason::StillBusy => f.write_str("its I/O continues"),
            Reason::Confirming {
                to,
                windows,
                needed,
            } => {
                write!(f, "it looks {} for {windows} of {needed} windows", look(to))
            }
            Reason::Held { to, left } => {
                write!(
                    f,
                    "it looks {}, but its class changed too recently: {} left",
                    look(to),
                    HumanTime(left)
                )
            }
        }
    }
}

fn look(class: Class) -> &'static str {
    match class {
        Class::Ls => "latency sensitive",
        Class::Batch => "not latency sensitive",
    }
}

/// The class of a VM after a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The VM's class from now on.
    pub class: Class,
    /// Whether it changed with this window.
    pub changed: bool,
    /// The reason.
    pub why: Reason,
}

/// Chooses the class of one VM, window by window.
#[derive(Debug, Clone)]
pub struct Classifier {
    thresholds: Thresholds,
    class: Hysteresis<Class>,
}

impl Classifier {
    /// A classifier for a VM that starts as a batch VM, as all VMs do (section 2.4).
    pub fn new(thresholds: Thresholds) -> Self {
        Self::with_class(thresholds, Class::Batch)
    }

    /// A classifier for a VM that starts with this class.
    pub fn with_class(thresholds: Thresholds, class: Class) -> Self {
        Self {
            thresholds,
            class: Hysteresis::new(class),
        }
    }

    /// The present class.
    pub fn class(&self) -> Class {
        self.class.value()
    }

    /// Takes a window that ended at `now` (ns, never goes back).
    pub fn observe(&mut self, now: Nanos, window: &Window) -> Verdict {
        let t = &self.thresholds;
        let (to, why) = match self.class() {
            Class::Batch => enter(t, window),
            Class::Ls => leave(t, window),
        };
        let needed = match to {
            Class::Ls => t.windows.0,
            Class::Batch => t.windows.1,
        };
        let step = self.class.observe(now, to, needed, t.hold);
        Verdict {
            class: self.class(),
            changed: step == Step::Changed,
            why: match step {
                Step::Same | Step::Changed => why,
                Step::Confirming(windows) => Reason::Confirming {
                    to,
                    windows,
                    needed,
                },
                Step::Held(left) => Reason::Held { to, left },
            },
        }
    }
}

/// Mean run per wake-up, ns.
fn mean_run(w: &Window) -> f64 {
    w.run * 1e9 / w.wakes.max(1e-9)
}

fn enter(t: &Thresholds, w: &Window) -> (Class, Reason) {
    let packets = w.packets >= t.packets.0;
    let wakes = w.wakes >= t.wakes.0 && w.blocked >= t.blocked && mean_run(w) <= t.longest_run;
    match (packets, wakes, w.wait >= t.wait) {
        (false, false, _) if w.run + w.wait >= 0.5 => (
            Class::Batch,
            Reason::Computes {
                wants: w.run + w.wait,
            },
        ),
        (false, false, _) => (Class::Batch, Reason::Quiet),
        (_, _, false) => (Class::Batch, Reason::HardlyWaits { wait: w.wait }),
        (true, _, true) => (
            Class::Ls,
            Reason::Packets {
                packets: w.packets,
                wait: w.wait,
            },
        ),
        (false, true, true) => (
            Class::Ls,
            Reason::Wakes {
                wakes: w.wakes,
                run: mean_run(w),
                wait: w.wait,
            },
        ),
    }
}

fn leave(t: &Thresholds, w: &Window) -> (Class, Reason) {
    if w.packets >= t.packets.1 || (w.wakes >= t.wakes.1 && mean_run(w) <= 2.0 * t.longest_run) {
        (Class::Ls, Reason::StillBusy)
    } else if w.run + w.wait >= 0.5 {
        (
            Class::Batch,
            Reason::Computes {
                wants: w.run + w.wait,
            },
        )
    } else {
        (Class::Batch, Reason::Quiet)
    }
}

/// What tells how long requests to a VM wait for its core, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figure {
    /// The p99 of the packet delay: from a packet's arrival until a vCPU runs.
    PacketDelay,
    /// The p99 of the residual wait: how long a vCPU still waits at a random moment.
    ResidualWait,
    /// The mean of the waits, where single waits are unknown.
    MeanWait,
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PacketDelay => "packet delay p99",
            Self::ResidualWait => "residual wait p99",
            Self::MeanWait => "mean wait",
        })
    }
}

/// The figures of a VM (ns) that are known from enough packets or waits.
///
/// The p99 of all waits is not among them: it counts each wake-up alike, and thousands of waits below a microsecond hide those
/// that requests meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// [`Figure::PacketDelay`].
    pub packet_delay: Option<Nanos>,
    /// [`Figure::ResidualWait`].
    pub residual_wait: Option<Nanos>,
    /// [`Figure::MeanWait`].
    pub mean_wait: Option<Nanos>,
}

impl Figures {
    /// The figure of this kind, ns.
    pub fn get(&self, figure: Figure) -> Option<Nanos> {
        match figure {
            Figure::PacketDelay => self.packet_delay,
            Figure::ResidualWait => self.residual_wait,
            Figure::MeanWait => self.mean_wait,
        }
    }

    /// The best figure that is known, ns.
    pub fn best(&self) -> Option<(Figure, Nanos)> {
        let all = [Figure::PacketDelay, Figure::ResidualWait, Figure::MeanWait];
        all.into_iter().find_map(|f| Some((f, self.get(f)?)))
    }
}

/// What class ls would change for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice {
    /// What was measured; `None`: nothing, and `now` is the worst case.
    pub figure: Option<Figure>,
    /// Wait in its present class, ns.
    pub now: Nanos,
    /// Longest wait in class ls, ns.
    pub after: Nanos,
    /// Whether the VM uses so little of its share that class ls serves it at once.
    pub is_inside: bool,
}

impl Advice {
    /// Whether class ls is worth it: the wait is 2 ms or more, and falls to half or less.
    pub fn is_worth_it(&self) -> bool {
        self.now >= 2 * MS && self.after <= self.now / 2
    }

    /// Name of the figure in `now`.
    pub fn what(&self) -> String {
        self.figure.map_or("worst wait".into(), |f| f.to_string())
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "class ls would cut its {} from {} to about {}",
            self.what(),
            HumanTime(self.now),
            HumanTime(self.after)
        )
    }
}

/// An LSVM that uses at most this part of its share is hardly ever out of credit.
const INSIDE: f64 = 0.75;

/// Estimates what class ls would gain for a VM.
///
/// `measured` is the best figure that is known of it. Without one the worst wait is taken, on a core on which
/// `contenders` other VMs run `slice` ns each in turn. `share` is its part of the core by weight, and `used` the part that it
/// uses, if that is known. `microslice` is the T_m (ns) it would get, `others` those (ns) of the LSVMs that the core already has.
///
/// A VM inside its share is served at once, but for a microslice of each LSVM; one that wants more waits until its share is due again.
pub fn advise(
    measured: Option<(Figure, Nanos)>,
    contenders: u32,
    slice: Nanos,
    (share, used): (f64, Option<f64>),
    microslice: Nanos,
    others: impl IntoIterator<Item = Nanos>,
) -> Advice {
    let is_inside = used.is_some_and(|used| used <= INSIDE * share);
    Advice {
        figure: measured.map(|(figure, _)| figure),
        now: measured.map_or(u64::from(contenders) * slice, |(_, ns)| ns),
        after: match is_inside {
            true => others.into_iter().fold(microslice, Nanos::saturating_add),
            false => interleaved_wait(share, microslice, others),
        },
        is_inside,
    }
}

#[cfg(test)]
mod tests;
