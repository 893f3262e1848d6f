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
            rotation: 0,
            changed: false,
            planned: false,
        }
    }

    /// Removes all threads.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.rank = None;
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

    /// Gives every thread the priority of `rank`. `set(tid, priority)` returns 0 or errno. Removes threads that have ended.
    ///
    /// The kernel queues threads of one priority in the order in which they reach it. So each time the VM is raised, another of its
    /// vCPUs comes first, and several vCPUs on one core take turns.
    pub fn apply(&mut self, rank: Rank, mut set: impl FnMut(i32, i32) -> i32) -> Applied {
        let mut applied = Applied::default();
        if self.rank == Some(rank) && !self.changed {
            return applied;
        }
        if self.rank.is_none_or(|old| old < rank) {
            self.rotation = self.rotation.wrapping_add(1);
        }
        self.rank = Some(rank);
        self.changed = false;
        let base = priority(rank);
        let first = if self.entries.is_empty() {
            0
        } else {
            self.rotation % self.entries.len()
        };
        let mut gone = false;
        let n = self.entries.len();
        for k in 0..n {
            let i = if first + k < n {
                first + k
            } else {
                first + k - n
            };
            let e = &mut self.entries[i];
            let want = base + i32::from(e.service);
            if e.priority == want {
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
mod tests {
    use super::*;

    #[test]
    fn threads_are_held_and_released_once() {
        let mut t = VmThreads::new();
        t.add(1, false);
        t.add(2, true);
        assert_eq!(t.hold(false, |_| panic!("none is away")).calls, 0);
        assert_eq!(t.hold(true, |_| 0).calls, 2);
        assert!(t.is_held_elsewhere());
        assert_eq!(t.hold(true, |_| panic!("all are away")).calls, 0);
        // One that was made there.
        t.add(3, false);
        assert_eq!(t.hold(true, |tid| if tid == 3 { 0 } else { 1 }).calls, 1);
        assert_eq!(t.hold(false, |_| 0).calls, 3);
        assert!(!t.is_held_elsewhere());
        assert_eq!(t.hold(true, |_| libc::EINVAL).refused, libc::EINVAL);
        assert!(!t.is_held_elsewhere());
    }

    /// A sleeping process, ended when dropped.
    struct Sleeper(std::process::Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn what_is_set_alone_is_not_inherited_and_an_ordinary_thread_has_no_flag() {
        use viola_host::attrs::{self, Policy, RESET_ON_FORK, SchedAttr};
        let sleeper = Sleeper(
            std::process::Command::new("sleep")
                .arg("60")
                .spawn()
                .unwrap(),
        );
        let tid = sleeper.0.id();
        let now = || attrs::get(tid).unwrap().unwrap();
        // Real-time classes need root.
        if set_fifo_alone(tid as i32, 18) != 0 {
            return;
        }
        let with_flag = SchedAttr {
            flags: RESET_ON_FORK,
            ..SchedAttr::fifo(18)
        };
        assert_eq!(now(), with_flag);
        assert_eq!(set_fifo(tid as i32, 20), 0);
        assert_eq!(now(), SchedAttr::fifo(20));
        assert_eq!(set_fifo_alone(tid as i32, 20), 0);
        assert_eq!(set_ordinary(tid as i32), 0);
        assert_eq!((now().policy, now().flags), (Policy::Normal, 0));
    }

    #[test]
    fn a_service_thread_ranks_one_above_the_vcpus_of_its_vm() {
        let mut t = VmThreads::new();
        t.add(1, false);
        t.add(2, true);
        let mut seen = Vec::new();
        t.apply(Rank::Owner, |tid, p| {
            seen.push((tid, p));
            0
        });
        seen.sort_unstable();
        assert_eq!(seen, [(1, 18), (2, 19)]);
    }

    #[test]
    fn an_unchanged_rank_costs_no_system_call_but_a_new_thread_is_set() {
        let mut t = VmThreads::new();
        t.add(1, false);
        assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 1);
        assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 0);
        t.add(2, false);
        assert_eq!(
            t.apply(Rank::Owner, |tid, _| if tid == 2 {
                0
            } else {
                panic!("{tid}")
            })
            .calls,
            1
        );
    }

    #[test]
    fn forgotten_priorities_are_set_again() {
        let mut t = VmThreads::new();
        t.add(1, false);
        t.add(2, true);
        t.apply(Rank::Owner, |_, _| 0);
        t.forget_priorities();
        assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 2);
    }

    #[test]
    fn released_threads_get_their_priority_again_at_the_same_rank() {
        let mut t = VmThreads::new();
        t.add(1, false);
        t.add(2, true);
        t.apply(Rank::Owner, |_, _| 0);
        assert_eq!(t.release(|_| 0).calls, 2);
        assert_eq!(t.release(|_| 0).calls, 0);
        t.add(3, false);
        assert_eq!(
            t.release(|tid| if tid == 3 { 0 } else { panic!("{tid}") })
                .calls,
            1
        );
        assert_eq!(t.apply(Rank::Owner, |_, _| 0).calls, 3);
        t.release(|_| libc::ESRCH);
        assert_eq!(t.len(), 3);
    }

    #[test]
    fn an_ended_thread_is_removed() {
        let mut t = VmThreads::new();
        t.add(1, false);
        t.add(2, false);
        t.apply(Rank::Boost, |tid, _| if tid == 1 { libc::ESRCH } else { 0 });
        assert_eq!(t.len(), 1);
        assert_eq!(t.apply(Rank::Background, |_, _| 0).calls, 1);
    }

    #[test]
    fn a_full_table_removes_ended_threads() {
        let mut t = VmThreads::new();
        let me = std::process::id() as i32;
        t.add(me, true);
        // Above any number that the kernel gives out.
        for tid in 0..MAX_VM_THREADS as i32 {
            assert!(t.add(i32::MAX - tid, false));
        }
        assert_eq!(t.len(), 2);
    }

    #[test]
    fn a_refusal_is_reported_and_tried_again() {
        let mut t = VmThreads::new();
        t.add(1, false);
        assert_eq!(
            t.apply(Rank::Owner, |_, _| libc::EPERM).refused,
            libc::EPERM
        );
        assert_eq!(t.apply(Rank::Waiting, |_, _| 0).calls, 1);
    }

    #[test]
    fn vcpus_of_one_vm_take_turns() {
        let mut t = VmThreads::new();
        for tid in 1..=3 {
            t.add(tid, false);
        }
        let mut firsts = std::collections::BTreeSet::new();
        for _ in 0..3 {
            let mut first = None;
            t.apply(Rank::Boost, |tid, _| {
                first.get_or_insert(tid);
                0
            });
            firsts.insert(first);
            t.apply(Rank::Background, |_, _| 0);
        }
        assert_eq!(firsts.len(), 3);
    }
}
