// SPDX-License-Identifier: Apache-2.0
//! The class of each VM: what the operator set, or, for class auto, what the meter finds.
//!
//! A VM of class auto becomes latency-sensitive when the classifier says so and the model predicts shorter waits. One VM changes at
//! a time, so that the effect of each change can be measured: by the delay of its packets if it got enough, else by its residual
//! wait. If that did not become shorter, or packets of another VM of its core wait much longer, the VM becomes batch again and is
//! not tried again for ten minutes.

mod neighbours;
mod why;

use std::collections::BTreeMap;

use viola_host::{Vm, VmId};
use viola_meter::{VmSample, WAIT_WINDOW_SECONDS};
use viola_policy::slices::classify::{
    Advice, Classifier, Figure, Figures, Thresholds, Verdict, Window,
};
use viola_policy::slices::{Class, MS, Nanos};
use viola_proto::ClassSetting;

pub use neighbours::Neighbour;
use viola_cli::error::one_line;
use viola_cli::quantities::{percent, rounded};

/// Shortest window of the classifier, ns.
const WINDOW: Nanos = 100 * MS;
/// Length of a trial, ns: after it, all waits that the meter remembers are from after the change.
const TRIAL_TIME: Nanos = (WAIT_WINDOW_SECONDS as u64 + 2) * 1000 * MS;
/// A change that did not help is tried again after this time, ns.
const RETRIAL_DELAY: Nanos = 600_000 * MS;
/// A change has helped when the figure is at most this part of what it was before.
const MAX_WAIT_RATIO: f64 = 0.75;

/// State of one VM.
#[derive(Debug)]
struct State {
    classifier: Classifier,
    verdict: Option<Verdict>,
    sums: WindowSums,
    /// Class while the setting is auto.
    chosen: Class,
    banned_until: Nanos,
    /// End of the last window, ns.
    observed_at: Nanos,
    /// Why its last trial began, or what that trial found; empty before the first one.
    last_change: String,
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

/// A change whose effect is being measured.
#[derive(Debug)]
struct Trial {
    vm: VmId,
    since: Nanos,
    /// What is compared, and its value before the change, ns.
    before: (Figure, Nanos),
    /// The other VMs of its core before the change.
    neighbours: Vec<Neighbour>,
}

/// The classes of all VMs.
#[derive(Debug, Default)]
pub struct Classes {
    vms: BTreeMap<VmId, State>,
    trial: Option<Trial>,
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
    /// How long requests to it waited in the last 10 s.
    pub figures: Figures,
    /// What class ls would do for its waits; `None` without a mechanism.
    pub advice: Option<Advice>,
    /// Reads the delays of the other VMs of its core, which is slow.
    pub neighbours: &'a dyn Fn() -> Vec<Neighbour>,
}

impl Classes {
    /// Takes what a VM did in a window. Returns a line for the log when its class changes.
    pub fn observe(&mut self, o: &Observation<'_>) -> Option<String> {
        let state = self.vms.entry(o.vm.id.clone()).or_insert_with(State::new);
        state.observed_at = o.at;
        state.add(o);
        if o.setting != ClassSetting::Auto {
            self.reset(&o.vm.id);
            return None;
        }
        if self
            .trial
            .as_ref()
            .is_some_and(|t| t.vm == o.vm.id && o.at >= t.since + TRIAL_TIME)
        {
            return self.end_trial_of(o);
        }
        let state = self.vms.get_mut(&o.vm.id)?;
        let verdict = state.verdict?;
        match (state.chosen, verdict.class) {
            (Class::Batch, Class::Ls) if self.trial.is_none() && o.at >= state.banned_until => {
                let advice = o.advice.filter(Advice::is_worth_it)?;
                let before = o.figures.best()?;
                state.chosen = Class::Ls;
                state.last_change = verdict.why.to_string();
                self.trial = Some(Trial {
                    vm: o.vm.id.clone(),
                    since: o.at,
                    before,
                    neighbours: (o.neighbours)(),
                });
                Some(format!(
                    "class ls (auto, was batch): {}; {advice}",
                    verdict.why
                ))
            }
            (Class::Ls, Class::Batch) => {
                state.chosen = Class::Batch;
                self.cancel_trial(&o.vm.id);
                Some(format!("class batch (auto, was ls): {}", verdict.why))
            }
            _ => None,
        }
    }

    /// Keeps the change under trial if it helped, and takes it back otherwise.
    fn end_trial_of(&mut self, o: &Observation<'_>) -> Option<String> {
        let trial = self.trial.take()?;
        let state = self.vms.get_mut(&o.vm.id)?;
        let (figure, before) = trial.before;
        // A VM without packets and waits proves nothing; the classifier decides about it.
        let after = o.figures.get(figure)?;
        let change = format!(
            "its {figure} went from {} to {}",
            rounded(before),
            rounded(after)
        );
        let loss = neighbours::harmed(&trial.neighbours, &(o.neighbours)());
        let has_helped = after as f64 <= before as f64 * MAX_WAIT_RATIO;
        let (taken_back, found) = match loss {
            Some(loss) => (Some("it harmed a neighbour"), loss),
            None if has_helped => (None, change),
            None => (Some("it did not help"), change),
        };
        state.last_change.clone_from(&found);
        let Some(why) = taken_back else {
            return Some(format!("stays class ls (auto): {found}"));
        };
        state.chosen = Class::Batch;
        state.banned_until = o.at + RETRIAL_DELAY;
        Some(format!("class batch (auto, was ls): {why}, {found}"))
    }

    /// The operator has set the class, so a trial ends.
    fn reset(&mut self, id: &VmId) {
        self.cancel_trial(id);
        if let Some(state) = self.vms.get_mut(id) {
            state.chosen = Class::Batch;
        }
    }

    fn cancel_trial(&mut self, id: &VmId) {
        if self.trial.as_ref().is_some_and(|t| t.vm == *id) {
            self.trial = None;
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.cancel_trial(id);
        self.vms.remove(id);
    }

    /// The class of a VM with this setting.
    pub fn class(&self, id: &VmId, setting: ClassSetting) -> Class {
        match setting {
            ClassSetting::Ls => Class::Ls,
            // In the plan, a VM of class turbo is a batch VM with a turbo vCPU.
            ClassSetting::Batch | ClassSetting::Turbo => Class::Batch,
            ClassSetting::Auto => self.vms.get(id).map_or(Class::Batch, |s| s.chosen),
        }
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

impl State {
    fn new() -> Self {
        Self {
            classifier: Classifier::new(Thresholds::default()),
            verdict: None,
            sums: WindowSums::default(),
            chosen: Class::Batch,
            banned_until: 0,
            observed_at: 0,
            last_change: String::new(),
        }
    }

    /// Adds to the window, and classifies when the window is full.
    fn add(&mut self, o: &Observation<'_>) {
        let (g, total) = (&mut self.sums, o.sample.vcpu_total());
        g.span += o.span;
        g.run += total.run;
        g.wait += total.wait;
        g.wakes += total.wakes;
        g.packets += o.sample.traffic.rx_packets + o.sample.traffic.tx_packets;
        if g.span < WINDOW {
            return;
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
        self.sums = WindowSums::default();
        self.verdict = Some(self.classifier.observe(o.at, &window));
    }
}

#[cfg(test)]
mod tests;
