// SPDX-License-Identifier: Apache-2.0
//! Scheduling attributes of one thread: read, change, and put back.
//!
//! A thread that has ended is an ordinary answer here ([`Outcome::Gone`] or `None`), never an error.

mod saved;
#[cfg(test)]
mod tests;

use std::io;

use serde::{Deserialize, Serialize};

use crate::cgroup::Mounts;
use crate::cpuset::CpuSet;
use crate::privilege::Privilege;
use crate::proc;
use crate::thread::Tid;

pub use saved::SavedThread;

/// Scheduling policy, sched(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// `SCHED_OTHER`, the fair class.
    Normal,
    /// `SCHED_FIFO`: real-time, runs until it blocks or a higher priority comes.
    Fifo,
    /// `SCHED_RR`: as FIFO, with a time slice among equals.
    Rr,
    /// `SCHED_BATCH`: fair class without preemption at wake-up.
    Batch,
    /// `SCHED_IDLE`: fair class with the lowest weight.
    Idle,
    /// `SCHED_DEADLINE`.
    Deadline,
    /// `SCHED_EXT`: a BPF scheduler, when one is loaded.
    Ext,
}

impl Policy {
    fn number(self) -> u32 {
        match self {
            Self::Normal => 0,
            Self::Fifo => 1,
            Self::Rr => 2,
            Self::Batch => 3,
            Self::Idle => 5,
            Self::Deadline => 6,
            Self::Ext => 7,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [
            Self::Normal,
            Self::Fifo,
            Self::Rr,
            Self::Batch,
            Self::Idle,
            Self::Deadline,
            Self::Ext,
        ]
        .into_iter()
        .find(|p| p.number() == number)
    }

    /// Whether threads of this policy run before all threads of the fair class.
    #[must_use]
    pub fn is_real_time(self) -> bool {
        matches!(self, Self::Fifo | Self::Rr | Self::Deadline)
    }
}

/// `SCHED_FLAG_RESET_ON_FORK`: children start in the fair class.
pub const RESET_ON_FORK: u64 = 0x01;

/// What `sched_setattr(2)` sets. Build one with [`SchedAttr::fair`] or [`SchedAttr::fifo`] and change
/// what is different.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedAttr {
    /// Policy.
    pub policy: Policy,
    /// `SCHED_FLAG_*` of `linux/sched.h`.
    pub flags: u64,
    /// -20..=19, for the fair class.
    pub nice: i32,
    /// 1..=99 for FIFO and RR, else 0.
    pub rt_priority: u32,
    /// Nanoseconds. Deadline: run time per period. Fair class on Linux 6.12 and later: the thread's
    /// slice, 100,000..=100,000,000; 0 for the kernel's default.
    pub runtime: u64,
    /// Nanoseconds, deadline class only.
    pub deadline: u64,
    /// Nanoseconds, deadline class only.
    pub period: u64,
}

impl SchedAttr {
    /// The fair class with this nice value and the kernel's default slice.
    #[must_use]
    pub fn fair(nice: i32) -> Self {
        Self {
            policy: Policy::Normal,
            flags: 0,
            nice,
            rt_priority: 0,
            runtime: 0,
            deadline: 0,
            period: 0,
        }
    }

    /// `SCHED_FIFO` with this priority, 1..=99.
    #[must_use]
    pub fn fifo(rt_priority: u32) -> Self {
        Self {
            policy: Policy::Fifo,
            rt_priority,
            ..Self::fair(0)
        }
    }
}

/// Whether the thread was still there.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Done.
    Done,
    /// The thread has ended (or, for [`SavedThread::restore`], its number belongs to another thread now);
    /// nothing was changed.
    Gone,
}

/// Why the kernel refused.
#[derive(Debug, thiserror::Error)]
pub enum AttrError {
    /// `EPERM`, with the reason that was found.
    #[error("thread {tid} may not be given {what}: {why}")]
    Denied {
        /// The thread.
        tid: Tid,
        /// What was to be set.
        what: String,
        /// What stands against it and what to do.
        why: String,
    },
    /// `EINVAL`: values out of range, CPUs that are not online, or a kernel that does not know them.
    #[error("thread {tid} cannot be given {what}: the kernel calls it invalid")]
    Invalid {
        /// The thread.
        tid: Tid,
        /// What was to be set.
        what: String,
    },
    /// Any other error, for example `EBUSY` when the deadline class is full.
    #[error("thread {tid}: cannot handle {what}")]
    Other {
        /// The thread.
        tid: Tid,
        /// What was to be set or read.
        what: String,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
}

/// `struct sched_attr` of its first published size.
#[repr(C)]
#[derive(Default)]
struct RawAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const RAW_SIZE: u32 = 48;
const _: () = assert!(size_of::<RawAttr>() == RAW_SIZE as usize);

/// `Ok(true)` on success, `Ok(false)` when there is no such thread.
fn checked(result: libc::c_long) -> io::Result<bool> {
    if result >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) {
        Ok(false)
    } else {
        Err(error)
    }
}

fn explained(tid: Tid, what: String, policy: Option<Policy>, source: io::Error) -> AttrError {
    match source.raw_os_error() {
        Some(libc::EPERM) => AttrError::Denied {
            tid,
            what,
            why: why_denied(tid, policy),
        },
        Some(libc::EINVAL) => AttrError::Invalid { tid, what },
        _ => AttrError::Other { tid, what, source },
    }
}

fn why_denied(tid: Tid, policy: Option<Policy>) -> String {
    if !Privilege::current().is_ok_and(|p| p.sys_nice) {
        return "this needs the capability CAP_SYS_NICE".to_owned();
    }
    if policy.is_some_and(Policy::is_real_time)
        && let Ok(Some(block)) = Mounts::read().and_then(|m| m.rt_group_blocks(tid))
    {
        return block.to_string();
    }
    "the kernel or a security module forbids it".to_owned()
}

/// Attributes of a thread; `None` when it is gone.
///
/// In the fair class the kernel always reports a slice, be it the default or one that was set. One that
/// equals the default (that of `kthreadd`) is reported as 0 here, so that giving the answer back to
/// [`set`] leaves a thread that follows the default following it.
///
/// # Errors
/// [`AttrError::Other`], also for a policy this module does not know.
pub fn get(tid: Tid) -> Result<Option<SchedAttr>, AttrError> {
    let what = || "its scheduling attributes".to_owned();
    let Some(raw) = raw_get(tid).map_err(|e| explained(tid, what(), None, e))? else {
        return Ok(None);
    };
    let policy = Policy::from_number(raw.policy).ok_or_else(|| AttrError::Other {
        tid,
        what: what(),
        source: io::Error::other(format!("unknown scheduling policy {}", raw.policy)),
    })?;
    let is_fair = matches!(policy, Policy::Normal | Policy::Batch | Policy::Idle);
    let runtime = match raw.runtime {
        slice if is_fair && default_slice() == Some(slice) => 0,
        runtime => runtime,
    };
    Ok(Some(SchedAttr {
        policy,
        flags: raw.flags,
        nice: raw.nice,
        rt_priority: raw.priority,
        runtime,
        deadline: raw.deadline,
        period: raw.period,
    }))
}

fn raw_get(tid: Tid) -> io::Result<Option<RawAttr>> {
    let mut raw = RawAttr::default();
    // SAFETY: `raw` is a writable struct of RAW_SIZE bytes that outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, tid, &raw mut raw, RAW_SIZE, 0) };
    Ok(checked(result)?.then_some(raw))
}

/// The slice in nanoseconds that a thread of the fair class gets when nobody asked for another: that of
/// `kthreadd`. `None` on kernels before 6.12, which report none, and where process 2 is something else.
#[must_use]
pub fn default_slice() -> Option<u64> {
    const KTHREADD: Tid = 2;
    if !proc::stat(KTHREADD).ok()??.is_kernel_thread() {
        return None;
    }
    let raw = raw_get(KTHREADD).ok()??;
    (raw.policy == Policy::Normal.number() && raw.runtime > 0).then_some(raw.runtime)
}

/// Sets all attributes of a thread.
///
/// # Errors
/// [`AttrError`], with the reason when it was `EPERM`.
pub fn set(tid: Tid, attr: &SchedAttr) -> Result<Outcome, AttrError> {
    let raw = RawAttr {
        size: RAW_SIZE,
        policy: attr.policy.number(),
        flags: attr.flags,
        nice: attr.nice,
        priority: attr.rt_priority,
        runtime: attr.runtime,
        deadline: attr.deadline,
        period: attr.period,
    };
    // SAFETY: `raw` is a readable struct whose first field tells its size; it outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, tid, &raw const raw, 0) };
    outcome(checked(result), || {
        let SchedAttr {
            policy,
            nice,
            rt_priority,
            runtime,
            ..
        } = attr;
        let what = match policy {
            Policy::Fifo | Policy::Rr => format!("policy {policy:?} with priority {rt_priority}"),
            _ => format!("policy {policy:?} with nice {nice} and {runtime} ns"),
        };
        (tid, what, Some(*policy))
    })
}

fn outcome(
    result: io::Result<bool>,
    context: impl Fn() -> (Tid, String, Option<Policy>),
) -> Result<Outcome, AttrError> {
    match result {
        Ok(true) => Ok(Outcome::Done),
        Ok(false) => Ok(Outcome::Gone),
        Err(e) => {
            let (tid, what, policy) = context();
            Err(explained(tid, what, policy, e))
        }
    }
}

/// CPUs a thread may run on; `None` when it is gone.
///
/// # Errors
/// [`AttrError::Other`].
pub fn affinity(tid: Tid) -> Result<Option<CpuSet>, AttrError> {
    CpuSet::of_thread(tid).map_err(|e| explained(tid, "its CPU affinity".to_owned(), None, e))
}

/// Sets the CPUs a thread may run on. CPUs that are offline or outside its cpuset are left out by the
/// kernel as long as one remains.
///
/// # Errors
/// [`AttrError::Invalid`] when no CPU remains, [`AttrError::Denied`] without the right to do it.
pub fn set_affinity(tid: Tid, cpus: &CpuSet) -> Result<Outcome, AttrError> {
    let mask = cpus.to_mask();
    // SAFETY: `mask` is readable and its size in bytes is passed along.
    let result = unsafe {
        libc::syscall(
            libc::SYS_sched_setaffinity,
            tid,
            size_of_val(mask.as_slice()),
            mask.as_ptr(),
        )
    };
    outcome(checked(result), || (tid, format!("the CPUs {cpus}"), None))
}
