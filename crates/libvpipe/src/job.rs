// SPDX-License-Identifier: Apache-2.0
//! Transfers for which nobody waits, by the descriptors that become readable when they are done.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec, write};

use crate::candidate::{Route, candidate};
use crate::copy::copy;
use crate::engine::{Descriptor, News, PerProcess, quietly};
use crate::file::{Begun, Place, advance, begin, finish, is_socket, send};

/// Stack of a thread that copies, in bytes.
const STACK: usize = 256 << 10;

/// A transfer.
struct Job {
    source: Descriptor,
    sink: Descriptor,
    /// First byte, when the source is no socket.
    offset: Option<u64>,
    length: usize,
    /// Becomes readable when it is over.
    completion: Descriptor,
    stage: Mutex<Stage>,
    over: Condvar,
}

#[derive(Clone, Copy)]
enum Stage {
    /// The engine has it.
    Piped,
    /// A thread has it.
    Copying,
    Copied(Result<usize, Errno>),
}

#[derive(Default)]
struct Jobs {
    /// By the number of the completion, which the caller knows.
    open: Mutex<HashMap<RawFd, Pending>>,
}

struct Pending {
    job: Arc<Job>,
    piped: Option<Begun>,
}

static JOBS: PerProcess<Jobs> = PerProcess::new();

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    fn place(&self) -> Place {
        Place {
            from: self.offset,
            to: None,
        }
    }

    fn signal(&self) {
        let _ = write(&self.completion, &1_u64.to_ne_bytes());
    }

    /// Copies all of it: nobody else is there to wait for sockets. Piece by piece by the host when that may be asked.
    fn copy(&self, asks: bool) {
        let mut at = self.offset;
        let mut done = 0;
        let (from, to) = (self.source.as_fd(), self.sink.as_fd());
        let result = loop {
            let left = self.length - done;
            let moved = match asks {
                true => send(from, to, at.as_mut(), left),
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
        self.copied(result);
    }

    fn copied(&self, result: Result<usize, Errno>) {
        *locked(&self.stage) = Stage::Copied(result);
        self.over.notify_all();
        self.signal();
    }

    fn copy_on_a_thread(self: &Arc<Self>, asks: bool) {
        *locked(&self.stage) = Stage::Copying;
        let job = self.clone();
        let made = quietly(|| {
            let named = thread::Builder::new().stack_size(STACK);
            named.spawn(move || job.copy(asks))
        });
        if made.is_err() {
            self.copied(Err(Errno::AGAIN));
        }
    }
}

/// Begins a transfer; the number of the descriptor that becomes readable when it is over.
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
        News::Progress => (),
        News::Over => watched.signal(),
        News::Refused => watched.copy_on_a_thread(false),
    });
    // one piece after the other takes somebody who asks for the next one
    let pieces = candidate(source, sink).is_some_and(|found| found.route == Route::Copy);
    let piped = match pieces {
        true => None,
        false => begin((source, sink), job.place(), length as u64, watcher),
    };
    if piped.is_none() {
        job.copy_on_a_thread(pieces);
    }
    let number = job.completion.as_fd().as_raw_fd();
    locked(&JOBS.get().open).insert(number, Pending { job, piped });
    Ok(number)
}

/// Waits for a transfer, and closes its descriptor; the number of bytes.
pub(crate) fn end(completion: RawFd) -> Result<usize, Errno> {
    let pending = locked(&JOBS.get().open).remove(&completion);
    let Pending { job, piped } = pending.ok_or(Errno::BADF)?;
    if let Some(begun) = piped
        && let Some(ended) = finish(begun.id)
    {
        let moved = ended?;
        let ends = (job.source.as_fd(), job.sink.as_fd());
        advance(ends, &begun, job.place(), moved)?;
        return Ok(usize::try_from(moved).unwrap_or(job.length));
    }
    let mut stage = locked(&job.stage);
    loop {
        match *stage {
            Stage::Piped => return Err(Errno::BADF), // closed before its time
            Stage::Copied(result) => return result,
            Stage::Copying => {
                stage = job.over.wait(stage).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
