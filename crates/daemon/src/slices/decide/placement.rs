// SPDX-License-Identifier: Apache-2.0
//! Which core each vCPU has, and when vCPUs move for balance.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, VmId};
use viola_meter::{Meter, Times};
use viola_policy::place::{self, Core, Limits, Reason, Topology, VcpuDemand};

use crate::cores::Candidate;
use crate::slices::decide::plan::PlacementRequest;

/// vCPUs that have a core move for balance at most once in this time.
const BALANCE_INTERVAL: Duration = Duration::from_secs(1);
/// The demand of a vCPU is its mean over this number of windows (2 s).
const DEMAND_WINDOWS: usize = 20;

/// Cores by VM and index of the vCPU.
type Cores = BTreeMap<(VmId, usize), u32>;

/// The core of each vCPU.
#[derive(Debug, Default)]
pub struct Placement {
    cores: Cores,
    balanced: Option<Instant>,
}

/// A placement that is not in force yet.
#[derive(Debug, Default)]
pub struct NewPlacement {
    cores: Cores,
    /// vCPUs that leave their core, and why.
    pub moved: Vec<(VmId, usize, String)>,
    balanced: bool,
}

impl Placement {
    /// A core for each request.
    pub fn place(
        &self,
        now: Instant,
        facts: &HostFacts,
        cores: &CpuSet,
        candidates: &[Candidate<'_>],
        requests: &[PlacementRequest],
        meter: &Meter,
    ) -> (Vec<u32>, NewPlacement) {
        let balanced = self
            .balanced
            .is_none_or(|at| now.saturating_duration_since(at) >= BALANCE_INTERVAL);
        let limits = Limits {
            max_moves: if balanced {
                Limits::default().max_moves
            } else {
                0
            },
            ..Limits::default()
        };
        let demand = demand(meter);
        let id = |r: &PlacementRequest| (candidates[r.vm].vm.id.clone(), r.vcpu);
        let demands: Vec<VcpuDemand> = requests
            .iter()
            .map(|r| {
                let c = &candidates[r.vm];
                VcpuDemand {
                    vm: r.vm as u32,
                    vcpu: r.vcpu as u32,
                    class: c.class,
                    weight: c.weight,
                    // A VM that was not measured yet may want a whole core.
                    load: demand
                        .get(&c.vm.id)
                        .and_then(|w| w.get(r.vcpu))
                        .copied()
                        .unwrap_or(1.0),
                    allowed: r.cores.iter().collect(),
                    node: None,
                    current: self.cores.get(&id(r)).copied(),
                }
            })
            .collect();
        let places = place::place(&topology(facts, cores), &demands, &limits);
        let mut new = NewPlacement {
            balanced,
            ..NewPlacement::default()
        };
        let cores = requests
            .iter()
            .zip(&places)
            .map(|(r, place)| {
                let core = place
                    .core
                    .or_else(|| r.cores.iter().next())
                    .unwrap_or_default();
                if !matches!(place.why, Reason::Stays | Reason::New | Reason::NoCore) {
                    new.moved.push((
                        candidates[r.vm].vm.id.clone(),
                        r.vcpu,
                        place.why.to_string(),
                    ));
                }
                new.cores.insert(id(r), core);
                core
            })
            .collect();
        (cores, new)
    }

    /// Puts a placement in force.
    pub fn commit(&mut self, now: Instant, new: NewPlacement) {
        self.cores = new.cores;
        if new.balanced {
            self.balanced = Some(now);
        }
    }

    /// The cores of all vCPUs of a VM.
    pub fn cores_of(&self, id: &VmId) -> BTreeSet<u32> {
        let from_vm = self.cores.range((id.clone(), 0)..);
        let of_vm = from_vm.take_while(|((vm, _), _)| vm == id);
        of_vm.map(|(_, cpu)| *cpu).collect()
    }

    /// The core of the first vCPU of a VM.
    pub fn home(&self, id: &VmId) -> Option<u32> {
        self.cores
            .range((id.clone(), 0)..)
            .next()
            .filter(|((vm, _), _)| vm == id)
            .map(|(_, cpu)| *cpu)
    }
}

fn topology(facts: &HostFacts, cores: &CpuSet) -> Topology {
    let kept = facts.cpus.iter().filter(|c| cores.contains(c.cpu));
    Topology {
        cores: kept
            .map(|c| Core {
                id: c.cpu,
                smt_siblings: c.siblings.iter().collect(),
                node: c.node,
            })
            .collect(),
    }
}

/// The time that each vCPU ran or waited for a core, as a part of the time that passed.
fn demand(meter: &Meter) -> BTreeMap<VmId, Vec<f64>> {
    let mut sums: BTreeMap<VmId, (u64, Vec<Times>)> = BTreeMap::new();
    for snapshot in meter.history().iter().rev().take(DEMAND_WINDOWS) {
        for vm in &snapshot.vms {
            let (span, times) = sums
                .entry(vm.id.clone())
                .or_insert_with(|| (0, vec![Times::default(); vm.vcpus.len()]));
            *span += snapshot.span;
            times
                .iter_mut()
                .zip(&vm.vcpus)
                .for_each(|(sum, t)| sum.add(t));
        }
    }
    let want = |span: u64, t: &Times| ((t.run + t.wait) as f64 / span.max(1) as f64).min(1.0);
    sums.into_iter()
        .map(|(id, (span, times))| (id, times.iter().map(|t| want(span, t)).collect()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;
    use viola_policy::slices::Class;

    fn candidate(vm: &viola_host::Vm) -> Candidate<'_> {
        Candidate {
            vm,
            index: 0,
            class: Class::Ls,
            turbo: false,
            microslice: 300_000,
            weight: 256,
            cap_permille: None,
            capped_by_viola: false,
            vcpu_quota: None,
            allowed: BTreeMap::new(),
            blocked: None,
        }
    }

    fn request(vm: usize, cores: &str) -> PlacementRequest {
        PlacementRequest {
            vm,
            vcpu: 0,
            cores: cores.parse().unwrap(),
        }
    }

    #[test]
    fn latency_sensitive_vms_get_cores_of_their_own_and_keep_them() {
        let facts = HostFacts {
            cpus: crate::testing::cpus(4),
            ..HostFacts::read().unwrap()
        };
        let vms = [vm("a", 10, &[&[1, 2]]), vm("b", 20, &[&[1, 2]])];
        let candidates: Vec<_> = vms.iter().map(candidate).collect();
        let cores: CpuSet = "1-2".parse().unwrap();
        let (mut p, meter, now) = (Placement::default(), Meter::sampled(), Instant::now());
        let (answers, placed) = p.place(
            now,
            &facts,
            &cores,
            &candidates,
            &[request(0, "1-2"), request(1, "1-2")],
            &meter,
        );
        assert_ne!(answers[0], answers[1]);
        assert!(placed.moved.is_empty());
        p.commit(now, placed);
        assert_eq!(p.home(&vms[1].id), Some(answers[1]));
        // They keep their cores when the requests come in another order.
        let turned = [candidates[1].clone(), candidates[0].clone()];
        let (again, _) = p.place(
            now,
            &facts,
            &cores,
            &turned,
            &[request(0, "1-2"), request(1, "1-2")],
            &meter,
        );
        assert_eq!(again, [answers[1], answers[0]]);
        // A vCPU that has to leave its core leaves with a reason.
        let other = 3 - answers[0];
        let (now_at, placed) = p.place(
            now,
            &facts,
            &cores,
            &candidates[..1],
            &[request(0, &other.to_string())],
            &meter,
        );
        assert_eq!(now_at, [other]);
        assert!(
            placed.moved[0].2.contains("may no longer use"),
            "{:?}",
            placed.moved
        );
    }
}
