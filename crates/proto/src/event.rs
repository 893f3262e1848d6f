// SPDX-License-Identifier: Apache-2.0
//! What the daemon has said: the last lines of its journal, for those who look at it now.

use serde::{Deserialize, Serialize};

/// What a line of the journal is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// Something does not work any more.
    Error,
    /// Something is not as it was asked for.
    Warning,
    /// Something was changed.
    Change,
    /// For information.
    Info,
}

/// One line of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts from 1 since the daemon started; none is left out.
    pub number: u64,
    /// When, milliseconds since 1970.
    pub at_ms: u64,
    /// What it is about.
    pub kind: EventKind,
    /// Identity of the VM, where it speaks of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// What was done, and why.
    pub what: String,
}

/// Answer to `GET /v1/events`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    /// Process of the daemon: another one counts from 1 again.
    pub pid: u32,
    /// The last 256, oldest first.
    pub events: Vec<Event>,
}
