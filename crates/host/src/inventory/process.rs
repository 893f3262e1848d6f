// SPDX-License-Identifier: Apache-2.0
//! What the inventory remembers of a process that is no VM.

use std::time::{Duration, Instant};

use crate::proc::Stat;
use crate::thread::{Thread, Tid};

/// The inventory reads a process that is no VM at every refresh until it has known the process for
/// this time, and then once in this time: an old process seldom becomes a VM.
const RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// A process that is no VM, or a thread in the kernel.
pub(super) struct NonVm {
    pub(super) identity: ProcessIdentity,
    /// For a vhost kernel thread: the process of the VM that it works for.
    pub(super) vhost_owner: Option<Tid>,
    pub(super) first_seen: Instant,
    pub(super) read: Instant,
}

impl NonVm {
    pub(super) fn new(stat: &Stat, vhost_owner: Option<Tid>, at: Instant) -> Self {
        Self {
            identity: ProcessIdentity::of(stat),
            vhost_owner,
            first_seen: at,
            read: at,
        }
    }

    /// Whether the process need not be read again now.
    pub(super) fn is_settled(&self, at: Instant) -> bool {
        at.saturating_duration_since(self.first_seen) >= RECHECK_INTERVAL
            && at.saturating_duration_since(self.read) < RECHECK_INTERVAL
    }

    pub(super) fn thread(&self, pid: Tid) -> Thread {
        Thread {
            pid,
            tid: pid,
            start_time: self.identity.start_time,
        }
    }
}

/// One program in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessIdentity {
    pub(super) start_time: u64,
    pub(super) comm: String,
    pub(super) start_stack: u64,
}

impl ProcessIdentity {
    pub(super) fn of(stat: &Stat) -> Self {
        Self {
            start_time: stat.start_time,
            comm: stat.comm.clone(),
            start_stack: stat.start_stack,
        }
    }

    /// The name is not compared: QEMU may rename its threads (`-name process=`).
    pub(super) fn is_same_vm(&self, stat: &Stat) -> bool {
        self.start_time == stat.start_time && self.start_stack == stat.start_stack
    }
}
