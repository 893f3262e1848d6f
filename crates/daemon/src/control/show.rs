// SPDX-License-Identifier: Apache-2.0
//! What the loop shows of itself.

use std::time::Instant;

use viola_host::Vm;
use viola_policy::slices::Class;
use viola_proto::{Check, ClassSetting, Core, Stage, Status, UnmanagedVm, VmList, VmReport};
use viola_sched::{Algorithm, VmPlan};

use crate::control::{Control, PUBLISH};
use crate::host::libvirt::Libvirt;
use crate::slices::check;
use crate::vms::recent::Recent;
use crate::vms::report::{self, Known, View, add_vread, reports};

/// A class as it is written.
pub fn class_text(class: ClassSetting) -> &'static str {
    match class {
        ClassSetting::Ls => "ls",
        ClassSetting::Batch => "batch",
        ClassSetting::Auto => "auto",
        ClassSetting::Turbo => "turbo",
    }
}

impl Control {
    /// Whether the view is old enough to be drawn up anew.
    pub fn should_publish(&mut self, now: Instant) -> bool {
        let due = self
            .published
            .is_none_or(|at| now.saturating_duration_since(at) >= PUBLISH);
        if due {
            self.published = Some(now);
        }
        due
    }

    /// Everything that can be asked for.
    pub fn view(&self, now: Instant) -> View {
        let recent = self.recent();
        let mut vms = self.reports_of(&recent);
        let mut rows = check::rows(
            &self.facts,
            &self.config.slices,
            &self.accounting,
            &self.scheduler,
            self.inventory.vms(),
        );
        rows.push(crate::host::check::row(
            Some(&self.shown_libvirt()),
            &self.config,
        ));
        let vread = self.vread.as_ref().map(|v| v.shown());
        let vread = vread.unwrap_or_else(|| viola_proto::vread::Vread {
            why: "this is a dry run".into(),
            ..Default::default()
        });
        add_vread(&mut vms, &vread);
        let advice = vms.iter().filter_map(|vm| vm.advice.clone()).collect();
        rows.push(crate::turbo::check::row(
            &self.config,
            &self.facts,
            (&self.accounting, &self.scheduler),
            self.inventory.vms(),
        ));
        let lanes = self.shown_lanes();
        rows.push(crate::lanes::check::row(Some(&lanes), &self.config));
        rows.push(check::vread(Some(&vread), &self.config.vread));
        rows.extend(crate::vread::check::row(Some(&vread), &self.config.vread));
        View {
            status: self.status(now),
            vms: VmList {
                vms,
                measured_ns: recent.span,
                warnings: self.warnings.clone(),
            },
            vread,
            totals: self.totals.shown(),
            lanes,
            check: Check {
                rows,
                advice,
                warnings: self.warnings.clone(),
            },
        }
    }

    pub(super) fn shown_lanes(&self) -> viola_proto::lanes::Lanes {
        let shown = self.lanes.as_ref().map(|l| l.shown());
        shown.unwrap_or_else(|| viola_proto::lanes::Lanes {
            why: "this is a dry run".into(),
            ..Default::default()
        })
    }

    fn shown_libvirt(&self) -> viola_proto::Libvirt {
        let shown = self.libvirt.as_ref().map(Libvirt::shown);
        shown.unwrap_or_default()
    }

    pub(super) fn recent(&self) -> Recent {
        Recent::of(self.meter.history())
    }

    pub(super) fn reports(&self) -> Vec<VmReport> {
        self.reports_of(&self.recent())
    }

    fn reports_of(&self, recent: &Recent) -> Vec<VmReport> {
        let applied = self.engine.applied();
        let got = self.engine.got();
        let wait = |vm: &Vm| {
            recent
                .vm(&vm.id)
                .map_or(0.0, |s| s.vcpu_total().wait_share())
        };
        let known = self
            .inventory
            .vms()
            .iter()
            .zip(self.advice())
            .map(|(vm, advice)| {
                let controls = self.settings.controls(&self.config, vm);
                let managed = applied
                    .cores
                    .iter()
                    .any(|c| c.vms.iter().any(|v| v.pid == vm.pid as i32));
                let remarks = self
                    .draft
                    .left_out
                    .iter()
                    .filter(|(id, _)| *id == vm.id)
                    .map(|(_, why)| why.clone());
                Known {
                    vm,
                    class: self.class(vm, &controls),
                    turbo: applied.cores.iter().any(|c| {
                        let turbo =
                            |v: &VmPlan| v.pid == vm.pid as i32 && v.params.class == Class::Ls;
                        c.algorithm == Algorithm::Turbo && c.vms.iter().any(turbo)
                    }),
                    controls,
                    scheduled_by: self.engine.at_work().filter(|_| managed),
                    turns: report::turns(&got, vm.pid),
                    remarks: remarks.chain(self.remark(&controls)).collect(),
                    advice: self.classes.advice(
                        vm,
                        self.advised(controls.class.value),
                        wait(vm),
                        advice,
                    ),
                }
            })
            .collect();
        reports(known, &self.meter, recent)
    }

    /// A dry run leaves to the operator what class auto would do.
    fn advised(&self, setting: ClassSetting) -> ClassSetting {
        match setting {
            ClassSetting::Auto if self.dry_run => ClassSetting::Batch,
            other => other,
        }
    }

    /// Why nothing comes of a setting.
    fn remark(&self, controls: &crate::vms::settings::Controls) -> Option<String> {
        if controls.class.value == ClassSetting::Batch && !controls.capped_by_viola() {
            return None;
        }
        match self.stage() {
            (Stage::Off | Stage::Stopped | Stage::Waiting | Stage::Advising, why) => {
                Some(format!("nothing is changed: {why}"))
            }
            _ => None,
        }
    }

    fn stage(&self) -> (Stage, String) {
        let trouble = &self.engine.trouble;
        if self.dry_run {
            (Stage::Advising, "this is a dry run".into())
        } else if let Some(by) = &self.stopped {
            (Stage::Stopped, format!("{by}; viola start goes on"))
        } else if let Err(obstacle) = &self.choice {
            (Stage::Off, obstacle.sentence())
        } else if trouble.is_off() {
            (
                Stage::Off,
                format!(
                    "it failed three times in a minute, last: {}; viola start tries it again",
                    trouble.why()
                ),
            )
        } else if trouble.is_pending() {
            (
                Stage::Waiting,
                format!("{}; it is tried again soon", trouble.why()),
            )
        } else if let Some(name) = self.engine.at_work() {
            let cores = self.engine.applied().cores.len();
            (
                Stage::Running,
                format!(
                    "{name} on {cores} {}",
                    if cores == 1 { "core" } else { "cores" }
                ),
            )
        } else {
            (
                Stage::Idle,
                "no VM is latency-sensitive or has a cap, so nothing is changed".into(),
            )
        }
    }

    pub(super) fn status(&self, now: Instant) -> Status {
        let (stage, why) = self.stage();
        let health = self.engine.cores();
        let cores = self
            .draft
            .cores
            .iter()
            .map(|note| {
                let health = health
                    .iter()
                    .find(|h| h.cpu == note.cpu)
                    .copied()
                    .unwrap_or_default();
                let managed = self
                    .engine
                    .applied()
                    .cores
                    .iter()
                    .any(|c| c.cpu == note.cpu);
                Core {
                    cpu: note.cpu,
                    managed,
                    why: if managed || !note.managed {
                        note.why.clone()
                    } else {
                        why.clone()
                    },
                    vms: note.vms.clone(),
                    decisions: health.decisions,
                    controller_ns: health.cpu_ns,
                    controller_share: self.engine.controller_share(note.cpu),
                    late_max_ns: health.late_max,
                }
            })
            .collect();
        Status {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").into(),
            config: self.config.path.display().to_string(),
            uptime_ns: now.saturating_duration_since(self.started).as_nanos() as u64,
            interval_ns: self.config.daemon.interval,
            stage,
            why,
            mechanism: self.choice.as_ref().ok().map(|c| c.name().to_owned()),
            accounting: match &self.accounting {
                Ok(()) => "exact".into(),
                Err(why) => format!("sampled ({why})"),
            },
            cores,
            left_out: self
                .draft
                .left_out
                .iter()
                .map(|(id, why)| UnmanagedVm {
                    vm: id.to_string(),
                    why: why.clone(),
                })
                .collect(),
            libvirt: self.shown_libvirt(),
            failures: self.engine.trouble.total(),
            warnings: self.warnings.clone(),
        }
    }
}
