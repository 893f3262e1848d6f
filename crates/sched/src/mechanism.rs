// SPDX-License-Identifier: Apache-2.0
//! One trait for all ways to bring a [`Plan`] about.

use viola_host::Vm;
use viola_meter::acct::Acct;

use crate::plan::Plan;
use crate::restore::RestoreError;

/// Why a mechanism could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum SchedError {
    /// The host lacks something; the sentence says what to change.
    #[error("{mechanism} cannot be used: {why}")]
    Unavailable {
        /// Name of the mechanism.
        mechanism: &'static str,
        /// What is missing and what to do.
        why: String,
    },
    /// A part of it could not be started or talked to.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// Attributes could not be saved or put back.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The accounting program.
    #[error(transparent)]
    Acct(#[from] viola_meter::acct::AcctError),
    /// A thread's attributes could not be changed.
    #[error(transparent)]
    Attr(#[from] viola_host::attrs::AttrError),
}

/// What a mechanism reports of itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Health {
    /// It ended without being asked to, and why; everything has been put back.
    pub ended: Option<String>,
    /// The controller lost track of threads; apply the plan again.
    pub resync: bool,
    /// The kernel refused a change (errno).
    pub refused: Option<i32>,
    /// Per core: decisions, rank changes, system calls and CPU time (ns) of the controller, longest lateness (ns).
    pub cores: Vec<CoreHealth>,
}

/// One core in [`Health`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CoreHealth {
    /// CPU number.
    pub cpu: u32,
    /// Decisions so far.
    pub decisions: u64,
    /// VMs raised or lowered so far.
    pub switches: u64,
    /// System calls spent on that.
    pub calls: u64,
    /// CPU time of the controller, ns.
    pub cpu_ns: u64,
    /// Longest time by which a timer came late, ns.
    pub late_max: u64,
}

/// What a VM got on one core, as the mechanism itself counts it, since it has had that core.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Main process of the VM.
    pub pid: i32,
    /// CPU number.
    pub cpu: u32,
    /// Time it ran, ns.
    pub run: u64,
    /// Times that one of its threads was put on the core.
    pub turns: u64,
    /// Waits for the core that ended.
    pub waits: u64,
    /// Their sum, ns.
    pub wait_sum: u64,
    /// The longest, ns.
    pub wait_max: u64,
    /// Times that it took the core from another VM when it woke.
    pub boosts: u64,
}

/// A way to give the cores to VMs as a plan says.
pub trait Mechanism {
    /// Its name: `slots`, `sched_ext` or `eevdf`.
    fn name(&self) -> &'static str;

    /// Brings the plan about; cores and VMs that are in it no more are left as they were found. `vms` are the
    /// VMs of this host, for looking up their threads. Nothing is half done on error: what cannot be managed is
    /// back to stock scheduling.
    fn apply(&mut self, plan: &Plan, vms: &[Vm], acct: Option<&mut Acct>)
    -> Result<(), SchedError>;

    /// Whether all is well, and what it costs.
    fn health(&mut self) -> Health;

    /// What each VM got, by VM and core; nothing from a mechanism that does not count it.
    fn usage(&self) -> Vec<Usage> {
        Vec::new()
    }

    /// Leaves every thread as it was found.
    fn stop(&mut self) -> Result<(), SchedError>;
}
