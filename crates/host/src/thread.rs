// SPDX-License-Identifier: Apache-2.0
//! A thread of the host.

use serde::{Deserialize, Serialize};

/// Number of a thread or process in the PID namespace of this program.
pub type Tid = u32;

/// One host thread. `(tid, start_time)` identifies it for ever: a reused number has another start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Thread {
    /// Process that the thread belongs to.
    pub pid: Tid,
    /// Thread number, equal to `pid` for a process's main thread.
    pub tid: Tid,
    /// Clock ticks after boot (`starttime` of proc_pid_stat(5)).
    pub start_time: u64,
}
