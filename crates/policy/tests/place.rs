// SPDX-License-Identifier: Apache-2.0
//! Properties of every placement.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use viola_policy::place::{Core, Limits, Placement, Reason, Topology, VcpuDemand, place};
use viola_policy::slices::Class;

fn topology() -> impl Strategy<Value = Topology> {
    (1_u32..7, any::<bool>(), 1_u32..3).prop_map(|(cores, smt, nodes)| {
        let threads = if smt { 2 } else { 1 };
        let core = |id: u32| {
            let siblings = (0..threads)
                .map(|t| id % cores + t * cores)
                .filter(|&s| s != id)
                .collect();
            Core {
                id,
                smt_siblings: siblings,
                node: id % cores % nodes,
            }
        };
        Topology {
            cores: (0..cores * threads).map(core).collect(),
        }
    })
}

fn demand(vm: u32) -> impl Strategy<Value = Vec<VcpuDemand>> {
    let weight = prop::sample::select(vec![128_u32, 256, 512]);
    let allowed = prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec(0_u32..16, 1..5)];
    let node = prop::option::of(0_u32..2);
    let vcpu = (0.0_f64..1.0, prop::option::of(0_u32..16));
    (
        any::<bool>(),
        weight,
        allowed,
        node,
        prop::collection::vec(vcpu, 1..4),
    )
        .prop_map(move |(is_ls, weight, allowed, node, vcpus)| {
            let class = if is_ls { Class::Ls } else { Class::Batch };
            let one = |(k, (load, now)): (usize, (f64, Option<u32>))| VcpuDemand {
                vm,
                vcpu: k as u32,
                class,
                weight,
                load,
                allowed: allowed.clone(),
                node,
                current: now,
            };
            vcpus.into_iter().enumerate().map(one).collect()
        })
}

fn demands() -> impl Strategy<Value = Vec<VcpuDemand>> {
    (0_u32..9)
        .prop_flat_map(|n| (0..n).map(demand).collect::<Vec<_>>())
        .prop_map(|vms| vms.concat())
}

fn follow(demands: &mut [VcpuDemand], places: &[Placement]) {
    for (d, p) in demands.iter_mut().zip(places) {
        d.current = p.core;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_vcpu_gets_one_core_that_it_may_use(topology in topology(), demands in demands()) {
        let places = place(&topology, &demands, &Limits::default());
        prop_assert_eq!(places.len(), demands.len());
        for (d, p) in demands.iter().zip(&places) {
            prop_assert_eq!((d.vm, d.vcpu), (p.vm, p.vcpu));
            let may = |id: u32| d.allowed.is_empty() || d.allowed.contains(&id);
            match p.core {
                Some(id) => prop_assert!(topology.cores.iter().any(|c| c.id == id) && may(id)),
                None => {
                    prop_assert_eq!(p.why, Reason::NoCore);
                    prop_assert!(!topology.cores.iter().any(|c| may(c.id)));
                }
            }
            prop_assert_eq!(p.why == Reason::Stays, p.core.is_some() && p.core == d.current);
        }
    }

    #[test]
    fn repeated_placement_converges(topology in topology(), mut demands in demands()) {
        let limits = Limits::default();
        for round in 0.. {
            let places = place(&topology, &demands, &limits);
            let moved = places.iter().zip(&demands).filter(|(p, d)| p.core != d.current).count();
            if moved == 0 {
                break;
            }
            if round > 0 {
                prop_assert!(moved <= limits.max_moves, "{moved} moved");
            }
            prop_assert!(round < 100, "it never comes to rest");
            follow(&mut demands, &places);
        }
    }

    #[test]
    fn a_little_noise_in_the_load_moves_nobody(topology in topology(), mut demands in demands(), noise in prop::collection::vec(-0.03_f64..0.03, 32)) {
        for d in &mut demands {
            d.weight = 256;
        }
        for _ in 0..100 {
            let places = place(&topology, &demands, &Limits { threshold: 0.15, ..Limits::default() });
            follow(&mut demands, &places);
        }
        // On a crowded core many small changes add up: together they stay below the gain that a move needs.
        let all: f64 = demands.iter().zip(noise.iter().cycle()).map(|(d, n)| (d.load * n).abs()).sum();
        let scale = (0.02 / all.max(1e-9)).min(1.0);
        for (d, n) in demands.iter_mut().zip(noise.iter().cycle()) {
            d.load = (d.load * (1.0 + n * scale)).clamp(0.0, 1.0);
        }
        let places = place(&topology, &demands, &Limits::default());
        prop_assert!(places.iter().all(|p| matches!(p.why, Reason::Stays | Reason::NoCore)), "{places:?}");
    }
}
