// SPDX-License-Identifier: Apache-2.0
//! Properties of every simulated host, for all schedulers and loads.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use viola_policy::slices::{Class, MS, US};
use viola_sim::cpu::CpuLoad;
use viola_sim::sched::XenConfig;
use viola_sim::setup::{HostSetup, Policy, VmSetup};
use viola_sim::work::{Ping, Udp};
use viola_sim::world::Workload;

fn policies() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::XEN),
        Just(Policy::Credit {
            slice: MS,
            boost: true
        }),
        Just(Policy::Credit {
            slice: 30 * MS,
            boost: false
        }),
        Just(Policy::Xen(XenConfig {
            slice: 30 * MS,
            cores: 2,
            by_tick: true,
            domain_0: true
        })),
        Just(Policy::Xen(XenConfig {
            slice: 30 * MS,
            cores: 1,
            by_tick: false,
            domain_0: false
        })),
        Just(Policy::Paper { slice: 30 * MS }),
        Just(Policy::Interleaved {
            batch_slice: 4 * MS
        }),
        Just(Policy::Eevdf),
        Just(Policy::VTURBO),
    ]
}

fn vm() -> impl Strategy<Value = VmSetup> {
    let load = prop_oneof![
        2 => Just(CpuLoad::Busy),
        1 => Just(CpuLoad::None),
        2 => (5..100_u64, 1..10_u64).prop_map(|(period, tenths)| CpuLoad::Duty {
            period: period * MS,
            on: period * MS / 10 * tenths,
        }),
    ];
    let weight = prop::sample::select(vec![128_u32, 256, 512]);
    (
        any::<bool>(),
        weight,
        load,
        prop::sample::select(vec![1_u64, 5, 10]),
    )
        .prop_map(|(ls, weight, load, microslice)| VmSetup {
            class: if ls { Class::Ls } else { Class::Batch },
            weight,
            load,
            microslice: microslice * MS,
            ..VmSetup::default()
        })
}

fn host(policy: Policy, vms: Vec<VmSetup>) -> HostSetup {
    HostSetup {
        turbo_cores: usize::from(matches!(policy, Policy::Turbo { .. })),
        policy,
        vms,
        ..HostSetup::default()
    }
}

/// Pings and datagrams for some of the VMs.
fn work(vms: usize, setup: &HostSetup, ring: bool) -> Vec<Box<dyn Workload + Send>> {
    let mut all: Vec<Box<dyn Workload + Send>> = Vec::new();
    for vm in 0..vms {
        all.push(Box::new(Ping::new(vm, (0, 20 * MS), 50 * US, setup.costs)));
    }
    if ring {
        all.push(Box::new(Udp::new(0, 60 * US, 1470, 64 << 10, setup.costs)));
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// No core idles while a VM wants it; the times of cores and VMs add up; every packet is accounted for; equal seeds
    /// give equal results.
    #[test]
    fn nothing_is_lost(
        policy in policies(),
        vms in prop::collection::vec(vm(), 1..6),
        seed in 0..1000_u64,
    ) {
        let setup = host(policy, vms);
        let time = 1_500 * MS;
        let run = || {
            let mut sim = setup.simulation(work(setup.vms.len(), &setup, true), seed);
            sim.run(time);
            sim
        };
        let (mut sim, again) = (run(), run());
        for core in 0..sim.world.cpus.cores() {
            let (idle, stolen, wasted) = sim.world.cpus.core_times(core);
            prop_assert_eq!(wasted, 0, "core {} idles while a VM waits", core);
            let on = (0..sim.world.cpus.vcpus()).filter(|&v| sim.world.cpus.core_of(v) == core);
            let ran: u64 = on.map(|v| sim.world.cpus.usage(v).ran).sum();
            prop_assert_eq!(ran + idle + stolen, time);
        }
        for nic in &sim.world.nics {
            prop_assert_eq!(nic.arrived, nic.dropped + nic.delivered + nic.waiting() as u64);
        }
        for (a, b) in sim.workloads.iter().zip(&again.workloads) {
            let (a, b) = (a.figures(&sim.world), b.figures(&again.world));
            prop_assert_eq!(format!("{a:?}"), format!("{b:?}"));
        }
        prop_assert_eq!(sim.world.handled(), again.world.handled());
        // One run and two consecutive runs give the same result.
        let mut halves = setup.simulation(work(setup.vms.len(), &setup, true), seed);
        halves.run(time / 2);
        halves.run(time);
        sim.run(time);
        for v in 0..sim.world.cpus.vcpus() {
            prop_assert_eq!(sim.world.cpus.usage(v).ran, halves.world.cpus.usage(v).ran);
        }
    }

    /// Busy VMs get their shares by weight.
    #[test]
    fn busy_vms_have_their_shares(
        policy in policies(),
        weights in prop::collection::vec(prop::sample::select(vec![128_u32, 256, 512]), 2..5),
        ls in 0..3_usize,
    ) {
        // The baseline's credits are at most a slice: with slices shorter than its accounting it keeps equal weights
        // only. Xen's own scheduler, with credits for more than one core, ignores weights.
        let short = matches!(policy, Policy::Credit { slice, .. } if slice < 30 * MS)
            || matches!(policy, Policy::Xen(_));
        let weights = if short { vec![256; weights.len()] } else { weights };
        let vms: Vec<VmSetup> = weights
            .iter()
            .enumerate()
            .map(|(k, &weight)| VmSetup {
                class: if k < ls { Class::Ls } else { Class::Batch },
                weight,
                load: CpuLoad::Busy,
                microslice: 2 * MS,
                ..VmSetup::default()
            })
            .collect();
        let setup = HostSetup { switch: 0, ..host(policy, vms) };
        let time = 6_000 * MS;
        let mut sim = setup.simulation(Vec::new(), 1);
        sim.run(time);
        let total: u32 = weights.iter().sum();
        // A round of slices scaled by weight; 30 ms is the longest slice.
        let round = 30 * MS * weights.len() as u64 * 4;
        for (vm, &weight) in sim.world.vms.iter().zip(&weights) {
            let due = time / u64::from(total) * u64::from(weight);
            let ran = sim.world.cpus.usage(vm.app).ran;
            prop_assert!(ran.abs_diff(due) <= round, "{policy:?}: {ran} instead of {due}");
        }
    }
}

/// The scenario files of the simulator run.
#[test]
fn the_scenarios_run() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let mut scenario = viola_sim::scenario::Scenario::read(&path).unwrap();
        scenario.time = scenario.time.min(3_000 * MS);
        let outcome = scenario.run(scenario.seed);
        assert!(outcome.events > 100 && outcome.vms.iter().all(|vm| vm.ran <= 2.0));
        seen += 1;
    }
    assert!(seen >= 4, "{seen} scenarios");
}
