// SPDX-License-Identifier: Apache-2.0
//! What must hold of the machines of both pools, whatever VMs share the cores.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use viola_policy::slices::simulate::{Behaviour, Core, Driver, Report, SimVm};
use viola_policy::slices::{Class, Decision, FOREVER, MS, Machine, Nanos, Params, Rank, Seen, US};
use viola_policy::turbo::shares::{Demand, Granted, allocate};
use viola_policy::turbo::simulate::{Host, HostConfig, HostVm};
use viola_policy::turbo::{
    Elsewhere, Pooled, RegularConfig, RegularCore, TURBO_SLOT, TurboConfig, TurboCore,
};

/// Without the floor, which takes up to 1 ms of each 150 ms from those that are owed it.
const LETTER: RegularConfig = RegularConfig {
    slice: 30 * MS,
    credit: MS,
    floor: 0,
    floor_every: 150 * MS,
};
/// Slices as stock EEVDF has them.
const SHORT: RegularConfig = RegularConfig {
    slice: 4 * MS,
    ..LETTER
};

/// Without the reserve, which takes from a VM what it may not use of a turbo core.
const NO_RESERVE: TurboConfig = TurboConfig {
    credit: TURBO_SLOT,
    slice: 4 * MS,
    floor: TURBO_SLOT,
    reserve: 0,
};

fn host(regular: RegularConfig) -> HostConfig {
    HostConfig {
        regular,
        turbo: NO_RESERVE,
        ..HostConfig::default()
    }
}

/// What wants `percent` of a core, in pieces of `period`.
fn wants(percent: u64, period: Nanos) -> Behaviour {
    match percent {
        0 => Behaviour::Idle,
        100.. => Behaviour::Busy,
        _ => Behaviour::Duty {
            period,
            on: period * percent / 100,
        },
    }
}

/// VMs with one regular vCPU and one turbo vCPU each: weight, cap, percent wanted of either.
fn vms(of: &[(u32, Option<u32>, u64, u64)]) -> Vec<HostVm> {
    of.iter()
        .zip(0..)
        .map(|(&(weight, cap_permille, regular, turbo), id)| HostVm {
            id,
            weight,
            cap_permille,
            regular: vec![(0, wants(regular, 300 * MS))],
            turbo: Some((0, wants(turbo, 5 * MS))),
        })
        .collect()
}

/// What the equations give them.
fn due(of: &[(u32, Option<u32>, u64, u64)], regular: f64, turbo: f64) -> Vec<Granted> {
    let demands: Vec<_> = of
        .iter()
        .map(|&(weight, cap, r, t)| Demand {
            weight,
            cap: cap.map(|c| f64::from(c) / 1000.0),
            regular: r as f64 / 100.0,
            turbo: t as f64 / 100.0,
        })
        .collect();
    allocate(&demands, regular, turbo)
}

fn run(config: HostConfig, vms: &[HostVm], time: Nanos) -> Host {
    let mut host = Host::new(config, vms);
    host.run_until(time).unwrap();
    host
}

fn table_1(config: RegularConfig, demand: [(u64, u64); 2], expected: [(f64, f64); 2]) {
    let of = demand.map(|(r, t)| (256, None, r, t));
    let host = run(host(config), &vms(&of), 10_000 * MS);
    for (id, (regular, turbo)) in (0..).zip(expected) {
        let got = host.used(id);
        assert!(
            (got.0 - regular).abs() < 0.01 && (got.1 - turbo).abs() < 0.01,
            "VM {id} got {got:?}, the paper ({regular}, {turbo})"
        );
    }
}

/// Paper Table 1, columns "demand" and "consumed". (What it prints as allocated is treated in `turbo::shares`.)
#[test]
fn the_machines_consume_what_table_1_says() {
    for config in [LETTER, SHORT, RegularConfig::default()] {
        table_1(config, [(100, 0), (100, 0)], [(0.5, 0.0), (0.5, 0.0)]);
        table_1(config, [(100, 0), (100, 100)], [(1.0, 0.0), (0.0, 1.0)]);
        table_1(config, [(100, 100), (100, 100)], [(0.5, 0.5), (0.5, 0.5)]);
        table_1(config, [(100, 15), (100, 55)], [(0.7, 0.15), (0.3, 0.55)]);
    }
}

/// Paper, introduction. VM2 asks for half of each core and gets 25 % of the regular one.
#[test]
fn the_machines_split_the_introductions_example_75_to_25() {
    for config in [LETTER, SHORT] {
        table_1(config, [(100, 0), (100, 50)], [(0.75, 0.0), (0.25, 0.5)]);
    }
}

#[test]
fn the_floor_lets_a_vm_read_what_its_turbo_vcpu_receives() {
    let of = [(256, None, 100, 0), (256, None, 100, 100)];
    let time = 10_000 * MS;
    let (letter, floor) = (
        run(host(LETTER), &vms(&of), time),
        run(host(RegularConfig::default()), &vms(&of), time),
    );
    let worst = |host: &Host| host.reports().next().unwrap().vm(1).unwrap().worst_wait();
    assert!(letter.used(1).0 < 0.005, "{:?}", letter.used(1));
    assert!(worst(&floor) <= 181 * MS, "{}", worst(&floor));
    assert!(floor.used(1).0 > 0.004, "{:?}", floor.used(1));
}

/// Four VMs that compute, one of which gets more packets than its share pays for.
fn livelock(reserve: u32, config: RegularConfig) -> [(f64, f64); 4] {
    let config = HostConfig {
        turbo: TurboConfig {
            reserve,
            ..NO_RESERVE
        },
        ..host(config)
    };
    let of = [
        (256, None, 100, 100),
        (256, None, 100, 0),
        (256, None, 100, 0),
        (256, None, 100, 0),
    ];
    let host = run(config, &vms(&of), 10_000 * MS);
    [0, 1, 2, 3].map(|id| host.used(id))
}

#[test]
fn interrupts_in_masses_leave_the_regular_vcpus_their_part() {
    for config in [SHORT, LETTER, RegularConfig::default()] {
        let none = livelock(0, config)[0];
        assert!(none.0 < 0.01 && none.1 > 0.95, "{none:?}");
        for (reserve, part) in [(500, 0.5), (250, 0.75), (750, 0.25)] {
            let all = livelock(reserve, config);
            let sum: f64 = all.iter().map(|(r, t)| r + t).sum();
            let (regular, turbo) = all[0];
            // FS^R = FS - td holds all the same.
            assert!((regular + turbo - sum / 4.0).abs() < 0.01, "{all:?}");
            assert!(
                (turbo - part * sum / 4.0).abs() < 0.015,
                "reserve {reserve}: {all:?}"
            );
            assert!(all.iter().map(|(r, _)| r).sum::<f64>() > 0.999, "{all:?}");
        }
    }
}

/// Scenarios 1 and 4 of Table 1, and the introduction's example: nobody there uses more than half of what he is due.
#[test]
fn a_reserve_changes_nothing_for_those_that_stay_below_it() {
    for (demand, expected) in [
        ([(100, 0), (100, 0)], [(0.5, 0.0), (0.5, 0.0)]),
        ([(100, 15), (100, 30)], [(0.575, 0.15), (0.425, 0.3)]),
        ([(100, 0), (0, 70)], [(1.0, 0.0), (0.0, 0.7)]),
    ] {
        let of = demand.map(|(r, t)| (256, None, r, t));
        let config = HostConfig {
            turbo: TurboConfig::default(),
            ..host(SHORT)
        };
        let host = run(config, &vms(&of), 10_000 * MS);
        for (id, (regular, turbo)) in (0..).zip(expected) {
            let got = host.used(id);
            assert!(
                (got.0 - regular).abs() < 0.02 && (got.1 - turbo).abs() < 0.02,
                "VM {id} at {demand:?} got {got:?} instead of ({regular}, {turbo})"
            );
        }
    }
}

#[test]
fn several_cores_of_each_pool_charge_a_vm_in_portions() {
    let vm = |id, cores: &[usize], turbo| HostVm {
        id,
        weight: 256,
        cap_permille: None,
        regular: cores.iter().map(|&c| (c, Behaviour::Busy)).collect(),
        turbo: Some((id as usize % 2, wants(turbo, 5 * MS))),
    };
    let vms = [vm(0, &[0, 1], 40), vm(1, &[0, 1], 0)];
    let config = HostConfig {
        regular_cores: 2,
        turbo_cores: 2,
        ..host(SHORT)
    };
    let host = run(config, &vms, 10_000 * MS);
    // 2.4 cores in all.
    let (a, b) = (host.used(0), host.used(1));
    assert!(
        (a.0 - 0.8).abs() < 0.01 && (a.1 - 0.4).abs() < 0.01,
        "{a:?}"
    );
    assert!((b.0 - 1.2).abs() < 0.01, "{b:?}");
}

fn turbo_vcpu(id: u32, behaviour: Behaviour) -> SimVm {
    SimVm {
        params: Params {
            id,
            class: Class::Ls,
            weight: 256,
            cap_permille: None,
            microslice: TURBO_SLOT,
        },
        behaviour,
    }
}

fn lodger(id: u32, behaviour: Behaviour) -> SimVm {
    let mut vm = turbo_vcpu(id, behaviour);
    vm.params.class = Class::Batch;
    vm
}

fn on_turbo_core(vms: &[SimVm], driver: Driver, time: Nanos) -> Report {
    Core::new(TurboCore::new(NO_RESERVE), vms, driver, 7)
        .run_until(time)
        .unwrap()
        .clone()
}

#[test]
fn turbo_vcpus_without_work_cost_nothing() {
    let mut vms: Vec<_> = (0..63).map(|id| turbo_vcpu(id, Behaviour::Idle)).collect();
    let none = on_turbo_core(&vms, Driver::default(), 10_000 * MS);
    assert!(none.decisions <= 2, "{} decisions", none.decisions);
    // Nor when a regular vCPU has the gaps, or one of them all of the core.
    for behaviour in [lodger(63, Behaviour::Busy), turbo_vcpu(63, Behaviour::Busy)] {
        vms.push(behaviour);
        let one = on_turbo_core(&vms, Driver::default(), 10_000 * MS);
        assert!(one.decisions <= 3, "{} decisions", one.decisions);
        assert_eq!(one.vm(63).unwrap().ran, 10_000 * MS);
        vms.pop();
    }
}

#[test]
fn a_turbo_core_that_is_idle_serves_as_a_regular_one_and_gives_way_at_once() {
    let io = Behaviour::Bursts {
        sleep: (MS, 5 * MS),
        run: (20 * US, 300 * US),
    };
    let vms = [
        turbo_vcpu(0, io),
        lodger(1, Behaviour::Busy),
        lodger(2, Behaviour::Busy),
    ];
    let report = on_turbo_core(&vms, Driver::default(), 10_000 * MS);
    assert_eq!(report.idle, 0);
    // The floor may be in the way for one slot, in theory.
    assert_eq!(report.vm(0).unwrap().worst_wait(), 0);
    let (a, b) = (report.share(1), report.share(2));
    assert!((a - b).abs() < 0.01 && a > 0.45, "{a} {b}");
}

#[test]
fn a_regular_vcpu_on_a_crowded_turbo_core_is_not_starved() {
    let vms = [
        turbo_vcpu(0, Behaviour::Busy),
        turbo_vcpu(1, Behaviour::Busy),
        lodger(2, Behaviour::Busy),
        lodger(3, Behaviour::Busy),
    ];
    for vms in [&vms[..], &vms[1..]] {
        let report = on_turbo_core(vms, Driver::default(), 10_000 * MS);
        for id in [2, 3] {
            let vm = report.vm(id).unwrap();
            assert!(vm.worst_wait() <= 92 * MS, "{}", vm.worst_wait());
            assert!(vm.ran > 10 * MS, "{}", vm.ran);
        }
        // 0.1 ms of each 30 ms.
        assert!(report.share(2) + report.share(3) < 0.005);
    }
}

#[test]
fn the_floor_outranks_a_turbo_vcpu_that_woke_first_and_runs_on() {
    let on = Behaviour::Duty {
        period: 1_000 * MS,
        on: 990 * MS,
    };
    let vms = [turbo_vcpu(0, on), lodger(1, Behaviour::Busy)];
    let report = on_turbo_core(&vms, Driver::default(), 5_000 * MS);
    let worst = report.vm(1).unwrap().worst_wait();
    assert!(worst <= 61 * MS, "{worst}");
}

#[test]
fn a_flood_keeps_an_interrupt_waiting_for_a_slot_at_most() {
    let mut vms = vec![turbo_vcpu(
        0,
        Behaviour::Bursts {
            sleep: (MS, 5 * MS),
            run: (10 * US, 60 * US),
        },
    )];
    vms.extend((1..4).map(|id| turbo_vcpu(id, Behaviour::Busy)));
    let report = on_turbo_core(&vms, Driver::default(), 10_000 * MS);
    assert!(report.vm(0).unwrap().worst_wait() <= TURBO_SLOT);
    // Busy ones wait for a slot of each other and for those that wake.
    let worst = report.vm(1).unwrap().worst_wait();
    assert!(worst <= 4 * TURBO_SLOT, "{worst}");
}

fn weight() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![128_u32, 256, 256, 512, 1024])
}

/// Weight, cap, percent wanted of the regular and of the turbo core. What is wanted of the regular one is nothing or
/// all, of the turbo one nothing, up to 60 % of the share, or all.
fn demands(most: usize) -> impl Strategy<Value = Vec<(u32, Option<u32>, u64, u64)>> {
    let one = (
        weight(),
        prop::sample::select(vec![0_u64, 100, 100]),
        prop_oneof![2 => Just(0_u64), 3 => 1..60_u64, 1 => Just(100)],
    );
    prop::collection::vec(one.prop_map(|(w, r, t)| (w, None, r, t)), 1..=most).prop_map(|mut of| {
        for k in 0..of.len() {
            fit(&mut of, k);
        }
        of
    })
}

/// One that wants nearly its share loses wake-ups that come while it still works, and then wants less.
fn fit(of: &mut [(u32, Option<u32>, u64, u64)], k: usize) {
    let all: u32 = of.iter().map(|vm| vm.0).sum();
    if of[k].3 < 100 {
        of[k].3 = of[k].3.min(u64::from(of[k].0 * 60 / all));
    }
}

fn any_behaviour() -> impl Strategy<Value = Behaviour> {
    prop_oneof![
        2 => Just(Behaviour::Busy),
        1 => Just(Behaviour::Idle),
        2 => (100 * US..60 * MS, 1_u64..100)
            .prop_map(|(period, percent)| Behaviour::Duty { period, on: (period * percent / 100).max(10 * US) }),
        2 => (10 * US..20 * MS, 1_u64..4, 10 * US..5 * MS, 1_u64..4)
            .prop_map(|(sleep, k, run, l)| Behaviour::Bursts { sleep: (sleep, sleep * k), run: (run, run * l) }),
        1 => (1..50 * US, 1..2 * MS).prop_map(|(margin, sleep)| Behaviour::Dodge { margin, sleep }),
    ]
}

fn any_host_vms(most: u32) -> impl Strategy<Value = Vec<HostVm>> {
    let one = (
        weight(),
        any_behaviour(),
        prop::option::of(any_behaviour()),
        prop::option::weighted(0.2, 50_u32..1900),
    );
    prop::collection::vec(one, 1..=most as usize).prop_map(|vms| {
        vms.into_iter()
            .zip(0..)
            .map(|((weight, regular, turbo, cap_permille), id)| HostVm {
                id,
                weight,
                cap_permille,
                regular: vec![(0, regular)],
                turbo: turbo.map(|t| (0, t)),
            })
            .collect()
    })
}

fn any_config() -> impl Strategy<Value = HostConfig> {
    (
        prop::sample::select(vec![LETTER, SHORT, RegularConfig::default()]),
        100 * US..5 * MS,
        any::<u64>(),
    )
        .prop_map(|(regular, exchange, seed)| HostConfig {
            regular,
            turbo: TurboConfig {
                reserve: if seed % 2 == 0 { 0 } else { 500 },
                ..NO_RESERVE
            },
            exchange,
            seed,
            ..HostConfig::default()
        })
}

/// What a capped VM cannot use goes to the others; that must not put them before it when it may run again.
#[test]
fn a_vm_reaches_its_cap_beside_others_that_are_owed_more() {
    let of = [
        (1024, Some(881), 100, 25),
        (1024, None, 0, 25),
        (256, None, 100, 6),
        (128, None, 100, 100),
    ];
    let host = run(host(SHORT), &vms(&of), 5_000 * MS);
    let (regular, turbo) = host.used(0);
    let got = regular + turbo;
    assert!((0.86..=0.885).contains(&got), "{got} with a cap of 0.881");
    let of = [
        (256, Some(367), 100, 0),
        (256, None, 100, 0),
        (256, None, 0, 100),
    ];
    let got = run(self::host(SHORT), &vms(&of), 5_000 * MS).used(0).0;
    assert!((0.355..=0.37).contains(&got), "{got} with a cap of 0.367");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shares_are_those_of_the_equations(of in demands(5), short in any::<bool>()) {
        let config = host(if short { SHORT } else { LETTER });
        let host = run(config, &vms(&of), 8_000 * MS);
        let due = due(&of, 1.0, 1.0);
        for (i, due) in due.iter().enumerate() {
            let got = host.used(i as u32);
            prop_assert!((got.1 - due.turbo).abs() < 0.01, "VM {i} of {of:?}: {got:?} of the turbo core, due {due:?}");
            prop_assert!((got.0 - due.regular).abs() < 0.01, "VM {i} of {of:?}: {got:?} of the regular core, due {due:?}");
        }
    }

    #[test]
    fn caps_limit_both_pools_together_and_are_used_up(
        of in demands(4), cap in 50_u32..1500, turbo in prop::sample::select(vec![0_u64, 30, 100]),
    ) {
        let mut of = of;
        of[0] = (of[0].0, Some(cap), 100, turbo);
        fit(&mut of, 0);
        let due = due(&of, 1.0, 1.0);
        let mut host = Host::new(host(SHORT), &vms(&of));
        let total = |host: &Host| { let (r, t) = host.used(0); r + t };
        let mut before = 0.0;
        for second in 1..=5_u64 {
            host.run_until(second * 1_000 * MS).unwrap();
            let sum = total(&host) * second as f64;
            let most = f64::from(cap) / 1000.0;
            prop_assert!(sum - before <= most + 0.02, "second {second}: {} with a cap of {most}", sum - before);
            before = sum;
        }
        let got = total(&host);
        let due = due[0].regular + due[0].turbo;
        // A quota that could not be used is carried over for one window only: see the departures in the module's text.
        prop_assert!(got >= due * 0.9 - 0.02, "{got} used, {due} is due: {of:?}");
    }

    #[test]
    fn no_core_idles_while_a_vm_wants_it(vms in any_host_vms(6), config in any_config()) {
        let host = run(HostConfig { turbo: NO_RESERVE, ..config }, &vms, 2_000 * MS);
        for report in host.reports() {
            prop_assert_eq!(report.wasted, 0);
        }
    }

    #[test]
    fn equal_inputs_give_equal_reports(vms in any_host_vms(5), config in any_config()) {
        let (a, b) = (run(config, &vms, 500 * MS), run(config, &vms, 500 * MS));
        prop_assert!(a.reports().eq(b.reports()));
    }

    #[test]
    fn decisions_are_as_many_as_slots_and_wake_ups(vms in any_host_vms(6), config in any_config()) {
        let time = 2_000 * MS;
        let host = run(config, &vms, time);
        for (report, slice) in host.reports().zip([config.regular.slice, TURBO_SLOT]) {
            let sleeps: usize = report.vms.iter().map(|vm| vm.wake_waits.len()).sum();
            let caps = vms.iter().filter(|vm| vm.cap_permille.is_some()).count() as u64 * time / (100 * US);
            // Besides: what a waking VM may run at once, accountings, floors.
            let most = 4 * (time / slice + sleeps as u64 + caps + time / (10 * MS)) + 1_000;
            prop_assert!(report.decisions <= most, "{} decisions, {most} expected", report.decisions);
        }
    }

    #[test]
    fn nobody_starves(mut vms in any_host_vms(6), config in any_config()) {
        vms[0].regular = vec![(0, Behaviour::Busy)];
        vms[0].turbo = Some((0, Behaviour::Busy));
        vms[0].cap_permille = None;
        let config = HostConfig { regular: RegularConfig { slice: 4 * MS, ..RegularConfig::default() }, ..config };
        let host = run(config, &vms, 3_000 * MS);
        let mut reports = host.reports();
        let n = vms.len() as u64;
        let regular = reports.next().unwrap().vm(0).unwrap();
        // One floor is granted each 150 ms, seen at the next accounting, to the one that waited longest.
        prop_assert!(regular.worst_wait() <= n * (150 + 30) * MS + 10 * MS, "waited {}", regular.worst_wait());
        prop_assert!(regular.ran >= MS * 4, "ran {}", regular.ran);
        let turbo = reports.next().unwrap().vm(0).unwrap();
        let weights: f64 = vms.iter().filter(|vm| vm.turbo.is_some()).map(|vm| f64::from(vm.weight)).sum();
        // Those that slept may have saved up a slot each, and it may have run two ahead.
        let most = (n + 3) as f64 * weights / f64::from(vms[0].weight) * TURBO_SLOT as f64;
        prop_assert!(turbo.worst_wait() as f64 <= most, "waited {} of at most {most}", turbo.worst_wait());
    }

    #[test]
    fn a_turbo_vcpu_that_dodges_gets_no_more_than_its_share(
        weights in prop::collection::vec(weight(), 1..4), own in weight(), margin in 1..50 * US, sleep in 1..2 * MS, late in 0..20 * US,
    ) {
        let mut vms: Vec<_> = weights.iter().zip(0..).map(|(&w, id)| {
            let mut vm = turbo_vcpu(id, Behaviour::Busy);
            vm.params.weight = w;
            vm
        }).collect();
        let mut vm = turbo_vcpu(99, Behaviour::Dodge { margin, sleep });
        vm.params.weight = own;
        vms.push(vm);
        let fair = f64::from(own) / vms.iter().map(|vm| f64::from(vm.params.weight)).sum::<f64>();
        let report = on_turbo_core(&vms, Driver { late, ..Driver::default() }, 5_000 * MS);
        let share = report.share(99);
        prop_assert!(share <= fair + 0.01, "dodging gave {share:.4}, fair is {fair:.4}");
    }

    #[test]
    fn whatever_the_driver_says_a_decision_can_be_carried_out(
        params in prop::collection::vec((0_u32..9, any::<bool>(), any::<u32>(), prop::option::of(any::<u32>()), any::<u64>()), 0..70),
        steps in prop::collection::vec((0..u64::MAX / 4096, prop::collection::vec((0..1_u64 << 44, 0..1_u64 << 44, any::<bool>()), 0..70)), 1..40),
        turbo in any::<bool>(), holds in any::<bool>(),
    ) {
        let mut machine: Box<dyn Pooled> = if turbo {
            Box::new(TurboCore::new(TurboConfig { credit: 0, slice: 0, floor: FOREVER, reserve: 1000 }))
        } else {
            Box::new(RegularCore::new(RegularConfig { slice: 0, credit: FOREVER, floor: FOREVER, floor_every: 0 }))
        };
        let params: Vec<_> = params.into_iter().zip(0..).map(|((id, ls, weight, cap_permille, microslice), k)| Params {
            id: id + 10 * k,
            class: if ls { Class::Ls } else { Class::Batch },
            weight,
            cap_permille,
            microslice,
        }).collect();
        let mut out = Decision::default();
        let mut now = 0_u64;
        for (k, (passed, seen)) in steps.iter().enumerate() {
            if k % 7 == 0 {
                let n = params.len() - params.len().min(k);
                machine.configure(now, &params[..n]);
            }
            now += passed;
            let ran: Vec<_> = seen.iter().map(|&(a, b, _)| Elsewhere { turbo: a, total: b, due: a, waits: holds && b % 3 == 0 }).collect();
            machine.elsewhere(&ran);
            let seen: Vec<_> = seen.iter().map(|&(used, _, runnable)| Seen { used, runnable, ..Seen::default() }).collect();
            machine.decide(now, &seen, &mut out);
            prop_assert!(out.until > now);
            prop_assert!(std::iter::zip(&out.ranks, &out.budgets).all(|(&r, &b)| b > 0 || r == Rank::Capped));
            let n = params.len() - params.len().min(k / 7 * 7);
            let wanted = (0..n.min(64)).filter(|&i| seen.get(i).is_some_and(|s| s.runnable) && params[i].cap_permille.is_none());
            prop_assert!(turbo && holds || wanted.into_iter().all(|i| out.ranks[i] != Rank::Capped));
        }
    }
}
