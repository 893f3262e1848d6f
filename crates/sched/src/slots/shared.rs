// SPDX-License-Identifier: Apache-2.0
//! The memory that daemon, watchdog and controller share: plans go down, heartbeats and counts come up.
//!
//! It has a fixed size and no pointers, so the controller reads a new plan without allocating, and the watchdog can restore
//! every thread when both others are gone. A sequence count guards the plan of each core.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use viola_meter::acct::MAX_VMS as MAX_INDEX;

use super::lock_free::{LastRows, SequenceCount};
use super::plan_rows::PlanRows;
pub use super::plan_rows::{LocalPlan, MAX_CORES, MAX_THREADS, PoolCore};
use crate::plan::CorePlan;

const MAGIC: u64 = 0x76_69_6f_6c_61_00_00_04;

/// Most new threads of one core between two reads of the daemon.
const MAX_FORKS: usize = 512;

/// One core's part.
#[repr(C)]
pub struct SharedCore {
    /// CPU number.
    pub cpu: AtomicU32,
    /// The controller sets this once it runs on its core.
    pub ready: AtomicU32,
    seq: SequenceCount,
    /// Sequence count of the plan that the controller follows.
    pub followed: AtomicU64,
    /// CLOCK_MONOTONIC (ns) of the controller's last step.
    pub beat: AtomicU64,
    /// Decisions.
    pub decisions: AtomicU64,
    /// Rank changes.
    pub switches: AtomicU64,
    /// System calls for rank changes.
    pub calls: AtomicU64,
    /// CPU time (ns) of the controller thread.
    pub cpu_ns: AtomicU64,
    /// Longest lateness of a timer, ns.
    pub late_max: AtomicU64,
    /// The controller lost events or has no room for a thread: publish the plan again.
    pub resync: AtomicU32,
    /// errno of a refused priority change (such as EPERM in a group without real-time runtime), else 0.
    pub refused: AtomicU32,
    /// On a regular core, by index in the accounting program: all time that the VM was ever due
    /// here (ns) times two, plus 1 while the VM waits for the core.
    dues: [AtomicU64; MAX_INDEX],
    /// The last threads that the controller learnt of by itself: index in the accounting program, and thread.
    forks: LastRows<MAX_FORKS>,
    plan: std::cell::UnsafeCell<PlanRows>,
}

/// The whole memory.
#[repr(C)]
pub struct SharedLayout {
    magic: u64,
    /// Number of cores in use.
    pub n_cores: AtomicU32,
    /// All processes must end and restore every thread.
    pub stop: AtomicU32,
    /// CLOCK_MONOTONIC (ns) of the watchdog's last step.
    pub watchdog_beat: AtomicU64,
    /// Per core; the first `n_cores` are in use.
    pub cores: [SharedCore; MAX_CORES],
}

/// A mapping of the memory.
pub struct SharedMemory {
    at: NonNull<SharedLayout>,
}

// SAFETY: everything shared is atomic, but for the plan rows, which are copied under a sequence count.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl std::ops::Deref for SharedMemory {
    type Target = SharedLayout;
    fn deref(&self) -> &SharedLayout {
        // SAFETY: mapped for the life of self; all fields are valid for any bit pattern.
        unsafe { self.at.as_ref() }
    }
}

impl SharedMemory {
    /// Creates the memory; the children that map it inherit the descriptor.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let fd = memfd_create("viola-shared", MemfdFlags::empty())?;
        ftruncate(&fd, size_of::<SharedLayout>() as u64)?;
        let shared = Self::map_fd(std::os::fd::AsFd::as_fd(&fd))?;
        // SAFETY: mapped writable, and no other process has it yet.
        unsafe { (*shared.at.as_ptr()).magic = MAGIC };
        Ok((shared, fd))
    }

    /// Maps memory that another process created.
    ///
    /// # Errors
    /// The kernel's error; [`io::ErrorKind::InvalidData`] for memory of another version.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        if rustix::fs::fstat(fd)?.st_size != size_of::<SharedLayout>() as i64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "shared memory of another size",
            ));
        }
        let shared = Self::map_fd(fd)?;
        if shared.magic != MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not shared memory of this version",
            ));
        }
        Ok(shared)
    }

    fn map_fd(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe {
            mmap(
                std::ptr::null_mut(),
                size_of::<SharedLayout>(),
                prot,
                MapFlags::SHARED,
                fd,
                0,
            )
        }?;
        NonNull::new(at.cast())
            .map(|at| Self { at })
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// The cores in use.
    pub fn cores(&self) -> &[SharedCore] {
        &self.cores[..(self.n_cores.load(Ordering::Acquire) as usize).min(MAX_CORES)]
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in map_fd, not used after this.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), size_of::<SharedLayout>()) };
    }
}

impl SharedCore {
    /// Publishes a new plan; `pool` are all cores of vTurbo's pools. Only the daemon calls this. Returns the plan's sequence
    /// count, and whether all VMs and threads had room.
    pub fn publish(&self, plan: &CorePlan, pool: &[PoolCore]) -> (u64, bool) {
        // SAFETY: mapped for the life of self. The one writer: readers discard what they copied meanwhile.
        self.seq
            .write(|| unsafe { PlanRows::write(self.plan.get(), plan, pool) })
    }

    /// Copies the plan and returns its sequence count; `None` while the daemon writes it (try again later).
    pub fn read(&self, into: &mut LocalPlan) -> Option<u64> {
        // SAFETY: mapped for the life of self; a torn copy is discarded.
        self.seq
            .read(|| unsafe { PlanRows::read(self.plan.get(), into) })
    }

    /// Publishes the time that a VM was ever due on this core (ns), and whether the VM waits for
    /// the core. The turbo cores read both.
    pub fn set_due(&self, index: u32, (due, waits): (u64, bool)) {
        if let Some(row) = self.dues.get(index as usize) {
            row.store(due << 1 | u64::from(waits), Ordering::Relaxed);
        }
    }

    /// The values of the last [`SharedCore::set_due`].
    pub fn due(&self, index: u32) -> (u64, bool) {
        let row = self.dues.get(index as usize);
        let row = row.map_or(0, |row| row.load(Ordering::Relaxed));
        (row >> 1, row & 1 != 0)
    }

    /// Reports a thread that the controller learnt of by itself. Only the controller calls this.
    pub fn report_fork(&self, index: u32, tid: i32) {
        self.forks
            .push(u64::from(index) << 32 | u64::from(tid.cast_unsigned()));
    }

    /// The threads reported since the count `from`, each with its VM's index; returns the new count, and whether none was lost.
    pub fn forks(&self, from: u64, into: &mut Vec<(u32, i32)>) -> (u64, bool) {
        self.forks.read(from, |row| {
            into.push(((row >> 32) as u32, (row as u32).cast_signed()));
        })
    }

    /// Sequence count of the newest plan.
    pub fn seq(&self) -> u64 {
        self.seq.current()
    }
}

/// CLOCK_MONOTONIC in ns.
pub fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::plan::{Algorithm, ThreadPlan, VmPlan};
    use viola_policy::slices::{Class, Params};

    const POOL: [PoolCore; 3] = [
        PoolCore {
            cpu: 0,
            turbo: true,
        },
        PoolCore {
            cpu: 1,
            turbo: false,
        },
        PoolCore {
            cpu: 2,
            turbo: false,
        },
    ];

    fn plan(n: u32) -> CorePlan {
        CorePlan {
            cpu: 1,
            algorithm: Algorithm::Credit { boost: true },
            batch_slice: 5,
            budget_permille: Some(500),
            reserve_permille: 300,
            vms: (0..n)
                .map(|i| VmPlan {
                    hold_cpu: None,
                    resets_on_fork: i == 1,
                    params: Params {
                        id: i,
                        class: if i == 0 { Class::Ls } else { Class::Batch },
                        weight: 256 + i,
                        cap_permille: (i == 1).then_some(200),
                        microslice: 300_000,
                    },
                    index: i + 7,
                    pid: 100 + i as i32,
                    sees_packets: i == 2,
                    threads: vec![ThreadPlan {
                        tid: 100 + i as i32,
                        service: i == 0,
                    }],
                    regular_vcpus: (i, i + 1),
                })
                .collect(),
        }
    }

    #[test]
    fn a_published_plan_is_read_in_another_mapping() {
        let (shared, fd) = SharedMemory::create().unwrap();
        let other = SharedMemory::open(fd.as_fd()).unwrap();
        let (seq, fits) = shared.cores[0].publish(&plan(3), &POOL);
        assert!(fits);
        let mut local = LocalPlan::new();
        assert_eq!(other.cores[0].read(&mut local), Some(seq));
        assert_eq!(local.algorithm, Algorithm::Credit { boost: true });
        assert_eq!(local.vms.len(), 3);
        assert_eq!(local.pool, [POOL[0], POOL[2]]);
        assert_eq!(local.budget_permille, Some(500));
        assert_eq!(local.vms[2].regular_vcpus, (2, 3));
        assert_eq!(local.vms[1].params.cap_permille, Some(200));
        assert_eq!(local.vms[2].params.weight, 258);
        assert!(local.vms[1].resets_on_fork && !local.vms[2].resets_on_fork);
        assert!(local.vms[2].sees_packets && !local.vms[0].sees_packets);
        assert_eq!(
            local.threads[0],
            (
                0,
                ThreadPlan {
                    tid: 100,
                    service: true
                }
            )
        );
    }

    #[test]
    fn reported_threads_are_read_once_and_a_loss_is_seen() {
        let (shared, _fd) = SharedMemory::create().unwrap();
        let core = &shared.cores[0];
        let mut found = Vec::new();
        assert_eq!(core.forks(0, &mut found), (0, true));
        core.report_fork(3, 70);
        core.report_fork(4, i32::MAX);
        assert_eq!(core.forks(0, &mut found), (2, true));
        assert_eq!(found, [(3, 70), (4, i32::MAX)]);
        found.clear();
        assert_eq!(core.forks(2, &mut found), (2, true));
        assert!(found.is_empty());
        for tid in 0..=MAX_FORKS as i32 {
            core.report_fork(5, tid);
        }
        let n = 3 + MAX_FORKS as u64;
        assert_eq!(core.forks(2, &mut found), (n, false));
        assert_eq!((found.len(), found[0]), (MAX_FORKS, (5, 1)));
    }

    #[test]
    fn a_plan_that_is_being_written_is_not_read() {
        let (shared, _fd) = SharedMemory::create().unwrap();
        let core = &shared.cores[0];
        core.publish(&plan(1), &[]);
        let (_, during) = core.seq.write(|| core.read(&mut LocalPlan::new()));
        assert_eq!(during, None);
    }

    #[test]
    fn too_many_threads_are_reported() {
        let (shared, _fd) = SharedMemory::create().unwrap();
        let mut plan = plan(1);
        plan.vms[0].threads = vec![
            ThreadPlan {
                tid: 1,
                service: false
            };
            MAX_THREADS + 1
        ];
        assert!(!shared.cores[0].publish(&plan, &[]).1);
    }

    #[test]
    fn other_memory_is_refused() {
        let fd = memfd_create("x", MemfdFlags::empty()).unwrap();
        assert!(SharedMemory::open(fd.as_fd()).is_err());
        ftruncate(&fd, size_of::<SharedLayout>() as u64).unwrap();
        assert!(SharedMemory::open(fd.as_fd()).is_err());
    }
}
