// SPDX-License-Identifier: Apache-2.0
use super::super::{Class, DEFAULT_WEIGHT, MS};
use super::*;

/// Ranks VMs by the parity of their ids and never asks to be called.
struct Fixed;

impl CoreScheduler for Fixed {
    fn configure(&mut self, _: Nanos, _: &[Params]) {}
    fn decide(&mut self, _: Nanos, activity: &[Activity], out: &mut Decision) {
        for i in 0..activity.len() {
            out.ranks[i] = if i % 2 == 1 {
                Rank::Boost
            } else {
                Rank::Waiting
            };
        }
    }
}

fn vm(id: u32, behaviour: Behaviour) -> SimVm {
    let params = Params {
        id,
        class: Class::Batch,
        weight: DEFAULT_WEIGHT,
        cap_permille: None,
        microslice: MS,
    };
    SimVm { params, behaviour }
}

fn record() -> Driver {
    Driver {
        record: true,
        ..Driver::default()
    }
}

#[test]
fn the_higher_rank_preempts_when_it_wakes_and_the_lower_waits() {
    let vms = [
        vm(0, Behaviour::Busy),
        vm(
            1,
            Behaviour::Duty {
                period: 10 * MS,
                on: 2 * MS,
            },
        ),
    ];
    let mut core = Core::new(Fixed, &vms, record(), 1);
    let report = core.run_until(20 * MS).unwrap();
    let runs: Vec<_> = report
        .runs
        .iter()
        .map(|s| (s.id, s.at / MS, s.len / MS))
        .collect();
    assert_eq!(runs, [(1, 0, 2), (0, 2, 8), (1, 10, 2), (0, 12, 8)]);
    assert_eq!(report.vms[1].wake_waits, [0, 0]);
    assert_eq!(report.vms[0].wake_waits, [2 * MS]);
    assert_eq!(report.vms[0].preempt_waits, [2 * MS]);
    assert_eq!((report.idle, report.wasted), (0, 0));
}

#[test]
fn equals_run_first_come_first_served() {
    let duty = Behaviour::Duty {
        period: 10 * MS,
        on: 2 * MS,
    };
    let mut core = Core::new(
        Fixed,
        &[vm(0, duty), vm(1, Behaviour::Idle), vm(2, duty)],
        record(),
        1,
    );
    let report = core.run_until(10 * MS).unwrap();
    let runs: Vec<_> = report
        .runs
        .iter()
        .map(|s| (s.id, s.at / MS, s.len / MS))
        .collect();
    assert_eq!(runs, [(0, 0, 2), (2, 2, 2)]);
    assert_eq!(report.idle, 6 * MS);
}

#[test]
fn a_scheduler_that_does_not_let_time_pass_is_an_error() {
    struct Hasty;
    impl CoreScheduler for Hasty {
        fn configure(&mut self, _: Nanos, _: &[Params]) {}
        fn decide(&mut self, now: Nanos, _: &[Activity], out: &mut Decision) {
            out.until = now;
        }
    }
    let mut core = Core::new(Hasty, &[vm(0, Behaviour::Busy)], Driver::default(), 1);
    assert_eq!(core.run_until(MS), Err(NoProgress { at: 0 }));
}

#[test]
fn equal_seeds_give_equal_reports() {
    let bursts = Behaviour::Bursts {
        sleep: (MS, 5 * MS),
        run: (100 * US, MS),
    };
    let run = |seed| {
        let mut core = Core::new(
            Fixed,
            &[vm(0, Behaviour::Busy), vm(1, bursts)],
            record(),
            seed,
        );
        core.run_until(100 * MS).unwrap().clone()
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
}
