// SPDX-License-Identifier: Apache-2.0
//! What `viola-agent status` shows of the mount.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The mount of other VMs' blocks. Counts are since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountReport {
    /// Mount point.
    pub path: String,
    /// Transport to the host.
    pub port: String,
    /// State as one sentence.
    pub state: String,
    /// Requests of the kernel.
    pub requests: u64,
    /// Bytes of replies.
    pub bytes: u64,
    /// Requests that failed because the host was not there.
    pub failed: u64,
    /// Sessions of the host.
    pub sessions: u64,
}

impl fmt::Display for MountReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} by {}: {}", self.path, self.port, self.state)?;
        writeln!(
            f,
            "  {} requests, {} MiB, {} failed without the host, {} sessions",
            self.requests,
            self.bytes >> 20,
            self.failed,
            self.sessions
        )
    }
}
