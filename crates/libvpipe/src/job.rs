// SPDX-License-Identifier: Apache-2.0
//! Transfers whose caller does not wait. A descriptor becomes readable when one ends.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec, write};

use crate::candidate::{TransferKind, classify};
use crate::copy::copy;
use crate::engine::{Descriptor, PerProcess, PipeEvent, with_signals_blocked};
use crate::transfer::{self, Offsets, StartedPipe, advance_positions, finish, is_socket, transfer};

/// Stack of a copying thread, in bytes.
const THREAD_STACK_BYTES: usize = 256 << 10;

/// A transfer.
struct Job {
    source: Descriptor,
    sink: Descriptor,
    /// Offset of the first byte, unless the source is a socket.
    offset: Option<u64>,
    length: usize,
    /// Becomes readable at the end of the transfer.
    completion: Descriptor,
    stage: Mutex<Stage>,
    over: Condvar,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The host moves the bytes.
    Piped,
    /// A thread copies them.
    Copying,
    Copied(Result<usize, Errno>),
}

#[derive(Default)]
struct Jobs {
    /// By the descriptor number that the caller has.
    open: Mutex<HashMap<RawFd, Pending>>,
}

struct Pending {
    job: Arc<Job>,
    piped: Option<StartedPipe>,
}

static JOBS: PerProcess<Jobs> = PerProcess::new();

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    fn offsets(&self) -> Offsets {
        Offsets {
            source: self.offset,
            sink: None,
        }
    }

    fn signal_completion(&self) {
        let _ = write(&self.completion, &1_u64.to_ne_bytes());
    }

    /// Copies all bytes and waits for sockets; asks the host for each part if `may_pipe`.
    fn copy(&self, may_pipe: bool) {
        let mut at = self.offset;
        let mut done = 0;
        let (from, to) = (self.source.as_fd(), self.sink.as_fd());
        let result = loop {
            let left = self.length - done;
            let moved = match may_pipe {
                true => transfer(from, to, at.as_mut(), left),
                false => copy(from, to, at.as_mut(), left),
            };
            match moved {
                Ok(0) => break Ok(done),
                Ok(n) => {
                    done += n;
                    if done >= self.length {
                        break Ok(done);
                    }
                }
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => {
                    let ready = match is_socket(from) {
                        true => PollFd::new(&self.source, PollFlags::IN),
                        false => PollFd::new(&self.sink, PollFlags::OUT),
                    };
                    let _ = poll(&mut [ready], None);
                }
                Err(e) if done == 0 => break Err(e),
                Err(_) => break Ok(done),
            }
        };
        self.complete(result);
    }

    fn complete(&self, result: Result<usize, Errno>) {
        *locked(&self.stage) = Stage::Copied(result);
        self.over.notify_all();
        self.signal_completion();
    }

    fn copy_on_thread(self: &Arc<Self>, may_pipe: bool) {
        *locked(&self.stage) = Stage::Copying;
        let job = self.clone();
        let made = with_signals_blocked(|| {
            let named = thread::Builder::new().stack_size(THREAD_STACK_BYTES);
            named.spawn(move || job.copy(may_pipe))
        });
        if made.is_err() {
            self.complete(Err(Errno::AGAIN));
        }
    }
}

/// Starts a transfer. Returns the descriptor that becomes readable at the end.
///
/// # Errors
/// `ESPIPE` when `offset` is not 0 for a socket, or the kernel's error.
pub(crate) fn start(
    source: BorrowedFd<'_>,
    sink: BorrowedFd<'_>,
    offset: u64,
    length: usize,
) -> Result<RawFd, Errno> {
    let offset = match is_socket(source) {
        true if offset != 0 => return Err(Errno::SPIPE),
        true => None,
        false => Some(offset),
    };
    let job = Arc::new(Job {
        source: fcntl_dupfd_cloexec(source, 0)?.into(),
        sink: fcntl_dupfd_cloexec(sink, 0)?.into(),
        offset,
        length,
        completion: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?.into(),
        stage: Mutex::new(Stage::Piped),
        over: Condvar::new(),
    });
    let watched = job.clone();
    let watcher = Box::new(move |news| match news {
        PipeEvent::Progress => (),
        PipeEvent::Finished => watched.signal_completion(),
        PipeEvent::Refused => watched.copy_on_thread(false),
    });
    // a copy between files is piped in pieces, and a thread asks for each
    let in_pieces = classify(source, sink).is_some_and(|found| found.kind == TransferKind::Copy);
    let piped = match in_pieces {
        true => None,
        false => transfer::start((source, sink), job.offsets(), length as u64, watcher),
    };
    if piped.is_none() {
        job.copy_on_thread(in_pieces);
    }
    let number = job.completion.as_fd().as_raw_fd();
    locked(&JOBS.get().open).insert(number, Pending { job, piped });
    Ok(number)
}

/// Waits for a transfer and closes its descriptor. Returns the number of bytes.
///
/// # Errors
/// `EBADF` when [`start`] did not return this descriptor, or the error of the transfer.
pub(crate) fn end(completion: RawFd) -> Result<usize, Errno> {
    let pending = locked(&JOBS.get().open).remove(&completion);
    let Pending { job, piped } = pending.ok_or(Errno::BADF)?;
    if let Some(begun) = piped
        && let Some(ended) = finish(begun.id)
    {
        let moved = ended?;
        let ends = (job.source.as_fd(), job.sink.as_fd());
        advance_positions(ends, &begun, job.offsets(), moved)?;
        return Ok(usize::try_from(moved).unwrap_or(job.length));
    }
    let mut stage = locked(&job.stage);
    loop {
        match *stage {
            Stage::Piped => return Err(Errno::BADF), // closed too early
            Stage::Copied(result) => return result,
            Stage::Copying => {
                stage = job.over.wait(stage).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
