// SPDX-License-Identifier: Apache-2.0
//! What the control socket shows of slices: the stage, each core, and how each VM is scheduled.

use viola_host::{Vm, VmId};
use viola_meter::Meter;
use viola_policy::slices::Class;
use viola_proto::{ClassSetting, Core, Stage, VmReport};
use viola_sched::{Algorithm, VmPlan};

use super::Slices;
use super::observe::mechanisms::Support;
use crate::vms::Inputs;
use crate::vms::recent::Recent;
use crate::vms::report::{VmState, reports, turns};
use crate::vms::settings::Controls;
use viola_config::Accelerator;

impl Slices {
    /// A report of each VM, by identity.
    pub fn reports(&self, inputs: &Inputs, meter: &Meter, recent: &Recent) -> Vec<VmReport> {
        let applied = self.engine.applied();
        let usage = self.engine.usage();
        let wait = |vm: &Vm| {
            let sample = recent.vm(&vm.id);
            sample.map_or(0.0, |s| s.vcpu_total().wait_share())
        };
        let vms = inputs.vms().iter().zip(self.advice(inputs, meter));
        let states = vms.map(|(vm, advice)| {
            let controls = inputs.controls(vm);
            let is_it = |v: &VmPlan| v.pid == vm.pid as i32;
            let is_managed = applied.cores.iter().any(|c| c.vms.iter().any(is_it));
            let is_turbo = |v: &VmPlan| is_it(v) && v.params.class == Class::Ls;
            let mut turbo_cores = applied.cores.iter();
            let left_out = self.draft.left_out.iter().filter(|(id, _)| *id == vm.id);
            let remarks = left_out.map(|(_, why)| why.clone());
            // A dry run changes no class, so it advises for VMs of class auto as well.
            let setting = match controls.class.value {
                ClassSetting::Auto if inputs.dry_run => ClassSetting::Batch,
                other => other,
            };
            VmState {
                vm,
                class: self.class(vm, &controls),
                turbo: turbo_cores
                    .any(|c| c.algorithm == Algorithm::Turbo && c.vms.iter().any(is_turbo)),
                controls,
                scheduled_by: self.engine.active_mechanism().filter(|_| is_managed),
                turns: turns(&usage, vm.pid),
                remarks: remarks.chain(self.remark(inputs, &controls)).collect(),
                why: match controls.class.value {
                    ClassSetting::Auto if !inputs.config.allows(Accelerator::Slices) => {
                        "auto, and allow in [auto] does not name slices".into()
                    }
                    value => (self.classes).why(&vm.id, (value, controls.class.source), advice),
                },
                advice: match inputs.config.advises(Accelerator::Slices) {
                    true => self.classes.advice(vm, setting, wait(vm), advice),
                    false => None,
                },
            }
        });
        reports(states.collect(), meter, recent)
    }

    /// Why a setting has no effect, if so.
    fn remark(&self, inputs: &Inputs, controls: &Controls) -> Option<String> {
        if controls.class.value == ClassSetting::Batch && !controls.capped_by_viola() {
            return None;
        }
        match self.stage(inputs) {
            (Stage::Off | Stage::Stopped | Stage::Waiting | Stage::Advising, why) => {
                Some(format!("nothing is changed: {why}"))
            }
            _ => None,
        }
    }

    /// What slices are doing, and why.
    pub fn stage(&self, inputs: &Inputs) -> (Stage, String) {
        let retry = &self.engine.retry;
        if inputs.dry_run {
            (Stage::Advising, "this is a dry run".into())
        } else if let Some(by) = &inputs.stopped {
            (Stage::Stopped, format!("{by}; viola start goes on"))
        } else if let Err(obstacle) = &self.mechanism {
            (Stage::Off, obstacle.sentence())
        } else if retry.is_off() {
            (
                Stage::Off,
                format!(
                    "it failed three times in a minute, last: {}; viola start tries it again",
                    retry.last_failure()
                ),
            )
        } else if retry.is_pending() {
            (
                Stage::Waiting,
                format!("{}; it is tried again soon", retry.last_failure()),
            )
        } else if let Some(name) = self.engine.active_mechanism() {
            let cores = self.engine.applied().cores.len();
            let noun = if cores == 1 { "core" } else { "cores" };
            (Stage::Running, format!("{name} on {cores} {noun}"))
        } else {
            (
                Stage::Idle,
                "no VM is latency-sensitive or has a cap, so nothing is changed".into(),
            )
        }
    }

    /// Each core that is set aside for VMs. `why` is what [`Slices::stage`] says.
    pub fn cores(&self, why: &str) -> Vec<Core> {
        let health = self.engine.core_health();
        let applied = self.engine.applied();
        let core = |note: &super::decide::plan::CoreNote| {
            let health = health.iter().find(|h| h.cpu == note.cpu);
            let health = health.copied().unwrap_or_default();
            let managed = applied.cores.iter().any(|c| c.cpu == note.cpu);
            Core {
                cpu: note.cpu,
                managed,
                why: match managed || !note.managed {
                    true => note.why.clone(),
                    false => why.to_owned(),
                },
                vms: note.vms.clone(),
                decisions: health.decisions,
                controller_ns: health.cpu_ns,
                controller_share: self.engine.controller_share(note.cpu),
                late_max_ns: health.late_max,
            }
        };
        self.draft.cores.iter().map(core).collect()
    }

    /// VMs that ask for something they do not get, and why.
    pub fn left_out(&self) -> &[(VmId, String)] {
        &self.draft.left_out
    }

    /// Name of the mechanism in use.
    pub fn mechanism_name(&self) -> Option<&'static str> {
        self.mechanism.as_ref().ok().map(|choice| choice.name())
    }

    /// Whether the kernel takes the BPF programs.
    pub fn support(&self) -> &Support {
        &self.support
    }

    /// How CPU times are measured.
    pub fn accounting_text(&self) -> String {
        match &self.support.accounting {
            Ok(()) => "exact".into(),
            Err(why) => format!("sampled ({why})"),
        }
    }

    /// How often a mechanism failed since the daemon started.
    pub fn failures(&self) -> u32 {
        self.engine.retry.failures()
    }
}
