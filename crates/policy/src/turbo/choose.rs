// SPDX-License-Identifier: Apache-2.0
//! Which VMs get a turbo vCPU.
//!
//! The paper gives one to every VM (section 3.1), as an unused one costs nothing. Here it costs the guest that its
//! applications leave a vCPU, so in automatic mode a VM gets one when it does steady I/O and waits for its core, and
//! gives it back when the I/O has ended. How much it then waits is no reason to take it back: that is what it is for.

use std::fmt;

use super::settle::{Settled, Step};
use crate::slices::classify::{Span, percent};
use crate::slices::{MS, Nanos};

/// What the operator says about a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Setting {
    /// What is seen of it decides.
    #[default]
    Auto,
    /// It has a turbo vCPU whenever it can.
    Always,
    /// It has none.
    Never,
}

/// Why a VM cannot have a turbo vCPU, whatever is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// It has one vCPU, and none can be added.
    OneVcpu,
    /// No agent in the guest answers.
    NoAgent,
    /// The guest does not let its interrupts be moved.
    Refused,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Obstacle::OneVcpu => "it has one vCPU and none can be added: give it a second one",
            Obstacle::NoAgent => "no agent answers in the guest: install viola-agent there",
            Obstacle::Refused => "the guest refuses to move its interrupts",
        })
    }
}

/// What was seen of a VM in a window (100 ms and more).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// Packets per second, received and sent.
    pub packets: f64,
    /// Bytes per second read from and written to disks.
    pub disk: f64,
    /// Part of the time its vCPUs wanted to run that they waited, 0.0 ..= 1.0.
    pub wait: f64,
    /// What its turbo vCPU ran of what it may while others wait ([`super::TurboConfig::reserve`]); 0.0 without one.
    pub interrupts: f64,
}

/// Settings of a [`Chooser`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Packets/s from which a VM counts as doing steady I/O, and below which it no longer does.
    pub packets: (f64, f64),
    /// The same for bytes/s of its disks.
    pub disk: (f64, f64),
    /// Least part of the wanted time that it waits, to get a turbo vCPU.
    pub wait: f64,
    /// Windows in a row until it gets one, and until it loses it.
    pub windows: (u32, u32),
    /// Shortest time (ns) between two changes in automatic mode.
    pub hold: Nanos,
    /// Part of what its turbo vCPU may run from which a VM that waits counts as flooded: interrupts then take what its
    /// programs would need, and it does better when packets that it cannot take are dropped before they cost anything.
    pub flood: f64,
    /// Windows in a row until a VM that is flooded loses its turbo vCPU, and how long (ns) it gets none then; twice as
    /// long each time that it is flooded again, up to 64 times.
    pub flooded: (u32, Nanos),
}

impl Default for Thresholds {
    fn default() -> Self {
        const MIB: f64 = 1024.0 * 1024.0;
        Self {
            packets: (1_000.0, 200.0),
            disk: (4.0 * MIB, MIB),
            wait: 0.05,
            windows: (5, 100),
            hold: 10_000 * MS,
            flood: 0.9,
            flooded: (20, 60_000 * MS),
        }
    }
}

/// Why a VM has a turbo vCPU or none. The text is meant for the journal and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// The operator says so.
    Setting,
    /// It cannot have one.
    Cannot(Obstacle),
    /// It does steady I/O and waits for its core.
    Waits {
        /// Packets per second.
        packets: f64,
        /// Bytes per second of its disks.
        disk: f64,
        /// Part of the wanted time that it waits.
        wait: f64,
    },
    /// It does steady I/O but hardly waits.
    HardlyWaits {
        /// Part of the wanted time that it waits.
        wait: f64,
    },
    /// Interrupts take what its programs would need.
    Flooded {
        /// Part of what its turbo vCPU may run.
        interrupts: f64,
    },
    /// It was flooded not long ago.
    WasFlooded {
        /// Time left, ns.
        left: Nanos,
    },
    /// It does little I/O.
    Quiet,
    /// Has one, and its I/O goes on.
    StillBusy,
    /// Looks as if that should change; not for long enough yet.
    Confirming {
        /// Whether it looks as if it should have one.
        to: bool,
        /// Windows in a row so far.
        seen: u32,
        /// Windows needed.
        of: u32,
    },
    /// Should change, but the last change is too recent.
    Held {
        /// Time left, ns.
        left: Nanos,
    },
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Why::Setting => f.write_str("as set"),
            Why::Cannot(obstacle) => obstacle.fmt(f),
            Why::Waits {
                packets,
                disk,
                wait,
            } => write!(
                f,
                "{packets:.0} packets/s and {:.1} MiB/s of disk, and it waits {} of the time it wants to run",
                disk / (1024.0 * 1024.0),
                percent(wait)
            ),
            Why::HardlyWaits { wait } => {
                write!(
                    f,
                    "it waits only {} of the time it wants to run",
                    percent(wait)
                )
            }
            Why::Flooded { interrupts } => write!(
                f,
                "it is flooded: its interrupts take {} of what they may, while its programs wait",
                percent(interrupts)
            ),
            Why::WasFlooded { left } => {
                write!(f, "it was flooded with one: {} left", Span(left))
            }
            Why::Quiet => f.write_str("it does little I/O"),
            Why::StillBusy => f.write_str("its I/O goes on"),
            Why::Confirming { to, seen, of } => write!(
                f,
                "it looks as if it {} for {seen} of {of} windows",
                if to {
                    "needed a turbo vCPU"
                } else {
                    "needed none"
                }
            ),
            Why::Held { left } => write!(f, "too soon after the last change: {} left", Span(left)),
        }
    }
}

/// What the chooser says after a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Whether the VM has a turbo vCPU from now on.
    pub turbo: bool,
    /// Whether that changed with this window.
    pub changed: bool,
    /// Why.
    pub why: Why,
}

/// Says of one VM, window by window, whether it gets a turbo vCPU.
#[derive(Debug, Clone)]
pub struct Chooser {
    thresholds: Thresholds,
    choice: Settled<bool>,
    /// Flooded windows in a row.
    floods: u32,
    /// When a VM that was flooded may have one again, and for how long it had none the last time.
    barred: (Nanos, Nanos),
}

impl Chooser {
    /// For a VM that has none.
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            choice: Settled::new(false),
            floods: 0,
            barred: (0, 0),
        }
    }

    /// Whether the VM has one now.
    pub fn turbo(&self) -> bool {
        self.choice.value()
    }

    /// Takes a window that ended at `now` (ns, never goes back). A setting or an obstacle takes effect at once.
    pub fn observe(
        &mut self,
        now: Nanos,
        window: &Window,
        setting: Setting,
        obstacle: Option<Obstacle>,
    ) -> Verdict {
        let was = self.choice.value();
        let forced = match (setting, obstacle) {
            (Setting::Never, _) => Some((false, Why::Setting)),
            (_, Some(obstacle)) => Some((false, Why::Cannot(obstacle))),
            (Setting::Always, None) => Some((true, Why::Setting)),
            (Setting::Auto, None) => None,
        };
        let why = if let Some((to, why)) = forced {
            self.choice.set(now, to);
            why
        } else {
            if let Some(why) = self.flooded(now, window) {
                let changed = self.choice.value();
                self.choice.set(now, false);
                return Verdict {
                    turbo: false,
                    changed,
                    why,
                };
            }
            let t = &self.thresholds;
            let (to, why) = if was {
                leave(t, window)
            } else {
                enter(t, window)
            };
            let of = if to { t.windows.0 } else { t.windows.1 };
            match self.choice.observe(now, to, of, t.hold) {
                Step::Same | Step::Changed => why,
                Step::Confirming(seen) => Why::Confirming { to, seen, of },
                Step::Held(left) => Why::Held { left },
            }
        };
        let turbo = self.choice.value();
        Verdict {
            turbo,
            changed: turbo != was,
            why,
        }
    }
}

impl Chooser {
    /// Whether it is out of the question because of a flood.
    fn flooded(&mut self, now: Nanos, w: &Window) -> Option<Why> {
        let t = &self.thresholds;
        let left = self.barred.0.saturating_sub(now);
        if left > 0 {
            return Some(Why::WasFlooded { left });
        }
        let is_flooded = self.choice.value() && w.interrupts >= t.flood && w.wait >= t.wait;
        self.floods = if is_flooded { self.floods + 1 } else { 0 };
        if self.floods < t.flooded.0 {
            return None;
        }
        // One that has been quiet for long begins anew.
        let (until, last) = self.barred;
        let again = last > 0 && now.saturating_sub(until) < 2 * last;
        let bar = match again {
            true => (2 * last).min(64 * t.flooded.1),
            false => t.flooded.1,
        };
        (self.floods, self.barred) = (0, (now.saturating_add(bar), bar));
        let interrupts = w.interrupts;
        Some(Why::Flooded { interrupts })
    }
}

fn enter(t: &Thresholds, w: &Window) -> (bool, Why) {
    if w.packets < t.packets.0 && w.disk < t.disk.0 {
        (false, Why::Quiet)
    } else if w.wait < t.wait {
        (false, Why::HardlyWaits { wait: w.wait })
    } else {
        let Window {
            packets,
            disk,
            wait,
            ..
        } = *w;
        let why = Why::Waits {
            packets,
            disk,
            wait,
        };
        (true, why)
    }
}

fn leave(t: &Thresholds, w: &Window) -> (bool, Why) {
    if w.packets >= t.packets.1 || w.disk >= t.disk.1 {
        (true, Why::StillBusy)
    } else {
        (false, Why::Quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Window = Window {
        packets: 20_000.0,
        disk: 0.0,
        wait: 0.7,
        interrupts: 0.0,
    };

    fn windows(c: &mut Chooser, at: &mut Nanos, n: u32, w: Window) -> Verdict {
        let mut last = None;
        for _ in 0..n {
            *at += 100 * MS;
            last = Some(c.observe(*at, &w, Setting::Auto, None));
        }
        last.unwrap()
    }

    #[test]
    fn a_vm_that_streams_and_waits_gets_one_and_keeps_it_until_the_stream_ends() {
        let (mut c, mut at) = (Chooser::new(Thresholds::default()), 0);
        assert!(!windows(&mut c, &mut at, 4, STREAM).turbo);
        let v = windows(&mut c, &mut at, 1, STREAM);
        assert!(v.turbo && v.changed, "{v:?}");
        let text = v.why.to_string();
        assert!(
            text.contains("20000 packets/s") && text.contains("70 %"),
            "{text}"
        );
        // With it the VM hardly waits.
        let served = Window {
            wait: 0.01,
            ..STREAM
        };
        assert_eq!(windows(&mut c, &mut at, 200, served).why, Why::StillBusy);
        assert!(windows(&mut c, &mut at, 99, Window::default()).turbo);
        // One busy window and the count begins anew.
        assert!(windows(&mut c, &mut at, 1, served).turbo);
        assert!(windows(&mut c, &mut at, 99, Window::default()).turbo);
        let v = windows(&mut c, &mut at, 1, Window::default());
        assert!(!v.turbo && v.changed);
    }

    #[test]
    fn one_that_is_flooded_does_better_without_and_is_left_alone_for_longer_each_time() {
        let (mut c, mut at) = (Chooser::new(Thresholds::default()), 0);
        let flood = Window {
            interrupts: 0.95,
            ..STREAM
        };
        // As long as its interrupts leave something, or nobody waits, it keeps it.
        let half = Window {
            interrupts: 0.5,
            ..STREAM
        };
        assert!(windows(&mut c, &mut at, 300, half).turbo);
        let alone = Window { wait: 0.0, ..flood };
        assert!(windows(&mut c, &mut at, 300, alone).turbo);
        assert!(windows(&mut c, &mut at, 19, flood).turbo);
        let v = windows(&mut c, &mut at, 1, flood);
        assert!(
            !v.turbo && v.changed && matches!(v.why, Why::Flooded { .. }),
            "{v:?}"
        );
        assert!(v.why.to_string().contains("95 %"), "{}", v.why);
        let v = windows(&mut c, &mut at, 500, STREAM);
        assert!(
            !v.turbo && v.why.to_string().contains("it was flooded"),
            "{v:?}"
        );
        // It is tried again after a minute, and then left alone for two.
        assert!(windows(&mut c, &mut at, 110, STREAM).turbo);
        assert!(!windows(&mut c, &mut at, 20, flood).turbo);
        assert!(!windows(&mut c, &mut at, 1190, STREAM).turbo);
        assert!(windows(&mut c, &mut at, 20, STREAM).turbo);
        // After a long quiet time a flood counts as the first.
        windows(&mut c, &mut at, 5000, half);
        assert!(!windows(&mut c, &mut at, 20, flood).turbo);
        assert!(windows(&mut c, &mut at, 620, STREAM).turbo);
    }

    #[test]
    fn disk_io_counts_as_packets_do() {
        let (mut c, mut at) = (Chooser::new(Thresholds::default()), 0);
        let disk = Window {
            disk: 50e6,
            wait: 0.5,
            ..Window::default()
        };
        assert!(windows(&mut c, &mut at, 5, disk).turbo);
    }

    #[test]
    fn one_that_does_not_wait_or_does_little_io_gets_none() {
        let (mut c, mut at) = (Chooser::new(Thresholds::default()), 0);
        let alone = Window {
            wait: 0.0,
            ..STREAM
        };
        assert_eq!(
            windows(&mut c, &mut at, 50, alone).why,
            Why::HardlyWaits { wait: 0.0 }
        );
        let computes = Window {
            packets: 100.0,
            ..STREAM
        };
        assert_eq!(windows(&mut c, &mut at, 50, computes).why, Why::Quiet);
        assert!(!c.turbo());
    }

    #[test]
    fn changes_are_held_apart() {
        let thresholds = Thresholds {
            windows: (1, 1),
            ..Thresholds::default()
        };
        let (mut c, mut at, mut changes) = (Chooser::new(thresholds), 0, 0);
        for k in 0..600 {
            let w = if k % 2 == 0 {
                STREAM
            } else {
                Window::default()
            };
            changes += u32::from(windows(&mut c, &mut at, 1, w).changed);
        }
        assert!((5..=7).contains(&changes), "{changes} changes in a minute");
    }

    #[test]
    fn settings_and_obstacles_take_effect_at_once() {
        let mut c = Chooser::new(Thresholds::default());
        let quiet = Window::default();
        assert!(c.observe(1, &quiet, Setting::Always, None).changed);
        let v = c.observe(2, &quiet, Setting::Always, Some(Obstacle::OneVcpu));
        assert!(!v.turbo && v.why == Why::Cannot(Obstacle::OneVcpu));
        assert!(v.why.to_string().contains("second one"));
        assert!(c.observe(3, &STREAM, Setting::Always, None).turbo);
        assert!(!c.observe(4, &STREAM, Setting::Never, None).turbo);
        let v = c.observe(5, &STREAM, Setting::Never, Some(Obstacle::NoAgent));
        assert_eq!(v.why, Why::Setting);
        assert!(!c.observe(6, &STREAM, Setting::Auto, None).turbo);
    }
}
