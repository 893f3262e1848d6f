// SPDX-License-Identifier: Apache-2.0
use super::tests::cpus;
use super::*;
use crate::cores::TurboConfig;
use crate::testing::{serve, thread, vm};
use proptest::prelude::*;

fn candidate(vm: &Vm, index: u32, turbo: bool) -> Candidate<'_> {
    Candidate {
        turbo,
        ..tests::candidate(vm, index, Class::Batch)
    }
}

fn draft(regular: &str, turbo: &str, budget: Option<u32>, candidates: &[Candidate<'_>]) -> Draft {
    let (cores, turbo) = (cpus(regular), turbo.parse().unwrap_or_default());
    let config = PlanConfig {
        cores: &cores,
        algorithm: Algorithm::Interleaved,
        batch_slice: 4_000_000,
        turbo: Some(TurboConfig {
            cores: &turbo,
            slot: 100_000,
            budget_permille: budget,
            reserve_permille: 300,
            why_none: "they are offline",
        }),
    };
    slots(config, candidates, |requests| {
        requests
            .iter()
            .map(|a| a.cores.iter().next().unwrap())
            .collect()
    })
}

fn core(d: &Draft, cpu: u32) -> &CorePlan {
    d.plan.cores.iter().find(|c| c.cpu == cpu).unwrap()
}

fn tids(v: &VmPlan) -> Vec<i32> {
    v.threads.iter().map(|t| t.tid).collect()
}

#[test]
fn a_turbo_vcpu_may_wait_on_a_regular_core_of_its_vm_unless_it_may_not_run_there() {
    let (a, b) = (
        vm("a", 10, &[&[0, 1], &[0, 1]]),
        vm("b", 20, &[&[0], &[0, 1]]),
    );
    let d = draft(
        "1",
        "0",
        None,
        &[candidate(&a, 0, true), candidate(&b, 1, true)],
    );
    let parks: Vec<_> = core(&d, 0).vms.iter().map(|v| v.hold_cpu).collect();
    assert_eq!(parks, [Some(1), None]);
    assert!(core(&d, 1).vms.iter().all(|v| v.hold_cpu.is_none()));
    assert_eq!(
        (core(&d, 0).reserve_permille, core(&d, 1).reserve_permille),
        (300, 0)
    );
}

#[test]
fn a_vm_whose_second_vcpu_is_unplugged_loses_its_turbo_vcpu_with_the_reason() {
    let mut a = vm("a", 10, &[&[0, 1], &[0, 1]]);
    let d = draft("1", "0", None, &[candidate(&a, 0, true)]);
    assert_eq!(core(&d, 0).algorithm, Algorithm::Turbo);
    a.vcpus.pop();
    let d = draft("1", "0", None, &[candidate(&a, 0, true)]);
    assert!(d.plan.cores.is_empty() && d.pins.is_empty(), "{d:?}");
    assert!(
        d.left_out[0].1.contains("it has one vCPU"),
        "{:?}",
        d.left_out
    );
}

#[test]
fn with_the_turbo_core_offline_the_vm_runs_without_a_turbo_vcpu_and_shows_why() {
    let a = vm("a", 10, &[&[0, 1], &[0, 1]]);
    let d = draft("1", "", None, &[candidate(&a, 0, true)]);
    assert!(d.plan.cores.is_empty() && d.pins.is_empty(), "{d:?}");
    assert!(
        d.left_out[0].1.contains("they are offline"),
        "{:?}",
        d.left_out
    );
}

#[test]
fn the_first_vcpu_of_an_io_vm_is_on_the_turbo_core_and_the_other_on_the_regular_one() {
    let (mut a, b) = (vm("a", 10, &[&[0, 1], &[0, 1]]), vm("b", 20, &[&[1]]));
    serve(&mut a, 15);
    // The guest processes: each vCPU creates one.
    a.vcpus[0].threads.push(thread(98, 98));
    a.vcpus[1].threads.push(thread(99, 99));
    let d = draft(
        "1",
        "0",
        Some(500),
        &[candidate(&a, 0, true), candidate(&b, 1, false)],
    );
    let (turbo, regular) = (core(&d, 0), core(&d, 1));
    assert_eq!(
        (turbo.algorithm, turbo.budget_permille, turbo.vms.len()),
        (Algorithm::Turbo, Some(500), 1)
    );
    assert_eq!(tids(&turbo.vms[0]), [10, 15]);
    assert_eq!(
        (
            turbo.vms[0].params.class,
            turbo.vms[0].params.microslice,
            turbo.vms[0].regular_vcpus
        ),
        (Class::Ls, 100_000, (0, 1))
    );
    assert_eq!(
        (
            regular.algorithm,
            regular.budget_permille,
            regular.vms.len()
        ),
        (Algorithm::Regular, None, 2)
    );
    assert_eq!(tids(&regular.vms[0]), [98, 11, 99]);
    assert_eq!(
        (regular.vms[0].params.class, regular.vms[0].regular_vcpus),
        (Class::Batch, (1, 1))
    );
    assert_eq!(regular.vms[1].regular_vcpus, (1, 1));
    let pin = |tid: u32| {
        d.pins
            .iter()
            .find(|(t, _)| t.tid == tid)
            .map(|(_, c)| c.to_string())
    };
    assert_eq!(
        [10, 15, 98, 11, 99].map(|t| pin(t).unwrap()),
        ["0", "0", "1", "1", "1"]
    );
    assert!(d.left_out.is_empty());
    assert_eq!(d.cores[0].why, "a has a turbo vCPU");
}

#[test]
fn without_a_turbo_vm_both_cores_keep_their_plans() {
    let a = vm("a", 10, &[&[0, 1], &[0, 1]]);
    let d = draft("1", "0", Some(500), &[candidate(&a, 0, false)]);
    assert!(d.plan.cores.is_empty() && d.pins.is_empty() && d.left_out.is_empty());
    assert_eq!(d.cores[0].why, "no VM has its turbo vCPU there");
}

#[test]
fn a_vm_with_one_vcpu_gets_no_turbo_vcpu_and_shows_why() {
    let (a, b) = (vm("a", 10, &[&[0, 1]]), vm("b", 20, &[&[1], &[1]]));
    let d = draft(
        "1",
        "0",
        None,
        &[candidate(&a, 0, true), candidate(&b, 1, true)],
    );
    assert!(d.plan.cores.is_empty());
    let why: Vec<&str> = d.left_out.iter().map(|l| l.1.as_str()).collect();
    assert_eq!(
        why,
        [
            "it has no turbo vCPU: it has one vCPU and none can be added: give it a second one",
            "it has no turbo vCPU: its vCPU 0 may run on 1 only, which are no turbo cores (0)",
        ]
    );
}

#[test]
fn a_cap_is_whole_on_every_core_of_the_pools() {
    let a = vm("a", 10, &[&[0], &[1], &[2]]);
    let mut c = candidate(&a, 0, true);
    (c.cap_permille, c.capped_by_viola) = (Some(1400), true);
    let d = draft("1-2", "0", None, &[c]);
    let caps: Vec<_> = d
        .plan
        .cores
        .iter()
        .map(|c| (c.vms[0].params.cap_permille, c.vms[0].regular_vcpus))
        .collect();
    assert_eq!(
        caps,
        [
            (Some(1400), (0, 2)),
            (Some(1400), (1, 2)),
            (Some(1400), (1, 2))
        ]
    );
}

#[test]
fn a_regular_core_that_cannot_be_managed_takes_the_turbo_vcpu_with_it() {
    let (a, b) = (vm("a", 10, &[&[0, 1], &[0, 1]]), vm("b", 20, &[&[1]]));
    let mut stuck = candidate(&b, 1, false);
    stuck.blocked = Some("no".into());
    let d = draft("1", "0", None, &[candidate(&a, 0, true), stuck]);
    assert!(d.plan.cores.is_empty() && d.pins.is_empty(), "{d:?}");
    assert_eq!(
        d.left_out[0].1,
        "it has no turbo vCPU: core 1 keeps stock scheduling: b runs there and cannot be managed: no"
    );
}

#[test]
fn a_vm_without_a_turbo_vcpu_that_may_only_run_on_a_turbo_core_runs_in_the_gaps() {
    let (a, b) = (vm("a", 10, &[&[2], &[1]]), vm("b", 20, &[&[2]]));
    let cs = [candidate(&a, 0, true), candidate(&b, 1, false)];
    let d = draft("1", "2", None, &cs);
    let classes: Vec<_> = core(&d, 2).vms.iter().map(|v| v.params.class).collect();
    assert_eq!(classes, [Class::Ls, Class::Batch]);
    // With a budget the host uses the gaps, so the VM without a turbo vCPU gets none.
    assert_eq!(core(&draft("1", "2", Some(500), &cs), 2).vms.len(), 1);
}

#[test]
fn class_ls_beside_a_vm_with_a_turbo_vcpu_is_reported_as_without_effect() {
    let (a, b) = (vm("a", 10, &[&[0], &[1]]), vm("b", 20, &[&[1]]));
    let mut ls = candidate(&b, 1, false);
    ls.class = Class::Ls;
    let d = draft("1", "0", None, &[candidate(&a, 0, true), ls]);
    assert_eq!(core(&d, 1).vms[1].params.class, Class::Batch);
    assert!(
        d.left_out[0].1.contains("since a has a turbo vCPU"),
        "{:?}",
        d.left_out
    );
}

proptest! {
    #[test]
    fn every_thread_is_real_time_on_at_most_one_core_and_kept_there(
        vms in proptest::collection::vec(
            (proptest::collection::vec(1u8..16, 1..4), any::<bool>(), proptest::bool::weighted(0.2)),
            1..6,
        ),
        regular in 1u8..16,
        turbo in 1u8..16,
        budget in any::<bool>(),
    ) {
        let set = |bits: u8| -> Vec<u32> { (0..4).filter(|b| bits & 1 << b != 0).collect() };
        let vms: Vec<(Vm, bool, bool)> = vms
            .iter()
            .enumerate()
            .map(|(i, (vcpus, turbo, blocked))| {
                let cores: Vec<Vec<u32>> = vcpus.iter().map(|b| set(*b)).collect();
                let cores: Vec<&[u32]> = cores.iter().map(Vec::as_slice).collect();
                let pid = 100 * (i as u32 + 1);
                let mut vm = vm(&format!("v{i}"), pid, &cores);
                vm.vcpus[0].threads.push(thread(pid + 50, pid + 50));
                serve(&mut vm, pid + 60);
                (vm, *turbo, *blocked)
            })
            .collect();
        let cs: Vec<Candidate<'_>> = vms
            .iter()
            .enumerate()
            .map(|(i, (vm, turbo, blocked))| {
                let mut c = candidate(vm, i as u32, *turbo);
                c.blocked = blocked.then(|| "no".to_owned());
                c
            })
            .collect();
        let list = |bits: u8| set(bits).iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let turbo = turbo & !regular;
        prop_assume!(turbo != 0);
        let d = draft(&list(regular), &list(turbo), budget.then_some(500), &cs);
        for c in &cs {
            let vm = c.vm;
            let allowed = |t: &viola_host::Thread| {
                let of = vm.vcpus.iter().find(|v| v.threads.contains(t));
                of.map_or(&vm.cores, |v| &v.cores).clone()
            };
            let on = |tid: u32| -> Vec<u32> {
                let has = |p: &&CorePlan| p.vms.iter().any(|v| tids(v).contains(&(tid as i32)));
                d.plan.cores.iter().filter(has).map(|p| p.cpu).collect()
            };
            for t in vm.threads() {
                let now = d.pins.get(t).cloned().unwrap_or_else(|| allowed(t));
                match on(t.tid)[..] {
                    [] => {}
                    [cpu] => prop_assert_eq!(now, [cpu].into_iter().collect::<CpuSet>(), "{}", t.tid),
                    _ => prop_assert!(false, "{} on two cores", t.tid),
                }
            }
            let turbo_here = |p: &&CorePlan| {
                p.algorithm == Algorithm::Turbo
                    && p.vms.iter().any(|v| v.pid == vm.pid as i32 && v.params.class == Class::Ls)
            };
            let has_turbo = d.plan.cores.iter().any(|p| turbo_here(&p));
            if has_turbo {
                prop_assert!(c.turbo && c.blocked.is_none());
                for v in &vm.vcpus[1..] {
                    let at = on(v.threads[0].tid);
                    prop_assert_eq!(at.len(), 1, "its shares are not kept");
                    prop_assert_eq!(core(&d, at[0]).algorithm, Algorithm::Regular);
                }
            } else if c.turbo {
                prop_assert!(d.left_out.iter().any(|(id, _)| *id == vm.id));
            }
        }
    }
}
