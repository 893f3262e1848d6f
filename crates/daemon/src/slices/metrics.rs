// SPDX-License-Identifier: Apache-2.0
//! Metrics of managed cores, and what sched_ext counts of each VM.

use viola_proto::{Core, SchedulerCounts, VmReport};

use crate::prometheus::{Text, metrics};
use crate::vms::metrics::{domains, seconds};

metrics! {
    const CORES: fn(&Core) -> f64 = {
        Gauge "viola_core_managed" "Whether viola schedules this core now", |c| u8::from(c.managed).into();
        Counter "viola_core_decisions_total" "Decisions of the core's controller", |c| c.decisions as f64;
        Counter "viola_core_controller_seconds_total" "CPU time of the core's controller", |c| c.controller_ns as f64 / 1e9;
        Gauge "viola_core_late_max_seconds" "Longest delay of a wake-up of the core's controller", |c| c.late_max_ns as f64 / 1e9;
    }

    const BY_SCHED_EXT: fn(&SchedulerCounts) -> f64 = {
        Counter "viola_sched_ext_turns_total" "Times that sched_ext put one of its threads on a core", |t| t.turns as f64;
        Counter "viola_sched_ext_run_seconds_total" "Time that its threads ran under sched_ext", |t| seconds(t.run_ns);
        Counter "viola_sched_ext_waits_total" "Waits for a core under sched_ext", |t| t.waits as f64;
        Counter "viola_sched_ext_wait_seconds_total" "Sum of these waits", |t| seconds(t.wait_ns);
        Gauge "viola_sched_ext_wait_max_seconds" "Longest of these waits", |t| seconds(t.wait_max_ns);
        Counter "viola_sched_ext_boosts_total" "Times that a thread preempted another VM when it woke", |t| t.boosts as f64;
    }
}

/// Writes what each core and each VM got.
pub fn write(out: &mut Text, cores: &[Core], vms: &[VmReport]) {
    out.all("", CORES, cores, |core| ("cpu", core.cpu.to_string()));
    let domains = domains(vms);
    for (name, kind, help, value) in BY_SCHED_EXT {
        out.head(name, *kind, help);
        for (vm, domain) in vms.iter().zip(&domains) {
            if let Some(turns) = &vm.turns {
                out.line(name, &[("domain", domain)], value(turns));
            }
        }
    }
}
