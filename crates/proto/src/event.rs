// SPDX-License-Identifier: Apache-2.0
//! The daemon's journal: its last lines, for `viola top` and other clients.

use serde::{Deserialize, Serialize};

/// Severity of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// A mechanism stopped working.
    Error,
    /// The daemon could not apply a setting.
    Warning,
    /// The daemon changed a setting of a VM or of the host.
    Change,
    /// Information only.
    Info,
}

/// One line of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the line. The first line of a daemon has number 1, and no number is skipped.
    pub number: u64,
    /// Milliseconds since 1970-01-01 UTC.
    pub at_ms: u64,
    /// Severity.
    pub kind: EventKind,
    /// Identity of the VM that the line is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// What happened, and why.
    pub what: String,
}

/// Answer to `GET /v1/events`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Process ID of the daemon. A new daemon counts from 1 again.
    pub pid: u32,
    /// The last 256 lines, oldest first.
    pub events: Vec<Event>,
}
