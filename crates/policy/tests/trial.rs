// SPDX-License-Identifier: Apache-2.0
//! Trials on simulated cores: whether viola, without knowing what VMs do, keeps class ls where it helps and nowhere else.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use viola_policy::slices::simulate::{Behaviour, Host, Usage, slowest_mean};
use viola_policy::slices::{MS, Nanos, US};
use viola_policy::trial::{LONG_WINDOW, Outcome, SETTLING, Sample, Trial, WINDOW, WindowSample};

/// Fewest wake-ups of a window from which a delay is computed, as in the daemon.
const MIN_WAKES: usize = 40;
/// The VM that is tried.
const TRIED: usize = 0;

/// The host's VMs in class batch, but for the first one while it is tried.
fn host(behaviours: &[Behaviour], seed: u64) -> Host {
    Host::new(behaviours, 300 * US, seed)
}

/// Runs for some time with the first VM in class ls or batch, and measures all but the settling.
fn window(host: &mut Host, ls: bool, length: Nanos) -> WindowSample<usize> {
    host.set_classes(&[ls]);
    host.run(SETTLING).unwrap();
    let usage = host.run(length - SETTLING).unwrap();
    let mut samples: Vec<_> = usage.iter().map(sample).enumerate().collect();
    let tried = vec![samples.remove(TRIED)];
    WindowSample {
        tried,
        neighbours: samples,
    }
}

/// What the VM that is tried got.
fn own(window: &WindowSample<usize>) -> &Sample {
    &window.tried[0].1
}

/// A whole trial. As in the daemon, windows are long if few requests come.
fn trial(behaviours: &[Behaviour], seed: u64) -> Outcome<usize> {
    let length = match behaviours[TRIED] {
        Behaviour::Duty { period, .. } if period < 10 * MS => WINDOW,
        _ => LONG_WINDOW,
    };
    let mut host = host(behaviours, seed);
    let mut trial = Trial::new(seed);
    loop {
        let sample = window(&mut host, trial.with(), length);
        if let Some(outcome) = trial.end_window(sample) {
            return outcome;
        }
    }
}

/// The mean of the slowest twentieth of the wake-ups, and the run time.
fn sample(usage: &Usage) -> Sample {
    let delay = slowest_mean(usage.wakes.clone());
    Sample {
        delay: (usage.wakes.len() >= MIN_WAKES).then_some(delay.max(1_024.0)),
        work: usage.run as f64,
        tolerated: 0.0,
    }
}

/// A server that is asked at fixed moments, in an open loop, and wants at most a third of its share of a core with `vms` VMs. One
/// that is asked often wants little: while it waits, requests come together, so it uses less of its share than when it does not.
fn server(vms: u64) -> impl Strategy<Value = Behaviour> {
    let rare = (25 * MS..45 * MS, 100_u64..330);
    let often = (2 * MS..8 * MS, 5_u64..20);
    prop_oneof![rare, often].prop_map(move |(period, permille)| Behaviour::Duty {
        period,
        on: period * permille / 1000 / vms,
    })
}

fn busy(count: usize) -> Vec<Behaviour> {
    vec![Behaviour::Busy; count]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// A server beside VMs that compute gains, nobody loses, and the trial finds both at its first look.
    #[test]
    fn a_server_beside_busy_vms_keeps_its_class(others in 2_usize..6, seed in any::<u64>(), behaviour in server(6)) {
        let vms = [vec![behaviour], busy(others)].concat();
        let outcome = trial(&vms, seed);
        prop_assert!(outcome.stays(&TRIED), "{outcome:?}");
        prop_assert_eq!(outcome.tried[&TRIED].pairs, 10);
        // The oracle: a long run of each kind.
        let long = |ls| window(&mut host(&vms, seed ^ 1), ls, 60_000 * MS);
        let (without, with) = (long(false), long(true));
        let gain = own(&with).delay.unwrap() / own(&without).delay.unwrap();
        let found = outcome.tried[&TRIED].ratio.unwrap();
        prop_assert!(gain < 0.7, "{gain}");
        prop_assert!((found.ratio / gain).ln().abs() < 0.7, "found {found:?}, oracle {gain}");
        for ((_, before), (_, after)) in without.neighbours.iter().zip(&with.neighbours) {
            prop_assert!(after.work >= before.work * 0.97, "{} to {}", before.work, after.work);
        }
    }

    /// A VM that only computes, and one that has the core alone, are never kept in class ls.
    #[test]
    fn who_cannot_gain_is_not_kept(others in 0_usize..4, seed in any::<u64>(), behaviour in server(1)) {
        let alone = trial(&[behaviour], seed);
        prop_assert!(!alone.stays(&TRIED), "{alone:?}");
        let computes = trial(&busy(others + 1), seed);
        prop_assert!(!computes.stays(&TRIED), "{computes:?}");
    }

    /// Beside servers that are batch, class ls for one stays only if the others do not lose.
    #[test]
    fn what_stays_harms_no_neighbour(
        servers in prop::collection::vec(server(6), 2..4), others in 1_usize..4, seed in any::<u64>()
    ) {
        let vms = [servers, busy(others)].concat();
        let outcome = trial(&vms, seed);
        if outcome.stays(&TRIED) {
            let long = |ls| window(&mut host(&vms, seed ^ 1), ls, 120_000 * MS);
            let (without, with) = (long(false), long(true));
            for ((id, before), (_, after)) in without.neighbours.iter().zip(&with.neighbours) {
                prop_assert!(after.work >= before.work * 0.96, "VM {id}: {before:?} to {after:?}");
                if let (Some(before), Some(after)) = (before.delay, after.delay) {
                    prop_assert!(after <= before * 1.15 + 50_000.0, "VM {id}: delay {before} to {after}");
                }
            }
        }
    }
}

#[test]
fn a_window_measures_the_tried_vm_and_its_neighbours() {
    let sample = window(&mut host(&busy(2), 1), false, WINDOW);
    assert_eq!(sample.neighbours[0].0, 1);
    assert!(
        (own(&sample).work / 1e9 - 0.5).abs() < 0.1,
        "half of 1 s: {}",
        own(&sample).work
    );
}
