// SPDX-License-Identifier: Apache-2.0
//! Scheduling attributes of one thread: reads, sets and restores them.
//!
//! A thread that has ended is an ordinary result ([`Outcome::Gone`] or `None`), not an error.

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
    /// `SCHED_FIFO`: real-time; runs until it blocks or a thread of higher priority wakes.
    Fifo,
    /// `SCHED_RR`: as FIFO, with a time slice among threads of equal priority.
    Rr,
    /// `SCHED_BATCH`: fair class without preemption at wake-up.
    Batch,
    /// `SCHED_IDLE`: fair class with the lowest weight.
    Idle,
    /// `SCHED_DEADLINE`.
    Deadline,
    /// `SCHED_EXT`: scheduled by the loaded BPF scheduler.
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

/// The attributes of sched_setattr(2). Start from [`SchedAttr::fair`] or [`SchedAttr::fifo`] and change fields.
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
    /// Nanoseconds. Deadline class: run time per period. Fair class on Linux 6.12 and later: the thread's slice,
    /// 100,000..=100,000,000; 0 for the kernel's default.
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

/// The result of a change to a thread.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The change was made.
    Done,
    /// The thread has ended, or (for [`SavedThread::restore`]) its number now belongs to another thread. Nothing was
    /// changed.
    Gone,
}

/// Why the kernel refused to read or set attributes.
#[derive(Debug, thiserror::Error)]
pub enum AttrError {
    /// `EPERM`, with the cause and the remedy.
    #[error("cannot set {what} of thread {tid}: permission denied: {why}")]
    Denied {
        /// The thread.
        tid: Tid,
        /// The attribute.
        what: String,
        /// The cause and the remedy.
        why: String,
    },
    /// `EINVAL`: a value out of range, no online CPU, or a kernel without the feature.
    #[error("cannot set {what} of thread {tid}: invalid argument")]
    Invalid {
        /// The thread.
        tid: Tid,
        /// The attribute.
        what: String,
    },
    /// Any other error, for example `EBUSY` when the deadline class is full.
    #[error("cannot read or set {what} of thread {tid}")]
    Other {
        /// The thread.
        tid: Tid,
        /// The attribute.
        what: String,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// `struct sched_attr` in its first published size (48 bytes).
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

fn attr_error(tid: Tid, what: String, policy: Option<Policy>, source: io::Error) -> AttrError {
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
        return "this needs the capability CAP_SYS_NICE; run as root".to_owned();
    }
    if policy.is_some_and(Policy::is_real_time)
        && let Ok(Some(block)) = Mounts::read().and_then(|m| m.rt_group_blocks(tid))
    {
        return block.to_string();
    }
    "the kernel or a security module forbids it".to_owned()
}

/// The attributes of a thread; `None` when it has ended.
///
/// The kernel always reports a slice for the fair class. A slice that equals the default is returned as 0, so that
/// [`set`] with this result leaves the thread on the default.
///
/// # Errors
/// [`AttrError::Other`], also for a policy that this module does not know.
pub fn get(tid: Tid) -> Result<Option<SchedAttr>, AttrError> {
    let what = || "the scheduling attributes".to_owned();
    let Some(raw) = raw_get(tid).map_err(|e| attr_error(tid, what(), None, e))? else {
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

/// The default slice of the fair class, ns: the slice of `kthreadd`. `None` on kernels before 6.12, which report
/// none, and where process 2 is not `kthreadd`.
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
/// [`AttrError`]; for `EPERM` with the cause.
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
            Err(attr_error(tid, what, policy, e))
        }
    }
}

/// The CPUs that a thread may run on; `None` when it has ended.
///
/// # Errors
/// [`AttrError::Other`].
pub fn affinity(tid: Tid) -> Result<Option<CpuSet>, AttrError> {
    CpuSet::of_thread(tid).map_err(|e| attr_error(tid, "the CPU affinity".to_owned(), None, e))
}

/// Sets the CPUs that a thread may run on. The kernel ignores CPUs that are offline or outside the thread's cpuset
/// while one CPU remains.
///
/// # Errors
/// [`AttrError::Invalid`] when no CPU remains, [`AttrError::Denied`] without the right to set it.
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
