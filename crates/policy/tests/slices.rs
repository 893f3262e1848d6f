// SPDX-License-Identifier: Apache-2.0
//! Properties of every scheduler of one core, for all VMs that share it.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use viola_policy::slices::simulate::{Behaviour, Core, Driver, Report, SimVm};
use viola_policy::slices::{
    Class, CoreScheduler, Credit, Interleaved, MS, Nanos, Paper, Params, US,
};

const BATCH_SLICE: Nanos = 4 * MS;
/// Run time that the reserve of an LSVM with up to a half of the core buys.
const RESERVE: Nanos = 6 * MS;

fn any_vm(id: u32) -> impl Strategy<Value = SimVm> {
    let weight = prop::sample::select(vec![128_u32, 256, 256, 256, 512, 1024]);
    (any::<bool>(), weight, 50 * US..10 * MS).prop_map(move |(ls, weight, microslice)| {
        let class = if ls { Class::Ls } else { Class::Batch };
        SimVm {
            params: Params {
                id,
                class,
                weight,
                cap_permille: None,
                microslice,
            },
            behaviour: Behaviour::Busy,
        }
    })
}

/// Busy VMs, some latency sensitive, some not.
fn busy_vms(most: u32) -> impl Strategy<Value = Vec<SimVm>> {
    (1..=most).prop_flat_map(|n| (0..n).map(any_vm).collect::<Vec<_>>())
}

fn any_behaviour() -> impl Strategy<Value = Behaviour> {
    prop_oneof![
        2 => Just(Behaviour::Busy),
        1 => Just(Behaviour::Idle),
        2 => (MS..60 * MS, 1_u64..100)
            .prop_map(|(period, percent)| Behaviour::Duty { period, on: (period * percent / 100).max(10 * US) }),
        2 => (10 * US..20 * MS, 1_u64..4, 10 * US..5 * MS, 1_u64..4)
            .prop_map(|(sleep, k, run, l)| Behaviour::Bursts { sleep: (sleep, sleep * k), run: (run, run * l) }),
        1 => (1..50 * US, 1..2 * MS).prop_map(|(margin, sleep)| Behaviour::Evade { margin, sleep }),
    ]
}

fn any_vms(most: u32) -> impl Strategy<Value = Vec<SimVm>> {
    busy_vms(most).prop_flat_map(|vms| {
        vms.into_iter()
            .map(|vm| any_behaviour().prop_map(move |behaviour| SimVm { behaviour, ..vm }))
            .collect::<Vec<_>>()
    })
}

/// Behaviours that attack the scheduler.
fn adversary() -> impl Strategy<Value = Behaviour> {
    prop_oneof![
        (1..100 * US, 1..5 * MS).prop_map(|(margin, sleep)| Behaviour::Evade { margin, sleep }),
        (US..5 * MS, 10 * US..20 * MS).prop_map(|(sleep, run)| Behaviour::Bursts {
            sleep: (0, sleep),
            run: (US, run)
        }),
        (100 * US..20 * MS, 40_u64..100).prop_map(|(period, percent)| Behaviour::Duty {
            period,
            on: period * percent / 100
        }),
    ]
}

fn run(scheduler: impl CoreScheduler, vms: &[SimVm], time: Nanos) -> Report {
    Core::new(scheduler, vms, Driver::default(), 11)
        .run_until(time)
        .unwrap()
        .clone()
}

fn total_weight(vms: &[SimVm]) -> f64 {
    vms.iter().map(|vm| f64::from(vm.params.weight)).sum()
}

fn fair(vms: &[SimVm], i: usize) -> f64 {
    f64::from(vms[i].params.weight) / total_weight(vms)
}

/// Every busy VM has its share by weight within 1 %, and the core never idles.
fn shares_are_fair(report: &Report, vms: &[SimVm]) -> Result<(), TestCaseError> {
    prop_assert_eq!(report.idle, 0);
    for (i, vm) in vms.iter().enumerate() {
        let (got, fair) = (report.share(vm.params.id), fair(vms, i));
        prop_assert!(
            (got - fair).abs() < 0.01,
            "VM {i} got {got:.4}, fair is {fair:.4}"
        );
    }
    Ok(())
}

/// Longest wait (ns) of a busy VM with share `s` under EEVDF with slices of [`BATCH_SLICE`] (Stoica and Abdel-Wahab, 1995,
/// theorem 1): a VM that has just run a slice has a lag of -q·(1 - s) and is eligible after q·(1 - s)/s; it then runs
/// by its deadline, q/s later, or at most one slice after it.
fn worst_stock_wait(s: f64) -> f64 {
    let q = BATCH_SLICE as f64;
    q * (1.0 - s) / s + q / s
}

/// Max-min fair shares of VMs that want these parts of the core.
fn water_fill(vms: &[SimVm], wants: &[f64]) -> Vec<f64> {
    let mut got = vec![None; vms.len()];
    loop {
        let left = 1.0 - got.iter().flatten().sum::<f64>();
        let open: f64 = (0..vms.len())
            .filter(|&i| got[i].is_none())
            .map(|i| f64::from(vms[i].params.weight))
            .sum();
        let share = |i: usize| left * f64::from(vms[i].params.weight) / open;
        let Some(i) = (0..vms.len()).find(|&i| got[i].is_none() && wants[i] <= share(i)) else {
            return (0..vms.len())
                .map(|i| got[i].unwrap_or_else(|| share(i)))
                .collect();
        };
        got[i] = Some(wants[i]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn interleaved_gives_busy_vms_their_shares(vms in busy_vms(7)) {
        shares_are_fair(&run(Interleaved::default(), &vms, 20_000 * MS), &vms)?;
    }

    #[test]
    fn paper_gives_busy_vms_their_shares(vms in busy_vms(7)) {
        shares_are_fair(&run(Paper::default(), &vms, 60_000 * MS), &vms)?;
    }

    #[test]
    fn credit_gives_busy_vms_their_shares(vms in busy_vms(7), boost in any::<bool>()) {
        shares_are_fair(&run(Credit::new(boost), &vms, 60_000 * MS), &vms)?;
    }

    #[test]
    fn late_timers_and_the_cost_of_deciding_do_not_shift_interleaved_shares(vms in busy_vms(5), late in 0..60 * US) {
        let driver = Driver { overhead: 3 * US, late, ..Driver::default() };
        let mut core = Core::new(Interleaved::default(), &vms, driver, 5);
        let report = core.run_until(20_000 * MS).unwrap();
        let used: Nanos = report.vms.iter().map(|vm| vm.ran).sum();
        for (i, vm) in vms.iter().enumerate() {
            let got = report.vm(vm.params.id).unwrap().ran as f64 / used as f64;
            prop_assert!((got - fair(&vms, i)).abs() < 0.01, "VM {i} got {got:.4}, fair is {:.4}", fair(&vms, i));
        }
    }

    #[test]
    fn no_scheduler_idles_the_core_or_decides_without_end(vms in any_vms(8), seed in any::<u64>()) {
        let time = 2_000 * MS;
        let reports = [
            Core::new(Interleaved::default(), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
            Core::new(Paper::default(), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
            Core::new(Credit::new(true), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
            Core::new(Credit::new(false), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
        ];
        for (k, report) in reports.iter().enumerate() {
            prop_assert_eq!(report.wasted, 0, "scheduler {}", k);
            let sleeps: usize = report.vms.iter().map(|vm| vm.wake_waits.len()).sum();
            let shortest = vms.iter().filter(|vm| vm.params.class == Class::Ls).map(|vm| vm.params.microslice).min();
            let slices = time / shortest.unwrap_or(BATCH_SLICE).min(BATCH_SLICE);
            let most = 4 * (slices + sleeps as u64) + 1_000;
            prop_assert!(report.decisions <= most, "scheduler {}: {} decisions, {} expected", k, report.decisions, most);
        }
    }

    #[test]
    fn a_busy_lsvm_waits_as_the_formula_says(vms in busy_vms(6)) {
        let report = run(Interleaved::default(), &vms, 10_000 * MS);
        let lsvms: Nanos = vms.iter().filter(|vm| vm.params.class == Class::Ls).map(|vm| vm.params.microslice).sum();
        for (i, vm) in vms.iter().enumerate() {
            let (s, t_m) = (fair(&vms, i), vm.params.microslice as f64);
            let most = match vm.params.class {
                Class::Ls => t_m * (1.0 - s) / s + lsvms as f64 - t_m,
                // Each batch VM may be a slice ahead and each LSVM a microslice; this VM must catch up.
                Class::Batch => (vms.len() as f64 * BATCH_SLICE as f64 + lsvms as f64) / s,
            };
            // Decisions come within 1/64 of a microslice of their time.
            let most = most * 1.04 + 20_000.0;
            let worst = report.vm(vm.params.id).unwrap().worst_wait() as f64;
            prop_assert!(worst <= most, "VM {i} ({:?}) waited {worst} ns, at most {most}", vm.params.class);
        }
    }

    #[test]
    fn packets_at_any_time_shift_no_shares(vms in busy_vms(6), seed in any::<u64>()) {
        let driver = Driver { packets: true, ..Driver::default() };
        let report = Core::new(Interleaved::default(), &vms, driver, seed).run_until(20_000 * MS).unwrap().clone();
        shares_are_fair(&report, &vms)?;
    }

    #[test]
    fn no_vm_waits_longer_than_on_a_stock_host(vms in busy_vms(6), packets in any::<bool>(), seed in any::<u64>()) {
        let mut vms = vms;
        for vm in &mut vms {
            vm.params.microslice = vm.params.microslice.min(MS);
        }
        let driver = Driver { packets, ..Driver::default() };
        let report = Core::new(Interleaved::default(), &vms, driver, seed).run_until(10_000 * MS).unwrap().clone();
        let lsvms = vms.iter().filter(|vm| vm.params.class == Class::Ls).count() as Nanos;
        let longest = vms.iter().map(|vm| vm.params.microslice).max().unwrap_or(0);
        for (i, vm) in vms.iter().enumerate() {
            // LSVMs may spend their reserves at once.
            let reserves = match vm.params.class {
                Class::Ls => 0,
                Class::Batch => lsvms * RESERVE,
            };
            let most = worst_stock_wait(fair(&vms, i)) + (longest + reserves) as f64;
            let worst = report.vm(vm.params.id).unwrap().worst_wait() as f64;
            prop_assert!(worst <= most, "VM {i} ({:?}) waited {worst} ns, at most {most}", vm.params.class);
        }
    }

    #[test]
    fn nobody_starves_whatever_the_others_do(mut vms in any_vms(6), seed in any::<u64>()) {
        vms[0].behaviour = Behaviour::Busy;
        let time = 4_000 * MS;
        let s = fair(&vms, 0);
        let micro: Nanos = vms.iter().map(|vm| vm.params.microslice).sum();
        let reports = [
            // The credits of sleeping VMs come on top.
            (Core::new(Interleaved::default(), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
                (vms.len() as f64 * (BATCH_SLICE + 4 * MS) as f64 + micro as f64) / s),
            (Core::new(Paper::default(), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
                vms.len() as f64 * (60 * MS) as f64 / s.min(0.5)),
            (Core::new(Credit::new(true), &vms, Driver::default(), seed).run_until(time).unwrap().clone(),
                vms.len() as f64 * (60 * MS) as f64 / s.min(0.5)),
        ];
        for (k, (report, most)) in reports.iter().enumerate() {
            let vm = report.vm(0).unwrap();
            prop_assert!(vm.worst_wait() as f64 <= *most, "scheduler {k}: waited {} of at most {most}", vm.worst_wait());
        }
    }

    #[test]
    fn vms_that_want_less_get_it_and_the_busy_share_the_rest(vms in busy_vms(5), wants in prop::collection::vec(1_u64..120, 5), period in 200 * MS..400 * MS) {
        let mut vms = vms;
        let mut parts = Vec::new();
        for (vm, &percent) in vms.iter_mut().zip(&wants) {
            vm.params.microslice /= 10;
            parts.push(if percent >= 60 { 1.0 } else { percent as f64 / 100.0 });
            if percent < 60 {
                vm.behaviour = Behaviour::Duty { period, on: period * percent / 100 };
            }
        }
        let report = run(Interleaved::default(), &vms, 20_000 * MS);
        let expected = water_fill(&vms, &parts);
        for (i, vm) in vms.iter().enumerate() {
            let (got, due) = (report.share(vm.params.id), expected[i]);
            // A VM that wants nearly its share loses wake-ups that come while it still works.
            if parts[i] == 1.0 || parts[i] < 0.6 * fair(&vms, i) {
                prop_assert!(got >= due - 0.01, "VM {i} got {got:.4}, should have {due:.4}");
            }
        }
    }

    #[test]
    fn a_vm_that_evades_its_budget_gets_no_more_than_its_share(
        vms in busy_vms(5), behaviour in adversary(), weight in prop::sample::select(vec![128_u32, 256, 512]),
        microslice in 50 * US..5 * MS, ls in any::<bool>(), seed in any::<u64>(),
    ) {
        let mut vms = vms;
        let class = if ls { Class::Ls } else { Class::Batch };
        let params = Params { id: 99, class, weight, cap_permille: None, microslice };
        vms.push(SimVm { params, behaviour });
        let s = fair(&vms, vms.len() - 1);
        let time = 10_000 * MS;
        let got = |mut core: Core<Interleaved>| core.run_until(time).unwrap().share(99);
        let share = got(Core::new(Interleaved::default(), &vms, Driver::default(), seed));
        // Its credit and a microslice come on top, once.
        prop_assert!(share <= s + 0.005, "evading gave {share:.4} of the core, fair is {s:.4}");
        let late = Driver { late: 50 * US, overhead: 3 * US, ..Driver::default() };
        let share = got(Core::new(Interleaved::default(), &vms, late, seed));
        prop_assert!(share <= s + 0.01, "evading late timers gave {share:.4} of the core, fair is {s:.4}");
    }

    #[test]
    fn boost_under_the_credit_scheduler_steals_no_share(
        n in 1_u32..5, behaviour in adversary(), seed in any::<u64>(),
    ) {
        let params = |id| Params { id, class: Class::Batch, weight: 256, cap_permille: None, microslice: MS };
        let mut vms: Vec<_> = (0..n).map(|id| SimVm { params: params(id), behaviour: Behaviour::Busy }).collect();
        vms.push(SimVm { params: params(99), behaviour });
        let s = fair(&vms, vms.len() - 1);
        let share = Core::new(Credit::new(true), &vms, Driver::default(), seed).run_until(30_000 * MS).unwrap().share(99);
        prop_assert!(share <= s + 0.02, "{share:.4} of the core, fair is {s:.4}");
    }

    #[test]
    fn caps_hold_and_are_used_up(vms in busy_vms(5), cap in 10_u32..900, alone in any::<bool>()) {
        let mut vms = vms;
        for vm in &mut vms {
            vm.params.microslice /= 5;
        }
        vms[0].params.cap_permille = Some(cap);
        if alone {
            for vm in &mut vms[1..] {
                vm.behaviour = Behaviour::Idle;
            }
        }
        let cap = f64::from(cap) / 1000.0;
        let due = if alone { cap } else { cap.min(fair(&vms, 0)) };
        let seconds = 10;
        let mut core = Core::new(Interleaved::default(), &vms, Driver::default(), 1);
        let mut before = 0;
        for second in 1..=seconds {
            let ran = core.run_until(second * 1_000 * MS).unwrap().vm(0).unwrap().ran;
            let share = (ran - before) as f64 / 1e9;
            prop_assert!(share <= cap + 0.01, "second {second}: {share:.4} with a cap of {cap}");
            before = ran;
        }
        let share = core.report().share(0);
        // A VM cannot use all of a quota when slices of others intervene, and carries it over for one window only.
        let slack = if alone { 0.01 } else { 0.015 };
        prop_assert!(share >= due - slack, "{share:.4} of the core, {due:.4} is due");
        for scheduler in [Box::new(Paper::default()) as Box<dyn CoreScheduler>, Box::new(Credit::new(true)), Box::new(Credit::new(false))] {
            let share = run(scheduler, &vms, 20_000 * MS).share(0);
            prop_assert!(share <= cap + 0.01, "{share:.4} with a cap of {cap}");
            // Slices of 30 ms hardly fit windows of 30 ms.
            prop_assert!(share >= due * 0.3, "{share:.4} of the core, {due:.4} is due");
        }
    }

    #[test]
    fn changing_the_vms_at_any_moment_keeps_shares(
        vms in busy_vms(5), changes in prop::collection::vec((10 * US..300 * MS, 0_u32..4, any::<prop::sample::Index>()), 1..40),
    ) {
        // VM 0 stays; it is due its share by weight while each set of VMs lasts.
        let mut now_vms = vms.clone();
        let mut core = Core::new(Interleaved::default(), &now_vms, Driver::default(), 1);
        let mut due = 0.0;
        let mut next_id = 100;
        for (span, what, index) in changes {
            let end = core.now() + span;
            due += fair(&now_vms, 0) * span as f64;
            core.run_until(end).unwrap();
            let k = 1 + index.index(now_vms.len().max(2) - 1);
            match what {
                0 if now_vms.len() < 7 => {
                    let mut vm = now_vms[0];
                    vm.params.id = next_id;
                    next_id += 1;
                    now_vms.insert(0, vm);
                    now_vms.swap(0, 1);
                }
                1 if now_vms.len() > 1 => { now_vms.remove(k.min(now_vms.len() - 1)); }
                2 => now_vms[0].params.weight = 768 - now_vms[0].params.weight.min(512),
                _ => {
                    let j = index.index(now_vms.len());
                    let class = now_vms[j].params.class;
                    now_vms[j].params.class = if class == Class::Ls { Class::Batch } else { Class::Ls };
                }
            }
            core.configure(&now_vms);
        }
        let end = core.now() + 8_000 * MS;
        due += fair(&now_vms, 0) * 8e9;
        let report = core.run_until(end).unwrap();
        let got = report.vm(0).unwrap().ran as f64;
        prop_assert!((got - due).abs() / (end as f64) < 0.01, "VM 0 got {got}, {due} is due of {end}");
    }

    #[test]
    fn an_lsvm_that_is_mostly_idle_runs_the_moment_it_wakes(
        others in busy_vms(6), sleep in 2 * MS..20 * MS, run in 10 * US..200 * US, microslice in 100 * US..MS,
    ) {
        let mut vms: Vec<_> = others;
        for vm in &mut vms {
            vm.params.class = Class::Batch;
            vm.params.weight = 256;
        }
        let params = Params { id: 99, class: Class::Ls, weight: 256, cap_permille: None, microslice };
        vms.push(SimVm { params, behaviour: Behaviour::Bursts { sleep: (sleep, 2 * sleep), run: (10 * US, run) } });
        let report = Core::new(Interleaved::default(), &vms, Driver::default(), 3).run_until(5_000 * MS).unwrap().clone();
        prop_assert_eq!(report.vm(99).unwrap().worst_wait(), 0);
    }
}
