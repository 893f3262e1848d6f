// SPDX-License-Identifier: Apache-2.0
//! What `viola-agent status` shows of pipes.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The pipes of this VM's programs. Counts are since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeReport {
    /// Socket at which programs ask.
    pub socket: String,
    /// Pipes that are requested or running.
    pub now: u64,
    /// Pipes that have ended.
    pub pipes: u64,
    /// Bytes moved by all kinds of pipes.
    pub bytes: u64,
    /// Pipes that lost a connection.
    pub lost: u64,
    /// Refused pipes by reason; the program moves those bytes itself.
    pub refused: BTreeMap<String, u64>,
    /// Detail of the last failure.
    pub refusal: Option<String>,
}

impl fmt::Display for PipeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "pipes at {}: {} now; so far {} with {} MiB, {} connections lost",
            self.socket,
            self.now,
            self.pipes,
            self.bytes >> 20,
            self.lost
        )?;
        for (why, count) in &self.refused {
            writeln!(f, "  {count} left to the program: {why}")?;
        }
        match &self.refusal {
            Some(why) => writeln!(f, "  the last in detail: {why}"),
            None => Ok(()),
        }
    }
}
