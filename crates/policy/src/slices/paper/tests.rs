// SPDX-License-Identifier: Apache-2.0
use super::super::DEFAULT_WEIGHT;
use super::super::simulate::{Behaviour, Core, Driver, Report, SimVm};
use super::*;

fn vm(id: u32, class: Class, microslice: Nanos, behaviour: Behaviour) -> SimVm {
    SimVm {
        params: Params {
            id,
            class,
            weight: DEFAULT_WEIGHT,
            cap_permille: None,
            microslice,
        },
        behaviour,
    }
}

fn busy(m: u32, n: u32, microslice: Nanos) -> Vec<SimVm> {
    let class = |id| if id <= m { Class::Ls } else { Class::Batch };
    (1..=m + n)
        .map(|id| vm(id, class(id), microslice, Behaviour::Busy))
        .collect()
}

fn run(vms: &[SimVm], time: Nanos) -> Report {
    let driver = Driver {
        record: true,
        ..Driver::default()
    };
    Core::new(Paper::default(), vms, driver, 1)
        .run_until(time)
        .unwrap()
        .clone()
}

/// VM ids and run times (ms), in order.
fn sequence(vms: &[SimVm], time: Nanos) -> Vec<(u32, u64)> {
    run(vms, time)
        .runs
        .iter()
        .map(|s| (s.id, s.len / MS))
        .collect()
}

#[test]
fn figure_2_6_one_lsvm_runs_10_ms_before_each_of_three_nlsvms() {
    let period = [(1, 10), (2, 30), (1, 10), (3, 30), (1, 10), (4, 30)];
    assert_eq!(sequence(&busy(1, 3, 10 * MS), 480 * MS), period.repeat(4));
}

#[test]
fn figure_2_7_two_lsvms_run_three_times_5_ms_before_each_of_two_nlsvms() {
    let t_s = [(1, 5), (2, 5)].repeat(3);
    let period = [t_s.clone(), vec![(3, 30)], t_s, vec![(4, 30)]].concat();
    assert_eq!(sequence(&busy(2, 2, 5 * MS), 480 * MS), period.repeat(4));
}

#[test]
fn an_lsvm_that_comes_last_in_the_list_still_runs_first() {
    let mut vms = busy(1, 3, 10 * MS);
    vms.rotate_left(1);
    assert_eq!(sequence(&vms, 40 * MS), [(1, 10), (2, 30)]);
}

#[test]
fn without_lsvm_it_is_round_robin_of_whole_slices() {
    assert_eq!(
        sequence(&busy(0, 3, MS), 180 * MS),
        [(1, 30), (2, 30), (3, 30)].repeat(2)
    );
}

#[test]
fn without_nlsvm_it_is_round_robin_of_microslices() {
    assert_eq!(
        sequence(&busy(3, 0, 5 * MS), 45 * MS),
        [(1, 5), (2, 5), (3, 5)].repeat(3)
    );
}

#[test]
fn one_of_each_alternate_by_the_same_rules() {
    assert_eq!(
        sequence(&busy(1, 1, 10 * MS), 120 * MS),
        [(1, 30), (2, 30)].repeat(2)
    );
}

#[test]
fn slices_scale_with_the_weight() {
    let mut vms = busy(0, 3, MS);
    vms[0].params.weight = 512;
    // Mean weight 341.3.
    let report = run(&vms, 900 * MS);
    assert_eq!(report.runs[0].len, 45 * MS);
    assert_eq!(report.runs[1].len, 22_500 * US);
    vms[0].params.class = Class::Ls;
    let report = run(&vms, 3600 * MS);
    assert!((report.share(1) - 0.5).abs() < 0.002, "{}", report.share(1));
}

#[test]
fn a_vm_that_blocks_gives_up_the_rest_of_its_slice() {
    let mut vms = busy(0, 2, MS);
    vms.push(vm(
        3,
        Class::Batch,
        MS,
        Behaviour::Duty {
            period: 100 * MS,
            on: 4 * MS,
        },
    ));
    let expected = [(1, 30), (2, 30), (3, 4), (1, 30), (2, 30)];
    assert_eq!(sequence(&vms, 124 * MS), expected);
}

#[test]
fn late_timers_do_not_shift_shares() {
    let vms = busy(1, 3, MS);
    let driver = Driver {
        late: 200 * US,
        ..Driver::default()
    };
    let mut core = Core::new(Paper::default(), &vms, driver, 3);
    let report = core.run_until(12_000 * MS).unwrap();
    for id in 1..=4 {
        assert!(
            (report.share(id) - 0.25).abs() < 0.005,
            "{id}: {}",
            report.share(id)
        );
    }
}

#[test]
fn the_queue_keeps_its_order_when_a_vm_comes() {
    let mut vms = busy(0, 3, MS);
    let driver = Driver {
        record: true,
        ..Driver::default()
    };
    let mut core = Core::new(Paper::default(), &vms, driver, 1);
    core.run_until(40 * MS).unwrap();
    vms.insert(0, vm(9, Class::Batch, MS, Behaviour::Busy));
    core.configure(&vms);
    let report = core.run_until(180 * MS).unwrap();
    let order: Vec<_> = report.runs.iter().map(|s| s.id).collect();
    assert_eq!(order, [1, 2, 3, 1, 9, 2]);
}
