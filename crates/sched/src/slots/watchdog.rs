// SPDX-License-Identifier: Apache-2.0
//! The dead man's handle: the process between daemon and controller.
//!
//! It starts the controller, watches its heartbeat from another core, and when anything is wrong (the
//! controller ended, hangs or was stopped, the daemon is gone) ends the controller and puts every thread back.
//! The controller in turn watches the watchdog and does the same. Only when both are killed at once is anything
//! left over; `viola restore` and the next start take care of that.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::controller::{CoreFiles, GLANCE, lock_memory, pin, run_core};
use super::shared::{SharedMemory, now};
use super::threads::{WATCHDOG_PRIORITY, set_fifo};
use crate::restore::{restore_and_keep_file, restore_file};

/// A controller that showed no sign of life for so long is taken to hang.
pub const HANG: Duration = Duration::from_millis(300);
/// How long a controller may take to start or to end.
const PATIENCE: Duration = Duration::from_secs(2);

/// What watchdog and controller are told on their command line (as JSON).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HelperArgs {
    /// Descriptor of the shared.
    pub shared: RawFd,
    /// Descriptor whose end of file says that the parent is gone.
    pub parent: RawFd,
    /// Rows of the accounting tables.
    pub cpus: u32,
    /// File with the attributes to restore.
    pub saved: std::path::PathBuf,
    /// CPUs that are not managed, for the controller threads and everything else; where there are none those that
    /// the host works on too; empty if there are none of these either.
    pub spare_cpus: Vec<u32>,
    /// VMs' real-time threads run on all CPUs, on some within a budget.
    pub crowded: bool,
    /// Managed cores in the order of the shared.
    pub cores: Vec<CoreArgs>,
}

/// One managed core in [`HelperArgs`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CoreArgs {
    /// CPU number.
    pub cpu: u32,
    /// Descriptor of the VM table.
    pub core_vms: RawFd,
    /// Descriptor of the core table.
    pub core_ctls: RawFd,
    /// Descriptor of the event ring.
    pub ring: RawFd,
}

/// Why the watchdog ended; its exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchdogExit {
    /// It was asked to.
    Stopped = 0,
    /// The controller ended by itself or was killed.
    ControllerDied = 3,
    /// The controller gave no sign of life and was killed.
    ControllerHung = 4,
    /// The daemon is gone.
    Orphaned = 5,
    /// The controller could not start.
    NotStarted = 6,
}

impl WatchdogExit {
    /// From an exit status.
    pub fn from_code(code: i32) -> Option<Self> {
        [
            Self::Stopped,
            Self::ControllerDied,
            Self::ControllerHung,
            Self::Orphaned,
            Self::NotStarted,
        ]
        .into_iter()
        .find(|&e| e as i32 == code)
    }

    /// One sentence for the journal.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Stopped => "slots ended as asked; every thread has its own scheduling back",
            Self::ControllerDied => {
                "the slot controller died; every thread has its own scheduling back"
            }
            Self::ControllerHung => {
                "the slot controller gave no sign of life and was killed; every thread has its own scheduling back"
            }
            Self::Orphaned => "the daemon is gone; every thread has its own scheduling back",
            Self::NotStarted => "the slot controller could not start; nothing was changed",
        }
    }
}

/// Body of the watchdog process. `controller` is the command line that starts the controller, to which the
/// arguments are added.
pub fn run_watchdog(args: &HelperArgs, controller: &mut Command) -> io::Result<WatchdogExit> {
    let shared = open_shared(args.shared)?;
    take_place(args)?;
    lock_memory()?;
    let (lifeline, held) = rustix::pipe::pipe()?;
    set_cloexec(held.as_raw_fd(), true)?;
    let mut below = args.clone();
    below.parent = lifeline.as_raw_fd();
    let json = serde_json::to_string(&below).map_err(io::Error::other)?;
    let mut child = controller.arg(json).stdin(Stdio::null()).spawn()?;
    drop(lifeline);
    shared.watchdog_beat.store(now(), Ordering::Release);
    let end = watch(&shared, args, &mut child)?;
    shared.stop.store(1, Ordering::Release);
    if end != WatchdogExit::ControllerHung {
        let deadline = Instant::now() + PATIENCE / 8;
        while child.try_wait()?.is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let _ = child.kill();
    // Before it is waited for: a thread of it on the VMs' core may need the VMs out of its way to end. And after,
    // for what it may have done in its last moment; restoring twice changes nothing.
    let restored = restore_and_keep_file(&args.saved);
    child.wait()?;
    restored
        .and_then(|()| restore_file(&args.saved).map(|_| ()))
        .map_err(io::Error::other)?;
    drop(held);
    Ok(end)
}

fn watch(shared: &SharedMemory, args: &HelperArgs, child: &mut Child) -> io::Result<WatchdogExit> {
    let started = Instant::now();
    loop {
        if gone(args.parent, GLANCE)? {
            return Ok(if shared.stop.load(Ordering::Acquire) == 0 {
                WatchdogExit::Orphaned
            } else {
                WatchdogExit::Stopped
            });
        }
        if shared.stop.load(Ordering::Acquire) != 0 {
            return Ok(WatchdogExit::Stopped);
        }
        let ready = shared
            .cores()
            .iter()
            .all(|c| c.ready.load(Ordering::Acquire) != 0);
        if child.try_wait()?.is_some() {
            return Ok(if ready {
                WatchdogExit::ControllerDied
            } else {
                WatchdogExit::NotStarted
            });
        }
        let t = now();
        shared.watchdog_beat.store(t, Ordering::Release);
        if !ready {
            if started.elapsed() > PATIENCE {
                return Ok(WatchdogExit::NotStarted);
            }
            continue;
        }
        for core in shared.cores() {
            let beat = core.beat.load(Ordering::Acquire);
            if t.saturating_sub(beat) > HANG.as_nanos() as u64 && beat != 0 {
                return Ok(WatchdogExit::ControllerHung);
            }
        }
    }
}

/// Body of the controller process: a thread per core, and this one to see whether the watchdog is still there.
pub fn run_controller(args: &HelperArgs) -> io::Result<()> {
    let shared = open_shared(args.shared)?;
    take_place(args)?;
    let orphaned = AtomicBool::new(false);
    let files: Vec<CoreFiles> = args
        .cores
        .iter()
        .enumerate()
        .map(|(slot, c)| {
            // SAFETY: the descriptors were made for this process and are used nowhere else in it.
            let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
            let home = match args.spare_cpus.len() {
                0 => c.cpu,
                n => args.spare_cpus[slot % n],
            };
            CoreFiles {
                cpu: c.cpu,
                home,
                slot,
                core_vms: own(c.core_vms),
                core_ctls: own(c.core_ctls),
                ring: own(c.ring),
            }
        })
        .collect();
    lock_memory()?;
    std::thread::scope(|scope| -> io::Result<()> {
        let mut threads = Vec::new();
        for f in &files {
            let (shared, orphaned) = (&shared, &orphaned);
            threads.push(
                std::thread::Builder::new()
                    .name(format!("slots/{}", f.cpu))
                    .stack_size(256 << 10)
                    .spawn_scoped(scope, move || run_core(shared, f, args.cpus, orphaned))?,
            );
        }
        let watchdog_gone = loop {
            if gone(args.parent, GLANCE)? {
                orphaned.store(true, Ordering::Release);
                break true;
            }
            if threads.iter().any(|t| t.is_finished()) {
                orphaned.store(true, Ordering::Release);
                break false;
            }
        };
        let mut result = Ok(());
        for t in threads {
            match t.join() {
                Ok(Ok(())) => {}
                Ok(Err(e)) => result = Err(e),
                Err(_) => result = Err(io::Error::other("a controller thread panicked")),
            }
        }
        if watchdog_gone {
            restore_file(&args.saved).map_err(io::Error::other)?;
        }
        result
    })
}

/// Where this thread looks after the others from: an unmanaged core, as an ordinary thread, so that no fault of its
/// own can take that core away. Only where VMs' real-time threads run on all cores it has to be real-time, to win
/// against them.
fn take_place(args: &HelperArgs) -> io::Result<()> {
    if args.crowded {
        match set_fifo(0, WATCHDOG_PRIORITY) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
    }
    match args.spare_cpus.as_slice() {
        [] => Ok(()),
        cpus => pin(cpus),
    }
}

fn open_shared(fd: RawFd) -> io::Result<SharedMemory> {
    // SAFETY: only borrowed for the call; the descriptor was inherited for this purpose.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    SharedMemory::open(fd.as_fd())
}

/// Waits up to `for_` for the other end of a pipe to be closed.
fn gone(fd: RawFd, for_: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let timeout = libc::timespec {
        tv_sec: 0,
        tv_nsec: i64::from(for_.subsec_nanos()),
    };
    // SAFETY: one live pollfd and a live timespec, no signal mask.
    let n = unsafe { libc::ppoll(&mut poll, 1, &timeout, std::ptr::null()) };
    if n < 0 {
        let e = io::Error::last_os_error();
        return if e.kind() == io::ErrorKind::Interrupted {
            Ok(false)
        } else {
            Err(e)
        };
    }
    Ok(n > 0 && poll.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0)
}

/// Sets whether a descriptor is closed on exec.
pub fn set_cloexec(fd: RawFd, on: bool) -> io::Result<()> {
    // SAFETY: fcntl on a descriptor number, no pointers.
    let r = unsafe { libc::fcntl(fd, libc::F_SETFD, if on { libc::FD_CLOEXEC } else { 0 }) };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
