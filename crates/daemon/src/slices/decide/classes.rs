// SPDX-License-Identifier: Apache-2.0
//! The class of each VM: what the operator set, or, for class auto, what the meter finds.
//!
//! A VM of class auto is tried in class ls when the classifier says so and the model predicts shorter waits. One VM of a core is
//! tried at a time, in pairs of windows with and without the class ([`viola_policy::trial`]), on its own delay and on what all VMs of its core
//! get. The class stays if the VM is found to gain and no other to lose. Otherwise the VM is batch again and is not tried again for
//! ten minutes. What was found survives a restart of the daemon (`memory`).
//!
//! A class that stays is tried again after an hour, and when the delays have become longer than they were without it. Repeated trials
//! have a budget (`budget`); without one, a class that may no longer help ends at once.

mod budget;
mod memory;
mod references;
mod state;
mod trial;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use viola_host::{Vm, VmId};
use viola_meter::VmSample;
use viola_policy::slices::classify::{Advice, Figure, Figures, Verdict};
use viola_policy::slices::{Class, MS, Nanos};
use viola_policy::trial::Finding;
use viola_proto::ClassSetting;

use self::budget::Budget;
use self::memory::{Memory, Remembered};
use self::references::References;
use self::state::{State, class_of};
pub use self::trial::Counters;
use self::trial::{Running, found};
use crate::vms::settings::shares_its_name;
use viola_cli::error::one_line;
use viola_cli::quantities::{percent, rounded};

/// A class that stays is tried again after this time, ns: the load may have become another.
const STAY_TIME: Nanos = 3_600_000 * MS;

/// The classes of all VMs.
#[derive(Debug, Default)]
pub struct Classes {
    vms: BTreeMap<VmId, State>,
    /// Trials that concern different VMs.
    trials: Vec<Running>,
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

/// A VM has another class from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClassChange {
    /// A line for the log; `None` within a trial.
    pub line: Option<String>,
}

impl ClassChange {
    fn logged(line: String) -> Option<Self> {
        Some(Self { line: Some(line) })
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

    /// Takes what a VM did in a window. Returns whether it has another class from now on.
    pub fn observe(&mut self, o: &Observation<'_>) -> Option<ClassChange> {
        let state = self.vms.entry(o.vm.id.clone()).or_insert_with(|| {
            let remembered = self.memory.get(&o.vm.id);
            State::remember(remembered, o.at)
        });
        (state.observed_at, state.setting) = (o.at, o.setting);
        if state.add(o) {
            self.end_role(&o.vm.id);
        }
        if o.setting != ClassSetting::Auto {
            self.cancel_trial(&o.vm.id);
            return None;
        }
        let state = self.vms.get_mut(&o.vm.id)?;
        let verdict = state.verdict?;
        let tried = self.trials.iter().position(|t| t.vm == o.vm.id);
        if verdict.class == Class::Batch {
            if tried.is_none() && state.chosen == Class::Batch {
                return None;
            }
            (state.chosen, state.without) = (Class::Batch, None);
            state.last_change.clear();
            // What its next load needs may be tried at once, but counts as one more trial.
            (state.tried_at, state.next_trial) = (Some(o.at), o.at);
            self.cancel_trial(&o.vm.id);
            let near = |trial: &&mut Running| trial.concerned.contains(&o.vm.id);
            (self.trials.iter_mut().filter(near)).for_each(|trial| trial.is_stale = true);
            self.memory.forget(&o.vm.id);
            return ClassChange::logged(format!("class batch (auto, was ls): {}", verdict.why));
        }
        if let Some(tried) = tried {
            return self.step_trial(tried, o);
        }
        self.begin_trial(o, verdict)
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

    /// Begins a trial of class ls if the VM may gain by it, or if the class that it has may no longer help.
    fn begin_trial(&mut self, o: &Observation<'_>, verdict: Verdict) -> Option<ClassChange> {
        let state = self.vms.get_mut(&o.vm.id)?;
        let is_near = |trial: &Running| trial.concerned.contains(&o.vm.id);
        if state.time_to_trial(o.at) > 0 || self.trials.iter().any(is_near) {
            return None;
        }
        let is_first = state.tried_at.is_none();
        let has_room = |id: &VmId| is_first || self.budget.has_room(id, o.at);
        let advice = o.advice?;
        let (before, reason, line) = match state.without.filter(|_| state.chosen == Class::Ls) {
            None if !advice.is_worth_it() => return None,
            None => {
                let why = state.looked.unwrap_or(verdict.why);
                let line = format!("tries class ls (auto): {why}; {advice}");
                ((o.figures)().best()?, why.to_string(), line)
            }
            Some((figure, without)) => {
                let now = (o.figures)().get(figure)?;
                let is_due = state.tried_at.is_none_or(|at| o.at >= at + STAY_TIME);
                let grown = state.other_use(true);
                if now <= without && !is_due && grown.is_none() {
                    return None;
                }
                let compared = match grown {
                    Some((before, now)) => format!(
                        "it runs {} of the time, and ran {} after its last trial",
                        percent(now),
                        percent(before)
                    ),
                    None => format!(
                        "its {figure} is {}, and was {} without",
                        rounded(now),
                        rounded(without)
                    ),
                };
                if now > without && !has_room(&o.vm.id) {
                    let found = format!("{compared} class ls");
                    let line = format!(
                        "class batch (auto, was ls): {found}; its core had too many trials for another one"
                    );
                    (state.chosen, state.without) = (Class::Batch, None);
                    state.last_change = found;
                    self.memory.forget(&o.vm.id);
                    return ClassChange::logged(line);
                }
                let line = format!("tries class ls again (auto): {compared}");
                ((figure, without), state.last_change.clone(), line)
            }
        };
        // Two trials on one core would disturb each other.
        let concerned = (o.near)();
        if self
            .trials
            .iter()
            .any(|t| !t.concerned.is_disjoint(&concerned))
        {
            return None;
        }
        if !concerned.iter().all(has_room) {
            return None;
        }
        if !is_first {
            self.budget.spend(o.at, concerned.clone());
        }
        let mut others = concerned.iter().filter(|id| **id != o.vm.id);
        let from_stock = others.all(|id| self.known_class(id) == Class::Batch);
        let state = self.vms.get_mut(&o.vm.id)?;
        state.last_change = reason;
        let trial = Running::begin(o.vm.id.clone(), concerned, before, from_stock, o.at);
        state.choose(trial.is_ls());
        self.trials.push(trial);
        ClassChange::logged(line)
    }

    /// Lets the time of the trial go on. Keeps the class if the trial ends well, and takes it back otherwise.
    fn step_trial(&mut self, tried: usize, o: &Observation<'_>) -> Option<ClassChange> {
        let disturbance = match self.is_disturbed(o) {
            true => Some("a VM on trial came to its core"),
            false => (self.trials.get(tried)?.is_stale)
                .then_some("class ls of another VM of its core ended"),
        };
        if let Some(what) = disturbance {
            self.cancel_trial(&o.vm.id);
            return ClassChange::logged(format!("ends its trial of class ls (auto): {what}"));
        }
        let trial = self.trials.get_mut(tried)?;
        let (vms, references) = (&self.vms, &self.references);
        let tolerated = |id: &VmId| match vms.get(id) {
            // A class that the operator set is to have its full effect.
            Some(state) if state.setting != ClassSetting::Ls => {
                references.tolerated(id, state.class(), o.at)
            }
            _ => 0.0,
        };
        let outcome = trial.step(o.at, o.counters, &tolerated);
        let state = self.vms.get_mut(&o.vm.id)?;
        let Some(outcome) = outcome else {
            let has_changed = state.choose(trial.is_ls());
            return has_changed.then_some(ClassChange { line: None });
        };
        let ((figure, without), compared) = (trial.before, trial.compared);
        if compared == Some(Figure::PacketDelay) {
            (self.references).learn(&o.vm.id, &outcome, trial.from_stock, o.at);
        }
        self.trials.swap_remove(tried);
        let stays = outcome.stays();
        let found = found(&outcome, compared, o.name);
        state.choose(stays);
        let class = if stays { "ls" } else { "batch" };
        let line = format!("class {class} (auto): {found}");
        state.end_trial(o.at);
        if let Finding::Harms { who, .. } = &outcome.finding {
            state.harmed = Some(who.clone());
        }
        state.without = stays.then_some((figure, without));
        state.last_change.clone_from(&found);
        if outcome.finding != Finding::TooFewEvents && !shares_its_name(o.vm) {
            let finding = Remembered {
                stays,
                found,
                by_packets: figure == Figure::PacketDelay,
                without_ns: without,
            };
            self.memory.set(&o.vm.id, finding);
        }
        ClassChange::logged(line)
    }

    /// Whether another VM on trial has come to a core of this one: vCPUs move for balance.
    fn is_disturbed(&self, o: &Observation<'_>) -> bool {
        if self.trials.len() < 2 {
            return false;
        }
        let near = (o.near)();
        let mut others = self.trials.iter().filter(|t| t.vm != o.vm.id);
        others.any(|t| near.contains(&t.vm))
    }

    /// Ends all trials without an outcome, since classes have no effect now. Their VMs have the class from before.
    pub fn suspend(&mut self) {
        for trial in std::mem::take(&mut self.trials) {
            self.restore_class(&trial.vm);
        }
    }

    fn cancel_trial(&mut self, id: &VmId) {
        if let Some(tried) = self.trials.iter().position(|t| t.vm == *id) {
            self.trials.swap_remove(tried);
            self.restore_class(id);
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
        self.cancel_trial(id);
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
