// SPDX-License-Identifier: Apache-2.0
//! The log lines about what a new plan changes.

use std::collections::BTreeMap;

use viola_host::{Vm, VmId};
use viola_sched::{Plan, VmPlan};

use crate::cores::DesiredPins;
use crate::slices::decide::plan::Draft;
use viola_cli::log::{self, Level};
use viola_cli::quantities::{cap_text, exact};

/// Where threads of a VM are kept from now on.
pub fn pinned_text(pins: &DesiredPins, vms: &[Vm], id: &VmId) -> String {
    let vm = vms.iter().find(|vm| vm.id == *id);
    let mut cpus: Vec<String> = vm
        .into_iter()
        .flat_map(Vm::threads)
        .filter_map(|t| pins.get(t))
        .map(ToString::to_string)
        .collect();
    cpus.sort();
    cpus.dedup();
    if cpus.is_empty() {
        "its threads may run where they could before".into()
    } else {
        format!(
            "threads that could run on several cores are kept on {}",
            cpus.join(" and ")
        )
    }
}

/// Logs each core and each VM that is scheduled in another way from now on.
pub fn log(mechanism: &str, old: &Plan, draft: &Draft, vms: &[Vm]) {
    for (vm, what) in lines(mechanism, old, draft, vms) {
        log_line(vm.as_ref(), what);
    }
}

/// Logs what a dry run would have changed.
pub fn log_as_dry_run(mechanism: &str, old: &Plan, draft: &Draft, vms: &[Vm]) {
    for (vm, what) in lines(mechanism, old, draft, vms) {
        log_line(vm.as_ref(), format!("dry run, would be: {what}"));
    }
}

fn log_line(vm: Option<&VmId>, what: String) {
    match vm {
        None => log::line(Level::Notice, what),
        Some(vm) => log::about(Level::Notice, vm, what),
    }
}

/// Lines about cores, then about VMs.
fn lines(mechanism: &str, old: &Plan, draft: &Draft, vms: &[Vm]) -> Vec<(Option<VmId>, String)> {
    let mut lines = Vec::new();
    let managed = |plan: &Plan, cpu: u32| plan.cores.iter().any(|c| c.cpu == cpu);
    for note in &draft.cores {
        match (managed(old, note.cpu), note.managed) {
            (false, true) => lines.push((
                None,
                format!("core {}: {mechanism} on, since {}", note.cpu, note.why),
            )),
            (true, false) => lines.push((
                None,
                format!(
                    "core {}: back to stock scheduling, since {}",
                    note.cpu, note.why
                ),
            )),
            _ => {}
        }
    }
    let (before, after) = (by_vm(old), by_vm(&draft.plan));
    for vm in vms {
        let key = |map: &BTreeMap<i32, Vec<String>>| {
            map.get(&(vm.pid as i32)).cloned().unwrap_or_default()
        };
        let (was, is) = (key(&before), key(&after));
        if was != is {
            let what = match is.is_empty() {
                true => "stock scheduling".to_owned(),
                false => format!("{mechanism}: {}", is.join("; ")),
            };
            lines.push((Some(vm.id.clone()), what));
        }
    }
    lines
}

/// How each VM is scheduled on each of its cores, by process.
fn by_vm(plan: &Plan) -> BTreeMap<i32, Vec<String>> {
    let mut words: BTreeMap<i32, Vec<String>> = BTreeMap::new();
    for core in &plan.cores {
        for v in &core.vms {
            words
                .entry(v.pid)
                .or_default()
                .push(format!("core {}, {}", core.cpu, params_text(v)));
        }
    }
    words
}

fn params_text(v: &VmPlan) -> String {
    let class = match v.params.class {
        viola_policy::slices::Class::Ls => {
            format!("class ls, microslice {}", exact(v.params.microslice))
        }
        viola_policy::slices::Class::Batch => "class batch".into(),
    };
    let cap = v
        .params
        .cap_permille
        .map(|c| format!(", cap {}", cap_text(Some(c))))
        .unwrap_or_default();
    format!("{class}, weight {}{cap}", v.params.weight)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::slices::decide::plan::CoreNote;
    use crate::testing::vm;
    use viola_policy::slices::{Class, Params};
    use viola_sched::{Algorithm, CorePlan};

    /// A plan of core 1 with these VMs: process, class, weight.
    pub fn plan(vms: &[(i32, Class, u32)]) -> Plan {
        let vms = vms
            .iter()
            .map(|&(pid, class, weight)| VmPlan {
                hold_cpu: None,
                resets_on_fork: false,
                params: Params {
                    id: pid as u32,
                    class,
                    weight,
                    cap_permille: None,
                    microslice: 300_000,
                },
                index: 0,
                pid,
                sees_packets: false,
                regular_vcpus: (0, 0),
                threads: Vec::new(),
            })
            .collect();
        Plan {
            cores: vec![CorePlan {
                cpu: 1,
                algorithm: Algorithm::Interleaved,
                batch_slice: 1,
                budget_permille: None,
                reserve_permille: 0,
                vms,
            }],
        }
    }

    fn draft(plan: Plan, why: &str) -> Draft {
        let managed = !plan.cores.is_empty();
        let note = CoreNote {
            cpu: 1,
            managed,
            why: why.into(),
            vms: Vec::new(),
        };
        Draft {
            plan,
            cores: vec![note],
            ..Draft::default()
        }
    }

    #[test]
    fn each_change_is_logged_once_with_its_reason() {
        let vms = [vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]])];
        let on = draft(
            plan(&[(10, Class::Ls, 256), (20, Class::Batch, 512)]),
            "a is latency-sensitive",
        );
        let text = |old: &Plan, draft: &Draft| -> Vec<String> {
            lines("slots", old, draft, &vms)
                .into_iter()
                .map(|(vm, t)| format!("{}{t}", vm.map(|v| format!("{v}: ")).unwrap_or_default()))
                .collect()
        };
        assert_eq!(
            text(&Plan::default(), &on),
            [
                "core 1: slots on, since a is latency-sensitive",
                "uml:a: slots: core 1, class ls, microslice 300us, weight 256",
                "uml:b: slots: core 1, class batch, weight 512",
            ]
        );
        assert!(text(&on.plan, &on).is_empty());
        assert_eq!(
            text(
                &on.plan,
                &draft(
                    Plan::default(),
                    "no VM there is latency-sensitive or has a cap"
                )
            ),
            [
                "core 1: back to stock scheduling, since no VM there is latency-sensitive or has a cap",
                "uml:a: stock scheduling",
                "uml:b: stock scheduling",
            ]
        );
    }
}
