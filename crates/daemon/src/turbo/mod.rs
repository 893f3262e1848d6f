// SPDX-License-Identifier: Apache-2.0
//! Turbo cores (vTurbo): the vCPU of a VM that takes its interrupts runs on a turbo core, where
//! slices are 0.1 ms.
//!
//! | file | role |
//! |---|---|
//! | `decide` | which VMs get a turbo vCPU, how many turbo cores there are, and what that changes in the plan |
//! | `check` | what `viola check` says |
//!
//! [`crate::slices`] observes for both, plans both kinds of core together, applies and restores the plan, and shows it, so the
//! other roles are there.

pub mod check;
pub(crate) mod decide;

use viola_host::{CpuSet, Vm, VmId};
use viola_meter::Snapshot;
use viola_proto::{Class, ClassSetting, VmReport};

use crate::vms::Inputs;
use crate::vms::report::propose;
use decide::cores::{Pools, TurboCores};
use decide::vms::TurboVms;
use viola_cli::log::{self, Level};
use viola_config::{Accelerator, Turbo as TurboSection};

/// State of turbo.
#[derive(Debug, Default)]
pub struct Turbo {
    vms: TurboVms,
    cores: TurboCores,
}

impl Turbo {
    /// Takes what each VM spent in a window; `true` when another number of turbo cores or another VM with a turbo vCPU follows.
    /// Without `can_act`, VMs of class auto get no turbo vCPU.
    pub fn decide(&mut self, window: &Snapshot, inputs: &Inputs, can_act: bool) -> bool {
        let mut has_changed = self.count_cores(window, inputs);
        let turbo = &inputs.config.turbo;
        let may_choose = can_act && inputs.config.allows(Accelerator::Turbo);
        let reserve = (may_choose && !turbo.cores.is_empty()).then_some(turbo.reserve);
        for vm in inputs.vms() {
            let Ok(at) = window.vms.binary_search_by(|s| s.id.cmp(&vm.id)) else {
                continue;
            };
            let setting = inputs.class(vm);
            let times = (window.at, window.span);
            let sample = &window.vms[at];
            if let Some(what) = self.vms.observe(vm, setting, reserve, sample, times) {
                log::about(Level::Notice, &vm.id, what);
                has_changed = true;
            }
        }
        has_changed
    }

    /// Takes the load of the turbo vCPUs; `true` when another number of turbo cores follows.
    fn count_cores(&mut self, window: &Snapshot, inputs: &Inputs) -> bool {
        let (mut vms, mut run) = (0, 0);
        for vm in inputs.vms() {
            if vm.vcpus.len() < 2 || !self.vms.wants(&vm.id, inputs.class(vm)) {
                continue;
            }
            vms += 1;
            let at = window.vms.binary_search_by(|s| s.id.cmp(&vm.id));
            let sample = at.ok().and_then(|at| window.vms.get(at));
            run += sample.map_or(0, |s| s.vcpus.first().map_or(0, |t| t.run) + s.service.run);
        }
        let config = &inputs.config;
        let changed = self.cores.observe(
            (window.at, window.span),
            vms,
            run,
            (&config.slices.cores, &config.turbo),
            &inputs.online,
        );
        if let Some(what) = &changed {
            log::line(Level::Notice, what);
        }
        changed.is_some()
    }

    /// The present regular and turbo cores.
    pub fn pools(&self, regular: &CpuSet, turbo: &TurboSection, online: &CpuSet) -> Pools {
        self.cores.pools(regular, turbo, online)
    }

    /// Whether a VM of this class setting gets a turbo vCPU, if its vCPUs and cores allow that.
    pub fn wants(&self, id: &VmId, setting: ClassSetting) -> bool {
        self.vms.wants(id, setting)
    }

    /// Advises VMs that do steady I/O and wait to get a turbo vCPU, unless a shorter way is open: class ls.
    pub fn add_advice(&self, reports: &mut [VmReport], vms: &[Vm]) {
        for (report, vm) in reports.iter_mut().zip(vms) {
            if report.class == Class::Ls || !report.help.is_empty() {
                continue;
            }
            let Some(why) = self.vms.advice(&vm.id) else {
                continue;
            };
            let sentence = format!(
                "{}: it has {why}; a turbo core could take its interrupts: the book's page on turbo tells what [turbo] and \
                 class turbo need",
                report.name
            );
            propose(report, "turbo", sentence);
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.vms.forget(id);
    }
}
