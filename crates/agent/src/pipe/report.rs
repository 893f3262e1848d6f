// SPDX-License-Identifier: Apache-2.0
//! What `viola-agent status` shows of pipes.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What the host moves for this VM's programs. Counts are since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipeReport {
    /// Where programs ask.
    pub socket: String,
    /// Pipes that are asked for or under way.
    pub now: u64,
    /// Pipes that are over.
    pub pipes: u64,
    /// Bytes that were moved, by whatever kind of pipe.
    pub bytes: u64,
    /// Pipes over which connections were lost.
    pub lost: u64,
    /// What was not moved by the host, by reason; the program does it by itself.
    pub refused: BTreeMap<String, u64>,
    /// The last reason in detail, where there is more to it.
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
