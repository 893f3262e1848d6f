// SPDX-License-Identifier: Apache-2.0
//! The pipes of a process: one connection to the agent, one thread that receives its replies, and a record of each
//! pipe.
//!
//! The first pipe of a process, and the first one after a fork, make the connection and the thread.
//! Replies of the agent, its end and a reset by the program change the state of a record. Each
//! change wakes waiting threads and calls the [`Watcher`].
//!
//! This module bypasses the C library for all system calls that the preload library replaces.
//!
//! A signal handler may interrupt the program in `malloc`, or a thread that has the table. So calls that POSIX allows in
//! handlers use only [`marks`], [`Engine::peek`], [`Engine::try_lock`], [`Engine::is_socket_of_pipe`] and
//! [`Table::reset`]: these neither wait for a lock nor allocate nor free memory. Work that needs a lock that is not
//! free is [deferred](marks::defer) to the thread that has the lock: a hook does it when the thread unlocks.

mod change;
mod descriptor;
mod link;
pub mod marks;
mod process;
mod slots;
mod table;

pub(crate) use descriptor::Descriptor;
pub use process::{PerProcess, is_own, watch_forks};
pub use slots::FdSlots;
pub use table::{ByteRange, Endpoint, Pipe, PipeEvent, PipeState, Table, Watcher};

use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use viola_proto::pipe::library::{LibraryRequest, LostConnections};

use crate::candidate::{Candidate, FileId, TransferKind};
use crate::settings::settings;
use link::AgentLink;

/// Time before the next attempt to connect to an agent.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// Stack of the receiving thread, in bytes.
const THREAD_STACK_BYTES: usize = 256 << 10;

/// Attempts of [`Engine::try_lock`]: a thread that has the table seldom has it for longer.
const LOCK_ATTEMPTS: u32 = 100;

static ENGINE: PerProcess<Engine> = PerProcess::new();
static UNLOCK_HOOK: OnceLock<fn()> = OnceLock::new();

/// Sets what a thread does after it has unlocked the table while work is [deferred](marks::defer). The first caller's
/// function stays.
pub fn set_unlock_hook(hook: fn()) {
    let _ = UNLOCK_HOOK.set(hook);
}

/// Runs the hook if work is deferred. Call this after unlocking.
#[inline]
pub fn run_unlock_hook() {
    // a handler either sees the lock free or is seen here
    fence(Ordering::SeqCst);
    if marks::any_deferred()
        && let Some(hook) = UNLOCK_HOOK.get()
    {
        hook();
    }
}

/// The locked table. Unlocking it does the deferred work.
pub struct TableGuard<'a>(ManuallyDrop<MutexGuard<'a, Table>>);

impl TableGuard<'_> {
    /// Unlocks the table and leaves deferred work to the caller.
    pub fn unlock_quietly(self) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither used nor dropped after this.
        unsafe { ManuallyDrop::drop(&mut this.0) };
    }
}

impl Deref for TableGuard<'_> {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.0
    }
}

impl DerefMut for TableGuard<'_> {
    fn deref_mut(&mut self) -> &mut Table {
        &mut self.0
    }
}

impl Drop for TableGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: it is not used after this.
        unsafe { ManuallyDrop::drop(&mut self.0) };
        run_unlock_hook();
    }
}

/// Why no pipe was started. The program moves its bytes itself.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A socket has a pipe already.
    #[error("socket has a pipe already")]
    Busy,
    /// The agent refused this socket, or this pair, before.
    #[error("agent refused this before")]
    RefusedBefore,
    /// The agent cannot be reached.
    #[error("agent cannot be reached: {0}")]
    Unreachable(#[source] io::Error),
    /// Another descriptor may be the same socket.
    #[error("another descriptor may be the same socket")]
    Shared,
    /// The descriptor's number is too large.
    #[error("descriptor's number is too large")]
    DescriptorTooLarge,
}

/// The pipes of this process.
#[derive(Default)]
pub struct Engine {
    table: Mutex<Table>,
    /// Inode of the last socket that the library has sent to the agent, for each descriptor.
    sockets: FdSlots<AtomicU64>,
}

impl Engine {
    /// The engine of this process; not for children of vfork.
    pub fn get() -> &'static Self {
        ENGINE.get()
    }

    /// The engine of this process, if it has one.
    pub fn own() -> Option<&'static Self> {
        ENGINE.own()
    }

    /// As [`Engine::own`] without a system call; in a child of vfork it is the parent's.
    pub fn peek() -> Option<&'static Self> {
        ENGINE.peek()
    }

    /// Locks the table, which keeps the receiving thread waiting. Not for signal handlers.
    pub fn lock(&self) -> TableGuard<'_> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut table = TableGuard(ManuallyDrop::new(table));
        table.free_buried();
        table
    }

    /// Locks the table if it is free, or will be within microseconds.
    pub fn try_lock(&self) -> Option<TableGuard<'_>> {
        fence(Ordering::SeqCst); // after work was deferred: see `run_unlock_hook`
        for _ in 0..LOCK_ATTEMPTS {
            let table = match self.table.try_lock() {
                Ok(table) => table,
                Err(TryLockError::Poisoned(table)) => table.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    std::hint::spin_loop();
                    continue;
                }
            };
            return Some(TableGuard(ManuallyDrop::new(table)));
        }
        None
    }

    /// Whether the descriptor, which has a pipe, is still the socket of that pipe. Takes no lock.
    pub fn is_socket_of_pipe(&self, fd: RawFd, socket: FileId) -> bool {
        let known = self.sockets.get(fd);
        known.is_none_or(|inode| inode.load(Ordering::Acquire) == socket.inode)
    }

    /// Whether the agent may be reachable. While it is not, callers need not check descriptors.
    pub fn may_start(&self) -> bool {
        !self.lock().is_agent_unreachable()
    }

    /// Whether the agent refused to send files over this socket, recently or for good.
    pub fn refuses(&self, socket: FileId) -> bool {
        self.lock().refuses((None, socket))
    }

    /// Passes both descriptors to the agent, without waiting for its reply. `range` must not go beyond the end of a
    /// source file. Returns the number of the pipe.
    ///
    /// # Errors
    /// A [`Refusal`]; nothing has happened then.
    pub fn start(
        &'static self,
        table: &mut Table,
        (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>),
        found: Candidate,
        range: ByteRange,
        watcher: Watcher,
    ) -> Result<u64, Refusal> {
        let (from, to) = match found.kind {
            TransferKind::Send => (None, Some(sink.as_raw_fd())),
            TransferKind::Receive => (Some(source.as_raw_fd()), None),
            TransferKind::Copy => (None, None),
            TransferKind::Relay => (Some(source.as_raw_fd()), Some(sink.as_raw_fd())),
        };
        for (fd, id) in [(from, found.source), (to, found.sink)] {
            let Some(fd) = fd else { continue };
            if table.pipe_of(fd, id).is_some() {
                return Err(Refusal::Busy);
            }
            if !marks::set(fd, marks::LENT) {
                return Err(Refusal::DescriptorTooLarge);
            }
            // a thread that duplicates the descriptor marks it first and then looks for LENT
            if marks::of(fd) & (marks::SHARED | marks::ALIAS) != 0 {
                return Err(Refusal::Shared);
            }
            if let Some(inode) = self.sockets.get_or_make(fd) {
                inode.store(id.inode, Ordering::Release);
            }
        }
        let named = (found.kind != TransferKind::Send).then_some(found.source);
        if table.refuses((named, found.sink)) {
            return Err(Refusal::RefusedBefore);
        }
        table.last_id += 1;
        let id = table.last_id;
        let ByteRange {
            source_offset: offset,
            length,
            sink_offset: place,
        } = range;
        let request = match found.kind {
            TransferKind::Send => LibraryRequest::Send { id, offset, length },
            TransferKind::Receive => LibraryRequest::Receive {
                id,
                offset: place,
                length,
            },
            TransferKind::Copy => LibraryRequest::Copy {
                id,
                offset,
                length,
                to: place,
            },
            TransferKind::Relay => LibraryRequest::Relay { id, length },
        };
        let times = found.kind == TransferKind::Send && settings().is_adaptive;
        let begun = times.then(|| (Instant::now(), table.active_pipes() + 1));
        let fds = [source, sink];
        let mut link = self.link(table)?;
        let mut given = link.send_with_descriptors(request, &fds);
        if matches!(given, Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)) {
            // the agent may have been restarted; the thread of the old connection ends by itself
            table.link = None;
            link = self.link(table)?;
            given = link.send_with_descriptors(request, &fds);
        }
        given.map_err(|e| Refusal::Unreachable(e.into()))?;
        let record = Pipe {
            id,
            source: Endpoint {
                id: found.source,
                socket: from,
            },
            sink: Endpoint {
                id: found.sink,
                socket: to,
            },
            range,
            reported: 0,
            moved: 0,
            state: PipeState::Active,
            lost: LostConnections::NONE,
            idle_polls: 0,
            checked_file: None,
            checked_socket: None,
            link: link.number,
            begun,
            watcher,
            changed: Arc::default(),
        };
        table.insert(record);
        Ok(id)
    }

    fn link(&'static self, table: &mut Table) -> Result<AgentLink, Refusal> {
        if let Some(link) = &table.link {
            return Ok(link.clone());
        }
        if table.is_agent_unreachable() {
            return Err(Refusal::Unreachable(io::ErrorKind::NotConnected.into()));
        }
        table.link_count += 1;
        let made =
            AgentLink::connect(&settings().agent_socket, table.link_count).and_then(|link| {
                let theirs = link.clone();
                with_signals_blocked(|| {
                    let named = thread::Builder::new()
                        .name("vpipe".into())
                        .stack_size(THREAD_STACK_BYTES);
                    named.spawn(move || self.listen(&theirs))
                })?;
                Ok(link)
            });
        match made {
            Ok(link) => {
                table.retry_at = None;
                table.link = Some(link.clone());
                Ok(link)
            }
            Err(e) => {
                table.retry_at = Some(Instant::now() + RECONNECT_INTERVAL);
                Err(Refusal::Unreachable(e))
            }
        }
    }

    fn listen(&self, link: &AgentLink) {
        let hearing = AssertUnwindSafe(|| {
            while let Some(answer) = link.receive() {
                self.lock().apply(answer);
            }
        });
        // however the loop ended: no thread may wait for replies any more
        let _ = catch_unwind(hearing);
        self.lock().agent_lost(link.number);
    }

    /// Waits until a pipe changes, or until the time `until`. The table is unlocked meanwhile: the
    /// caller must look up the pipe again.
    pub fn wait<'a>(
        &'a self,
        mut table: TableGuard<'a>,
        id: u64,
        until: Option<Instant>,
    ) -> TableGuard<'a> {
        let Some(changed) = table.pipe(id).map(|record| record.changed.clone()) else {
            return table;
        };
        let seen = changed.now();
        drop(table);
        let time = until.map(|t| t.saturating_duration_since(Instant::now()));
        changed.wait(seen, time);
        self.lock()
    }
}

/// Runs `work` with all signals blocked: a thread made in it never runs the program's handlers.
pub(crate) fn with_signals_blocked<T>(work: impl FnOnce() -> T) -> T {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: the first call fills `all`, the second reads it and fills `before`.
    let held = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0
    };
    let done = work();
    if held {
        // SAFETY: `before` was filled, as the call went well.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    done
}
