// SPDX-License-Identifier: Apache-2.0
//! The scheduling of a thread before viola changed it.

use std::io;

use serde::{Deserialize, Serialize};

use super::{AttrError, Outcome, SchedAttr, affinity, get, set, set_affinity};
use crate::cpuset::CpuSet;
use crate::proc;
use crate::thread::{Thread, Tid};

/// The scheduling of a thread before viola changed it, as the state file keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedThread {
    /// Thread number.
    pub tid: Tid,
    /// Start time in clock ticks after boot; identifies the thread when its number is reused.
    pub start_time: u64,
    /// Scheduling attributes.
    pub attr: SchedAttr,
    /// CPUs that it could run on.
    pub affinity: CpuSet,
}

impl SavedThread {
    /// Reads the present scheduling of a thread; `None` when it has ended.
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
        // Checked last: the values above belong to this thread only if it still has the number.
        Ok(is_same(tid, start_time)?.then_some(Self {
            tid,
            start_time,
            attr,
            affinity,
        }))
    }

    /// Restores the thread. Leaves a thread of the same number but another start time alone. (Between the check and the
    /// change lie microseconds; the number could be reused only if the kernel wrapped around all thread numbers.)
    ///
    /// # Errors
    /// The first [`AttrError`]; the affinity is restored even when the attributes are not.
    pub fn restore(&self) -> Result<Outcome, AttrError> {
        if !is_same(self.tid, self.start_time)? {
            return Ok(Outcome::Gone);
        }
        // The class first: a real-time thread must not reach the host's other cores.
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
