// SPDX-License-Identifier: Apache-2.0
//! How a thread was scheduled before viola changed it, and the way back.

use std::io;

use serde::{Deserialize, Serialize};

use super::{AttrError, Outcome, SchedAttr, affinity, get, set, set_affinity};
use crate::cpuset::CpuSet;
use crate::proc;
use crate::thread::{Thread, Tid};

/// How a thread was scheduled before viola changed it; what the state file keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedThread {
    /// Thread number.
    pub tid: Tid,
    /// Clock ticks after boot, so that no other thread of that number is ever touched.
    pub start_time: u64,
    /// Scheduling attributes.
    pub attr: SchedAttr,
    /// CPUs it could run on.
    pub affinity: CpuSet,
}

impl SavedThread {
    /// Notes how a thread is scheduled now; `None` when it is gone.
    ///
    /// # Errors
    /// As [`get`].
    pub fn capture(thread: &Thread) -> Result<Option<Self>, AttrError> {
        let Thread {
            tid, start_time, ..
        } = *thread;
        let (Some(attr), Some(affinity)) = (get(tid)?, affinity(tid)?) else {
            return Ok(None);
        };
        // Asked last: the answers above are those of this thread only if it is still the same now.
        Ok(is_same(tid, start_time)?.then_some(Self {
            tid,
            start_time,
            attr,
            affinity,
        }))
    }

    /// Puts the thread back. A thread of the same number but another start time is left alone. Between
    /// that look and the change lie microseconds in which the kernel would have to use up all its
    /// thread numbers to give this one out again.
    ///
    /// # Errors
    /// The first [`AttrError`]; affinity is put back even when the attributes cannot be.
    pub fn restore(&self) -> Result<Outcome, AttrError> {
        if !is_same(self.tid, self.start_time)? {
            return Ok(Outcome::Gone);
        }
        // The class first: a real-time thread must not be let loose on the host's other cores.
        let attr = set(self.tid, &self.attr);
        let affinity = set_affinity(self.tid, &self.affinity);
        match (attr?, affinity?) {
            (Outcome::Done, Outcome::Done) => Ok(Outcome::Done),
            _ => Ok(Outcome::Gone),
        }
    }
}

fn is_same(tid: Tid, start_time: u64) -> Result<bool, AttrError> {
    match proc::stat(tid) {
        Ok(stat) => Ok(stat.is_some_and(|s| s.start_time == start_time && !s.is_dead())),
        Err(e) => Err(AttrError::Other {
            tid,
            what: "its state".to_owned(),
            source: io::Error::other(e.one_line()),
        }),
    }
}
