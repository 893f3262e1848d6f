// SPDX-License-Identifier: Apache-2.0
//! What is known of one VM of class auto: its windows, its class, and its trials.

use viola_host::VmId;
use viola_policy::slices::classify::{Classifier, Figure, Reason, Thresholds, Verdict, Window};
use viola_policy::slices::{Class, MS, Nanos};
use viola_proto::ClassSetting;

use super::Observation;
use super::gather::Wish;
use super::memory::Remembered;

/// Shortest window of the classifier, ns.
const WINDOW: Nanos = 100 * MS;
/// Shortest time between two trials of a VM under the same load, ns.
const RETRIAL_DELAY: Nanos = 600_000 * MS;
/// Time over which the mean of a VM's CPU use is taken, ns.
const USE_TIME: f64 = 10e9;
/// Time after a trial until the VM's CPU use is that of its class, ns.
const USE_SETTLING: Nanos = 20_000 * MS;
/// A VM uses more or less than before when its CPU use is another by this factor, and by this part of its vCPUs' time.
const OTHER_USE: (f64, f64) = (1.5, 0.01);
/// Windows in a row after which a VM has another role.
const ROLE_WINDOWS: u32 = 50;

/// State of one VM.
#[derive(Debug)]
pub(super) struct State {
    /// The class that the operator set.
    pub(super) setting: ClassSetting,
    /// Whether its identity is its own, so that what was found about it may be kept.
    pub(super) is_unique: bool,
    classifier: Classifier,
    pub(super) verdict: Option<Verdict>,
    /// Why it looked latency sensitive when it began to.
    pub(super) looked: Option<Reason>,
    sums: WindowSums,
    /// What it does, and the number of windows in a row that showed something else.
    role: Option<Role>,
    other_windows: u32,
    /// Part of its vCPUs' time that it runs, a mean of some ten seconds, and the same [`USE_SETTLING`] after its last trial.
    used: Option<f64>,
    used_before: Option<f64>,
    /// Class while the setting is auto.
    pub(super) chosen: Class,
    /// Time of its last trial's end, ns; `None` before the first one.
    pub(super) tried_at: Option<Nanos>,
    /// When it may be tried (again), ns.
    pub(super) next_trial: Nanos,
    /// Whether class ls serves it at once, by its last advice.
    pub(super) is_inside: bool,
    /// That it may gain by a trial, as of its last window.
    pub(super) wish: Option<Wish>,
    /// VMs of the lowest turn are tried first, together.
    pub(super) turn: usize,
    /// The neighbour that its last trial harmed.
    pub(super) harmed: Option<VmId>,
    /// What the VM's figure was without class ls, ns, if that class stays.
    pub(super) without: Option<(Figure, Nanos)>,
    /// End of the last window, ns.
    pub(super) observed_at: Nanos,
    /// Why its last trial began, or what that trial found; empty before the first one.
    pub(super) last_change: String,
}

/// Sums of the current window.
#[derive(Debug, Default)]
struct WindowSums {
    span: Nanos,
    run: u64,
    wait: u64,
    wakes: u64,
    packets: u64,
}

/// What a VM does, as far as its neighbours feel it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Computes,
    Serves,
    Rests,
}

impl Role {
    /// The role that a window shows; `None` between two roles.
    fn of(window: &Window) -> Option<Self> {
        let wanted = window.run + window.wait;
        match window.packets {
            packets if packets >= Thresholds::default().packets.0 => Some(Self::Serves),
            packets if packets >= Thresholds::default().packets.1 => None,
            _ if wanted >= 0.5 => Some(Self::Computes),
            _ if wanted < 0.1 => Some(Self::Rests),
            _ => None,
        }
    }
}

/// The class of a VM with this setting, for which viola chose that one.
pub(super) fn class_of(setting: ClassSetting, chosen: Class) -> Class {
    match setting {
        ClassSetting::Ls => Class::Ls,
        // In the plan, a VM of class turbo is a batch VM with a turbo vCPU.
        ClassSetting::Batch | ClassSetting::Turbo => Class::Batch,
        ClassSetting::Auto => chosen,
    }
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            setting: ClassSetting::Auto,
            is_unique: true,
            classifier: Classifier::new(Thresholds::default()),
            verdict: None,
            looked: None,
            sums: WindowSums::default(),
            role: None,
            other_windows: 0,
            used: None,
            used_before: None,
            chosen: Class::Batch,
            tried_at: None,
            next_trial: 0,
            is_inside: true,
            wish: None,
            turn: 0,
            harmed: None,
            without: None,
            observed_at: 0,
            last_change: String::new(),
        }
    }

    /// The state of a VM that appears at `at` (ns), with what its last trial found.
    pub(super) fn remember(remembered: Option<&Remembered>, at: Nanos) -> Self {
        let Some(remembered) = remembered else {
            return Self::new();
        };
        let mut state = Self::new();
        state.end_trial(at);
        state.last_change.clone_from(&remembered.found);
        if remembered.stays {
            state.chosen = Class::Ls;
            state.classifier = Classifier::with_class(Thresholds::default(), Class::Ls);
            let figure = match remembered.by_packets {
                true => Figure::PacketDelay,
                false => Figure::ResidualWait,
            };
            state.without = Some((figure, remembered.without_ns));
        }
        state
    }

    /// The class that the VM has.
    pub(super) fn class(&self) -> Class {
        class_of(self.setting, self.chosen)
    }

    /// Part of its vCPUs' time that it runs, a mean of some ten seconds.
    pub(super) fn used(&self) -> Option<f64> {
        self.used
    }

    /// Gives the VM class ls or batch. Returns whether it had the other one.
    pub(super) fn choose(&mut self, ls: bool) -> bool {
        let class = match ls {
            true => Class::Ls,
            false => Class::Batch,
        };
        std::mem::replace(&mut self.chosen, class) != class
    }

    /// A trial ended at `at` (ns).
    pub(super) fn end_trial(&mut self, at: Nanos) {
        (self.tried_at, self.harmed) = (Some(at), None);
        (self.used_before, self.turn) = (None, 0);
        self.next_trial = at + RETRIAL_DELAY;
    }

    /// Time until the VM may be tried (again), ns.
    pub(super) fn time_to_trial(&self, at: Nanos) -> Nanos {
        // With less use of its own it harms its neighbours less, and more of it may harm them.
        let may_differ = match self.without {
            Some(_) => self.other_use(true),
            None => self.other_use(false).filter(|_| self.harmed.is_some()),
        };
        match may_differ {
            Some(_) => 0,
            None => self.next_trial.saturating_sub(at),
        }
    }

    /// How much of its vCPUs' time the VM used after its last trial, and uses now, if it uses `more`, or less, than then.
    pub(super) fn other_use(&self, more: bool) -> Option<(f64, f64)> {
        let (before, now) = (self.used_before?, self.used?);
        let (low, high) = if more { (before, now) } else { (now, before) };
        (high > low * OTHER_USE.0 && high > low + OTHER_USE.1).then_some((before, now))
    }

    /// Lets the VM be tried at once if its last trial harmed the VM `id`, which is gone or does something else.
    pub(super) fn allow_trial_without(&mut self, id: &VmId) {
        if self.harmed.take_if(|harmed| harmed == id).is_some() {
            self.next_trial = 0;
        }
    }

    /// Adds to the window, and classifies when the window is full. Returns whether the VM has another role from now on.
    pub(super) fn add(&mut self, o: &Observation<'_>) -> bool {
        let (g, total) = (&mut self.sums, o.sample.vcpu_total());
        g.span += o.span;
        g.run += total.run;
        g.wait += total.wait;
        g.wakes += total.wakes;
        g.packets += o.sample.traffic.rx_packets + o.sample.traffic.tx_packets;
        if g.span < WINDOW {
            return false;
        }
        let time = g.span as f64 * o.sample.vcpus.len().max(1) as f64;
        let part = |ns: u64| (ns as f64 / time).min(1.0);
        let per_s = |n: u64| n as f64 * 1e9 / g.span as f64;
        let (run, wait) = (part(g.run), part(g.wait));
        let window = Window {
            run,
            wait,
            blocked: (1.0 - run - wait).max(0.0),
            wakes: per_s(g.wakes),
            packets: per_s(g.packets),
        };
        let span = std::mem::take(&mut self.sums).span;
        let verdict = self.classifier.observe(o.at, &window);
        if verdict.changed && verdict.class == Class::Ls {
            self.looked = Some(verdict.why);
        }
        self.verdict = Some(verdict);
        let weight = (span as f64 / USE_TIME).min(1.0);
        self.used = Some(self.used.map_or(run, |used| used + weight * (run - used)));
        // In the trial it had both classes, and a server that is served faster may use more.
        if self
            .tried_at
            .is_some_and(|tried| o.at >= tried + USE_SETTLING)
        {
            self.used_before = self.used_before.or(self.used);
        }
        self.update_role(&window)
    }

    fn update_role(&mut self, window: &Window) -> bool {
        let role = Role::of(window);
        if role.is_none() || role == self.role {
            self.other_windows = 0;
            return false;
        }
        self.other_windows += 1;
        let is_new = self.role.is_none();
        let has_changed = is_new || self.other_windows >= ROLE_WINDOWS;
        if has_changed {
            (self.role, self.other_windows) = (role, 0);
        }
        has_changed && !is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_another_one_after_five_seconds_in_a_row() {
        let computes = Window {
            run: 0.3,
            wait: 0.6,
            ..Window::default()
        };
        let serves = Window {
            packets: 100.0,
            ..computes
        };
        let between = Window {
            run: 0.2,
            ..Window::default()
        };
        let mut state = State::new();
        let mut changes = |windows: &[Window], times: usize| {
            let all = windows.iter().cycle().take(windows.len() * times);
            all.filter(|window| state.update_role(window)).count()
        };
        assert_eq!(changes(&[computes], 100), 0, "its first role");
        assert_eq!(changes(&[serves, computes], 100), 0);
        assert_eq!(changes(&[between], 100), 0);
        assert_eq!(changes(&[serves], 49), 0);
        assert_eq!(changes(&[serves], 100), 1);
    }
}
