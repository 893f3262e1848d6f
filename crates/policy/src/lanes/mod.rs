// SPDX-License-Identifier: Apache-2.0
//! Lanes: the few SR-IOV virtual functions (VFs) of a host go to the VMs that gain most from them (Raccoon: paper
//! "Raccoon: A Novel Network I/O Allocation Framework for Workload-Aware VM Scheduling in Virtual Environments").
//!
//! # Model
//! Every VM has a paravirtual NIC in each of its networks. A VF is granted on top of that and taken back again
//! without a lost connection, so who has one is decided anew at each call of [`Lanes::decide`], from two measures:
//! - DI2 ([`di2`], eq 1): how long the VM was blocked for the time that it ran. High for one that waits for I/O.
//! - IF ([`Traffic::intensity`], eq 2): how often and how much its NIC sends and receives.
//!
//! A VM whose DI2 and packet frequency both pass their thresholds is network-bound ([`classify`]). The priority queue
//! (PQ) is the ordered tree of those that hold VFs, the general queue (GQ) is everyone else; all start in GQ. The
//! highest of GQ is promoted while a VF is free, else it takes the place of the lowest of PQ if its IF is higher
//! (sections 3.2 to 3.6). [`sizing`] says how many VFs a NIC should have.
//!
//! # Beyond the paper
//! - Several VFs for one VM (which section 3.1 allows, without a rule): the k-th VF of a VM stands in the queues with
//!   IF/k, so that a second one goes to nobody while it gains less than somebody's first.
//! - Several pools and networks: a NIC only ever gets a VF of its own network.
//! - A VM that got a VF keeps it for [`Config::hold`] against other VMs, longer where attaching takes long; and the
//!   IF of the one that takes its place must be higher by [`Config::margin`]. Both 0 is the paper.
//! - A VM that is no longer network-bound leaves its VF when another one wants it. Taking it earlier would help nobody;
//!   [`Config::release`] does it all the same, for hosts where a held VF pins memory.
//! - The operator's word ([`Setting`]) takes effect at once.
//!
//! # Where the paper contradicts itself
//! - Table 2 prints IFs that eq 2 does not give for its own columns: VM9, VM11 and VM14 are off by more than 10 %.
//! - Section 4.5 sets TRAFFIC_FREQ to 80, yet VM9 gets a VF at 60 % and VM1 holds one at 35 %. So it is no condition for
//!   a first VF; here it is what a VM needs for more than one ([`Kind::NetHeavy`]).
//! - DI2 of VM5, which computes all the time, is printed as 34.6; by eq 1 it would be near 0. Thresholds of DI2 are
//!   for eq 1, not for that column.

pub mod classify;
pub mod sizing;

mod decide;
mod measure;
mod queues;

pub use classify::Kind;
pub use decide::{Action, Decision, Lanes, Standing, Why};
pub use measure::{CpuTime, Samples, TABLE_2, Traffic, di2};

use crate::slices::{MS, Nanos};

/// One NIC of a VM: what a VF is granted to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nic {
    /// Which VM.
    pub vm: u32,
    /// Which network it is in.
    pub network: u32,
}

/// A virtual function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vf {
    /// Which pool it is of.
    pub pool: u32,
    /// Its number there, from 0.
    pub index: u32,
}

/// The VFs of one physical function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Identity, unique.
    pub id: u32,
    /// Network that its cable leads to.
    pub network: u32,
    /// VFs that may be granted, numbered from 0. See [`sizing::usable`].
    pub vfs: u32,
}

/// What the operator says about a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Setting {
    /// What is seen of it decides.
    #[default]
    Auto,
    /// It has a VF before all others.
    Pin,
    /// It has none.
    Never,
}

/// What was seen of one NIC.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Observed {
    /// Which NIC.
    pub nic: Nic,
    /// DI2 of its VM ([`di2`]), at least 0.
    pub di2: f64,
    /// What it sent and received on both paths together.
    pub traffic: Traffic,
    /// What the operator says.
    pub setting: Setting,
    /// Most VFs it may hold at once, at least 1; more than one only while it is [`Kind::NetHeavy`].
    pub most: u32,
    /// How long attaching a VF takes with this VM, ns; 0 if that is not known.
    pub attach: Nanos,
}

/// Settings of [`Lanes`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Config {
    /// Weight of the frequency against the mean in IF (alpha of eq 2), 0.0 ..= 1.0.
    pub alpha: f64,
    /// Least DI2 of a network-bound VM.
    pub di2: f64,
    /// Least packet frequency of a network-bound VM, percent of the samples.
    pub freq: f64,
    /// Packet frequency from which it is a heavy one, percent (TRAFFIC_FREQ of section 4.5).
    pub heavy: f64,
    /// By what part the IF of a VM must be higher to take another one's place, at least 0.0.
    pub margin: f64,
    /// Shortest time that a VM keeps a VF against others, ns.
    pub hold: Nanos,
    /// It keeps it at least so many times as long as attaching took.
    pub hold_per_attach: u32,
    /// Most VFs that change hands at once.
    pub moves: usize,
    /// After so long (ns) a VF is taken from a VM that is not network-bound although nobody wants it.
    pub release: Option<Nanos>,
    /// How long (ns) nothing is tried again that a VM refused.
    pub retry: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            alpha: 0.8,
            di2: 0.01,
            freq: 10.0,
            heavy: 80.0,
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
    /// The paper's rules: no margin, no hold, as many moves as it takes.
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
