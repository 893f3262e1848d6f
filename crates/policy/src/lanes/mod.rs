// SPDX-License-Identifier: Apache-2.0
//! Lanes: the few SR-IOV virtual functions (VFs) of a host go to the VMs that gain most from them (Raccoon: paper
//! "Raccoon: A Novel Network I/O Allocation Framework for Workload-Aware VM Scheduling in Virtual Environments").
//!
//! # Model
//! Every VM has a paravirtual NIC in each of its networks. A VF is granted in addition and revoked again without a lost
//! connection, so each call of [`VfScheduler::decide`] decides anew which VMs hold VFs, from two measures:
//! - DI2 ([`di2`], eq 1): the time the VM was blocked over the time it ran. High for a VM that waits for I/O.
//! - IF ([`Traffic::intensity`], eq 2): how often and how much its NIC sends and receives.
//!
//! A VM whose DI2 and packet frequency both reach their thresholds is network-bound ([`classify`]). The priority queue
//! (PQ) is the ordered tree of the holders of VFs; the general queue (GQ) has all other VMs, and all VMs start there.
//! The highest of GQ is promoted while a VF is free; otherwise it takes the place of the lowest of PQ if its IF is
//! higher (sections 3.2 to 3.6). [`sizing`] computes how many VFs a NIC should have.
//!
//! # Beyond the paper
//! - A VM may hold several VFs (section 3.1 allows it without a rule). The k-th VF of a VM competes with IF/k, so a VM
//!   gets a second one only if it gains more from it than other VMs from their first.
//! - There are several pools and networks. A NIC gets VFs of its own network only.
//! - A VM keeps a new VF against other VMs for [`Config::hold`], longer where attaching takes long. A VM that takes its
//!   place needs an IF that is higher by [`Config::margin`]. Both are 0 in the paper.
//! - A VM that is no longer network-bound keeps its VF until another VM wants it. [`Config::release`] revokes it
//!   earlier, for hosts where a held VF pins memory.
//! - The operator's [`Setting`] takes effect at once.
//!
//! # Contradictions in the paper
//! - Table 2 prints IFs that eq 2 does not give for the table's own columns: VM9, VM11 and VM14 are off by more than 10
//!   %.
//! - Section 4.5 sets TRAFFIC_FREQ to 80, yet VM9 gets a VF at 60 % and VM1 holds one at 35 %. Here it is the condition
//!   for a second VF, not for the first ([`Kind::NetHeavy`]).
//! - The DI2 of VM5, which computes all the time, is printed as 34.6; eq 1 gives nearly 0. Thresholds here are for eq
//!   1.

pub mod classify;
pub mod sizing;

mod decision;
mod measure;
mod queues;
mod scheduler;
mod worth;

pub use classify::Kind;
pub use decision::{Action, Decision, NicStatus, Reason};
pub use measure::{CpuTime, Samples, TABLE_2, Traffic, di2};
pub use scheduler::VfScheduler;
pub use worth::{Thresholds as WorthThresholds, VfWorth, Window as WorthWindow};

use crate::slices::{MS, Nanos};

/// One NIC of a VM, to which VFs are granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nic {
    /// VM.
    pub vm: u32,
    /// Network.
    pub network: u32,
}

/// An SR-IOV virtual function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vf {
    /// Pool.
    pub pool: u32,
    /// Number in its pool, from 0.
    pub index: u32,
}

/// The VFs of one physical function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Identity, unique.
    pub id: u32,
    /// Network to which the physical function connects.
    pub network: u32,
    /// Number of VFs that may be granted; they are numbered from 0. See [`sizing::usable`].
    pub vfs: u32,
}

/// The operator's setting for a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Setting {
    /// Its measurements decide.
    #[default]
    Auto,
    /// It gets a VF before all others.
    Pin,
    /// It gets no VF.
    Never,
}

/// What was measured of one NIC.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NicObservation {
    /// The NIC.
    pub nic: Nic,
    /// DI2 of its VM ([`di2`]), at least 0.
    pub di2: f64,
    /// Traffic, sent and received, on the paravirtual path and the VF together.
    pub traffic: Traffic,
    /// The operator's setting.
    pub setting: Setting,
    /// Maximum number of VFs it may hold at once, at least 1; more than one only while it is [`Kind::NetHeavy`].
    pub max_vfs: u32,
    /// Time to attach a VF to this VM, ns; 0 if unknown.
    pub attach_time: Nanos,
}

/// Settings of [`VfScheduler`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Weight of the packet frequency against the mean in IF, 0.0 ..= 1.0 (alpha of eq 2).
    pub alpha: f64,
    /// Minimum DI2 of a network-bound VM.
    pub di2: f64,
    /// Minimum packet frequency of a network-bound VM, percent of the samples.
    pub freq: f64,
    /// Minimum packet frequency of a VM that may hold several VFs, percent (TRAFFIC_FREQ of section 4.5).
    pub heavy_freq: f64,
    /// Part by which an IF must be higher to take the place of a holder, at least 0.0.
    pub margin: f64,
    /// Minimum time that a VM keeps a VF against others, ns.
    pub hold: Nanos,
    /// The same, as a multiple of the time that attaching took.
    pub hold_per_attach: u32,
    /// Maximum number of VFs granted in one decision.
    pub moves: usize,
    /// Time (ns) after which a VM that is not network-bound loses its VF although no VM wants it; `None`: never.
    pub release: Option<Nanos>,
    /// Time until a failed grant or revocation is tried again, ns.
    pub retry: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            alpha: 0.8,
            di2: 0.01,
            freq: 10.0,
            heavy_freq: 80.0,
            margin: 0.1,
            hold: 10_000 * MS,
            hold_per_attach: 20,
            moves: 4,
            release: None,
            retry: 30_000 * MS,
        }
    }
}

impl Config {
    /// The paper's rules: no margin, no hold, any number of moves.
    pub fn paper() -> Self {
        Self {
            margin: 0.0,
            hold: 0,
            hold_per_attach: 0,
            moves: usize::MAX,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests;
