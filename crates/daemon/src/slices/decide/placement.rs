// SPDX-License-Identifier: Apache-2.0
//! Which core each vCPU was given, and when that is thought over again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, VmId};
use viola_meter::{Meter, Times};
use viola_policy::place::{self, Core, Limits, Reason, Topology, VcpuDemand};

use crate::slices::decide::plan::{Ask, Candidate};

/// vCPUs that have a core are moved for balance no more often than this.
const BALANCE: Duration = Duration::from_secs(5);
/// What a vCPU wants is its mean over the last so many snapshots.
const SNAPSHOTS: usize = 50;

/// Cores by VM and index of the vCPU.
type Cores = BTreeMap<(VmId, usize), u32>;

/// Where vCPUs are.
#[derive(Debug, Default)]
pub struct Placement {
    cores: Cores,
    balanced: Option<Instant>,
}

/// A new placement, not in force yet.
#[derive(Debug, Default)]
pub struct Placed {
    cores: Cores,
    /// vCPUs that are to leave the core they had, with the reason.
    pub moved: Vec<(VmId, usize, String)>,
    balanced: bool,
}

impl Placement {
    /// Answers each ask with a core.
    pub fn answer(
        &self,
        now: Instant,
        facts: &HostFacts,
        cores: &CpuSet,
        candidates: &[Candidate<'_>],
        asks: &[Ask],
        meter: &Meter,
    ) -> (Vec<u32>, Placed) {
        let balanced = self
            .balanced
            .is_none_or(|at| now.saturating_duration_since(at) >= BALANCE);
        let limits = Limits {
            max_moves: if balanced {
                Limits::default().max_moves
            } else {
                0
            },
            ..Limits::default()
        };
        let wants = wants(meter);
        let id = |ask: &Ask| (candidates[ask.vm].vm.id.clone(), ask.vcpu);
        let demands: Vec<VcpuDemand> = asks
            .iter()
            .map(|ask| {
                let c = &candidates[ask.vm];
                VcpuDemand {
                    vm: ask.vm as u32,
                    vcpu: ask.vcpu as u32,
                    class: c.class,
                    weight: c.weight,
                    // A VM of which nothing is known yet may want a whole core.
                    load: wants
                        .get(&c.vm.id)
                        .and_then(|w| w.get(ask.vcpu))
                        .copied()
                        .unwrap_or(1.0),
                    allowed: ask.cores.iter().collect(),
                    node: None,
                    current: self.cores.get(&id(ask)).copied(),
                }
            })
            .collect();
        let places = place::place(&topology(facts, cores), &demands, &limits);
        let mut placed = Placed {
            balanced,
            ..Placed::default()
        };
        let answers = asks
            .iter()
            .zip(&places)
            .map(|(ask, place)| {
                let core = place
                    .core
                    .or_else(|| ask.cores.iter().next())
                    .unwrap_or_default();
                if !matches!(place.why, Reason::Stays | Reason::New | Reason::NoCore) {
                    placed.moved.push((
                        candidates[ask.vm].vm.id.clone(),
                        ask.vcpu,
                        place.why.to_string(),
                    ));
                }
                placed.cores.insert(id(ask), core);
                core
            })
            .collect();
        (answers, placed)
    }

    /// Puts a placement in force.
    pub fn take(&mut self, now: Instant, placed: Placed) {
        self.cores = placed.cores;
        if placed.balanced {
            self.balanced = Some(now);
        }
    }

    /// Core of a VM's first vCPU.
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

/// The part of a core that each vCPU ran or waited for.
fn wants(meter: &Meter) -> BTreeMap<VmId, Vec<f64>> {
    let mut sums: BTreeMap<VmId, (u64, Vec<Times>)> = BTreeMap::new();
    for snapshot in meter.history().iter().rev().take(SNAPSHOTS) {
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

    fn ask(vm: usize, cores: &str) -> Ask {
        Ask {
            vm,
            vcpu: 0,
            cores: cores.parse().unwrap(),
        }
    }

    #[test]
    fn latency_sensitive_vms_are_kept_apart_and_stay_where_they_are() {
        let facts = HostFacts {
            cpus: crate::testing::cpus(4),
            ..HostFacts::read().unwrap()
        };
        let vms = [vm("a", 10, &[&[1, 2]]), vm("b", 20, &[&[1, 2]])];
        let candidates: Vec<_> = vms.iter().map(candidate).collect();
        let cores: CpuSet = "1-2".parse().unwrap();
        let (mut p, meter, now) = (Placement::default(), Meter::sampled(), Instant::now());
        let (answers, placed) = p.answer(
            now,
            &facts,
            &cores,
            &candidates,
            &[ask(0, "1-2"), ask(1, "1-2")],
            &meter,
        );
        assert_ne!(answers[0], answers[1]);
        assert!(placed.moved.is_empty());
        p.take(now, placed);
        assert_eq!(p.home(&vms[1].id), Some(answers[1]));
        // Asked in another order they keep their cores.
        let turned = [candidates[1].clone(), candidates[0].clone()];
        let (again, _) = p.answer(
            now,
            &facts,
            &cores,
            &turned,
            &[ask(0, "1-2"), ask(1, "1-2")],
            &meter,
        );
        assert_eq!(again, [answers[1], answers[0]]);
        // One that has to leave is told why.
        let other = 3 - answers[0];
        let (now_at, placed) = p.answer(
            now,
            &facts,
            &cores,
            &candidates[..1],
            &[ask(0, &other.to_string())],
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
