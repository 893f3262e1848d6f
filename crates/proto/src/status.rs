// SPDX-License-Identifier: Apache-2.0
//! State of the host and of the daemon.

use serde::{Deserialize, Serialize};

/// Result of one row of [`Check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowState {
    /// Available, or good enough.
    Yes,
    /// Missing; `why` says what is missing.
    No,
    /// Information only.
    Info,
}

/// One line of `viola check`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// What the row is about, for example `slices: slots`.
    pub name: String,
    /// Result.
    pub state: RowState,
    /// Value in one word or number: `yes`, `no`, `ok`, `14`.
    pub value: String,
    /// The reason, or details; may be empty.
    pub why: String,
    /// What the operator can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

/// Answer to `GET /v1/check`: what this host can do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// One row per capability.
    pub rows: Vec<Row>,
    /// One sentence per VM that viola could help. Empty without a running daemon, which alone measures for long
    /// enough.
    #[serde(default)]
    pub advice: Vec<String>,
    /// One sentence per probe that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// State of the connection to libvirt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Libvirt {
    /// Whether the configuration lets the daemon use libvirt.
    pub on: bool,
    /// Whether the daemon is connected.
    pub connected: bool,
    /// If not, why.
    #[serde(default)]
    pub why: String,
    /// Running domains.
    pub domains: u64,
    /// Events received so far.
    pub events: u64,
}

/// What the daemon is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// A mechanism schedules at least one core or VM.
    Running,
    /// No VM needs a mechanism.
    Idle,
    /// A mechanism failed; the daemon tries it again soon.
    Waiting,
    /// The mechanism is unavailable or switched off in the configuration; `why` says which.
    Off,
    /// The operator ran `viola stop --all`.
    Stopped,
    /// `--dry-run`: the daemon changes nothing.
    Advising,
}

/// One core that is set aside for VMs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Core {
    /// CPU number.
    pub cpu: u32,
    /// Whether viola schedules the core now.
    pub managed: bool,
    /// Why it does, or does not.
    pub why: String,
    /// Names of the VMs on the core.
    pub vms: Vec<String>,
    /// Decisions of the slot controller so far.
    pub decisions: u64,
    /// CPU time of the controller so far.
    pub controller_ns: u64,
    /// Share of the core's CPU time that the controller used over about the last second, 0..=1.
    pub controller_share: f64,
    /// Longest time by which the controller woke late, so far.
    pub late_max_ns: u64,
}

/// A VM whose setting the daemon cannot apply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmanagedVm {
    /// Identity of the VM.
    pub vm: String,
    /// The reason, and what the operator can change.
    pub why: String,
}

/// Looks at what all VMs spent in a window, with what follows for their classes and turbo vCPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decisions {
    /// How many since the daemon started.
    pub count: u64,
    /// CPU time of all of them.
    pub cpu_ns: u64,
}

/// Answer to `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Process ID of the daemon.
    pub pid: u32,
    /// Version of the daemon.
    pub version: String,
    /// Configuration file in use.
    pub config: String,
    /// Time since the daemon started.
    pub uptime_ns: u64,
    /// Length of a round of the control loop.
    pub interval_ns: u64,
    /// What the daemon is doing.
    pub stage: Stage,
    /// The reason, in one sentence.
    pub why: String,
    /// `slots`, `sched_ext` or `eevdf`; absent when the daemon chose none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<String>,
    /// Source of CPU times: `exact` (context switches) or `sampled` (schedstat).
    pub accounting: String,
    /// Cores that are set aside.
    pub cores: Vec<Core>,
    /// VMs whose settings the daemon cannot apply.
    pub unmanaged: Vec<UnmanagedVm>,
    /// Unexpected ends of a mechanism since the daemon started.
    pub failures: u32,
    /// What the decisions on classes and turbo vCPUs have cost.
    #[serde(default)]
    pub decisions: Decisions,
    /// The connection to libvirt.
    #[serde(default)]
    pub libvirt: Libvirt,
    /// Settings and VMs of the configuration that need the operator's attention, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Answer to a request that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// What the daemon did, in one sentence.
    pub done: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After an upgrade the command line may be newer than the daemon that still runs, or older.
    #[test]
    fn a_status_of_another_version_is_read() {
        // as 0.1.0 wrote it, with a key of a version to come
        let text = r#"{"pid":1,"version":"0.1.0","config":"/etc/viola/viola.toml","uptime_ns":5,"interval_ns":100000000,
            "stage":"idle","why":"no VM asks for it","mechanism":"slots","accounting":"exact","cores":[],"unmanaged":[],
            "failures":0,"of_tomorrow":{"a":1}}"#;
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!(status.stage, Stage::Idle);
        assert_eq!(status.libvirt, Libvirt::default());
        assert_eq!(status.decisions, Decisions::default());
        let mut now = serde_json::to_value(&status).unwrap();
        for later in ["libvirt", "decisions"] {
            assert!(now.as_object_mut().unwrap().remove(later).is_some());
        }
        assert_eq!(serde_json::from_value::<Status>(now).unwrap(), status);
    }
}
