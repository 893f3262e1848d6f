// SPDX-License-Identifier: Apache-2.0
use super::super::DEFAULT_WEIGHT;
use super::super::simulate::{Behaviour, Core, Driver, Report, SimVm};
use super::*;

mod packets;

fn ls(id: u32, microslice: Nanos, behaviour: Behaviour) -> SimVm {
    let params = Params {
        id,
        class: Class::Ls,
        weight: DEFAULT_WEIGHT,
        cap_permille: None,
        microslice,
    };
    SimVm { params, behaviour }
}

fn batch(id: u32, behaviour: Behaviour) -> SimVm {
    let vm = ls(id, MS, behaviour);
    SimVm {
        params: Params {
            class: Class::Batch,
            ..vm.params
        },
        behaviour,
    }
}

fn run(vms: &[SimVm], time: Nanos) -> Report {
    let driver = Driver {
        record: true,
        ..Driver::default()
    };
    Core::new(Interleaved::default(), vms, driver, 1)
        .run_until(time)
        .unwrap()
        .clone()
}

fn near(a: Nanos, b: Nanos) -> bool {
    a.abs_diff(b) <= 10 * US
}

#[test]
fn a_busy_lsvm_among_three_vms_runs_300_us_every_1200_us() {
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy)];
    vms.extend((1..4).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 1000 * MS);
    let own: Vec<_> = report.runs.iter().filter(|s| s.id == 0).collect();
    assert!(own.len() > 800);
    for pair in own.windows(2) {
        assert!(near(pair[0].len, 300 * US), "{pair:?}");
        assert!(
            near(pair[1].at - (pair[0].at + pair[0].len), 900 * US),
            "{pair:?}"
        );
    }
    for id in 0..4 {
        assert!(
            (report.share(id) - 0.25).abs() < 0.005,
            "{id}: {}",
            report.share(id)
        );
    }
    // Two rank changes per microslice, and two per batch slice (4 ms of its own run time).
    let expected = 2 * own.len() as u64 + 2 * (750 / 4) + 10;
    assert!(
        report.rank_changes <= expected,
        "{} rank changes, {expected} expected",
        report.rank_changes
    );
}

#[test]
fn the_microslice_cuts_the_owners_slice_but_not_its_turn() {
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy)];
    vms.extend((1..4).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 100 * MS);
    let others: Vec<_> = report.runs.iter().filter(|s| s.id != 0).collect();
    let mut turn = 0;
    for pair in others.windows(2) {
        turn += pair[0].len;
        if pair[0].id != pair[1].id {
            let margin = super::margin(4 * MS) as Nanos;
            assert!(
                turn.abs_diff(4 * MS) <= margin + 10 * US,
                "turn of {turn} ns"
            );
            turn = 0;
        }
    }
}

#[test]
fn an_lsvm_that_sleeps_most_of_the_time_never_waits() {
    let bursts = Behaviour::Bursts {
        sleep: (2 * MS, 20 * MS),
        run: (50 * US, 400 * US),
    };
    let mut vms = vec![ls(0, 300 * US, bursts)];
    vms.extend((1..5).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 5000 * MS);
    let vm = report.vm(0).unwrap();
    assert!(vm.wake_waits.len() > 300);
    assert_eq!(vm.worst_wait(), 0);
}

#[test]
fn two_lsvms_take_turns_and_keep_their_shares() {
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy), ls(1, MS, Behaviour::Busy)];
    vms.extend((2..4).map(|id| batch(id, Behaviour::Busy)));
    let report = run(&vms, 3000 * MS);
    for id in 0..4 {
        assert!(
            (report.share(id) - 0.25).abs() < 0.005,
            "{id}: {}",
            report.share(id)
        );
    }
    assert!(report.vm(0).unwrap().worst_wait() <= 900 * US + MS + 50 * US);
    assert!(report.vm(1).unwrap().worst_wait() <= 3 * MS + 300 * US + 50 * US);
}

#[test]
fn lsvms_alone_share_by_microslices() {
    let vms = [
        ls(0, 300 * US, Behaviour::Busy),
        ls(1, 300 * US, Behaviour::Busy),
    ];
    let report = run(&vms, 1000 * MS);
    assert!((report.share(0) - 0.5).abs() < 0.002);
    assert!(report.runs.iter().all(|s| s.len <= 310 * US));
}

#[test]
fn without_contention_there_are_few_decisions() {
    let wakes = |period| Behaviour::Duty {
        period,
        on: 20 * US,
    };
    let idle = [
        ls(0, 300 * US, wakes(7 * MS)),
        batch(1, wakes(11 * MS)),
        batch(2, wakes(13 * MS)),
    ];
    let one_busy = [
        ls(0, 300 * US, wakes(7 * MS)),
        batch(1, Behaviour::Busy),
        batch(2, wakes(13 * MS)),
    ];
    let busy_ls = [
        ls(0, 300 * US, Behaviour::Busy),
        batch(1, wakes(11 * MS)),
        batch(2, wakes(13 * MS)),
    ];
    for vms in [idle, one_busy, busy_ls] {
        let report = run(&vms, 10_000 * MS);
        assert!(
            report.decisions < 500,
            "{} decisions in 10 s",
            report.decisions
        );
        assert!(
            report.rank_changes < 100,
            "{} rank changes in 10 s",
            report.rank_changes
        );
    }
}

#[test]
fn a_vm_alone_has_no_budget_and_wakes_behind_it_are_notified() {
    let params: Vec<_> = [ls(0, 300 * US, Behaviour::Busy), batch(1, Behaviour::Busy)]
        .map(|vm| vm.params)
        .into();
    let ready = Activity {
        runnable: true,
        ..Activity::default()
    };
    let mut out = Decision::default();
    let mut scheduler = Interleaved::default();
    scheduler.configure(0, &params);
    scheduler.decide(0, &[ready, Activity::default()], &mut out);
    assert_eq!((out.until, out.budgets[0]), (FOREVER, FOREVER));
    assert!(
        out.notify_wake,
        "batch VM 1 would wait behind the LSVM for ever"
    );
    scheduler.decide(
        MS,
        &[
            Activity {
                used: MS,
                ..Activity::default()
            },
            ready,
        ],
        &mut out,
    );
    assert_eq!((out.until, out.budgets[1]), (FOREVER, FOREVER));
    assert!(!out.notify_wake, "the LSVM preempts");
    assert!(out.budgets[0] < FOREVER);
    scheduler.decide(2 * MS, &[ready, ready], &mut out);
    assert!(!out.notify_wake && out.budgets[0] < FOREVER && out.budgets[1] < FOREVER);
    scheduler.decide(
        3 * MS,
        &[Activity::default(), Activity::default()],
        &mut out,
    );
    assert!(!out.notify_wake && out.budgets[0] < FOREVER && out.budgets[1] < FOREVER);
}

#[test]
fn a_busy_lsvm_that_ran_alone_does_not_wait_long_when_the_others_wake() {
    let period = Behaviour::Duty {
        period: 50 * MS,
        on: 10 * MS,
    };
    let mut vms = vec![ls(0, 300 * US, Behaviour::Busy)];
    vms.extend((1..4).map(|id| batch(id, period)));
    let report = run(&vms, 2000 * MS);
    let worst = report.vm(0).unwrap().worst_wait();
    assert!(worst <= 1200 * US, "waited {worst} ns");
}

#[test]
fn a_cap_holds_on_an_idle_core_and_is_used_up() {
    for cap in [10, 200, 500, 990] {
        let mut vm = batch(0, Behaviour::Busy);
        vm.params.cap_permille = Some(cap);
        let share = run(&[vm], 1000 * MS).share(0);
        assert!(
            (share - f64::from(cap) / 1000.0).abs() < 0.01,
            "cap {cap}: {share}"
        );
    }
}

#[test]
fn a_cap_is_used_up_though_other_slices_last_longer_than_its_windows() {
    // Beside LSVMs that are due half of the core, the slice of VM 2 lasts for more than a window of VM 0's cap.
    let mut vms = [
        batch(0, Behaviour::Busy),
        ls(1, 1814 * US, Behaviour::Busy),
        batch(2, Behaviour::Busy),
        ls(3, 1656 * US, Behaviour::Busy),
    ];
    for (vm, weight) in vms.iter_mut().zip([1024, 128, 128, 1024]) {
        vm.params.weight = weight;
    }
    vms[0].params.cap_permille = Some(277);
    let share = run(&vms, 10_000 * MS).share(0);
    assert!((share - 0.277).abs() < 0.01, "{share}");
}

#[test]
fn a_stalled_controller_does_not_bar_an_lsvm_for_long() {
    let mut scheduler = Interleaved::default();
    let params = [
        ls(0, 300 * US, Behaviour::Busy).params,
        batch(1, Behaviour::Busy).params,
    ];
    let mut out = Decision::default();
    scheduler.configure(0, &params);
    let ready = Activity {
        runnable: true,
        ..Activity::default()
    };
    scheduler.decide(0, &[ready, ready], &mut out);
    scheduler.decide(
        1000 * MS,
        &[
            Activity {
                used: 1000 * MS,
                ..ready
            },
            ready,
        ],
        &mut out,
    );
    assert_eq!(out.ranks[0], Rank::Background);
    assert!(out.until <= 1017 * MS, "barred until {}", out.until);
}
