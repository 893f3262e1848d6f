// SPDX-License-Identifier: Apache-2.0
//! Which vCPU runs on which core of those kept for VMs.
//!
//! Each vCPU gets one core. What counts, in this order of strength: cores it may use (a must), vCPUs of one VM
//! on cores of their own, latency-sensitive vCPUs apart from each other, even load by weight, hyperthreads of one
//! core not both loaded while another core idles, memory on the same NUMA node. A vCPU that has a core keeps it
//! unless moving relieves it of more than [`Limits::threshold`].

use std::collections::BTreeMap;
use std::fmt;

use crate::slices::Class;

/// One logical CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Core {
    /// CPU number.
    pub id: u32,
    /// CPU numbers of the other hyperthreads of the same physical core (its own number does no harm).
    pub smt_siblings: Vec<u32>,
    /// NUMA node.
    pub node: u32,
}

/// The cores kept for VMs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    /// Each logical CPU once.
    pub cores: Vec<Core>,
}

/// A vCPU that needs a core.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand {
    /// Which VM.
    pub vm: u32,
    /// Which of its vCPUs.
    pub vcpu: u32,
    /// Class of the VM.
    pub class: Class,
    /// Weight of the VM, 1 ..= 65535.
    pub weight: u32,
    /// Part of a core that it wants (runs or waits), 0.0 ..= 1.0.
    pub wants: f64,
    /// CPU numbers it may use; empty: any of the topology.
    pub allowed: Vec<u32>,
    /// NUMA node of the VM's memory, if it has one.
    pub node: Option<u32>,
    /// The core it has now.
    pub now: Option<u32>,
}

/// How readily vCPUs are moved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// A move must relieve the vCPU of competition worth this part of one busy vCPU of mean weight.
    pub threshold: f64,
    /// Most vCPUs moved at once for balance (those that must have a core do not count).
    pub moves: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            threshold: 0.25,
            moves: 2,
        }
    }
}

/// Why a vCPU is where it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// It has a core and nothing is much better.
    Stays,
    /// It had no core.
    New,
    /// The core it had is gone, or it may no longer use it.
    Lost {
        /// That core.
        was: u32,
    },
    /// Less competition: what it competes with on its old and on its new core, in busy vCPUs of mean weight.
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
    /// To the node of its memory.
    NearMemory {
        /// That node.
        node: u32,
    },
    /// Made room for another vCPU, which is better off.
    MadeRoom,
    /// None of the cores it may use is kept for VMs.
    NoCore,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Why::Stays => f.write_str("nothing is much better"),
            Why::New => f.write_str("it had no core"),
            Why::Lost { was } => write!(f, "it may no longer use core {was}"),
            Why::Balance { from, to } => write!(
                f,
                "it competes with {to:.1} busy vCPUs instead of {from:.1}"
            ),
            Why::ApartFromLs => f.write_str("away from another latency-sensitive vCPU"),
            Why::ApartFromOwn => f.write_str("away from another vCPU of its VM"),
            Why::NearMemory { node } => write!(f, "its memory is on node {node}"),
            Why::MadeRoom => f.write_str("it made room for another vCPU"),
            Why::NoCore => f.write_str(
                "no core that it may use is kept for VMs: widen its cores or the kept ones",
            ),
        }
    }
}

/// Where a vCPU goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    /// Which VM.
    pub vm: u32,
    /// Which of its vCPUs.
    pub vcpu: u32,
    /// CPU number; `None` if there is none that it may use.
    pub core: Option<u32>,
    /// Why there.
    pub why: Why,
}

/// Load of a hyperthread as felt by its sibling: two threads of a core do about 1.3 times the work of one.
const SMT: f64 = 0.5;
/// A vCPU that hardly runs counts as this much, so that idle VMs are spread too.
const LEAST_WANT: f64 = 0.05;
/// What two latency-sensitive vCPUs on one core count beyond their load, in busy vCPUs.
const LS_APART: f64 = 0.6;
/// What two vCPUs of the same VM on one core count beyond their load.
const OWN_APART: f64 = 1.0;
/// A vCPU counts as at least this large when it is to be kept apart from others.
const APART_LEAST: f64 = 0.5;
/// Differences below this are none.
const ROUNDING: f64 = 1e-9;
/// What memory on another node counts.
const FAR: f64 = 0.3;
/// A vCPU counts as at least this large when it is asked whether a move pays: hardly running ones stay.
const MOVE_LEAST: f64 = 0.25;

/// The parts of what a vCPU on a core costs it and the others there: products of their sizes (in busy vCPUs of
/// mean weight). The sum over all vCPUs, each pair once, falls with every move, so placement cannot go in circles.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    load: f64,
    ls: f64,
    own: f64,
    far: f64,
}

impl Cost {
    fn sum(self) -> f64 {
        self.load + self.ls + self.own + self.far
    }
}

/// Chooses a core for each vCPU; the answer is in the order of `demands`. Equal inputs give equal answers.
pub fn place(topology: &Topology, demands: &[Demand], limits: &Limits) -> Vec<Place> {
    let mut map = Map::new(topology, demands);
    let mut why = vec![Why::Stays; demands.len()];
    let mut homeless: Vec<usize> = (0..demands.len())
        .filter(|&i| map.at[i].is_none())
        .collect();
    // Heavy ones first: the light ones fill the gaps.
    homeless.sort_by(|&a, &b| map.size[b].total_cmp(&map.size[a]).then(a.cmp(&b)));
    for i in homeless {
        why[i] = match (map.best_core(i), demands[i].now) {
            (None, _) => Why::NoCore,
            (Some(_), Some(was)) => Why::Lost { was },
            (Some(_), None) => Why::New,
        };
        if let Some(c) = map.best_core(i) {
            map.put(i, c);
        }
    }
    let mut left = limits.moves;
    while left > 0 {
        if let Some((i, c, reason)) = map.best_move(limits.threshold) {
            map.take(i);
            map.put(i, c);
            settle(&mut why[i], reason);
            left -= 1;
        } else if let Some((i, j, reason)) =
            map.best_exchange(limits.threshold).filter(|_| left >= 2)
        {
            if let (Some(a), Some(b)) = (map.take(i), map.take(j)) {
                map.put(i, b);
                map.put(j, a);
            }
            settle(&mut why[i], reason);
            settle(&mut why[j], Why::MadeRoom);
            left -= 2;
        } else {
            break;
        }
    }
    let entry = |(i, d): (usize, &Demand)| {
        let core = map.at[i].map(|c| topology.cores[c].id);
        let why = if core == d.now && why[i] != Why::NoCore {
            Why::Stays
        } else {
            why[i]
        };
        Place {
            vm: d.vm,
            vcpu: d.vcpu,
            core,
            why,
        }
    };
    demands.iter().enumerate().map(entry).collect()
}

/// Keeps the reason why a vCPU had to have a core over that of a later move.
fn settle(why: &mut Why, reason: Why) {
    if !matches!(why, Why::New | Why::Lost { .. }) {
        *why = reason;
    }
}

/// A placement under construction.
struct Map<'a> {
    topology: &'a Topology,
    demands: &'a [Demand],
    /// Wanted part of a core times weight over mean weight.
    size: Vec<f64>,
    /// Indexes of the sibling cores.
    siblings: Vec<Vec<usize>>,
    /// Indexes of the cores a vCPU may use.
    allowed: Vec<Vec<usize>>,
    /// VM of a vCPU, numbered from 0.
    vm: Vec<usize>,
    /// Core of a vCPU.
    at: Vec<Option<usize>>,
    /// Sizes of the vCPUs on a core, of the latency-sensitive ones there, and of those of a VM there.
    load: Vec<f64>,
    ls: Vec<f64>,
    own: Vec<Vec<f64>>,
    /// Node of a VM's memory.
    home: Vec<Option<u32>>,
}

impl<'a> Map<'a> {
    fn new(topology: &'a Topology, demands: &'a [Demand]) -> Self {
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
        let weight = |d: &Demand| f64::from(d.weight.max(1));
        let wants = |d: &Demand| {
            if d.wants.is_finite() {
                d.wants.clamp(LEAST_WANT, 1.0)
            } else {
                1.0
            }
        };
        let mean = demands.iter().map(weight).sum::<f64>() / demands.len().max(1) as f64;
        let size = demands
            .iter()
            .map(|d| wants(d) * weight(d) / mean)
            .collect();
        let mut numbers = BTreeMap::new();
        let vm: Vec<usize> = demands
            .iter()
            .map(|d| {
                let next = numbers.len();
                *numbers.entry(d.vm).or_insert(next)
            })
            .collect();
        let mut home = vec![None; numbers.len()];
        for (i, d) in demands.iter().enumerate() {
            home[vm[i]] = home[vm[i]].or(d.node);
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
            home,
        };
        for (i, d) in demands.iter().enumerate() {
            let now = d.now.and_then(|id| index.get(&id).copied());
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
        let apart = sign * self.size[i].max(APART_LEAST);
        self.load[c] += sign * self.size[i];
        if self.demands[i].class == Class::Ls {
            self.ls[c] += apart;
        }
        self.own[self.vm[i]][c] += apart;
    }

    /// What a vCPU that has no core (or was taken off it) would cost on core `c`.
    fn cost(&self, i: usize, c: usize) -> Cost {
        let size = self.size[i];
        let apart = size.max(APART_LEAST);
        let felt: f64 = self.siblings[c].iter().map(|&s| self.load[s]).sum();
        let ls = self.demands[i].class == Class::Ls;
        let far = self.home[self.vm[i]].is_some_and(|node| node != self.topology.cores[c].node);
        Cost {
            load: size * (self.load[c] + SMT * felt),
            ls: if ls {
                LS_APART * apart * self.ls[c]
            } else {
                0.0
            },
            own: OWN_APART * apart * self.own[self.vm[i]][c],
            far: if far { FAR * size } else { 0.0 },
        }
    }

    fn best_core(&self, i: usize) -> Option<usize> {
        let cost = |&c: &usize| self.cost(i, c).sum();
        self.allowed[i]
            .iter()
            .copied()
            .min_by(|a, b| cost(a).total_cmp(&cost(b)))
    }

    /// The move that saves most, of those that relieve the vCPU by more than `threshold`.
    fn best_move(&mut self, threshold: f64) -> Option<(usize, usize, Why)> {
        let mut best: Option<(f64, usize, usize, Why)> = None;
        for i in 0..self.demands.len() {
            let Some(a) = self.take(i) else { continue };
            let from = self.cost(i, a);
            if let Some(b) = self.best_core(i).filter(|&b| b != a) {
                let to = self.cost(i, b);
                let gain = from.sum() - to.sum();
                let pays = gain > threshold * self.size[i].max(MOVE_LEAST) + ROUNDING;
                if pays && best.is_none_or(|(g, ..)| gain > g + ROUNDING) {
                    best = Some((gain, i, b, self.reason(i, from, to)));
                }
            }
            self.put(i, a);
        }
        best.map(|(_, i, c, why)| (i, c, why))
    }

    /// The exchange of two vCPUs that saves most, of those that relieve both together by more than `threshold`
    /// each. The first one is that which gains more.
    fn best_exchange(&mut self, threshold: f64) -> Option<(usize, usize, Why)> {
        let mut best: Option<(f64, usize, usize, Why)> = None;
        for i in 0..self.demands.len() {
            for j in i + 1..self.demands.len() {
                let (Some(a), Some(b)) = (self.at[i], self.at[j]) else {
                    continue;
                };
                if a == b || !self.allowed[i].contains(&b) || !self.allowed[j].contains(&a) {
                    continue;
                }
                // With both taken off, what they cost each other (as siblings) is the same before and after.
                self.take(i);
                self.take(j);
                let (i_from, i_to) = (self.cost(i, a), self.cost(i, b));
                let (j_from, j_to) = (self.cost(j, b), self.cost(j, a));
                self.put(i, a);
                self.put(j, b);
                let (i_gain, j_gain) = (i_from.sum() - i_to.sum(), j_from.sum() - j_to.sum());
                let gain = i_gain + j_gain;
                let sizes = self.size[i].max(MOVE_LEAST) + self.size[j].max(MOVE_LEAST);
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

    /// Which part of the cost a move saves most.
    fn reason(&self, i: usize, from: Cost, to: Cost) -> Why {
        let load = from.load - to.load;
        let rest = [from.ls - to.ls, from.own - to.own, from.far - to.far];
        let most = rest.iter().copied().fold(load, f64::max);
        if most == load {
            Why::Balance {
                from: from.load / self.size[i],
                to: to.load / self.size[i],
            }
        } else if most == rest[1] {
            Why::ApartFromOwn
        } else if most == rest[0] {
            Why::ApartFromLs
        } else {
            Why::NearMemory {
                node: self.home[self.vm[i]].unwrap_or_default(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
