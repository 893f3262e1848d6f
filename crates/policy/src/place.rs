// SPDX-License-Identifier: Apache-2.0
//! Which vCPU runs on which of the cores that are kept for VMs.
//!
//! Each vCPU gets one core. The goals, strongest first:
//! 1. only cores that the vCPU may use (a hard limit);
//! 2. vCPUs of one VM on different cores;
//! 3. latency-sensitive vCPUs apart from each other;
//! 4. even load by weight;
//! 5. no two hyperthreads of one core loaded while another core idles;
//! 6. memory on the same NUMA node.
//!
//! A vCPU keeps its core unless a move relieves it of more than [`Limits::threshold`].

use std::collections::BTreeMap;
use std::fmt;

use crate::slices::Class;

/// One logical CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Core {
    /// CPU number.
    pub id: u32,
    /// CPU numbers of the hyperthreads of the same physical core; may contain its own number.
    pub smt_siblings: Vec<u32>,
    /// NUMA node.
    pub node: u32,
}

/// The cores kept for VMs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    /// The logical CPUs, each once.
    pub cores: Vec<Core>,
}

/// A vCPU that needs a core.
#[derive(Debug, Clone, PartialEq)]
pub struct VcpuDemand {
    /// VM.
    pub vm: u32,
    /// Number of the vCPU in its VM.
    pub vcpu: u32,
    /// Class of the VM.
    pub class: Class,
    /// Weight of the VM, 1 ..= 65535.
    pub weight: u32,
    /// Part of a core that it runs or waits for, 0.0 ..= 1.0.
    pub load: f64,
    /// CPU numbers that it may use; empty: any of the topology.
    pub allowed: Vec<u32>,
    /// NUMA node of the VM's memory, if known.
    pub node: Option<u32>,
    /// CPU number of its present core.
    pub current: Option<u32>,
}

/// How readily vCPUs move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Minimum gain of a move: competition that the vCPU loses, in busy vCPUs of mean weight.
    pub threshold: f64,
    /// Maximum number of vCPUs that move at once for a better balance. vCPUs without a core do not count.
    pub max_moves: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            threshold: 0.25,
            max_moves: 2,
        }
    }
}

/// Why a vCPU has its core.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// It has a core, and no other is much better.
    Stays,
    /// It had no core.
    New,
    /// Its core is gone, or it may no longer use it.
    Lost {
        /// CPU number of that core.
        was: u32,
    },
    /// Less competition on the new core. Competition is in busy vCPUs of mean weight.
    Balance {
        /// On the old core.
        from: f64,
        /// On the new core.
        to: f64,
    },
    /// Away from another latency-sensitive vCPU.
    ApartFromLs,
    /// Away from another vCPU of the same VM.
    ApartFromOwn,
    /// The NUMA node of its memory.
    LocalMemory {
        /// NUMA node.
        node: u32,
    },
    /// It made room for another vCPU, which gains from it.
    MadeRoom,
    /// None of the cores it may use is kept for VMs.
    NoCore,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Stays => f.write_str("no other core is much better"),
            Reason::New => f.write_str("it had no core"),
            Reason::Lost { was } => write!(f, "it may no longer use core {was}"),
            Reason::Balance { from, to } => write!(
                f,
                "it competes with {to:.1} busy vCPUs instead of {from:.1}"
            ),
            Reason::ApartFromLs => f.write_str("away from another latency-sensitive vCPU"),
            Reason::ApartFromOwn => f.write_str("away from another vCPU of its VM"),
            Reason::LocalMemory { node } => write!(f, "its memory is on node {node}"),
            Reason::MadeRoom => f.write_str("it made room for another vCPU"),
            Reason::NoCore => f.write_str(
                "no core that it may use is kept for VMs: widen its cores or the kept ones",
            ),
        }
    }
}

/// The core of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placement {
    /// VM.
    pub vm: u32,
    /// Number of the vCPU in its VM.
    pub vcpu: u32,
    /// CPU number; `None` if it may use no core of the topology.
    pub core: Option<u32>,
    /// The reason.
    pub why: Reason,
}

/// Part of a hyperthread's load that counts on its sibling too: two hyperthreads do about 1.3 times
/// the work of one.
const SMT_SIBLING_LOAD: f64 = 0.5;
/// Minimum load of a vCPU, as a part of a core, so that idle VMs are spread too.
const MIN_LOAD: f64 = 0.05;
/// Cost of two latency-sensitive vCPUs on one core beyond their load, in busy vCPUs.
const LS_PAIR_COST: f64 = 0.6;
/// Cost of two vCPUs of one VM on one core beyond their load, in busy vCPUs.
const SAME_VM_COST: f64 = 1.0;
/// Minimum size of a vCPU in the cost of such a pair, in busy vCPUs.
const MIN_PAIR_SIZE: f64 = 0.5;
/// Costs that differ by less than this, in busy vCPUs, count as equal.
const ROUNDING: f64 = 1e-9;
/// Cost of memory on a remote node, in busy vCPUs.
const REMOTE_MEMORY_COST: f64 = 0.3;
/// Minimum size of a vCPU, in busy vCPUs, when a move is weighed: a vCPU that hardly runs stays.
const MIN_MOVE_SIZE: f64 = 0.25;

/// Cost of a vCPU on a core, for itself and the others there: products of their sizes (in busy vCPUs of mean weight).
/// Each move lowers the sum over all pairs of vCPUs, so placement cannot cycle.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    load: f64,
    ls: f64,
    own: f64,
    remote: f64,
}

impl Cost {
    fn sum(self) -> f64 {
        self.load + self.ls + self.own + self.remote
    }
}

/// Chooses a core for each vCPU, in the order of `demands`. Equal inputs give equal answers.
pub fn place(topology: &Topology, demands: &[VcpuDemand], limits: &Limits) -> Vec<Placement> {
    let mut map = Draft::new(topology, demands);
    let mut why = vec![Reason::Stays; demands.len()];
    let mut unplaced: Vec<usize> = (0..demands.len())
        .filter(|&i| map.at[i].is_none())
        .collect();
    // Heavy ones first; the light ones fill the gaps.
    unplaced.sort_by(|&a, &b| map.size[b].total_cmp(&map.size[a]).then(a.cmp(&b)));
    for i in unplaced {
        why[i] = match (map.best_core(i), demands[i].current) {
            (None, _) => Reason::NoCore,
            (Some(_), Some(was)) => Reason::Lost { was },
            (Some(_), None) => Reason::New,
        };
        if let Some(c) = map.best_core(i) {
            map.put(i, c);
        }
    }
    let mut left = limits.max_moves;
    while left > 0 {
        if let Some((i, c, reason)) = map.best_move(limits.threshold) {
            map.take(i);
            map.put(i, c);
            set_reason(&mut why[i], reason);
            left -= 1;
        } else if let Some((i, j, reason)) =
            map.best_exchange(limits.threshold).filter(|_| left >= 2)
        {
            if let (Some(a), Some(b)) = (map.take(i), map.take(j)) {
                map.put(i, b);
                map.put(j, a);
            }
            set_reason(&mut why[i], reason);
            set_reason(&mut why[j], Reason::MadeRoom);
            left -= 2;
        } else {
            break;
        }
    }
    let entry = |(i, d): (usize, &VcpuDemand)| {
        let core = map.at[i].map(|c| topology.cores[c].id);
        let why = if core == d.current && why[i] != Reason::NoCore {
            Reason::Stays
        } else {
            why[i]
        };
        Placement {
            vm: d.vm,
            vcpu: d.vcpu,
            core,
            why,
        }
    };
    demands.iter().enumerate().map(entry).collect()
}

/// Sets the reason for a move, unless the vCPU had to be placed anyway.
fn set_reason(why: &mut Reason, reason: Reason) {
    if !matches!(why, Reason::New | Reason::Lost { .. }) {
        *why = reason;
    }
}

/// A placement under construction.
struct Draft<'a> {
    topology: &'a Topology,
    demands: &'a [VcpuDemand],
    /// By vCPU: load times weight over mean weight.
    size: Vec<f64>,
    /// By core: indexes of its sibling cores.
    siblings: Vec<Vec<usize>>,
    /// By vCPU: indexes of the cores it may use.
    allowed: Vec<Vec<usize>>,
    /// By vCPU: its VM, numbered from 0.
    vm: Vec<usize>,
    /// By vCPU: its core.
    at: Vec<Option<usize>>,
    /// By core: sizes of all vCPUs there, of the latency-sensitive ones, and (by VM first) of those of one VM.
    load: Vec<f64>,
    ls: Vec<f64>,
    own: Vec<Vec<f64>>,
    /// By VM: NUMA node of its memory.
    memory_node: Vec<Option<u32>>,
}

impl<'a> Draft<'a> {
    fn new(topology: &'a Topology, demands: &'a [VcpuDemand]) -> Self {
        let cores = &topology.cores;
        let index: BTreeMap<u32, usize> = cores
            .iter()
            .enumerate()
            .map(|(c, core)| (core.id, c))
            .collect();
        let known = |ids: &[u32], but: Option<usize>| -> Vec<usize> {
            ids.iter()
                .filter_map(|id| index.get(id).copied())
                .filter(|&c| Some(c) != but)
                .collect()
        };
        let siblings = cores
            .iter()
            .enumerate()
            .map(|(c, core)| known(&core.smt_siblings, Some(c)))
            .collect();
        let allowed: Vec<Vec<usize>> = demands
            .iter()
            .map(|d| {
                if d.allowed.is_empty() {
                    (0..cores.len()).collect()
                } else {
                    known(&d.allowed, None)
                }
            })
            .collect();
        let weight = |d: &VcpuDemand| f64::from(d.weight.max(1));
        let load = |d: &VcpuDemand| {
            if d.load.is_finite() {
                d.load.clamp(MIN_LOAD, 1.0)
            } else {
                1.0
            }
        };
        let mean = demands.iter().map(weight).sum::<f64>() / demands.len().max(1) as f64;
        let size = demands.iter().map(|d| load(d) * weight(d) / mean).collect();
        let mut numbers = BTreeMap::new();
        let vm: Vec<usize> = demands
            .iter()
            .map(|d| {
                let next = numbers.len();
                *numbers.entry(d.vm).or_insert(next)
            })
            .collect();
        let mut memory_node = vec![None; numbers.len()];
        for (i, d) in demands.iter().enumerate() {
            memory_node[vm[i]] = memory_node[vm[i]].or(d.node);
        }
        let mut map = Self {
            topology,
            demands,
            size,
            siblings,
            allowed,
            at: vec![None; demands.len()],
            load: vec![0.0; cores.len()],
            ls: vec![0.0; cores.len()],
            own: vec![vec![0.0; cores.len()]; numbers.len()],
            vm,
            memory_node,
        };
        for (i, d) in demands.iter().enumerate() {
            let now = d.current.and_then(|id| index.get(&id).copied());
            if let Some(c) = now.filter(|c| map.allowed[i].contains(c)) {
                map.put(i, c);
            }
        }
        map
    }

    fn put(&mut self, i: usize, c: usize) {
        self.at[i] = Some(c);
        self.add(i, c, 1.0);
    }

    fn take(&mut self, i: usize) -> Option<usize> {
        let c = self.at[i].take()?;
        self.add(i, c, -1.0);
        Some(c)
    }

    fn add(&mut self, i: usize, c: usize, sign: f64) {
        let apart = sign * self.size[i].max(MIN_PAIR_SIZE);
        self.load[c] += sign * self.size[i];
        if self.demands[i].class == Class::Ls {
            self.ls[c] += apart;
        }
        self.own[self.vm[i]][c] += apart;
    }

    /// Cost on core `c` of a vCPU that has no core in this draft.
    fn cost(&self, i: usize, c: usize) -> Cost {
        let size = self.size[i];
        let apart = size.max(MIN_PAIR_SIZE);
        let felt: f64 = self.siblings[c].iter().map(|&s| self.load[s]).sum();
        let ls = self.demands[i].class == Class::Ls;
        let remote =
            self.memory_node[self.vm[i]].is_some_and(|node| node != self.topology.cores[c].node);
        Cost {
            load: size * (self.load[c] + SMT_SIBLING_LOAD * felt),
            ls: if ls {
                LS_PAIR_COST * apart * self.ls[c]
            } else {
                0.0
            },
            own: SAME_VM_COST * apart * self.own[self.vm[i]][c],
            remote: if remote {
                REMOTE_MEMORY_COST * size
            } else {
                0.0
            },
        }
    }

    /// The cheapest core; of equally cheap ones that with less latency-sensitive work, since who is there may come to want more.
    fn best_core(&self, i: usize) -> Option<usize> {
        let cost = |&c: &usize| (self.cost(i, c).sum() / ROUNDING).round();
        let by_cost = |a: &usize, b: &usize| cost(a).total_cmp(&cost(b));
        let by_ls = |a: &usize, b: &usize| self.ls[*a].total_cmp(&self.ls[*b]);
        let cores = self.allowed[i].iter().copied();
        cores.min_by(|a, b| by_cost(a, b).then(by_ls(a, b)))
    }

    /// The move with the largest gain, among those that relieve the vCPU by more than `threshold`.
    fn best_move(&mut self, threshold: f64) -> Option<(usize, usize, Reason)> {
        let mut best: Option<(f64, usize, usize, Reason)> = None;
        for i in 0..self.demands.len() {
            let Some(a) = self.take(i) else { continue };
            let from = self.cost(i, a);
            if let Some(b) = self.best_core(i).filter(|&b| b != a) {
                let to = self.cost(i, b);
                let gain = from.sum() - to.sum();
                let pays = gain > threshold * self.size[i].max(MIN_MOVE_SIZE) + ROUNDING;
                if pays && best.is_none_or(|(g, ..)| gain > g + ROUNDING) {
                    best = Some((gain, i, b, self.reason(i, from, to)));
                }
            }
            self.put(i, a);
        }
        best.map(|(_, i, c, why)| (i, c, why))
    }

    /// The exchange of two vCPUs with the largest gain, among those that relieve a vCPU by more
    /// than `threshold` on average over the two. The vCPU that gains more comes first.
    fn best_exchange(&mut self, threshold: f64) -> Option<(usize, usize, Reason)> {
        let mut best: Option<(f64, usize, usize, Reason)> = None;
        for i in 0..self.demands.len() {
            for j in i + 1..self.demands.len() {
                let (Some(a), Some(b)) = (self.at[i], self.at[j]) else {
                    continue;
                };
                if a == b || !self.allowed[i].contains(&b) || !self.allowed[j].contains(&a) {
                    continue;
                }
                // With both taken off, their cost to each other (as siblings) is the same before and after.
                self.take(i);
                self.take(j);
                let (i_from, i_to) = (self.cost(i, a), self.cost(i, b));
                let (j_from, j_to) = (self.cost(j, b), self.cost(j, a));
                self.put(i, a);
                self.put(j, b);
                let (i_gain, j_gain) = (i_from.sum() - i_to.sum(), j_from.sum() - j_to.sum());
                let gain = i_gain + j_gain;
                let sizes = self.size[i].max(MIN_MOVE_SIZE) + self.size[j].max(MIN_MOVE_SIZE);
                if gain > threshold * sizes + ROUNDING
                    && best.is_none_or(|(g, ..)| gain > g + ROUNDING)
                {
                    best = Some(if i_gain >= j_gain {
                        (gain, i, j, self.reason(i, i_from, i_to))
                    } else {
                        (gain, j, i, self.reason(j, j_from, j_to))
                    });
                }
            }
        }
        best.map(|(_, i, j, why)| (i, j, why))
    }

    /// The part of the cost that a move lowers most.
    fn reason(&self, i: usize, from: Cost, to: Cost) -> Reason {
        let load = from.load - to.load;
        let rest = [from.ls - to.ls, from.own - to.own, from.remote - to.remote];
        let largest = rest.iter().copied().fold(load, f64::max);
        if largest == load {
            Reason::Balance {
                from: from.load / self.size[i],
                to: to.load / self.size[i],
            }
        } else if largest == rest[1] {
            Reason::ApartFromOwn
        } else if largest == rest[0] {
            Reason::ApartFromLs
        } else {
            Reason::LocalMemory {
                node: self.memory_node[self.vm[i]].unwrap_or_default(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
