// SPDX-License-Identifier: Apache-2.0
//! Input and output of a simulated core.

use super::super::{Nanos, Params};

/// What a simulated VM does. Times are ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Always wants to run.
    Busy,
    /// Never wants to run.
    Idle,
    /// Wakes at each multiple of `period` to run for `on`. A wake-up while the VM still works is lost.
    Duty {
        /// Time between wake-ups.
        period: Nanos,
        /// Run time per wake-up.
        on: Nanos,
    },
    /// Sleeps for a random time, runs for a random time, and so on; both uniform within the bounds.
    Bursts {
        /// Shortest and longest sleep.
        sleep: (Nanos, Nanos),
        /// Shortest and longest run.
        run: (Nanos, Nanos),
    },
    /// Attacks the scheduler: sleeps just before its budget is used up, and wakes again.
    Evade {
        /// Rest of the budget at which it sleeps.
        margin: Nanos,
        /// How long it sleeps.
        sleep: Nanos,
    },
}

/// A VM on the simulated core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimVm {
    /// Its scheduling parameters.
    pub params: Params,
    /// What it does.
    pub behaviour: Behaviour,
}

/// Cost and accuracy of driving the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Driver {
    /// Core time of each decision, ns; no VM runs meanwhile.
    pub overhead: Nanos,
    /// Maximum lateness of timers and budgets, ns (uniform).
    pub late: Nanos,
    /// Whether [`Report::runs`] is filled.
    pub record: bool,
    /// Whether decisions see random packets of the LSVMs and come at random times too.
    pub packets: bool,
}

/// A run of one VM without interruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// [`Params::id`] of the VM.
    pub id: u32,
    /// Start, ns.
    pub at: Nanos,
    /// Length, ns.
    pub len: Nanos,
}

/// What one VM got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmReport {
    /// [`Params::id`] of the VM.
    pub id: u32,
    /// Time it ran, ns.
    pub ran: Nanos,
    /// Time it wanted to run, was not over its cap, and did not run, ns.
    pub waited: Nanos,
    /// Waits from a wake-up to running, ns, in order.
    pub wake_waits: Vec<Nanos>,
    /// Waits from a preemption to running again, ns, in order.
    pub preempt_waits: Vec<Nanos>,
}

impl VmReport {
    /// Longest wait of either kind that has ended, ns.
    pub fn worst_wait(&self) -> Nanos {
        self.wake_waits
            .iter()
            .chain(&self.preempt_waits)
            .copied()
            .max()
            .unwrap_or(0)
    }
}

/// What happened on the core.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Simulated time, ns.
    pub time: Nanos,
    /// Time in which no VM ran and no decision was made, ns.
    pub idle: Nanos,
    /// Part of `idle` in which a VM without a cap wanted to run, ns. Not 0 means a fault of the scheduler.
    pub wasted: Nanos,
    /// Number of decisions.
    pub decisions: u64,
    /// Core time of all decisions, ns.
    pub overhead: Nanos,
    /// Number of rank changes from one decision to the next.
    pub rank_changes: u64,
    /// The VMs, in order of first appearance.
    pub vms: Vec<VmReport>,
    /// All runs, if [`Driver::record`].
    pub runs: Vec<Run>,
}

impl Report {
    /// The report of a VM.
    pub fn vm(&self, id: u32) -> Option<&VmReport> {
        self.vms.iter().find(|vm| vm.id == id)
    }

    /// Part of the simulated time in which a VM ran, 0.0 ..= 1.0.
    pub fn share(&self, id: u32) -> f64 {
        self.vm(id)
            .map_or(0.0, |vm| vm.ran as f64 / self.time.max(1) as f64)
    }
}

/// The scheduler asked to be called again and again without time passing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no progress at {at} ns of simulated time: the scheduler asks to be called again at once, over and over"
)]
pub struct NoProgress {
    /// Simulated time, ns.
    pub at: Nanos,
}
