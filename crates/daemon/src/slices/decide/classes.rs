// SPDX-License-Identifier: Apache-2.0
//! The class of each VM: what the operator set, or, for class auto, what the meter finds.
//!
//! A VM of class auto is tried in class ls when the classifier says so and the model predicts shorter waits. All such VMs of a
//! core are tried together (`gather`), in pairs of windows with and without the class ([`viola_policy::trial`]), on their own delays
//! and on what all VMs of the core get. The class stays for each VM that is found to gain, if no other is found to lose. If one loses,
//! fewer are tried. A VM that does not gain, or harms others by itself, is batch again and is not tried again for ten minutes. What was
//! found survives a restart of the daemon (`memory`).
//!
//! A class that stays is tried again after an hour, and when the delays have become longer than they were without it. Repeated trials
//! have a budget (`budget`); without one, a class that may no longer help ends at once.

mod budget;
mod gather;
mod memory;
mod references;
mod state;
mod trial;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use viola_host::{Vm, VmId};
use viola_meter::{VmSample, WAIT_WINDOW_SECONDS};
use viola_policy::slices::classify::{Advice, Figure, Figures};
use viola_policy::slices::{Class, MS, Nanos};
use viola_policy::trial::{Finding, Harm, Outcome};
use viola_proto::ClassSetting;

use self::budget::Budget;
use self::gather::Gathering;
use self::memory::{Memory, Remembered};
use self::references::References;
use self::state::{State, class_of};
pub use self::trial::Counters;
use self::trial::{Candidate, Running, found, harmed};
use crate::vms::settings::shares_its_name;
use viola_cli::error::one_line;
use viola_cli::quantities::{percent, rounded};

/// A class that stays is tried again after this time, ns: the load may have become another.
const STAY_TIME: Nanos = 3_600_000 * MS;

/// Time over which the figures add up waits, ns.
const FIGURES_TIME: Nanos = WAIT_WINDOW_SECONDS as Nanos * 1000 * MS;

/// The classes of all VMs.
#[derive(Debug, Default)]
pub struct Classes {
    vms: BTreeMap<VmId, State>,
    /// Trials that concern different VMs.
    trials: Vec<Running>,
    /// Those that begin soon.
    gatherings: Vec<Gathering>,
    budget: Budget,
    references: References,
    memory: Memory,
}

/// What the loop knows of a VM at the end of a window.
pub struct Observation<'a> {
    /// The VM.
    pub vm: &'a Vm,
    /// The class that the operator set.
    pub setting: ClassSetting,
    /// What the VM spent in the window.
    pub sample: &'a VmSample,
    /// End of the window, ns.
    pub at: Nanos,
    /// Its length, ns.
    pub span: Nanos,
    /// Adds up how long requests to it waited in the last 10 s, which is slow.
    pub figures: &'a dyn Fn() -> Figures,
    /// What class ls would do for its waits; `None` without a mechanism.
    pub advice: Option<Advice>,
    /// The VM and the other VMs of its cores.
    pub near: &'a dyn Fn() -> BTreeSet<VmId>,
    /// Reads the counters of these.
    pub counters: &'a dyn Fn() -> Counters,
    /// The name of a VM.
    pub name: &'a dyn Fn(&VmId) -> String,
}

/// VMs have another class from now on.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ClassChange {
    /// Lines for the log, each about a VM; none within a trial.
    pub lines: Vec<(VmId, String)>,
}

impl ClassChange {
    fn logged(id: &VmId, line: String) -> Self {
        Self {
            lines: vec![(id.clone(), line)],
        }
    }
}

impl Classes {
    /// No VM yet; what earlier daemons found is in `state_dir`.
    pub fn new(state_dir: &Path) -> Self {
        Self {
            memory: Memory::read(state_dir),
            ..Self::default()
        }
    }

    /// Takes what a VM did in a window. Returns whether VMs have another class from now on.
    pub fn observe(&mut self, o: &Observation<'_>) -> Option<ClassChange> {
        let state = self.vms.entry(o.vm.id.clone()).or_insert_with(|| {
            let remembered = self.memory.get(&o.vm.id);
            State::remember(remembered, o.at)
        });
        (state.observed_at, state.setting) = (o.at, o.setting);
        (state.wish, state.is_unique) = (None, !shares_its_name(o.vm));
        if let Some(advice) = o.advice {
            state.is_inside = advice.is_inside;
        }
        if state.add(o) {
            self.end_role(&o.vm.id);
        }
        if o.setting != ClassSetting::Auto {
            self.leave_trial(&o.vm.id);
            return None;
        }
        let state = self.vms.get_mut(&o.vm.id)?;
        let verdict = state.verdict?;
        let tried = self.trials.iter().position(|t| t.tries(&o.vm.id));
        if verdict.class == Class::Batch {
            if tried.is_none() && state.chosen == Class::Batch {
                self.end_gathering(&o.vm.id);
                return None;
            }
            (state.chosen, state.without) = (Class::Batch, None);
            state.last_change.clear();
            // What its next load needs may be tried at once, but counts as one more trial.
            (state.tried_at, state.next_trial, state.turn) = (Some(o.at), o.at, 0);
            self.leave_trial(&o.vm.id);
            let near = |trial: &&mut Running| trial.concerned.contains(&o.vm.id);
            (self.trials.iter_mut().filter(near)).for_each(|trial| trial.is_stale = true);
            self.memory.forget(&o.vm.id);
            let line = format!("class batch (auto, was ls): {}", verdict.why);
            return Some(ClassChange::logged(&o.vm.id, line));
        }
        match tried {
            Some(tried) if self.trials[tried].is_led_by(&o.vm.id) => self.step_trial(tried, o),
            Some(_) => None,
            None => self.begin_trial(o, verdict),
        }
    }

    /// Whether a VM has done latency-sensitive I/O and waited for so long that class ls may be tried.
    pub fn is_candidate(&self, id: &VmId) -> bool {
        let verdict = self.vms.get(id).and_then(|state| state.verdict);
        verdict.is_some_and(|verdict| verdict.class == Class::Ls)
    }

    /// Part of its vCPUs' time that a VM runs, a mean of some ten seconds.
    pub fn used(&self, id: &VmId) -> Option<f64> {
        self.vms.get(id).and_then(State::used)
    }

    /// Lets the time of the trial go on. Keeps the class of those that gain if the trial ends well, and takes it back otherwise.
    fn step_trial(&mut self, tried: usize, o: &Observation<'_>) -> Option<ClassChange> {
        let disturbance = match self.trials.get(tried)?.is_stale {
            true => Some("class ls of another VM of its core ended"),
            false => self.disturbance(tried, o),
        };
        if let Some(what) = disturbance {
            let trial = self.trials.swap_remove(tried);
            let line = format!("ends its trial of class ls (auto): {what}");
            let lines = trial.tried.iter().map(|t| (t.vm.clone(), line.clone()));
            let lines = lines.collect();
            self.restore_classes(&trial);
            return Some(ClassChange { lines });
        }
        let trial = self.trials.get_mut(tried)?;
        let (vms, references) = (&self.vms, &self.references);
        let is_inside = |id| vms.get(id).is_some_and(|state: &State| state.is_inside);
        let all_inside = trial.tried.iter().all(|t| is_inside(&t.vm));
        let tolerated = |id: &VmId| match vms.get(id) {
            // A class that the operator set is to have its full effect.
            Some(state) if state.setting == ClassSetting::Ls => 0.0,
            // A VM that wants more than its share takes nothing from one that wants less.
            Some(state) if state.class() == Class::Ls && state.is_inside && !all_inside => 0.0,
            Some(state) => references.tolerated(id, state.class(), o.at),
            None => 0.0,
        };
        let Some(outcome) = trial.step(o.at, o.counters, &tolerated) else {
            let mut has_changed = false;
            for candidate in &trial.tried {
                let state = self.vms.get_mut(&candidate.vm);
                has_changed |= state.is_some_and(|state| state.choose(trial.is_ls()));
            }
            return has_changed.then(ClassChange::default);
        };
        let trial = self.trials.swap_remove(tried);
        self.learn(&trial, &outcome, o.at);
        match &outcome.harm {
            Some(harm) if trial.tried.len() > 1 => Some(self.split(&trial, harm, o)),
            _ => Some(self.end_trial(&trial, &outcome, o)),
        }
    }

    /// Keeps the delays without the class that a trial found by `at` (ns).
    fn learn(&mut self, trial: &Running, outcome: &Outcome<VmId>, at: Nanos) {
        let by_packets = |t: &&Candidate| t.measure.figure == Figure::PacketDelay;
        for candidate in trial.tried.iter().filter(by_packets) {
            let tried = outcome.tried.get(&candidate.vm);
            if let Some(delay) = tried.and_then(|tried| tried.delay) {
                self.references.learn(&candidate.vm, delay, at);
            }
        }
        // Where others had the class, a delay is shorter than on stock.
        if trial.from_stock {
            let delays = outcome.delays.iter();
            delays.for_each(|(id, delay)| self.references.learn(id, *delay, at));
        }
    }

    /// Takes the class back from VMs that harmed somebody together. Half of them, those that run least, are tried next.
    fn split(&mut self, trial: &Running, harm: &Harm<VmId>, o: &Observation<'_>) -> ClassChange {
        let last_turn = (trial.concerned.iter()).filter_map(|id| Some(self.vms.get(id)?.turn));
        let last_turn = last_turn.max().unwrap_or(0);
        let mut tried: Vec<&VmId> = trial.tried.iter().map(|t| &t.vm).collect();
        let used = |id: &&VmId| self.used(id).unwrap_or(0.0);
        tried.sort_by(|a, b| used(a).total_cmp(&used(b)));
        let half = tried.len() / 2;
        let found = format!(
            "with {} others it harmed a VM: {}",
            tried.len() - 1,
            harmed(harm, o.name)
        );
        let mut change = ClassChange::default();
        for (i, id) in tried.into_iter().enumerate() {
            let Some(state) = self.vms.get_mut(id) else {
                continue;
            };
            state.choose(false);
            if i >= half {
                state.turn = last_turn + 1 + i - half;
            }
            state.last_change.clone_from(&found);
            let line = format!("ends its trial of class ls (auto): {found}; fewer are tried now");
            change.lines.push((id.clone(), line));
        }
        change
    }

    /// Keeps the class of the VMs that gain if nobody loses.
    fn end_trial(
        &mut self,
        trial: &Running,
        outcome: &Outcome<VmId>,
        o: &Observation<'_>,
    ) -> ClassChange {
        // What the others waited in the windows without the class they wait no longer.
        if trial.tried.iter().any(|t| outcome.stays(&t.vm)) {
            for id in &trial.concerned {
                if let Some(state) = self.vms.get_mut(id) {
                    state.next_trial = state.next_trial.max(o.at + FIGURES_TIME);
                }
            }
        }
        let mut change = ClassChange::default();
        for candidate in &trial.tried {
            let id = &candidate.vm;
            let Some(state) = self.vms.get_mut(id) else {
                continue;
            };
            let stays = outcome.stays(id);
            let tried = outcome.tried.get(id);
            let found = match &outcome.harm {
                Some(harm) => format!("it harmed a neighbour: {}", harmed(harm, o.name)),
                None => found(tried, candidate.measure.figure),
            };
            state.choose(stays);
            state.end_trial(o.at);
            state.harmed = outcome.harm.as_ref().map(|harm| harm.who.clone());
            let (figure, without) = candidate.before;
            state.without = stays.then_some((figure, without));
            state.last_change.clone_from(&found);
            let class = if stays { "ls" } else { "batch" };
            change
                .lines
                .push((id.clone(), format!("class {class} (auto): {found}")));
            let is_decided = tried.is_some_and(|tried| tried.finding != Finding::TooFewEvents);
            if is_decided && state.is_unique {
                let finding = Remembered {
                    stays,
                    found,
                    by_packets: figure == Figure::PacketDelay,
                    without_ns: without,
                };
                self.memory.set(id, finding);
            }
        }
        change
    }

    /// What has happened to the VMs of a trial since it began: vCPUs move for balance.
    fn disturbance(&self, tried: usize, o: &Observation<'_>) -> Option<&'static str> {
        let trial = self.trials.get(tried)?;
        if self.trials.len() == 1 && trial.tried.len() == 1 {
            return None;
        }
        let near = (o.near)();
        let are_near = |trial: &Running| trial.tried.iter().any(|t| near.contains(&t.vm));
        let mut others = self.trials.iter().enumerate().filter(|(i, _)| *i != tried);
        if others.any(|(_, trial)| are_near(trial)) {
            return Some("a VM on trial came to its core");
        }
        let has_left = trial.tried.iter().any(|t| !near.contains(&t.vm));
        has_left.then_some("a VM that was tried with it left its core")
    }

    /// Ends all trials without an outcome, since classes have no effect now. Their VMs have the class from before.
    pub fn suspend(&mut self) {
        self.gatherings.clear();
        for trial in std::mem::take(&mut self.trials) {
            self.restore_classes(&trial);
        }
    }

    /// Takes a VM out of its trial, of which nothing comes then.
    fn leave_trial(&mut self, id: &VmId) {
        self.end_gathering(id);
        let Some(tried) = self.trials.iter().position(|t| t.tries(id)) else {
            return;
        };
        self.restore_class(id);
        let trial = &mut self.trials[tried];
        trial.tried.retain(|t| t.vm != *id);
        trial.is_stale = true;
        if trial.tried.is_empty() {
            self.trials.swap_remove(tried);
        }
    }

    fn restore_classes(&mut self, trial: &Running) {
        for candidate in &trial.tried {
            self.restore_class(&candidate.vm);
        }
    }

    /// The VM's class from before its trial.
    fn restore_class(&mut self, id: &VmId) {
        if let Some(state) = self.vms.get_mut(id) {
            state.choose(state.without.is_some());
        }
    }

    /// A VM is gone or does something else: what trials found about it no longer counts.
    fn end_role(&mut self, id: &VmId) {
        self.references.forget(id);
        for state in self.vms.values_mut() {
            state.allow_trial_without(id);
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.leave_trial(id);
        self.end_role(id);
        self.vms.remove(id);
    }

    /// The class of a VM with this setting.
    pub fn class(&self, id: &VmId, setting: ClassSetting) -> Class {
        let chosen = self.vms.get(id).map_or(Class::Batch, |s| s.chosen);
        class_of(setting, chosen)
    }

    /// The class of a VM with the setting that it had in the last window.
    fn known_class(&self, id: &VmId) -> Class {
        self.vms.get(id).map_or(Class::Batch, State::class)
    }

    /// Advice to the operator about a VM that is set to batch and whose waits class ls would shorten.
    pub fn advice(
        &self,
        vm: &Vm,
        setting: ClassSetting,
        wait_share: f64,
        advice: Option<Advice>,
    ) -> Option<String> {
        let verdict = self.vms.get(&vm.id)?.verdict?;
        let advice = advice.filter(Advice::is_worth_it)?;
        if setting != ClassSetting::Batch || verdict.class != Class::Ls {
            return None;
        }
        Some(format!(
            "{name} waits {} of the time it wants to run ({} {}); class ls would cut that to about {}. \
             Try: viola set {} --class ls",
            percent(wait_share),
            advice.what(),
            rounded(advice.now),
            rounded(advice.after),
            shell_word(&vm.name),
            name = one_line(&vm.name),
        ))
    }
}

/// A name as one word of a shell.
fn shell_word(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:@".contains(c);
    if !name.is_empty() && name.chars().all(plain) {
        name.to_owned()
    } else {
        format!("'{}'", name.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod deceivers;
#[cfg(test)]
mod roles;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod together;
