// SPDX-License-Identifier: Apache-2.0
use super::*;
use crate::testing::{serve, thread, vm};
use proptest::prelude::*;

pub(super) fn candidate(vm: &Vm, index: u32, class: Class) -> Candidate<'_> {
    Candidate {
        vm,
        index,
        class,
        turbo: false,
        microslice: 300_000,
        weight: 256,
        cap_permille: None,
        capped_by_viola: false,
        vcpu_quota: None,
        allowed: vm
            .service
            .iter()
            .map(|s| (s.thread.tid, vm.cores.clone()))
            .collect(),
        blocked: None,
    }
}

fn first_core(requests: &[PlacementRequest]) -> Vec<u32> {
    requests
        .iter()
        .map(|a| a.cores.iter().next().unwrap())
        .collect()
}

pub(super) fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

fn draft(cores: &str, candidates: &[Candidate<'_>]) -> Draft {
    draft_as(Algorithm::Interleaved, cores, candidates)
}

fn draft_as(algorithm: Algorithm, cores: &str, candidates: &[Candidate<'_>]) -> Draft {
    slots(
        PlanConfig {
            cores: &cpus(cores),
            algorithm,
            batch_slice: 4_000_000,
            turbo: None,
        },
        candidates,
        first_core,
    )
}

fn managed(d: &Draft) -> Vec<u32> {
    d.plan.cores.iter().map(|c| c.cpu).collect()
}

#[test]
fn without_a_latency_sensitive_vm_no_core_is_managed() {
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[0, 1]]));
    let d = draft(
        "1",
        &[
            candidate(&a, 0, Class::Batch),
            candidate(&b, 1, Class::Batch),
        ],
    );
    assert_eq!(
        (d.plan.cores.len(), d.pins.len(), d.left_out.len()),
        (0, 0, 0)
    );
    assert_eq!(
        d.cores[0].why,
        "no VM there is latency-sensitive or has a cap"
    );
    assert_eq!(d.cores[0].vms, ["a", "b"]);
}

#[test]
fn a_core_with_a_latency_sensitive_vm_is_managed_with_all_its_vms_and_the_next_core_is_not() {
    let (a, b, c) = (
        vm("a", 10, &[&[1]]),
        vm("b", 20, &[&[1]]),
        vm("c", 30, &[&[2]]),
    );
    let cs = [
        candidate(&a, 0, Class::Ls),
        candidate(&b, 1, Class::Batch),
        candidate(&c, 2, Class::Batch),
    ];
    let d = draft("1-2", &cs);
    assert_eq!(managed(&d), [1]);
    assert_eq!(
        d.plan.cores[0]
            .vms
            .iter()
            .map(|v| v.pid)
            .collect::<Vec<_>>(),
        [10, 20]
    );
    assert!(d.pins.is_empty());
    assert_eq!(d.cores[0].why, "a is latency-sensitive");
    assert!(!d.cores[1].managed);
}

#[test]
fn the_papers_modes_manage_every_core_with_a_vm() {
    let a = vm("a", 10, &[&[1]]);
    for algorithm in [Algorithm::Paper, Algorithm::Credit { boost: true }] {
        assert_eq!(
            managed(&draft_as(
                algorithm,
                "1-2",
                &[candidate(&a, 0, Class::Batch)]
            )),
            [1]
        );
    }
}

#[test]
fn a_cap_that_the_kernel_does_not_enforce_makes_a_core_managed_and_a_quota_does_not() {
    let a = vm("a", 10, &[&[1]]);
    let mut c = candidate(&a, 0, Class::Batch);
    c.cap_permille = Some(200);
    assert!(managed(&draft("1", std::slice::from_ref(&c))).is_empty());
    c.capped_by_viola = true;
    let d = draft("1", &[c]);
    assert_eq!(managed(&d), [1]);
    assert_eq!(d.plan.cores[0].vms[0].params.cap_permille, Some(200));
}

#[test]
fn a_cap_is_divided_among_the_cores_that_the_vm_uses() {
    let a = vm("a", 10, &[&[1], &[2], &[2], &[0]]);
    let mut c = candidate(&a, 0, Class::Ls);
    c.cap_permille = Some(900);
    let caps = |c: &Candidate<'_>| -> Vec<_> {
        draft("1-2", std::slice::from_ref(c))
            .plan
            .cores
            .iter()
            .map(|p| p.vms[0].params.cap_permille)
            .collect()
    };
    assert_eq!(caps(&c), [Some(300), Some(300)]);
    // vcpu_quota counts once for each of the VM's vCPUs on the core.
    c.vcpu_quota = Some(140);
    assert_eq!(caps(&c), [Some(140), Some(280)]);
    c.cap_permille = Some(3000);
    c.vcpu_quota = None;
    assert_eq!(caps(&c), [None, None]);
}

#[test]
fn several_vcpus_of_a_vm_on_a_core_are_one_entry_and_kernel_threads_rank_above() {
    let a = vm("a", 10, &[&[1], &[1]]);
    let d = draft("1", &[candidate(&a, 5, Class::Ls)]);
    let entry = &d.plan.cores[0].vms;
    assert_eq!(entry.len(), 1);
    assert_eq!((entry[0].index, entry[0].params.id), (5, 5));
    assert_eq!(
        entry[0].threads,
        [
            ThreadPlan {
                tid: 10,
                service: true
            },
            ThreadPlan {
                tid: 11,
                service: true
            }
        ]
    );
}

#[test]
fn a_guest_process_of_uml_is_an_ordinary_vcpu_thread() {
    let mut a = vm("a", 10, &[&[1]]);
    a.vcpus[0].threads.push(thread(99, 99));
    let d = draft("1", &[candidate(&a, 0, Class::Ls)]);
    assert_eq!(
        d.plan.cores[0].vms[0].threads[1],
        ThreadPlan {
            tid: 99,
            service: false
        }
    );
}

#[test]
fn a_vcpu_that_may_run_on_several_cores_is_pinned_with_all_its_threads_where_it_was_placed() {
    let mut a = vm("a", 10, &[&[0, 1, 2]]);
    a.vcpus[0].threads.push(thread(99, 99));
    let d = draft("1-2", &[candidate(&a, 0, Class::Ls)]);
    assert_eq!(managed(&d), [1]);
    assert_eq!(
        d.pins,
        [(thread(10, 10), cpus("1")), (thread(99, 99), cpus("1"))]
            .into_iter()
            .collect()
    );
}

#[test]
fn threads_that_may_run_elsewhere_are_kept_off_a_managed_core() {
    let a = vm("a", 10, &[&[1]]);
    let mut b = vm("b", 20, &[&[2]]);
    serve(&mut b, 25);
    let mut cb = candidate(&b, 1, Class::Batch);
    cb.allowed.insert(25, cpus("0-2"));
    let d = draft("1-2", &[candidate(&a, 0, Class::Ls), cb]);
    assert_eq!(managed(&d), [1]);
    assert_eq!(
        d.pins,
        [(thread(20, 25), cpus("0,2"))].into_iter().collect()
    );
}

#[test]
fn service_threads_go_with_the_first_vcpu_that_they_can_reach() {
    let mut a = vm("a", 10, &[&[1], &[2]]);
    for tid in [15, 16, 17] {
        serve(&mut a, tid);
    }
    let mut c = candidate(&a, 0, Class::Ls);
    c.allowed = [(15, cpus("0-2")), (16, cpus("2")), (17, cpus("0"))].into();
    let d = draft("1-2", &[c]);
    let tids = |i: usize| {
        d.plan.cores[i].vms[0]
            .threads
            .iter()
            .map(|t| t.tid)
            .collect::<Vec<_>>()
    };
    assert_eq!(tids(0), [10, 15]);
    assert_eq!(tids(1), [11, 16]);
    // Thread 16 may run only on its vCPU's core and needs no pin. Thread 17 may run only on core 0, which the host keeps.
    assert_eq!(d.pins, [(thread(10, 15), cpus("1"))].into_iter().collect());
}

#[test]
fn a_service_thread_that_can_only_run_on_another_vms_managed_core_is_managed_there() {
    let a = vm("a", 10, &[&[1]]);
    let mut b = vm("b", 20, &[&[2]]);
    serve(&mut b, 25);
    let mut cb = candidate(&b, 1, Class::Batch);
    cb.allowed.insert(25, cpus("1"));
    let d = draft("1-2", &[candidate(&a, 0, Class::Ls), cb]);
    assert_eq!(
        d.plan.cores[0].vms[1].threads,
        [ThreadPlan {
            tid: 25,
            service: true
        }]
    );
}

#[test]
fn a_vm_that_cannot_be_managed_moves_to_another_core_that_it_may_use() {
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1, 2]]));
    let mut cb = candidate(&b, 1, Class::Ls);
    cb.blocked = Some("its control group forbids it".into());
    let d = draft("1-2", &[candidate(&a, 0, Class::Ls), cb]);
    assert_eq!(managed(&d), [1]);
    assert_eq!(d.plan.cores[0].vms.len(), 1);
    assert_eq!(d.pins, [(thread(20, 20), cpus("2"))].into_iter().collect());
    assert_eq!(
        d.left_out,
        [(b.id.clone(), "its control group forbids it".into())]
    );
}

#[test]
fn a_core_that_an_unmanageable_vm_cannot_leave_stays_stock_with_the_reason() {
    let (a, b) = (vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]]));
    let mut cb = candidate(&b, 1, Class::Batch);
    cb.blocked = Some("its control group forbids it".into());
    let d = draft("1-2", &[candidate(&a, 0, Class::Ls), cb]);
    assert!(d.plan.cores.is_empty() && d.pins.is_empty());
    assert_eq!(
        d.cores[0].why,
        "b runs there and cannot be managed: its control group forbids it"
    );
    assert_eq!(d.left_out.len(), 1);
    assert_eq!(d.left_out[0].0, a.id);
    assert!(
        d.left_out[0]
            .1
            .contains("core 1 keeps stock scheduling: b runs there")
    );
}

#[test]
fn a_latency_sensitive_vm_outside_of_the_cores_is_reported_with_its_core() {
    let a = vm("a", 10, &[&[0]]);
    let d = draft("1-2", &[candidate(&a, 0, Class::Ls)]);
    assert!(d.plan.cores.is_empty());
    assert_eq!(
        d.left_out[0].1,
        "its vCPU 0 runs on 0, outside of the cores set aside for VMs (1-2)"
    );
}

#[test]
fn more_vms_than_a_controller_takes_leave_the_core_stock() {
    let vms: Vec<Vm> = (0..65)
        .map(|i| vm(&format!("g{i}"), 100 + i, &[&[1]]))
        .collect();
    let cs: Vec<_> = vms
        .iter()
        .enumerate()
        .map(|(i, v)| candidate(v, i as u32, Class::Ls))
        .collect();
    let d = draft("1", &cs);
    assert!(d.plan.cores.is_empty() && d.pins.is_empty());
    assert_eq!(
        d.cores[0].why,
        "65 VMs run there, and a controller takes 64"
    );
    assert_eq!(d.left_out.len(), 65);
    assert_eq!(managed(&draft("1", &cs[..64])), [1]);
}

#[test]
fn eevdf_names_the_threads_of_latency_sensitive_vms_and_pins_nothing() {
    let (mut a, b) = (vm("a", 10, &[&[0, 1], &[1]]), vm("b", 20, &[&[1]]));
    serve(&mut a, 15);
    let none = CpuSet::new();
    let config = PlanConfig {
        cores: &none,
        algorithm: Algorithm::Interleaved,
        batch_slice: 1,
        turbo: None,
    };
    let d = eevdf(
        config,
        &[candidate(&a, 0, Class::Ls), candidate(&b, 1, Class::Batch)],
    );
    let tids: Vec<i32> = d
        .plan
        .cores
        .iter()
        .flat_map(|c| &c.vms)
        .flat_map(|v| &v.threads)
        .map(|t| t.tid)
        .collect();
    assert_eq!(tids, [10, 15, 11]);
    assert!(d.pins.is_empty());
}

prop_compose! {
    fn any_vm(index: u32)(
        vcpus in prop::collection::vec(prop::collection::btree_set(0u32..5, 1..4), 1..4),
        service in prop::collection::vec(prop::collection::btree_set(0u32..5, 1..4), 0..3),
        ls in any::<bool>(),
        capped in any::<bool>(),
        blocked in prop::bool::weighted(0.2),
    ) -> (Vm, Vec<CpuSet>, bool, bool, bool) {
        let cores: Vec<Vec<u32>> = vcpus.iter().map(|s| s.iter().copied().collect()).collect();
        let cores: Vec<&[u32]> = cores.iter().map(Vec::as_slice).collect();
        let pid = 1000 + index * 100;
        let mut v = vm(&format!("g{index}"), pid, &cores);
        for i in 0..service.len() as u32 {
            serve(&mut v, pid + 50 + i);
        }
        (v, service.into_iter().map(|s| s.into_iter().collect()).collect(), ls, capped, blocked)
    }
}

proptest! {
    #[test]
    fn every_thread_that_may_run_on_a_managed_core_is_managed_or_kept_off(
        vms in (any_vm(0), any_vm(1), any_vm(2), any_vm(3)),
        cores in prop::collection::btree_set(1u32..5, 1..4),
    ) {
        let vms = [vms.0, vms.1, vms.2, vms.3];
        let cores: CpuSet = cores.into_iter().collect();
        let cs: Vec<Candidate<'_>> = vms.iter().enumerate().map(|(i, (v, service, ls, capped, blocked))| {
            let mut c = candidate(v, i as u32, if *ls { Class::Ls } else { Class::Batch });
            c.allowed = v.service.iter().map(|s| s.thread.tid).zip(service.iter().cloned()).collect();
            c.capped_by_viola = *capped;
            c.cap_permille = capped.then_some(300);
            c.blocked = blocked.then(|| "no".into());
            c
        }).collect();
        let config = PlanConfig { cores: &cores, algorithm: Algorithm::Interleaved, batch_slice: 1, turbo: None };
        let d = slots(config, &cs, first_core);
        let managed: BTreeSet<u32> = d.plan.cores.iter().map(|c| c.cpu).collect();
        prop_assert!(managed.iter().all(|&c| cores.contains(c)));
        prop_assert_eq!(d.cores.iter().filter(|c| c.managed).map(|c| c.cpu).collect::<BTreeSet<_>>(), managed.clone());
        for c in &cs {
            let vcpus = c.vm.vcpus.iter().flat_map(|v| v.threads.iter().map(|t| (*t, c.allowed_of(v).clone())));
            let service = c.vm.service.iter().map(|s| (s.thread, c.allowed[&s.thread.tid].clone()));
            for (t, allowed) in vcpus.chain(service) {
                let now = d.pins.get(&t).unwrap_or(&allowed);
                prop_assert!(now.iter().all(|cpu| allowed.contains(cpu)), "a pin goes beyond what the operator allows");
                prop_assert!(!now.is_empty());
                let on: Vec<u32> = d.plan.cores.iter()
                    .filter(|p| p.vms.iter().any(|v| v.threads.iter().any(|p| p.tid == t.tid as i32)))
                    .map(|p| p.cpu).collect();
                if on.is_empty() {
                    prop_assert!(now.iter().all(|cpu| !managed.contains(&cpu)), "{} would starve", t.tid);
                } else {
                    prop_assert!(c.blocked.is_none());
                    prop_assert_eq!(on.len(), 1);
                    // A thread that is real-time on this core must not be real-time on another one.
                    prop_assert_eq!(now, &[on[0]].into_iter().collect::<CpuSet>());
                }
            }
            for p in &d.plan.cores {
                prop_assert!(p.vms.iter().filter(|v| v.pid == c.vm.pid as i32).count() <= 1);
            }
        }
    }
}
