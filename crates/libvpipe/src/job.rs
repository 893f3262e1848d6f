// SPDX-License-Identifier: Apache-2.0
//! Transfers for which nobody waits, by the descriptors that become readable when they are done.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec, write};

use crate::candidate::file_id;
use crate::copy::copy;
use crate::engine::{Descriptor, News, PerProcess, quietly};
use crate::file::{begin, finish};

/// Stack of a thread that copies, in bytes.
const STACK: usize = 256 << 10;

/// A transfer.
struct Job {
    file: Descriptor,
    socket: Descriptor,
    offset: u64,
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
    /// The caller's own descriptor, when it is piped.
    piped: Option<RawFd>,
}

static JOBS: PerProcess<Jobs> = PerProcess::new();

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    fn signal(&self) {
        let _ = write(&self.completion, &1_u64.to_ne_bytes());
    }

    /// Copies by itself, all of it: nobody else is there to wait for the socket.
    fn copy(&self) {
        let mut at = self.offset;
        let mut done = 0;
        let result = loop {
            match copy(
                self.file.as_fd(),
                self.socket.as_fd(),
                Some(&mut at),
                self.length - done,
            ) {
                Ok(0) => break Ok(done),
                Ok(n) => {
                    done += n;
                    if done >= self.length {
                        break Ok(done);
                    }
                }
                Err(Errno::INTR) => (),
                Err(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], None);
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

    fn copy_on_a_thread(self: &Arc<Self>) {
        *locked(&self.stage) = Stage::Copying;
        let job = self.clone();
        let made = quietly(|| {
            let named = thread::Builder::new().stack_size(STACK);
            named.spawn(move || job.copy())
        });
        if made.is_err() {
            self.copied(Err(Errno::AGAIN));
        }
    }
}

/// Begins a transfer; the number of the descriptor that becomes readable when it is over.
pub(crate) fn start(
    file: BorrowedFd<'_>,
    socket: BorrowedFd<'_>,
    offset: u64,
    length: usize,
) -> Result<RawFd, Errno> {
    let job = Arc::new(Job {
        file: fcntl_dupfd_cloexec(file, 0)?.into(),
        socket: fcntl_dupfd_cloexec(socket, 0)?.into(),
        offset,
        length,
        completion: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?.into(),
        stage: Mutex::new(Stage::Piped),
        over: Condvar::new(),
    });
    let watched = job.clone();
    let watcher = Box::new(move |_, news| match news {
        News::Progress => (),
        News::Over => watched.signal(),
        News::Refused => watched.copy_on_a_thread(),
    });
    let piped = begin((file, socket), offset, length as u64, watcher);
    if !piped {
        job.copy_on_a_thread();
    }
    let number = job.completion.as_fd().as_raw_fd();
    let pending = Pending {
        job,
        piped: piped.then(|| socket.as_raw_fd()),
    };
    locked(&JOBS.get().open).insert(number, pending);
    Ok(number)
}

/// Waits for a transfer, and closes its descriptor; the number of bytes.
pub(crate) fn end(completion: RawFd) -> Result<usize, Errno> {
    let pending = locked(&JOBS.get().open).remove(&completion);
    let Pending { job, piped } = pending.ok_or(Errno::BADF)?;
    if let Some(fd) = piped
        && let Some(ended) = finish(fd, file_id(job.socket.as_fd())?)
    {
        return ended.map(|sent| usize::try_from(sent).unwrap_or(job.length));
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
