// SPDX-License-Identifier: Apache-2.0
//! A process's pipes: one connection to the agent, one thread that hears it, and a record for each pipe.
//!
//! Connection and thread are made when the first pipe is begun, and again after a fork. Only the agent's answers change a
//! record by themselves; a thread that waits is woken, and a [`Watcher`] is called.
//!
//! All system calls in here that the preload library takes the place of are made past the C library.

mod descriptor;
mod link;
pub mod marks;
mod process;
mod table;

pub(crate) use descriptor::Descriptor;
pub use process::PerProcess;
pub use table::{End, News, Part, Record, State, Table, Watcher};

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use viola_proto::pipe::library::{LibraryRequest, LostConnections};

use crate::candidate::{Candidate, FileId, Route};
use crate::settings::settings;
use link::Link;

/// How long an agent that could not be reached is left alone.
const RETRY: Duration = Duration::from_secs(1);
/// Stack of the thread that hears the agent, in bytes.
const STACK: usize = 256 << 10;

static ENGINE: PerProcess<Engine> = PerProcess::new();

/// Why no pipe was begun. The program sends by itself.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A socket has one.
    #[error("socket has a pipe already")]
    Busy,
    /// The agent did not want this socket, or this pair, before.
    #[error("agent refused this before")]
    Before,
    /// There is no agent, or not one that listens.
    #[error("agent cannot be reached: {0}")]
    Agent(#[source] io::Error),
    /// The descriptor's number is too large.
    #[error("descriptor's number is too large")]
    Number,
}

/// The pipes of this process.
#[derive(Default)]
pub struct Engine {
    table: Mutex<Table>,
}

impl Engine {
    /// This process's; not for children of vfork.
    pub fn here() -> &'static Self {
        ENGINE.get()
    }

    /// This process's, when it has one of its own.
    pub fn own() -> Option<&'static Self> {
        ENGINE.own()
    }

    /// The same without a system call; in a child of vfork that is its parent's.
    pub fn peek() -> Option<&'static Self> {
        ENGINE.peek()
    }

    /// The table. Whoever has it keeps the thread that hears the agent waiting.
    pub fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is worth the trouble to look at descriptors.
    pub fn may_begin(&self) -> bool {
        !self.lock().not_now()
    }

    /// Whether the agent did not want to have a file sent down this socket a moment ago, or ever.
    pub fn refuses(&self, socket: FileId) -> bool {
        self.lock().refuses((None, socket))
    }

    /// Hands both ends to the agent, and does not wait for what it says. `part` must not end after a source that is a file.
    /// The number of the pipe.
    ///
    /// # Errors
    /// A [`Refusal`]; then nothing has happened.
    pub fn begin(
        &'static self,
        table: &mut Table,
        (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>),
        found: Candidate,
        part: Part,
        watcher: Watcher,
    ) -> Result<u64, Refusal> {
        let (from, to) = match found.route {
            Route::Send => (None, Some(sink.as_raw_fd())),
            Route::Receive => (Some(source.as_raw_fd()), None),
            Route::Copy => (None, None),
            Route::Relay => (Some(source.as_raw_fd()), Some(sink.as_raw_fd())),
        };
        for (fd, id) in [(from, found.source), (to, found.sink)] {
            let Some(fd) = fd else { continue };
            if table.record_of(fd, id).is_some() {
                return Err(Refusal::Busy);
            }
            if !marks::set(fd, marks::LENT) {
                return Err(Refusal::Number);
            }
        }
        let named = (found.route != Route::Send).then_some(found.source);
        if table.refuses((named, found.sink)) {
            return Err(Refusal::Before);
        }
        table.last += 1;
        let id = table.last;
        let Part {
            offset,
            length,
            to: place,
        } = part;
        let ask = match found.route {
            Route::Send => LibraryRequest::Send { id, offset, length },
            Route::Receive => LibraryRequest::Receive {
                id,
                offset: place,
                length,
            },
            Route::Copy => LibraryRequest::Copy {
                id,
                offset,
                length,
                to: place,
            },
            Route::Relay => LibraryRequest::Relay { id, length },
        };
        let counts = found.route == Route::Send && settings().adapts;
        let begun = counts.then(|| (Instant::now(), table.piping() + 1));
        let fds = [source, sink];
        let mut link = self.link(table)?;
        let mut given = link.give(ask, &fds);
        if matches!(given, Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN)) {
            // The agent was started anew, maybe. Whoever hears the old one hears it to the end.
            table.link = None;
            link = self.link(table)?;
            given = link.give(ask, &fds);
        }
        given.map_err(|e| Refusal::Agent(e.into()))?;
        let record = Record {
            id,
            source: End {
                id: found.source,
                socket: from,
            },
            sink: End {
                id: found.sink,
                socket: to,
            },
            part,
            consumed: 0,
            sent: 0,
            state: State::Piping,
            lost: LostConnections::NONE,
            asked: 0,
            file: None,
            looked: None,
            link: link.number,
            begun,
            watcher,
            changed: Arc::new(Condvar::new()),
        };
        table.insert(record);
        Ok(id)
    }

    fn link(&'static self, table: &mut Table) -> Result<Link, Refusal> {
        if let Some(link) = &table.link {
            return Ok(link.clone());
        }
        if table.not_now() {
            return Err(Refusal::Agent(io::ErrorKind::NotConnected.into()));
        }
        table.links += 1;
        let made = Link::connect(&settings().agent, table.links).and_then(|link| {
            let theirs = link.clone();
            quietly(|| {
                let named = thread::Builder::new()
                    .name("vpipe".into())
                    .stack_size(STACK);
                named.spawn(move || self.listen(&theirs))
            })?;
            Ok(link)
        });
        match made {
            Ok(link) => {
                table.not_before = None;
                table.link = Some(link.clone());
                Ok(link)
            }
            Err(e) => {
                table.not_before = Some(Instant::now() + RETRY);
                Err(Refusal::Agent(e))
            }
        }
    }

    fn listen(&self, link: &Link) {
        let hearing = AssertUnwindSafe(|| {
            while let Some(answer) = link.hear() {
                self.lock().hear(answer);
            }
        });
        // whatever ends it: nobody may wait for answers any more
        let _ = catch_unwind(hearing);
        self.lock().lose(link.number);
    }

    /// Waits until something about a pipe changes, or a time has come. The table is let go meanwhile: whoever
    /// wants to go on looks whether the record is still there.
    pub fn wait<'a>(
        &self,
        mut table: MutexGuard<'a, Table>,
        id: u64,
        until: Option<Instant>,
    ) -> MutexGuard<'a, Table> {
        let Some(changed) = table.pipe(id).map(|record| record.changed.clone()) else {
            return table;
        };
        match until {
            None => changed.wait(table).unwrap_or_else(PoisonError::into_inner),
            Some(t) => {
                let time = t.saturating_duration_since(Instant::now());
                let waited = changed.wait_timeout(table, time);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// Does something with all signals held back: a thread that is made here never runs the program's handlers.
pub(crate) fn quietly<T>(work: impl FnOnce() -> T) -> T {
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
