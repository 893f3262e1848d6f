// SPDX-License-Identifier: Apache-2.0
//! Decides which mechanism runs, which class each VM has, and which core each vCPU gets.
//!
//! | file | decides |
//! |---|---|
//! | `classes` | whether a VM of class auto becomes latency-sensitive, and whether that helped |
//! | `plan` | which cores are managed, with which threads; pure |
//! | `figures` | how long requests to a VM wait, by the best measurement there is |
//! | `placement` | a core for each vCPU that may run on several |

pub mod classes;
mod figures;
pub mod placement;
pub mod plan;

use std::collections::BTreeSet;
use std::time::Instant;

use viola_host::{Vm, VmId};
use viola_meter::{Meter, Snapshot};
use viola_policy::slices::Class;
use viola_policy::slices::classify::{self, Advice};

use super::Slices;
use crate::cores::{Candidate, PlanConfig, TurboConfig};
use crate::turbo::Turbo;
use crate::vms::settings::Controls;
use crate::vms::{Inputs, recent};
use classes::{Counters, Observation};
use placement::{NewPlacement, Placement};
use plan::{CoreNote, Draft};
use viola_cli::log::{self, Level};
use viola_config::{Accelerator, MechanismChoice};
use viola_proto::ClassSetting;

impl Slices {
    /// Chooses the mechanism again: configuration or host may have changed.
    pub fn choose_mechanism(&mut self, inputs: &Inputs) {
        let choice = (self.support).choose(&inputs.facts, &inputs.config.slices);
        if choice != self.mechanism {
            self.mechanism = choice;
            self.log_mechanism(inputs);
        }
    }

    pub(super) fn log_mechanism(&self, inputs: &Inputs) {
        let (facts, slices) = (&inputs.facts, &inputs.config.slices);
        let choice = match &self.mechanism {
            Ok(choice) => *choice,
            Err(o) => {
                let what = format!("slices are off: {}", o.sentence());
                return log::line(Level::Warning, what);
            }
        };
        let supports = |choice| self.support.supports(choice, facts, slices);
        let mut line = format!("slices: {}", choice.name());
        if let (Ok(terms), true) = (supports(choice), choice.manages_cores()) {
            line.push_str(&format!(", {terms}"));
        }
        for other in slices.mechanisms.iter().take_while(|m| **m != choice) {
            if let Err(o) = supports(*other) {
                line.push_str(&format!("; no {}: {}", other.name(), o.sentence()));
            }
        }
        log::line(Level::Info, line);
    }

    /// Gives up a sched_ext scheduler that failed too often, where the configuration names another mechanism; `true` when it did.
    pub(super) fn fall_back(&mut self, inputs: &Inputs) -> bool {
        let has_choice = inputs.config.slices.mechanisms.len() > 1;
        let is_sched_ext = self.mechanism == Ok(MechanismChoice::SchedExt);
        if !has_choice || !is_sched_ext || !self.engine.retry.is_off() {
            return false;
        }
        let why = format!("it failed: {}", self.engine.retry.last_failure());
        self.support.scheduler = Err(why);
        self.engine.retry.reset();
        self.choose_mechanism(inputs);
        true
    }

    pub(super) fn manages_cores(&self) -> bool {
        self.mechanism.as_ref().is_ok_and(|m| m.manages_cores())
    }

    pub(super) fn class(&self, vm: &Vm, controls: &Controls) -> Class {
        self.classes.class(&vm.id, controls.class.value)
    }

    /// Takes what each VM spent in a window; `true` when one of them has another class from now on.
    pub fn classify(&mut self, window: &Snapshot, inputs: &Inputs, meter: &Meter) -> bool {
        let may_choose = inputs.config.allows(Accelerator::Slices);
        let setting = |vm: &Vm| match inputs.class(vm) {
            ClassSetting::Auto if !may_choose => ClassSetting::Batch,
            other => other,
        };
        let settings: Vec<ClassSetting> = inputs.vms().iter().map(setting).collect();
        let can_act = self.can_act(inputs) && inputs.stopped.is_none();
        if !can_act {
            // Nothing can be tried, so class auto stays as it is.
            self.classes.suspend();
        }
        let is_candidate = |(vm, setting): (&Vm, &ClassSetting)| {
            *setting == ClassSetting::Auto && self.classes.is_candidate(&vm.id)
        };
        let has_candidate = inputs.vms().iter().zip(&settings).any(is_candidate);
        // Advice adds up all waits of ten seconds, so it is asked for only where it counts.
        let advice = match can_act && has_candidate {
            true => self.advice(inputs, meter),
            false => vec![None; inputs.vms().len()],
        };
        let name = |id: &VmId| {
            let vm = inputs.vms().iter().find(|vm| vm.id == *id);
            vm.map_or(id.to_string(), |vm| vm.name.clone())
        };
        let (mut has_changed, mut is_quiet) = (false, true);
        let vms = inputs.vms().iter().zip(settings);
        for ((vm, setting), advice) in vms.zip(advice) {
            // Both are sorted by identity.
            let Ok(at) = window.vms.binary_search_by(|s| s.id.cmp(&vm.id)) else {
                continue;
            };
            let figures = || figures::all(meter, &vm.id);
            let near = || near(&self.placement, inputs.vms(), &vm.id);
            let counters = || counters(near(), meter);
            let observation = Observation {
                vm,
                setting,
                sample: &window.vms[at],
                at: window.at,
                span: window.span,
                figures: &figures,
                advice,
                near: &near,
                counters: &counters,
                name: &name,
            };
            if let Some(change) = self.classes.observe(&observation) {
                is_quiet &= change.lines.is_empty();
                for (id, line) in change.lines {
                    log::about(Level::Notice, &id, line);
                }
                has_changed = true;
            }
        }
        // The windows of a trial, some twenty of each class, are one change.
        self.engine.is_quiet = has_changed && is_quiet;
        has_changed
    }

    /// What class ls would do for the waits of each VM, in their order; `None` without a mechanism that manages cores.
    pub(super) fn advice(&self, inputs: &Inputs, meter: &Meter) -> Vec<Option<Advice>> {
        let vms = inputs.vms();
        if !self.manages_cores() || inputs.stopped.is_some() {
            return vec![None; vms.len()];
        }
        let controls: Vec<Controls> = vms.iter().map(|vm| inputs.controls(vm)).collect();
        let claims: Vec<_> = vms
            .iter()
            .zip(&controls)
            .map(|(vm, c)| (&vm.cores, vm.vcpus.len(), c.weight.value, c.cap.value))
            .collect();
        let shares = recent::shares(&claims);
        let homes: Vec<Option<u32>> = (vms.iter().map(|vm| self.placement.home(&vm.id))).collect();
        let advise = |i: usize| {
            let home = homes[i]?;
            let others: Vec<usize> = (0..vms.len())
                .filter(|&j| j != i && homes[j] == Some(home))
                .collect();
            let ls = others
                .iter()
                .filter(|&&j| self.class(&vms[j], &controls[j]) == Class::Ls);
            // The share of one core that one vCPU gets.
            let share = shares[i] * vms[i].cores.len() as f64 / vms[i].vcpus.len().max(1) as f64;
            Some(classify::advise(
                figures::best(meter, &vms[i].id),
                others.len() as u32,
                inputs.config.slices.batch_slice(),
                (share.min(1.0), self.classes.used(&vms[i].id)),
                controls[i].microslice.value,
                ls.map(|&j| controls[j].microslice.value),
            ))
        };
        (0..vms.len()).map(advise).collect()
    }

    /// Plans all cores of slices and turbo.
    pub fn plan(
        &self,
        now: Instant,
        inputs: &Inputs,
        turbo: &Turbo,
        meter: &Meter,
    ) -> (Draft, NewPlacement) {
        let config = &inputs.config;
        let pools = turbo.pools(&config.slices.cores, &config.turbo, &inputs.online);
        let plan_config = PlanConfig {
            cores: &pools.regular,
            algorithm: config.slices.algorithm(),
            batch_slice: config.slices.batch_slice(),
            turbo: (!config.turbo.cores.is_empty()).then_some(TurboConfig {
                cores: &pools.turbo,
                slot: config.turbo.slot,
                budget_permille: config.turbo.budget,
                reserve_permille: config.turbo.reserve,
                why_none: &pools.why_none,
            }),
        };
        let vms = inputs.vms().iter();
        let candidates: Vec<Candidate<'_>> = vms
            .map(|vm| self.candidate(vm, inputs, turbo, meter))
            .collect();
        match self.active_choice(inputs) {
            None => (Draft::default(), NewPlacement::default()),
            Some(MechanismChoice::Eevdf) => (
                plan::eevdf(plan_config, &candidates),
                NewPlacement::default(),
            ),
            Some(_) => {
                let mut cores = pools.regular.clone();
                cores.extend(&pools.turbo);
                let mut new = NewPlacement::default();
                let mut draft = plan::slots(plan_config, &candidates, |requests| {
                    let (places, placement) = self.placement.place(
                        now,
                        &inputs.facts,
                        &cores,
                        &candidates,
                        requests,
                        meter,
                    );
                    new = placement;
                    places
                });
                let unused = |cpu, why: &str| CoreNote {
                    cpu,
                    managed: false,
                    why: why.into(),
                    vms: Vec::new(),
                };
                let offline = pools.offline.iter();
                (draft.cores).extend(offline.map(|cpu| unused(cpu, "it is offline")));
                let is_noted = |cpu: &u32| draft.cores.iter().any(|note| note.cpu == *cpu);
                let spare: Vec<u32> = config.turbo.cores.iter().filter(|c| !is_noted(c)).collect();
                let why = "no turbo core is needed there";
                (draft.cores).extend(spare.into_iter().map(|cpu| unused(cpu, why)));
                draft.cores.sort_by_key(|note| note.cpu);
                (draft, new)
            }
        }
    }

    /// The mechanism to be used now: none while viola is stopped.
    pub(super) fn active_choice(&self, inputs: &Inputs) -> Option<MechanismChoice> {
        let choice = self.mechanism.as_ref().ok().copied();
        choice.filter(|_| inputs.stopped.is_none())
    }

    fn candidate<'a>(
        &self,
        vm: &'a Vm,
        inputs: &Inputs,
        turbo: &Turbo,
        meter: &Meter,
    ) -> Candidate<'a> {
        let c = inputs.controls(vm);
        Candidate {
            vm,
            index: meter.index(&vm.id).unwrap_or(u32::MAX),
            class: self.class(vm, &c),
            turbo: turbo.wants(&vm.id, c.class.value),
            microslice: c.microslice.value,
            weight: c.weight.value,
            cap_permille: c.cap.value,
            capped_by_viola: c.capped_by_viola(),
            vcpu_quota: c.vcpu_quota,
            allowed: self.allowed.get(&vm.id).cloned().unwrap_or_default(),
            blocked: self.blocked.get(&vm.id).cloned(),
        }
    }

    /// Logs VMs that newly do not get what they ask for.
    pub fn log_left_out(&mut self) {
        let is_new = |l: &&(VmId, String)| !self.logged_left_out.contains(l);
        for (id, why) in self.draft.left_out.iter().filter(is_new) {
            log::about(Level::Warning, id, format!("stock scheduling: {why}"));
        }
        self.logged_left_out.clone_from(&self.draft.left_out);
    }
}

/// A VM and the other VMs of its cores.
fn near(placement: &Placement, vms: &[Vm], id: &VmId) -> BTreeSet<VmId> {
    let cores = placement.cores_of(id);
    let is_near = |vm: &&Vm| vm.id == *id || !placement.cores_of(&vm.id).is_disjoint(&cores);
    vms.iter().filter(is_near).map(|vm| vm.id.clone()).collect()
}

/// The counters of these VMs, of those that have any.
fn counters(vms: BTreeSet<VmId>, meter: &Meter) -> Counters {
    let counters = vms.into_iter();
    let counters = counters.filter_map(|id| meter.counters(&id).map(|found| (id, found)));
    counters.collect()
}
