// SPDX-License-Identifier: Apache-2.0
//! The memory that daemon, watchdog and controller share: the plan goes down, heartbeats and counts come up.
//!
//! Fixed in size and without pointers, so that the controller reads a new plan without allocating and the
//! watchdog can restore every thread even when both others are gone. The plan of a core is guarded by a
//! sequence count: odd while it is written.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use viola_meter::acct::MAX_VMS as MAX_INDEX;
use viola_policy::slices::{Class, MAX_VMS, Params};

use crate::plan::{Algorithm, CorePlan, ThreadPlan};

/// Most cores with a controller on one host.
pub const MAX_CORES: usize = 64;
/// Most threads of all VMs on one core.
pub const MAX_THREADS: usize = 2048;

const MAGIC: u64 = 0x76_69_6f_6c_61_00_00_03;
const NO_CPU: u32 = u32::MAX;

#[derive(Clone, Copy)]
#[repr(C)]
struct VmRow {
    id: u32,
    class: u32,
    weight: u32,
    cap_permille: u32,
    microslice: u64,
    index: u32,
    pid: i32,
    sees_packets: u32,
    regular_here: u32,
    regular_all: u32,
    /// CPU, or [`NO_CPU`].
    hold_cpu: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct PoolRow {
    cpu: u32,
    turbo: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ThreadRow {
    tid: i32,
    vm: u16,
    service: u16,
}

#[repr(C)]
struct PlanRows {
    algorithm: u32,
    n_vms: u32,
    n_threads: u32,
    n_pool: u32,
    budget_permille: u32,
    reserve_permille: u32,
    batch_slice: u64,
    pool: [PoolRow; MAX_CORES],
    vms: [VmRow; MAX_VMS],
    threads: [ThreadRow; MAX_THREADS],
}

/// One core's part of the shared.
#[repr(C)]
pub struct SharedCore {
    /// CPU number.
    pub cpu: AtomicU32,
    /// Set by the controller once it runs on its core.
    pub ready: AtomicU32,
    /// Sequence count of the plan; odd while it is written.
    seq: AtomicU64,
    /// Sequence count of the plan that the controller follows.
    pub followed: AtomicU64,
    /// CLOCK_MONOTONIC (ns) of the controller's last turn.
    pub beat: AtomicU64,
    /// Decisions so far.
    pub decisions: AtomicU64,
    /// Rank changes so far.
    pub switches: AtomicU64,
    /// System calls spent on rank changes.
    pub calls: AtomicU64,
    /// CPU time (ns) of the controller thread.
    pub cpu_ns: AtomicU64,
    /// Longest time (ns) by which a timer was late.
    pub late_max: AtomicU64,
    /// The controller missed events or has no room for a thread: send the plan again.
    pub resync: AtomicU32,
    /// errno of a refused priority change (such as EPERM in a group without real-time runtime), else 0.
    pub refused: AtomicU32,
    /// On a regular core, by index in the accounting program: what the VM was ever due here.
    dues: [AtomicU64; MAX_INDEX],
    plan: std::cell::UnsafeCell<PlanRows>,
}

/// The whole shared.
#[repr(C)]
pub struct SharedLayout {
    magic: u64,
    /// Number of cores in use.
    pub n_cores: AtomicU32,
    /// All shall end and leave every thread as it was.
    pub stop: AtomicU32,
    /// CLOCK_MONOTONIC (ns) of the watchdog's last turn.
    pub watchdog_beat: AtomicU64,
    /// Per core, the first `n_cores` in use.
    pub cores: [SharedCore; MAX_CORES],
}

/// A mapping of the shared.
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
    /// Makes a shared in anonymous memory; the descriptor is inherited by the children that are to map it.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let fd = memfd_create("viola-shared", MemfdFlags::empty())?;
        ftruncate(&fd, size_of::<SharedLayout>() as u64)?;
        let shared = Self::map_fd(std::os::fd::AsFd::as_fd(&fd))?;
        // SAFETY: mapped writable, nobody else has it yet.
        unsafe { (*shared.at.as_ptr()).magic = MAGIC };
        Ok((shared, fd))
    }

    /// Maps a shared that another process made.
    pub fn open(fd: BorrowedFd<'_>) -> io::Result<Self> {
        if rustix::fs::fstat(fd)?.st_size != size_of::<SharedLayout>() as i64 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "shared of another size",
            ));
        }
        let shared = Self::map_fd(fd)?;
        if shared.magic != MAGIC {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a shared of this version",
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

/// A plan as the controller holds it: filled in place, never allocated anew.
pub struct LocalPlan {
    /// Which algorithm.
    pub algorithm: Algorithm,
    /// Slice of batch VMs, ns.
    pub batch_slice: u64,
    /// As [`CorePlan::budget_permille`].
    pub budget_permille: Option<u32>,
    /// As [`CorePlan::reserve_permille`].
    pub reserve_permille: u32,
    /// The other cores of vTurbo's pools.
    pub pool: Vec<PoolCore>,
    /// VMs in the order of the plan.
    pub vms: Vec<LocalVm>,
    /// Threads with the position of their VM.
    pub threads: Vec<(usize, ThreadPlan)>,
}

/// A core of vTurbo's pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolCore {
    /// CPU number.
    pub cpu: u32,
    /// Of the turbo pool.
    pub turbo: bool,
}

/// A VM in a [`LocalPlan`].
#[derive(Debug, Clone, Copy)]
pub struct LocalVm {
    /// Controls.
    pub params: Params,
    /// Index in the accounting program.
    pub index: u32,
    /// Main process.
    pub pid: i32,
    /// Its packets are announced.
    pub sees_packets: bool,
    /// As [`crate::VmPlan::regular_vcpus`].
    pub regular_vcpus: (u32, u32),
    /// As [`crate::VmPlan::hold_cpu`].
    pub hold_cpu: Option<u32>,
}

impl LocalPlan {
    /// Room for the largest plan.
    pub fn new() -> Self {
        Self {
            algorithm: Algorithm::Interleaved,
            batch_slice: 0,
            budget_permille: None,
            reserve_permille: 0,
            pool: Vec::with_capacity(MAX_CORES),
            vms: Vec::with_capacity(MAX_VMS),
            threads: Vec::with_capacity(MAX_THREADS),
        }
    }
}

impl Default for LocalPlan {
    fn default() -> Self {
        Self::new()
    }
}

impl SharedCore {
    /// Writes a new plan; `pool` are all cores of vTurbo's pools. One writer at a time (the daemon). Returns its
    /// sequence count, and whether all threads had room.
    pub fn publish(&self, plan: &CorePlan, pool: &[PoolCore]) -> (u64, bool) {
        let seq = self.seq.load(Ordering::Relaxed);
        self.seq.store(seq + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        let rows = self.plan.get();
        let mut n_threads = 0;
        let mut fits = plan.vms.len() <= MAX_VMS;
        // SAFETY: the one writer; readers copy and discard what they read while seq is odd or has changed.
        // Volatile, because they may read at the same time.
        unsafe {
            (&raw mut (*rows).algorithm).write_volatile(algorithm_code(plan.algorithm));
            (&raw mut (*rows).batch_slice).write_volatile(plan.batch_slice);
            (&raw mut (*rows).budget_permille).write_volatile(plan.budget_permille.unwrap_or(0));
            (&raw mut (*rows).reserve_permille).write_volatile(plan.reserve_permille);
            let mut n_pool = 0;
            let others = pool.iter().filter(|c| c.cpu != plan.cpu);
            for other in others.take(MAX_CORES) {
                (&raw mut (*rows).pool[n_pool]).write_volatile(PoolRow {
                    cpu: other.cpu,
                    turbo: u32::from(other.turbo),
                });
                n_pool += 1;
            }
            (&raw mut (*rows).n_pool).write_volatile(n_pool as u32);
            for (i, vm) in plan.vms.iter().take(MAX_VMS).enumerate() {
                let p = &vm.params;
                (&raw mut (*rows).vms[i]).write_volatile(VmRow {
                    id: p.id,
                    class: u32::from(p.class == Class::Ls),
                    weight: p.weight,
                    cap_permille: p.cap_permille.unwrap_or(0),
                    microslice: p.microslice,
                    index: vm.index,
                    pid: vm.pid,
                    sees_packets: u32::from(vm.sees_packets),
                    regular_here: vm.regular_vcpus.0,
                    regular_all: vm.regular_vcpus.1,
                    hold_cpu: vm.hold_cpu.unwrap_or(NO_CPU),
                });
                for t in &vm.threads {
                    if n_threads < MAX_THREADS {
                        let row = ThreadRow {
                            tid: t.tid,
                            vm: i as u16,
                            service: u16::from(t.service),
                        };
                        (&raw mut (*rows).threads[n_threads]).write_volatile(row);
                        n_threads += 1;
                    } else {
                        fits = false;
                    }
                }
            }
            (&raw mut (*rows).n_vms).write_volatile(plan.vms.len().min(MAX_VMS) as u32);
            (&raw mut (*rows).n_threads).write_volatile(n_threads as u32);
        }
        fence(Ordering::Release);
        self.seq.store(seq + 2, Ordering::Release);
        (seq + 2, fits)
    }

    /// Tells the turbo cores what a VM was ever due on this core (ns), and whether it waits for it.
    pub fn set_due(&self, index: u32, (due, waits): (u64, bool)) {
        if let Some(row) = self.dues.get(index as usize) {
            row.store(due << 1 | u64::from(waits), Ordering::Relaxed);
        }
    }

    /// What was told last.
    pub fn due(&self, index: u32) -> (u64, bool) {
        let row = self.dues.get(index as usize);
        let row = row.map_or(0, |row| row.load(Ordering::Relaxed));
        (row >> 1, row & 1 != 0)
    }

    /// Sequence count of the newest plan.
    pub fn seq(&self) -> u64 {
        self.seq.load(Ordering::Acquire)
    }

    /// Copies the plan; `None` while it is being written (try again later).
    pub fn read(&self, into: &mut LocalPlan) -> Option<u64> {
        let seq = self.seq.load(Ordering::Acquire);
        if seq % 2 == 1 {
            return None;
        }
        let rows = self.plan.get();
        into.vms.clear();
        into.threads.clear();
        into.pool.clear();
        // SAFETY: volatile copies of plain integers from mapped memory; torn reads are thrown away below.
        unsafe {
            into.algorithm = algorithm_of((&raw const (*rows).algorithm).read_volatile());
            into.batch_slice = (&raw const (*rows).batch_slice).read_volatile();
            let budget = (&raw const (*rows).budget_permille).read_volatile();
            into.budget_permille = (budget != 0).then_some(budget);
            into.reserve_permille = (&raw const (*rows).reserve_permille).read_volatile();
            let n_pool = ((&raw const (*rows).n_pool).read_volatile() as usize).min(MAX_CORES);
            for i in 0..n_pool {
                let row = (&raw const (*rows).pool[i]).read_volatile();
                into.pool.push(PoolCore {
                    cpu: row.cpu,
                    turbo: row.turbo != 0,
                });
            }
            let n_vms = ((&raw const (*rows).n_vms).read_volatile() as usize).min(MAX_VMS);
            let n_threads =
                ((&raw const (*rows).n_threads).read_volatile() as usize).min(MAX_THREADS);
            for i in 0..n_vms {
                let row = (&raw const (*rows).vms[i]).read_volatile();
                into.vms.push(LocalVm {
                    params: Params {
                        id: row.id,
                        class: if row.class == 1 {
                            Class::Ls
                        } else {
                            Class::Batch
                        },
                        weight: row.weight,
                        cap_permille: (row.cap_permille != 0).then_some(row.cap_permille),
                        microslice: row.microslice,
                    },
                    index: row.index,
                    pid: row.pid,
                    sees_packets: row.sees_packets != 0,
                    regular_vcpus: (row.regular_here, row.regular_all),
                    hold_cpu: (row.hold_cpu != NO_CPU).then_some(row.hold_cpu),
                });
            }
            for i in 0..n_threads {
                let row = (&raw const (*rows).threads[i]).read_volatile();
                if usize::from(row.vm) < n_vms {
                    into.threads.push((
                        row.vm.into(),
                        ThreadPlan {
                            tid: row.tid,
                            service: row.service != 0,
                        },
                    ));
                }
            }
        }
        fence(Ordering::Acquire);
        (self.seq.load(Ordering::Relaxed) == seq).then_some(seq)
    }
}

fn algorithm_code(a: Algorithm) -> u32 {
    match a {
        Algorithm::Interleaved => 0,
        Algorithm::Paper => 1,
        Algorithm::Credit { boost: true } => 2,
        Algorithm::Credit { boost: false } => 3,
        Algorithm::Regular => 4,
        Algorithm::Turbo => 5,
    }
}

fn algorithm_of(code: u32) -> Algorithm {
    match code {
        1 => Algorithm::Paper,
        2 => Algorithm::Credit { boost: true },
        3 => Algorithm::Credit { boost: false },
        4 => Algorithm::Regular,
        5 => Algorithm::Turbo,
        _ => Algorithm::Interleaved,
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
    use crate::plan::VmPlan;

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
    fn what_one_process_publishes_another_reads() {
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
    fn every_algorithm_has_a_code_of_its_own() {
        use Algorithm::*;
        let all = [
            Interleaved,
            Paper,
            Credit { boost: true },
            Credit { boost: false },
            Regular,
            Turbo,
        ];
        assert_eq!(all.map(|a| algorithm_of(algorithm_code(a))), all);
    }

    #[test]
    fn a_plan_that_is_being_written_is_not_read() {
        let (shared, _fd) = SharedMemory::create().unwrap();
        shared.cores[0].publish(&plan(1), &[]);
        shared.cores[0].seq.fetch_add(1, Ordering::Relaxed);
        assert_eq!(shared.cores[0].read(&mut LocalPlan::new()), None);
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
    fn a_file_that_is_no_board_is_refused() {
        let fd = memfd_create("x", MemfdFlags::empty()).unwrap();
        assert!(SharedMemory::open(fd.as_fd()).is_err());
        ftruncate(&fd, size_of::<SharedLayout>() as u64).unwrap();
        assert!(SharedMemory::open(fd.as_fd()).is_err());
    }
}
