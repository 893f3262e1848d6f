// SPDX-License-Identifier: Apache-2.0
//! What lanes read of the host: the guests' NICs (`guests`), their traffic (`counters`), and the CPU times of VMs.

pub mod counters;
pub mod guests;

use std::collections::BTreeMap;

use viola_host::{Vm, VmId};
use viola_policy::lanes::CpuTime;

use crate::vms::recent::Recent;

/// How each vCPU spent the last second, which gives DI2.
pub fn cpu_times(recent: &Recent, vms: &[Vm]) -> BTreeMap<VmId, Vec<CpuTime>> {
    let times = |vm: &Vm| {
        let vcpus = &recent.vm(&vm.id)?.vcpus;
        let time = |t: &viola_meter::Times| CpuTime {
            gotten: t.run,
            blocked: t.blocked,
        };
        Some((vm.id.clone(), vcpus.iter().map(time).collect()))
    };
    vms.iter().filter_map(times).collect()
}
