// SPDX-License-Identifier: Apache-2.0
use super::*;

/// `n` cores of one thread each, on one node.
fn plain(n: u32) -> Topology {
    Topology {
        cores: (0..n)
            .map(|id| Core {
                id,
                smt_siblings: vec![],
                node: 0,
            })
            .collect(),
    }
}

/// `n` cores of two threads each (c and c + n).
fn smt(n: u32) -> Topology {
    let core = |id| Core {
        id,
        smt_siblings: vec![id % n, id % n + n],
        node: 0,
    };
    Topology {
        cores: (0..2 * n).map(core).collect(),
    }
}

fn busy(vm: u32, now: Option<u32>) -> VcpuDemand {
    VcpuDemand {
        vm,
        vcpu: 0,
        class: Class::Batch,
        weight: 256,
        load: 1.0,
        allowed: vec![],
        node: None,
        current: now,
    }
}

fn ls(vm: u32, now: Option<u32>) -> VcpuDemand {
    VcpuDemand {
        class: Class::Ls,
        ..busy(vm, now)
    }
}

fn cores(places: &[Placement]) -> Vec<Option<u32>> {
    places.iter().map(|p| p.core).collect()
}

fn run(topology: &Topology, demands: &[VcpuDemand]) -> Vec<Placement> {
    place(topology, demands, &Limits::default())
}

fn count(places: &[Placement], core: u32) -> usize {
    places.iter().filter(|p| p.core == Some(core)).count()
}

#[test]
fn new_vcpus_spread_evenly() {
    let places = run(&plain(2), &[0, 1, 2, 3].map(|vm| busy(vm, None)));
    assert_eq!((count(&places, 0), count(&places, 1)), (2, 2));
    assert!(places.iter().all(|p| p.why == Reason::New));
}

#[test]
fn the_odd_one_out_joins_the_core_without_the_latency_sensitive_vm() {
    let mut demands = vec![ls(0, None)];
    demands.extend((1..5).map(|vm| busy(vm, None)));
    let places = run(&plain(2), &demands);
    let at = places[0].core.unwrap();
    assert_eq!(count(&places, at), 2, "{places:?}");
}

#[test]
fn vcpus_keep_their_core_when_another_arrives() {
    let mut demands = vec![
        busy(0, Some(0)),
        busy(1, Some(0)),
        busy(2, Some(1)),
        busy(3, Some(1)),
    ];
    demands.push(busy(4, None));
    let places = run(&plain(2), &demands);
    assert_eq!(cores(&places)[..4], [Some(0), Some(0), Some(1), Some(1)]);
    assert!(places[..4].iter().all(|p| p.why == Reason::Stays));
}

#[test]
fn a_crowded_core_gives_to_an_empty_one() {
    let demands = [
        busy(0, Some(0)),
        busy(1, Some(0)),
        busy(2, Some(0)),
        busy(3, Some(1)),
    ];
    let places = run(&plain(2), &demands);
    assert_eq!((count(&places, 0), count(&places, 1)), (2, 2));
    let moved: Vec<_> = places.iter().filter(|p| p.why != Reason::Stays).collect();
    assert_eq!(moved.len(), 1);
    assert_eq!(
        moved[0].why.to_string(),
        "it competes with 1.0 busy vCPUs instead of 2.0"
    );
}

#[test]
fn three_vcpus_against_two_do_not_move() {
    let demands = [
        busy(0, Some(0)),
        busy(1, Some(0)),
        busy(2, Some(0)),
        busy(3, Some(1)),
        busy(4, Some(1)),
    ];
    assert!(
        run(&plain(2), &demands)
            .iter()
            .all(|p| p.why == Reason::Stays)
    );
}

#[test]
fn hyperthreads_of_one_core_are_used_last() {
    let places = run(&smt(2), &[busy(0, None), busy(1, None)]);
    let (a, b) = (places[0].core.unwrap(), places[1].core.unwrap());
    assert_ne!(a % 2, b % 2, "{a} and {b} are one core");
    // Both threads of core 0 are busy, core 1 idles.
    let places = run(&smt(2), &[busy(0, Some(0)), busy(1, Some(2))]);
    assert_ne!(places[0].core.unwrap() % 2, places[1].core.unwrap() % 2);
    // Four vCPUs take all four threads.
    let mut all: Vec<_> = cores(&run(&smt(2), &[0, 1, 2, 3].map(|vm| busy(vm, None))));
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3].map(Some));
}

#[test]
fn the_balance_is_of_weights_not_of_numbers() {
    let heavy = VcpuDemand {
        weight: 768,
        ..busy(0, None)
    };
    let places = run(
        &plain(2),
        &[busy(1, None), busy(2, None), heavy, busy(3, None)],
    );
    let core = places[2].core.unwrap();
    assert_eq!(count(&places, core), 1);
}

#[test]
fn a_vcpu_never_leaves_the_cores_it_may_use() {
    let only = |vm, allowed: &[u32]| VcpuDemand {
        allowed: allowed.to_vec(),
        ..busy(vm, Some(0))
    };
    let demands = [
        only(0, &[0]),
        only(1, &[0]),
        only(2, &[0]),
        only(3, &[1]),
        only(4, &[7]),
    ];
    let places = run(&plain(2), &demands);
    assert_eq!(cores(&places), [Some(0), Some(0), Some(0), Some(1), None]);
    assert_eq!(places[3].why, Reason::Lost { was: 0 });
    assert_eq!(places[4].why, Reason::NoCore);
}

#[test]
fn latency_sensitive_vcpus_are_kept_apart_by_an_exchange() {
    let demands = [
        ls(0, Some(0)),
        ls(1, Some(0)),
        busy(2, Some(1)),
        busy(3, Some(1)),
    ];
    let places = run(&plain(2), &demands);
    assert_ne!(places[0].core, places[1].core);
    assert_eq!((count(&places, 0), count(&places, 1)), (2, 2));
    let why: Vec<_> = places
        .iter()
        .map(|p| p.why)
        .filter(|w| *w != Reason::Stays)
        .collect();
    assert!(
        why.contains(&Reason::ApartFromLs) && why.contains(&Reason::MadeRoom),
        "{why:?}"
    );
}

#[test]
fn vcpus_of_one_vm_get_cores_of_their_own() {
    let vcpu = |vm, vcpu| VcpuDemand {
        vcpu,
        ..busy(vm, None)
    };
    let places = run(&plain(2), &[vcpu(0, 0), vcpu(0, 1), vcpu(1, 0), vcpu(1, 1)]);
    assert_ne!(places[0].core, places[1].core);
    assert_ne!(places[2].core, places[3].core);
}

#[test]
fn a_vcpu_goes_to_its_memory_when_that_costs_nothing() {
    let mut topology = plain(2);
    topology.cores[1].node = 1;
    let demand = VcpuDemand {
        node: Some(1),
        ..busy(0, Some(0))
    };
    let places = run(&topology, std::slice::from_ref(&demand));
    assert_eq!(
        (places[0].core, places[0].why),
        (Some(1), Reason::LocalMemory { node: 1 })
    );
    // Two busy vCPUs there already are worse than remote memory.
    let places = run(&topology, &[demand, busy(1, Some(1)), busy(2, Some(1))]);
    assert_eq!(places[0].core, Some(0));
}

#[test]
fn hardly_running_vcpus_are_not_moved_for_balance() {
    let idle = |vm| VcpuDemand {
        load: 0.02,
        ..busy(vm, Some(0))
    };
    let demands: Vec<_> = (0..8).map(idle).collect();
    assert!(
        run(&plain(2), &demands)
            .iter()
            .all(|p| p.why == Reason::Stays)
    );
}

#[test]
fn no_more_than_two_move_at_once() {
    let demands: Vec<_> = (0..8).map(|vm| busy(vm, Some(0))).collect();
    let places = run(&plain(4), &demands);
    assert_eq!(places.iter().filter(|p| p.why != Reason::Stays).count(), 2);
}
