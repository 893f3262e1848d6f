// SPDX-License-Identifier: Apache-2.0
//! What is said about the host and the daemon.

use serde::{Deserialize, Serialize};

/// Whether a row of [`Check`] is good news.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RowState {
    /// There, or good enough.
    Yes,
    /// Not there; `why` says what is missing.
    No,
    /// Only information.
    Info,
}

/// One line of `viola check`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// What the row is about, for example `slices: slots`.
    pub name: String,
    /// Good or bad.
    pub state: RowState,
    /// One word or number: `yes`, `no`, `ok`, `14`.
    pub value: String,
    /// The reason, or details; may be empty.
    pub why: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub change: Option<String>,
}

/// What this host can do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// The table.
    pub rows: Vec<Row>,
    /// One sentence per VM that viola could help; only a running daemon has measured long enough to tell.
    #[serde(default)]
    pub advice: Vec<String>,
    /// What could not be found out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// What libvirt tells the daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Libvirt {
    /// Whether it is asked; the configuration may forbid it.
    pub on: bool,
    /// Whether the connection stands.
    pub connected: bool,
    /// Why it does not.
    #[serde(default)]
    pub why: String,
    /// Its domains that run.
    pub domains: u64,
    /// Events so far.
    pub events: u64,
}

/// What the daemon is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// A mechanism schedules at least one core or VM.
    Running,
    /// Nothing to do: no VM asks for it.
    Idle,
    /// A mechanism failed and is tried again soon.
    Waiting,
    /// Not available or switched off in the configuration; `why` says it.
    Off,
    /// `viola stop --all` was asked for.
    Stopped,
    /// `--dry-run`: nothing is ever changed.
    Advising,
}

/// One core that is set aside for VMs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Core {
    /// CPU number.
    pub cpu: u32,
    /// Whether viola schedules it now.
    pub managed: bool,
    /// Why, or why not.
    pub why: String,
    /// VMs on it, by name.
    pub vms: Vec<String>,
    /// Decisions of the controller so far.
    pub decisions: u64,
    /// CPU time of the controller so far.
    pub controller_ns: u64,
    /// Part of a CPU that the controller took over the last second or so, 0..=1.
    pub controller_share: f64,
    /// Longest time by which the controller came late.
    pub late_max_ns: u64,
}

/// A VM that asked for something it cannot get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmanagedVm {
    /// Its identity.
    pub vm: String,
    /// The reason, and what to change.
    pub why: String,
}

/// Answer to `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Process of the daemon.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Configuration file in use.
    pub config: String,
    /// How long it has run.
    pub uptime_ns: u64,
    /// Time between two looks at the host.
    pub interval_ns: u64,
    /// What it is doing.
    pub stage: Stage,
    /// The reason for that, in one sentence.
    pub why: String,
    /// `slots` or `eevdf`, when one was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mechanism: Option<String>,
    /// `exact` (at context switches) or `sampled` (schedstat).
    pub accounting: String,
    /// Cores that are set aside.
    pub cores: Vec<Core>,
    /// VMs that asked for something they cannot get.
    pub left_out: Vec<UnmanagedVm>,
    /// Times a mechanism ended without being asked to, since the daemon started.
    pub failures: u32,
    /// What libvirt tells.
    #[serde(default)]
    pub libvirt: Libvirt,
    /// Settings and VMs of the configuration about which something is to be said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Answer to a request that was carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    /// What was done, in one sentence.
    pub done: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After an upgrade the command line may be newer than the daemon that still runs, or older.
    #[test]
    fn another_versions_status_is_understood() {
        // as 0.1.0 wrote it, with a key of a version to come
        let text = r#"{"pid":1,"version":"0.1.0","config":"/etc/viola/viola.toml","uptime_ns":5,"interval_ns":100000000,
            "stage":"idle","why":"no VM asks for it","mechanism":"slots","accounting":"exact","cores":[],"left_out":[],
            "failures":0,"of_tomorrow":{"a":1}}"#;
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!(status.stage, Stage::Idle);
        assert_eq!(status.libvirt, Libvirt::default());
        let mut now = serde_json::to_value(&status).unwrap();
        assert!(now.as_object_mut().unwrap().remove("libvirt").is_some());
        assert_eq!(serde_json::from_value::<Status>(now).unwrap(), status);
    }
}
