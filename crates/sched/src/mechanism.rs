// SPDX-License-Identifier: Apache-2.0
//! The trait of all mechanisms, and what they report.

use viola_host::Vm;
use viola_meter::acct::Acct;

use crate::plan::Plan;
use crate::restore::RestoreError;

/// Why a mechanism failed.
#[derive(Debug, thiserror::Error)]
pub enum SchedError {
    /// The host lacks a requirement.
    #[error("{mechanism} cannot be used: {why}")]
    Unavailable {
        /// Name of the mechanism.
        mechanism: &'static str,
        /// What is missing, and the remedy.
        why: String,
    },
    /// A part of it could not be started or reached.
    #[error("{what}: {source}")]
    Io {
        /// The step or file.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// Attributes could not be saved or restored.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The accounting program failed.
    #[error(transparent)]
    Acct(#[from] viola_meter::acct::AcctError),
    /// A thread's attributes could not be changed.
    #[error(transparent)]
    Attr(#[from] viola_host::attrs::AttrError),
}

impl SchedError {
    pub(crate) fn unavailable(mechanism: &'static str, why: impl Into<String>) -> Self {
        let why = why.into();
        Self::Unavailable { mechanism, why }
    }
}

/// The state of a mechanism.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Health {
    /// Why it ended without being asked to; every thread has been restored then.
    pub ended: Option<String>,
    /// The controller lost track of threads; apply the plan again.
    pub resync: bool,
    /// errno of a change that the kernel refused.
    pub refused: Option<i32>,
    /// What scheduling cost, by core.
    pub cores: Vec<CoreHealth>,
}

/// What scheduling cost on one core, so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CoreHealth {
    /// CPU number.
    pub cpu: u32,
    /// Decisions.
    pub decisions: u64,
    /// VMs raised or lowered.
    pub switches: u64,
    /// System calls for that.
    pub calls: u64,
    /// CPU time of the controller, ns.
    pub cpu_ns: u64,
    /// Longest lateness of a timer, ns.
    pub late_max: u64,
}

/// What a VM used of one core since the mechanism gave it that core, as the mechanism counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Main process of the VM.
    pub pid: i32,
    /// CPU number.
    pub cpu: u32,
    /// Time it ran, ns.
    pub run: u64,
    /// Context switches to one of its threads.
    pub turns: u64,
    /// Waits for the core that have ended.
    pub waits: u64,
    /// Their sum, ns.
    pub wait_sum: u64,
    /// The longest, ns.
    pub wait_max: u64,
    /// Times that it preempted another VM when it woke.
    pub boosts: u64,
}

/// A way to schedule VMs on cores by a plan.
pub trait Mechanism {
    /// Its name: `slots`, `sched_ext` or `eevdf`.
    fn name(&self) -> &'static str;

    /// Carries the plan out, and restores the threads of cores and VMs that are no longer in it.
    /// `vms` are the VMs of this host; `acct` is the accounting program, if it is loaded.
    ///
    /// # Errors
    /// [`SchedError`]. The threads that it could not manage are back in stock scheduling then.
    fn apply(&mut self, plan: &Plan, vms: &[Vm], acct: Option<&mut Acct>)
    -> Result<(), SchedError>;

    /// Its state and cost.
    fn health(&mut self) -> Health;

    /// What each VM used, by VM and core; empty for a mechanism that does not count it.
    fn usage(&self) -> Vec<Usage> {
        Vec::new()
    }

    /// Restores every thread.
    ///
    /// # Errors
    /// [`SchedError`].
    fn stop(&mut self) -> Result<(), SchedError>;
}
