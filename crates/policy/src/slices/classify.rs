// SPDX-License-Identifier: Apache-2.0
//! Class "auto": whether a VM is latency sensitive, from what a meter sees of it, and what class ls would bring.
//!
//! A VM is taken for latency sensitive when it answers packets, or wakes often for short runs, **and** waits for
//! its core: without a wait there is nothing to gain. It stays so until its I/O goes quiet, not when the wait is
//! gone, because class ls takes the wait away. Both changes need several windows in a row and a class is held
//! for a while, so that nothing flaps. The dissertation leaves the choice to the operator and names virtual
//! interrupts and pending packets as what to look at (section 2.4).

use std::fmt;

use super::model::interleaved_wait;
use super::{Class, MS, Nanos};

/// What a meter saw of one VM over one window. Shares are of the time of its vCPUs, 0.0 ..= 1.0 each.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// Part of the time that it ran.
    pub run: f64,
    /// Part of the time that it wanted to run and did not.
    pub wait: f64,
    /// Part of the time that it slept.
    pub blocked: f64,
    /// Wake-ups per second.
    pub wakes: f64,
    /// Packets per second, received and sent.
    pub packets: f64,
}

/// Settings of a [`Classifier`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Packets/s from which a VM counts as answering packets, and below which it no longer does.
    pub packets: (f64, f64),
    /// Wake-ups/s from which a VM counts as waking often, and below which it no longer does. An idle guest's
    /// timer makes up to 100.
    pub wakes: (f64, f64),
    /// Longest mean run per wake-up (ns) with which frequent wake-ups count.
    pub longest_run: f64,
    /// Least part of the time that it sleeps with which frequent wake-ups count.
    pub blocked: f64,
    /// Least part of the time that it waits, to become latency sensitive.
    pub wait: f64,
    /// Windows in a row until it becomes latency sensitive, and until it no longer is.
    pub windows: (u32, u32),
    /// Shortest time (ns) between two changes of class.
    pub hold: Nanos,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            packets: (50.0, 10.0),
            wakes: (250.0, 120.0),
            longest_run: 2.0 * MS as f64,
            blocked: 0.1,
            wait: 0.02,
            windows: (5, 50),
            hold: 10_000 * MS,
        }
    }
}

/// Why a VM has the class it has. The text is meant for the journal and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// Answers packets and waits for its core.
    Packets {
        /// Packets per second.
        packets: f64,
        /// Part of the time it waits.
        wait: f64,
    },
    /// Wakes often for short runs and waits for its core.
    Wakes {
        /// Wake-ups per second.
        wakes: f64,
        /// Mean run per wake-up, ns.
        run: f64,
        /// Part of the time it waits.
        wait: f64,
    },
    /// Does latency-sensitive I/O but hardly waits.
    HardlyWaits {
        /// Part of the time it waits.
        wait: f64,
    },
    /// Computes, without I/O worth a name.
    Computes {
        /// Part of the time it wants to run.
        wants: f64,
    },
    /// Neither computes nor does I/O worth a name.
    Quiet,
    /// Latency sensitive, and its I/O goes on.
    StillBusy,
    /// Looks as if the class should change; not for long enough yet.
    Confirming {
        /// The class it looks like.
        to: Class,
        /// Windows in a row so far.
        seen: u32,
        /// Windows needed.
        of: u32,
    },
    /// The class should change, but the last change is too recent.
    Held {
        /// The class it looks like.
        to: Class,
        /// Time left, ns.
        left: Nanos,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Why::Packets { packets, wait } => {
                write!(
                    f,
                    "{packets:.0} packets/s, and it waits {} of the time",
                    percent(wait)
                )
            }
            Why::Wakes { wakes, run, wait } => write!(
                f,
                "{wakes:.0} wake-ups/s for {} each, and it waits {} of the time",
                Span(run as Nanos),
                percent(wait)
            ),
            Why::HardlyWaits { wait } => write!(f, "it waits only {} of the time", percent(wait)),
            Why::Computes { wants } => {
                write!(
                    f,
                    "it computes ({} of the time) and does little I/O",
                    percent(wants)
                )
            }
            Why::Quiet => f.write_str("it is quiet"),
            Why::StillBusy => f.write_str("its I/O goes on"),
            Why::Confirming { to, seen, of } => {
                write!(f, "it looks {} for {seen} of {of} windows", look(to))
            }
            Why::Held { to, left } => {
                write!(
                    f,
                    "it looks {}, but was changed less than {} ago",
                    look(to),
                    Span(left)
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

pub(crate) fn percent(part: f64) -> String {
    let p = part * 100.0;
    if p < 10.0 {
        format!("{p:.1} %")
    } else {
        format!("{p:.0} %")
    }
}

/// A time as an operator reads it.
pub(crate) struct Span(pub(crate) Nanos);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0 as f64 / 1e3;
        match us {
            ..1_000.0 => write!(f, "{us:.0} us"),
            ..9_950.0 => write!(f, "{:.1} ms", us / 1e3),
            ..2_000_000.0 => write!(f, "{:.0} ms", us / 1e3),
            _ => write!(f, "{:.0} s", us / 1e6),
        }
    }
}

/// What the classifier says after a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The VM's class from now on.
    pub class: Class,
    /// Whether it changed with this window.
    pub changed: bool,
    /// Why.
    pub why: Why,
}

/// Chooses the class of one VM, window by window.
#[derive(Debug, Clone)]
pub struct Classifier {
    thresholds: Thresholds,
    class: Class,
    streak: u32,
    changed_at: Option<Nanos>,
}

impl Classifier {
    /// A classifier for a VM that starts as a batch VM, as all VMs do (section 2.4).
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            class: Class::Batch,
            streak: 0,
            changed_at: None,
        }
    }

    /// The present class.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Takes a window that ended at `now` (ns, never goes back).
    pub fn observe(&mut self, now: Nanos, window: &Window) -> Verdict {
        let t = &self.thresholds;
        let (to, why) = match self.class {
            Class::Batch => enter(t, window),
            Class::Ls => leave(t, window),
        };
        if to == self.class {
            self.streak = 0;
            return Verdict {
                class: self.class,
                changed: false,
                why,
            };
        }
        let of = if to == Class::Ls {
            t.windows.0
        } else {
            t.windows.1
        };
        self.streak = (self.streak + 1).min(of);
        if self.streak < of {
            return Verdict {
                class: self.class,
                changed: false,
                why: Why::Confirming {
                    to,
                    seen: self.streak,
                    of,
                },
            };
        }
        let left = self
            .changed_at
            .map_or(0, |at| (at + t.hold).saturating_sub(now));
        if left > 0 {
            return Verdict {
                class: self.class,
                changed: false,
                why: Why::Held { to, left },
            };
        }
        (self.class, self.streak, self.changed_at) = (to, 0, Some(now));
        Verdict {
            class: to,
            changed: true,
            why,
        }
    }
}

/// Mean run per wake-up, ns.
fn mean_run(w: &Window) -> f64 {
    w.run * 1e9 / w.wakes.max(1e-9)
}

fn enter(t: &Thresholds, w: &Window) -> (Class, Why) {
    let packets = w.packets >= t.packets.0;
    let wakes = w.wakes >= t.wakes.0 && w.blocked >= t.blocked && mean_run(w) <= t.longest_run;
    match (packets, wakes, w.wait >= t.wait) {
        (false, false, _) if w.run + w.wait >= 0.5 => (
            Class::Batch,
            Why::Computes {
                wants: w.run + w.wait,
            },
        ),
        (false, false, _) => (Class::Batch, Why::Quiet),
        (_, _, false) => (Class::Batch, Why::HardlyWaits { wait: w.wait }),
        (true, _, true) => (
            Class::Ls,
            Why::Packets {
                packets: w.packets,
                wait: w.wait,
            },
        ),
        (false, true, true) => (
            Class::Ls,
            Why::Wakes {
                wakes: w.wakes,
                run: mean_run(w),
                wait: w.wait,
            },
        ),
    }
}

fn leave(t: &Thresholds, w: &Window) -> (Class, Why) {
    if w.packets >= t.packets.1 || (w.wakes >= t.wakes.1 && mean_run(w) <= 2.0 * t.longest_run) {
        (Class::Ls, Why::StillBusy)
    } else if w.run + w.wait >= 0.5 {
        (
            Class::Batch,
            Why::Computes {
                wants: w.run + w.wait,
            },
        )
    } else {
        (Class::Batch, Why::Quiet)
    }
}

/// What class ls would do to the wait of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advice {
    /// Long wait (p99, or worst where nothing was measured) as it is, ns.
    pub now: Nanos,
    /// Worst wait as an LSVM, ns.
    pub after: Nanos,
}

impl Advice {
    /// Whether it is worth the change: the wait is felt (2 ms or more) and falls to half or less.
    pub fn is_worth_it(&self) -> bool {
        self.now >= 2 * MS && self.after <= self.now / 2
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "class ls would cut the wait from {} to about {}",
            Span(self.now),
            Span(self.after)
        )
    }
}

/// Estimates what class ls would bring a VM.
///
/// `measured` is the p99 of its waits if one is known; else the worst wait of a core on which `contenders` other
/// VMs run `slice` each in turn is taken. `share` is its part of the core by weight, `microslice` the T_m it
/// would get, `others` the microslices of the LSVMs that are on the core already.
pub fn advise(
    measured: Option<Nanos>,
    contenders: u32,
    slice: Nanos,
    share: f64,
    microslice: Nanos,
    others: impl IntoIterator<Item = Nanos>,
) -> Advice {
    let now = measured.unwrap_or(u64::from(contenders) * slice);
    Advice {
        now,
        after: interleaved_wait(share, microslice, others),
    }
}

#[cfg(test)]
mod tests;
