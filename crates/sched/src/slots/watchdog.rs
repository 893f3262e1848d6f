// SPDX-License-Identifier: Apache-2.0
//! The watchdog: the process between daemon and controller.
//!
//! It starts the controller, watches its heartbeat from another core, and when something fails (the controller ended, hangs or was
//! stopped, or the daemon has ended) it ends the controller and restores every thread. The controller watches the watchdog in the
//! same way. Only when both are killed at once do threads stay changed; `viola restore` and the next start restore them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::child;
use super::controller::{CoreFiles, lock_memory, pin, run_core};
use super::shared::{SharedMemory, now};
use super::threads::set_fifo;
use crate::priorities::WATCHDOG_PRIORITY;
use crate::restore::{restore_and_keep_file, restore_file};

/// A controller without a heartbeat for this time counts as hung.
pub const CONTROLLER_HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(300);
/// Interval between checks of the other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout for a controller to start or to end.
const CONTROLLER_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of watchdog and controller on their command line, as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HelperArgs {
    /// Descriptor of the shared memory.
    pub shared: RawFd,
    /// Descriptor whose end of file shows that the parent has ended.
    pub parent: RawFd,
    /// Rows of the accounting tables.
    pub cpus: u32,
    /// File with the attributes to restore.
    pub saved: std::path::PathBuf,
    /// CPUs for the controller threads and the watchdog: those that are not managed. If there are
    /// none, the managed ones that the host uses too. Empty if there are none of these either.
    pub spare_cpus: Vec<u32>,
    /// Whether VMs have real-time threads on all CPUs, on some of them within a budget.
    pub crowded: bool,
    /// Managed cores, in the order of the shared memory.
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

/// Why the watchdog ended: its exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchdogExit {
    /// The daemon asked it to.
    Stopped = 0,
    /// The controller ended or was killed.
    ControllerDied = 3,
    /// The controller hung and was killed.
    ControllerHung = 4,
    /// The daemon has ended.
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
            Self::Stopped => "the slot controller was stopped; every thread is restored",
            Self::ControllerDied => "the slot controller died; every thread is restored",
            Self::ControllerHung => {
                "the slot controller hung and was killed; every thread is restored"
            }
            Self::Orphaned => "the daemon has ended; every thread is restored",
            Self::NotStarted => "the slot controller could not start; no thread was changed",
        }
    }
}

/// The watchdog process. `controller` is the command that starts the controller, to which the arguments are added.
///
/// # Errors
/// The kernel's error.
pub fn run_watchdog(args: &HelperArgs, controller: &mut Command) -> io::Result<WatchdogExit> {
    let shared = open_shared(args.shared)?;
    choose_cpu(args)?;
    lock_memory()?;
    let (lifeline, held) = rustix::pipe::pipe()?;
    set_cloexec(held.as_raw_fd(), true)?;
    let mut below = args.clone();
    below.parent = lifeline.as_raw_fd();
    let json = serde_json::to_string(&below).map_err(io::Error::other)?;
    let mut child = controller.arg(json).stdin(Stdio::null()).spawn()?;
    drop(lifeline);
    shared.watchdog_beat.store(now(), Ordering::Release);
    let end = watch(&shared, args, &child)?;
    shared.stop.store(1, Ordering::Release);
    if end != WatchdogExit::ControllerHung {
        let deadline = Instant::now() + CONTROLLER_TIMEOUT / 8;
        while !child::has_ended(&child)? && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let _ = child.kill();
    // Before waiting for it: a thread of it on the VMs' core may need the VMs out of its way to exit. And again afterwards, for
    // changes that it made in its last moment. An error of the first time that lasts comes again.
    let _ = restore_and_keep_file(&args.saved);
    child::await_end(&child)?;
    restore_file(&args.saved).map_err(io::Error::other)?;
    child::reap(&mut child)?;
    drop(held);
    Ok(end)
}

fn watch(shared: &SharedMemory, args: &HelperArgs, child: &Child) -> io::Result<WatchdogExit> {
    let started = Instant::now();
    loop {
        if is_closed(args.parent, POLL_INTERVAL)? {
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
        if child::has_ended(child)? {
            return Ok(if ready {
                WatchdogExit::ControllerDied
            } else {
                WatchdogExit::NotStarted
            });
        }
        let t = now();
        shared.watchdog_beat.store(t, Ordering::Release);
        if !ready {
            if started.elapsed() > CONTROLLER_TIMEOUT {
                return Ok(WatchdogExit::NotStarted);
            }
            continue;
        }
        for core in shared.cores() {
            let beat = core.beat.load(Ordering::Acquire);
            if t.saturating_sub(beat) > CONTROLLER_HEARTBEAT_TIMEOUT.as_nanos() as u64 && beat != 0
            {
                return Ok(WatchdogExit::ControllerHung);
            }
        }
    }
}

/// The controller process: a thread per core, while this thread watches the watchdog.
///
/// # Errors
/// The kernel's error.
pub fn run_controller(args: &HelperArgs) -> io::Result<()> {
    let shared = open_shared(args.shared)?;
    choose_cpu(args)?;
    let orphaned = AtomicBool::new(false);
    let files: Vec<CoreFiles> = args
        .cores
        .iter()
        .enumerate()
        .map(|(slot, c)| {
            // SAFETY: the descriptors were made for this process and are used nowhere else in it.
            let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
            let cpu_of_controller = match args.spare_cpus.len() {
                0 => c.cpu,
                n => args.spare_cpus[slot % n],
            };
            CoreFiles {
                cpu: c.cpu,
                cpu_of_controller,
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
        let watchdog_ended = loop {
            if is_closed(args.parent, POLL_INTERVAL)? {
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
        if watchdog_ended {
            restore_file(&args.saved).map_err(io::Error::other)?;
        }
        result
    })
}

/// Pins this thread to a CPU that is not managed, as an ordinary thread, so that a fault of its own cannot take that CPU away. Only
/// where VMs have real-time threads on all CPUs it must be real-time itself, to win against them.
fn choose_cpu(args: &HelperArgs) -> io::Result<()> {
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

/// Waits up to `timeout` for the other end of a pipe to be closed. Returns whether it was.
fn is_closed(fd: RawFd, timeout: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let limit = libc::timespec {
        tv_sec: 0,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    };
    // SAFETY: one live pollfd and a live timespec, no signal mask.
    let n = unsafe { libc::ppoll(&mut poll, 1, &limit, std::ptr::null()) };
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
///
/// # Errors
/// The kernel's error.
pub fn set_cloexec(fd: RawFd, on: bool) -> io::Result<()> {
    // SAFETY: fcntl on a descriptor number, no pointers.
    let r = unsafe { libc::fcntl(fd, libc::F_SETFD, if on { libc::FD_CLOEXEC } else { 0 }) };
    if r < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
