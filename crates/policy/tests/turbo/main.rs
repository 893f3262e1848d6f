// SPDX-License-Identifier: Apache-2.0
//! The schedulers of both pools against the equations and tables of the vTurbo paper.
#![allow(clippy::unwrap_used)]

mod host;
mod properties;

use host::{Host, HostConfig, HostVm};
use viola_policy::slices::simulate::{Behaviour, Core, Driver, Report, SimVm};
use viola_policy::slices::{Class, MS, Nanos, Params, US};
use viola_policy::turbo::shares::{Demand, Granted, allocate};
use viola_policy::turbo::{RegularConfig, TURBO_SLOT, TurboConfig, TurboCore};

/// Without the floor, which takes up to 1 ms of each 150 ms from the VMs that are owed it.
const NO_FLOOR: RegularConfig = RegularConfig {
    slice: 30 * MS,
    credit: MS,
    floor: 0,
    floor_interval: 150 * MS,
};
/// Slices as under stock EEVDF.
const SHORT_SLICES: RegularConfig = RegularConfig {
    slice: 4 * MS,
    ..NO_FLOOR
};

/// Without the reserve.
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

/// Wants `percent` of a core, in each `period`.
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

/// The shares by the equations.
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

/// Paper Table 1, columns "demand" and "consumed". (`turbo::shares` treats the column "allocated".)
#[test]
fn the_schedulers_consume_what_table_1_says() {
    for config in [NO_FLOOR, SHORT_SLICES, RegularConfig::default()] {
        table_1(config, [(100, 0), (100, 0)], [(0.5, 0.0), (0.5, 0.0)]);
        table_1(config, [(100, 0), (100, 100)], [(1.0, 0.0), (0.0, 1.0)]);
        table_1(config, [(100, 100), (100, 100)], [(0.5, 0.5), (0.5, 0.5)]);
        table_1(config, [(100, 15), (100, 55)], [(0.7, 0.15), (0.3, 0.55)]);
    }
}

/// Paper, introduction. VM2 asks for half of each core and gets 25 % of the regular one.
#[test]
fn the_schedulers_split_the_introductions_example_75_to_25() {
    for config in [NO_FLOOR, SHORT_SLICES] {
        table_1(config, [(100, 0), (100, 50)], [(0.75, 0.0), (0.25, 0.5)]);
    }
}

#[test]
fn the_floor_lets_a_vm_read_what_its_turbo_vcpu_receives() {
    let of = [(256, None, 100, 0), (256, None, 100, 100)];
    let time = 10_000 * MS;
    let (without_floor, floor) = (
        run(host(NO_FLOOR), &vms(&of), time),
        run(host(RegularConfig::default()), &vms(&of), time),
    );
    let worst = |host: &Host| host.reports().next().unwrap().vm(1).unwrap().worst_wait();
    assert!(
        without_floor.used(1).0 < 0.005,
        "{:?}",
        without_floor.used(1)
    );
    assert!(worst(&floor) <= 181 * MS, "{}", worst(&floor));
    assert!(floor.used(1).0 > 0.004, "{:?}", floor.used(1));
}

/// Four VMs that compute; one of them receives more packets than its share pays for.
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
fn a_flood_of_interrupts_leaves_the_regular_vcpus_their_part() {
    for config in [SHORT_SLICES, NO_FLOOR, RegularConfig::default()] {
        let none = livelock(0, config)[0];
        assert!(none.0 < 0.01 && none.1 > 0.95, "{none:?}");
        for (reserve, part) in [(500, 0.5), (250, 0.75), (750, 0.25)] {
            let all = livelock(reserve, config);
            let sum: f64 = all.iter().map(|(r, t)| r + t).sum();
            let (regular, turbo) = all[0];
            // FS^R = FS - td still holds.
            assert!((regular + turbo - sum / 4.0).abs() < 0.01, "{all:?}");
            assert!(
                (turbo - part * sum / 4.0).abs() < 0.015,
                "reserve {reserve}: {all:?}"
            );
            assert!(all.iter().map(|(r, _)| r).sum::<f64>() > 0.999, "{all:?}");
        }
    }
}

/// Scenarios 1 and 4 of Table 1, and the introduction's example: each turbo vCPU uses at most half of what is due.
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
            ..host(SHORT_SLICES)
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
        ..host(SHORT_SLICES)
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

fn gap_vcpu(id: u32, behaviour: Behaviour) -> SimVm {
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
    // Nor when a regular vCPU has the gaps, or one turbo vCPU the whole core.
    for behaviour in [
        gap_vcpu(63, Behaviour::Busy),
        turbo_vcpu(63, Behaviour::Busy),
    ] {
        vms.push(behaviour);
        let one = on_turbo_core(&vms, Driver::default(), 10_000 * MS);
        assert!(one.decisions <= 3, "{} decisions", one.decisions);
        assert_eq!(one.vm(63).unwrap().ran, 10_000 * MS);
        vms.pop();
    }
}

#[test]
fn an_idle_turbo_core_runs_regular_vcpus_that_yield_at_once() {
    let io = Behaviour::Bursts {
        sleep: (MS, 5 * MS),
        run: (20 * US, 300 * US),
    };
    let vms = [
        turbo_vcpu(0, io),
        gap_vcpu(1, Behaviour::Busy),
        gap_vcpu(2, Behaviour::Busy),
    ];
    let report = on_turbo_core(&vms, Driver::default(), 10_000 * MS);
    assert_eq!(report.idle, 0);
    // A run of the floor may delay it by one slot in theory.
    assert_eq!(report.vm(0).unwrap().worst_wait(), 0);
    let (a, b) = (report.share(1), report.share(2));
    assert!((a - b).abs() < 0.01 && a > 0.45, "{a} {b}");
}

#[test]
fn a_regular_vcpu_on_a_crowded_turbo_core_is_not_starved() {
    let vms = [
        turbo_vcpu(0, Behaviour::Busy),
        turbo_vcpu(1, Behaviour::Busy),
        gap_vcpu(2, Behaviour::Busy),
        gap_vcpu(3, Behaviour::Busy),
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
    let vms = [turbo_vcpu(0, on), gap_vcpu(1, Behaviour::Busy)];
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
    // Busy turbo vCPUs wait for a slot of each other one and for those that wake.
    let worst = report.vm(1).unwrap().worst_wait();
    assert!(worst <= 4 * TURBO_SLOT, "{worst}");
}

/// The other VMs get what a capped VM cannot use. That must not put them before it when it may run again.
#[test]
fn a_vm_reaches_its_cap_beside_others_that_are_owed_more() {
    let of = [
        (1024, Some(881), 100, 25),
        (1024, None, 0, 25),
        (256, None, 100, 6),
        (128, None, 100, 100),
    ];
    let host = run(host(SHORT_SLICES), &vms(&of), 5_000 * MS);
    let (regular, turbo) = host.used(0);
    let got = regular + turbo;
    assert!((0.86..=0.885).contains(&got), "{got} with a cap of 0.881");
    let of = [
        (256, Some(367), 100, 0),
        (256, None, 100, 0),
        (256, None, 0, 100),
    ];
    let got = run(self::host(SHORT_SLICES), &vms(&of), 5_000 * MS)
        .used(0)
        .0;
    assert!((0.355..=0.37).contains(&got), "{got} with a cap of 0.367");
}
