// SPDX-License-Identifier: Apache-2.0
//! Which VMs get a turbo vCPU.
//!
//! The paper gives one to every VM (section 3.1), because an unused one costs nothing. Here it costs the guest a vCPU,
//! which its applications must leave. In automatic mode a VM therefore gets one when it does steady I/O and waits for
//! its core, and loses it when the I/O has ended. That it no longer waits is no reason to take the vCPU away: ending
//! the wait is its purpose.

use std::fmt;

use crate::hysteresis::{Hysteresis, Step};

use crate::slices::{MS, Nanos};
use crate::text::{HumanTime, percent};

/// The operator's setting for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Setting {
    /// Its measurements decide.
    #[default]
    Auto,
    /// It has a turbo vCPU whenever it can have one.
    Always,
    /// It has no turbo vCPU.
    Never,
}

/// Why a VM cannot have a turbo vCPU, whatever its setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// It has one vCPU, and another one cannot be added.
    OneVcpu,
    /// No agent in the guest answers.
    NoAgent,
    /// The guest does not let viola move its interrupts.
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

/// What was measured of a VM in a window (100 ms or more).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Window {
    /// Packets received and sent, per second.
    pub packets: f64,
    /// Bytes read from and written to disks, per second.
    pub disk: f64,
    /// Part of the time its vCPUs wanted to run in which they waited, 0.0 ..= 1.0.
    pub wait: f64,
    /// What its turbo vCPU ran, as a part of what it may while regular vCPUs wait ([`super::TurboConfig::reserve`]);
    /// 0.0 without one.
    pub interrupt_load: f64,
}

/// Settings of a [`TurboChooser`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Packets/s from which a VM counts as doing steady I/O, and below which it no longer does.
    pub packets: (f64, f64),
    /// The same for bytes/s of its disks.
    pub disk: (f64, f64),
    /// Minimum wait (part of the wanted time) for a VM to get a turbo vCPU.
    pub wait: f64,
    /// Number of windows in a row until it gets one, and until it loses it.
    pub windows: (u32, u32),
    /// Minimum time between two changes in automatic mode, ns.
    pub hold: Nanos,
    /// [`Window::interrupt_load`] from which a VM that waits counts as flooded: interrupts then take the time that its
    /// programs need, and dropping excess packets before they cost anything serves it better.
    pub flood: f64,
    /// Number of flooded windows in a row until it loses its turbo vCPU, and for how long (ns) it then gets none: twice
    /// as long at each repetition, up to 64 times.
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

/// Why a VM has a turbo vCPU or none. The text goes to the journal and the operator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// The operator's setting.
    Setting,
    /// There is an obstacle.
    Cannot(Obstacle),
    /// It does steady I/O and waits for its core.
    Waits {
        /// Packets per second.
        packets: f64,
        /// Bytes per second of its disks.
        disk: f64,
        /// Part of the wanted time in which it waits.
        wait: f64,
    },
    /// It does steady I/O but hardly waits.
    HardlyWaits {
        /// Part of the wanted time in which it waits.
        wait: f64,
    },
    /// Interrupts take the time that its programs need.
    Flooded {
        /// [`Window::interrupt_load`].
        interrupt_load: f64,
    },
    /// It was flooded a short time ago.
    WasFlooded {
        /// Time left, ns.
        left: Nanos,
    },
    /// It does little I/O.
    Quiet,
    /// It has one, and its I/O continues.
    StillBusy,
    /// The measurements ask for a change, but not for enough windows yet.
    Confirming {
        /// Whether they ask for a turbo vCPU.
        to: bool,
        /// Windows in a row so far.
        windows: u32,
        /// Windows needed.
        needed: u32,
    },
    /// It should change, but the last change is too recent.
    Held {
        /// Time left until it may change, ns.
        left: Nanos,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Setting => f.write_str("as set"),
            Reason::Cannot(obstacle) => obstacle.fmt(f),
            Reason::Waits {
                packets,
                disk,
                wait,
            } => write!(
                f,
                "{packets:.0} packets/s and {:.1} MiB/s of disk, and it waits {} of the time it wants to run",
                disk / (1024.0 * 1024.0),
                percent(wait)
            ),
            Reason::HardlyWaits { wait } => {
                write!(
                    f,
                    "it waits only {} of the time it wants to run",
                    percent(wait)
                )
            }
            Reason::Flooded { interrupt_load } => write!(
                f,
                "it is flooded: its interrupts take {} of their limit while its programs wait",
                percent(interrupt_load)
            ),
            Reason::WasFlooded { left } => {
                write!(
                    f,
                    "it was flooded with a turbo vCPU: {} left",
                    HumanTime(left)
                )
            }
            Reason::Quiet => f.write_str("it does little I/O"),
            Reason::StillBusy => f.write_str("its I/O continues"),
            Reason::Confirming {
                to,
                windows,
                needed,
            } => write!(
                f,
                "it has {} for {windows} of {needed} windows",
                if to {
                    "needed a turbo vCPU"
                } else {
                    "needed none"
                }
            ),
            Reason::Held { left } => {
                write!(f, "the last change is too recent: {} left", HumanTime(left))
            }
        }
    }
}

/// The choice after a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Whether the VM has a turbo vCPU from now on.
    pub turbo: bool,
    /// Whether that changed with this window.
    pub changed: bool,
    /// The reason.
    pub why: Reason,
}

/// Decides for one VM, window by window, whether it gets a turbo vCPU.
#[derive(Debug, Clone)]
pub struct TurboChooser {
    thresholds: Thresholds,
    choice: Hysteresis<bool>,
    /// Number of flooded windows in a row.
    floods: u32,
    /// Time (ns) until which a flooded VM gets none, and the length (ns) of that period.
    barred: (Nanos, Nanos),
}

impl TurboChooser {
    /// Begins without a turbo vCPU.
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            choice: Hysteresis::new(false),
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
            (Setting::Never, _) => Some((false, Reason::Setting)),
            (_, Some(obstacle)) => Some((false, Reason::Cannot(obstacle))),
            (Setting::Always, None) => Some((true, Reason::Setting)),
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
            let needed = if to { t.windows.0 } else { t.windows.1 };
            match self.choice.observe(now, to, needed, t.hold) {
                Step::Same | Step::Changed => why,
                Step::Confirming(windows) => Reason::Confirming {
                    to,
                    windows,
                    needed,
                },
                Step::Held(left) => Reason::Held { left },
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

impl TurboChooser {
    /// The reason if a flood rules a turbo vCPU out.
    fn flooded(&mut self, now: Nanos, w: &Window) -> Option<Reason> {
        let t = &self.thresholds;
        let left = self.barred.0.saturating_sub(now);
        if left > 0 {
            return Some(Reason::WasFlooded { left });
        }
        let is_flooded = self.choice.value() && w.interrupt_load >= t.flood && w.wait >= t.wait;
        self.floods = if is_flooded { self.floods + 1 } else { 0 };
        if self.floods < t.flooded.0 {
            return None;
        }
        // After a long quiet time a flood counts as the first one.
        let (until, last) = self.barred;
        let again = last > 0 && now.saturating_sub(until) < 2 * last;
        let bar = match again {
            true => (2 * last).min(64 * t.flooded.1),
            false => t.flooded.1,
        };
        (self.floods, self.barred) = (0, (now.saturating_add(bar), bar));
        let interrupt_load = w.interrupt_load;
        Some(Reason::Flooded { interrupt_load })
    }
}

fn enter(t: &Thresholds, w: &Window) -> (bool, Reason) {
    if w.packets < t.packets.0 && w.disk < t.disk.0 {
        (false, Reason::Quiet)
    } else if w.wait < t.wait {
        (false, Reason::HardlyWaits { wait: w.wait })
    } else {
        let Window {
            packets,
            disk,
            wait,
            ..
        } = *w;
        let why = Reason::Waits {
            packets,
            disk,
            wait,
        };
        (true, why)
    }
}

fn leave(t: &Thresholds, w: &Window) -> (bool, Reason) {
    if w.packets >= t.packets.1 || w.disk >= t.disk.1 {
        (true, Reason::StillBusy)
    } else {
        (false, Reason::Quiet)
    }
}

#[cfg(test)]
mod tests;
