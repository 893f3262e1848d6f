// SPDX-License-Identifier: Apache-2.0
//! The threads of one VM on one core.

use std::io;

use viola_policy::slices::Rank;

use crate::priorities::priority;

/// Most threads of one VM on one core.
pub const MAX_VM_THREADS: usize = 512;

#[derive(Debug, Clone, Copy)]
struct Entry {
    tid: i32,
    service: bool,
    /// Present priority; 0 when unknown, [`RELEASED`] when not real-time.
    priority: i32,
    /// Whether it is on the CPU where the plan holds it.
    held: bool,
}

/// The ordinary class.
const RELEASED: i32 = -1;

/// Threads of one VM on one core.
#[derive(Debug)]
pub struct VmThreads {
    entries: Vec<Entry>,
    rank: Option<Rank>,
    /// Whether service threads have the rank of the vCPUs.
    level: bool,
    /// Whether the service threads still have the VM's former, higher rank.
    trails: bool,
    rotation: usize,
    changed: bool,
    planned: bool,
}

/// The cost and outcome of setting priorities.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Applied {
    /// System calls made.
    pub calls: u32,
    /// errno of the kernel's refusal, other than "no such thread"; 0 without one.
    pub refused: i32,
}

impl VmThreads {
    /// Room for [`MAX_VM_THREADS`].
    pub fn new() -> Self {
        Self {
            entries: Vec::with_capacity(MAX_VM_THREADS),
            rank: None,
            level: false,
            trails: false,
            rotation: 0,
            changed: false,
            planned: false,
        }
    }

    /// Removes all threads.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.rank = None;
        self.level = false;
        self.trails = false;
        self.rotation = 0;
        self.changed = false;
    }

    /// Sets whether the VM is in the plan.
    pub fn set_planned(&mut self, planned: bool) {
        self.planned = planned;
    }

    /// Whether the VM is in the plan.
    pub fn is_planned(&self) -> bool {
        self.planned
    }

    /// Makes the next [`VmThreads::apply`] set every priority again, since another program may have changed one.
    pub fn forget_priorities(&mut self) {
        for e in &mut self.entries {
            e.priority = 0;
        }
        self.changed = true;
    }

    /// Makes every thread an ordinary one until the next [`VmThreads::apply`]. `set(tid)` returns 0 or errno.
    pub fn release(&mut self, mut set: impl FnMut(i32) -> i32) -> Applied {
        let mut applied = Applied::default();
        for e in self.entries.iter_mut().filter(|e| e.priority != RELEASED) {
            applied.calls += 1;
            match set(e.tid) {
                0 => e.priority = RELEASED,
                // Removed when its next priority is set.
                libc::ESRCH => {}
                errno => applied.refused = errno,
            }
        }
        self.changed |= applied.calls > 0;
        applied
    }

    /// Moves all threads to the CPU where the plan holds them, or back. `set(tid)` returns 0 or errno.
    pub fn hold(&mut self, held: bool, mut set: impl FnMut(i32) -> i32) -> Applied {
        let mut applied = Applied::default();
        for e in self.entries.iter_mut().filter(|e| e.held != held) {
            applied.calls += 1;
            match set(e.tid) {
                0 | libc::ESRCH => e.held = held,
                errno => applied.refused = errno,
            }
        }
        applied
    }

    /// Whether a thread is on the CPU where the plan holds it.
    pub fn is_held_elsewhere(&self) -> bool {
        self.entries.iter().any(|e| e.held)
    }

    /// Adds a thread, or changes its role. Returns `false` without room.
    ///
    /// Ended threads are removed at the next change of rank, not earlier: a thread that is exiting still needs the core, and its VM
    /// may wait for it.
    pub fn add(&mut self, tid: i32, service: bool) -> bool {
        self.changed = true;
        if let Some(e) = self.entries.iter_mut().find(|e| e.tid == tid) {
            e.service = service;
            return true;
        }
        if self.entries.len() == MAX_VM_THREADS {
            self.entries.retain(|e| exists(e.tid));
            if self.entries.len() == MAX_VM_THREADS {
                return false;
            }
        }
        self.entries.push(Entry {
            tid,
            service,
            priority: 0,
            held: false,
        });
        true
    }

    /// Number of threads.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether service threads have the rank of the vCPUs from the next [`VmThreads::apply`] on, instead of one more.
    pub fn set_level(&mut self, level: bool) {
        self.changed |= self.level != level;
        self.level = level;
    }

    /// Whether the service threads keep the former rank until the next [`VmThreads::apply`].
    pub fn trails(&self) -> bool {
        self.trails
    }

    /// Makes the service threads run once before the vCPUs of the same rank. `set(tid, priority)` returns 0 or errno.
    ///
    /// A thread whose priority is raised preempts the vCPU if it is runnable; one whose priority is lowered comes first in its new
    /// queue (sched(7)).
    pub fn lead(&mut self, mut set: impl FnMut(i32, i32) -> i32) -> Applied {
        let mut applied = Applied::default();
        for e in self.entries.iter().filter(|e| e.service && e.priority > 0) {
            for priority in [e.priority + 1, e.priority] {
                applied.calls += 1;
                match set(e.tid, priority) {
                    // Removed when its next priority is set.
                    0 | libc::ESRCH => {}
                    errno => applied.refused = errno,
                }
            }
        }
        applied
    }

    /// Gives every thread the priority of `rank`. `set(tid, priority)` returns 0 or errno. Removes threads that have ended.
    ///
    /// The kernel queues threads of one priority in the order in which they reach it. So service threads come first, and each time
    /// the VM is raised, another of its vCPUs comes first, and several vCPUs on one core take turns.
    pub fn apply(&mut self, rank: Rank, mut set: impl FnMut(i32, i32) -> i32) -> Applied {
        let mut applied = Applied::default();
        if self.rank == Some(rank) && !self.changed {
            return applied;
        }
        if self.rank.is_none_or(|old| old < rank) {
            self.rotation = self.rotation.wrapping_add(1);
        }
        // What the vCPUs have sent is carried before another VM runs.
        self.trails = self.level && !self.trails && self.rank.is_some_and(|old| old > rank);
        self.rank = Some(rank);
        self.changed = self.trails;
        let base = priority(rank);
        let above = i32::from(!self.level);
        let n = self.entries.len();
        let first = self.rotation.checked_rem(n).unwrap_or(0);
        let mut gone = false;
        for service in [true, false] {
            for k in (first..n).chain(0..first) {
                let e = &mut self.entries[k];
                let want = base + if service { above } else { 0 };
                if e.service != service
                    || service && self.trails
                    || e.priority == want
                    || e.tid == 0
                {
                    continue;
                }
                applied.calls += 1;
                match set(e.tid, want) {
                    0 => e.priority = want,
                    libc::ESRCH => {
                        e.tid = 0;
                        gone = true;
                    }
                    errno => applied.refused = errno,
                }
            }
        }
        if gone {
            self.entries.retain(|e| e.tid != 0);
        }
        applied
    }
}

impl Default for VmThreads {
    fn default() -> Self {
        Self::new()
    }
}

fn exists(tid: i32) -> bool {
    // SAFETY: a plain system call.
    unsafe { libc::sched_getscheduler(tid) >= 0 }
}

/// sched_setscheduler(2) with SCHED_FIFO, which children inherit. Returns 0 or errno.
pub fn set_fifo(tid: i32, priority: i32) -> i32 {
    set_scheduler(tid, libc::SCHED_FIFO, priority)
}

/// As [`set_fifo`], with SCHED_RESET_ON_FORK: what the thread forks begins in the fair class. Returns 0 or errno.
pub fn set_fifo_alone(tid: i32, priority: i32) -> i32 {
    set_scheduler(tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, priority)
}

/// sched_setscheduler(2) with SCHED_OTHER, which keeps the nice value. Returns 0 or errno.
pub fn set_ordinary(tid: i32) -> i32 {
    set_scheduler(tid, libc::SCHED_OTHER, 0)
}

fn set_scheduler(tid: i32, policy: i32, priority: i32) -> i32 {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: a plain system call with a pointer to a live structure.
    if unsafe { libc::sched_setscheduler(tid, policy, &param) } == 0 {
        return 0;
    }
    let error = io::Error::last_os_error();
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// sched_setaffinity(2) with one CPU. Returns 0 or errno.
pub fn set_cpu(tid: i32, cpu: u32) -> i32 {
    let mut set = rustix::thread::CpuSet::new();
    if cpu as usize >= rustix::thread::CpuSet::MAX_CPU {
        return libc::EINVAL;
    }
    set.set(cpu as usize);
    let thread = rustix::thread::Pid::from_raw(tid);
    match rustix::thread::sched_setaffinity(thread, &set) {
        Ok(()) => 0,
        Err(e) => e.raw_os_error(),
    }
}

/// Gives the calling thread SCHED_FIFO and pins it.
///
/// # Errors
/// The kernel's error.
pub fn become_realtime(cpu: u32, priority: i32) -> io::Result<()> {
    for errno in [set_fifo(0, priority), set_cpu(0, cpu)] {
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
