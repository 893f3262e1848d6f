// SPDX-License-Identifier: Apache-2.0
//! A file that the host writes: prepared before, and settled after.
//!
//! | module | contents |
//! |---|---|
//! | `fill` | allocated, written blocks for every byte |
//! | `immutable` | the flag that keeps others from writing, moving or freeing them |
//! | `note` | what the next run must undo after a kill |
//! | `cache` | the file's pages in the guest's page cache |
//! | `prepared` | all steps in their order |
//!
//! These steps wait for disks, so each sink file has a thread of its own.

mod cache;
mod fill;
mod immutable;
pub mod note;
mod prepared;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::fs::{FileType, OFlags};
use viola_proto::agent::FileMap;
use viola_proto::pipe::PipeId;

use super::counters::Counters;
use super::lease::FileKey;
use super::reason::Reason;
use super::state::Completion;
use crate::io::queue;
use note::Notes;
use prepared::Prepared;

/// Stack size of a sink thread, in bytes.
const STACK: usize = 256 << 10;

/// How to settle a prepared file.
#[derive(Debug)]
struct SettleRequest {
    /// Bytes of the pipe in all.
    bytes: u64,
    /// The first of them, which the agent has received and the host has not written.
    kept: Vec<u8>,
}

/// A sink file of a pipe.
#[derive(Debug)]
pub struct Target {
    /// Device and inode number.
    pub key: FileKey,
    /// Offset of the first byte.
    pub offset: u64,
    /// Its extents, once it is prepared.
    pub map: Option<FileMap>,
    /// The first bytes, which the agent received before the host had the connection.
    pub kept: Vec<u8>,
    requests: Sender<SettleRequest>,
    stop: Arc<AtomicBool>,
}

/// Checks that a program may write anywhere in its file.
///
/// # Errors
/// [`Reason::BadFile`] when it is not a regular file, or not open for writing at any offset.
pub fn writable(program_file: BorrowedFd<'_>) -> Result<FileKey, Reason> {
    let flags = rustix::fs::fcntl_getfl(program_file).map_err(|_| Reason::BadFile)?;
    let stat = rustix::fs::fstat(program_file).map_err(|_| Reason::BadFile)?;
    let way = flags & OFlags::RWMODE;
    // the agent could write more than the program
    let good = (way == OFlags::WRONLY || way == OFlags::RDWR)
        && !flags.intersects(OFlags::PATH | OFlags::APPEND)
        && FileType::from_raw_mode(stat.st_mode).is_file();
    match good {
        true => Ok((stat.st_dev, stat.st_ino)),
        false => Err(Reason::BadFile),
    }
}

impl Target {
    /// Starts to prepare `length` bytes at `offset`; [`Completion::Prepared`] follows.
    ///
    /// # Errors
    /// As [`writable`], [`Reason::OutOfRange`], or [`Reason::SystemError`] when no thread can be started.
    pub fn begin(
        pipe: PipeId,
        program_file: OwnedFd,
        (offset, length): (u64, u64),
        notes: Notes,
        (results, counters): (&queue::Sender<Completion>, &Arc<Counters>),
    ) -> Result<Self, Reason> {
        let key = writable(program_file.as_fd())?;
        let end = offset.checked_add(length).filter(|e| *e <= i64::MAX as u64);
        let part = (offset, end.ok_or(Reason::OutOfRange)?);
        let (requests, request_queue) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (halt, results, counters) = (Arc::clone(&stop), results.clone(), Arc::clone(counters));
        std::thread::Builder::new()
            .name("viola-pipe-sink".into())
            .stack_size(STACK)
            .spawn(move || {
                let made = Prepared::prepare(program_file, part, &notes, pipe, &halt, &counters);
                run_sink(pipe, made, &request_queue, &results, &counters);
            })
            .map_err(|_| Reason::SystemError)?;
        Ok(Self {
            key,
            offset,
            map: None,
            kept: Vec::new(),
            requests,
            stop,
        })
    }

    /// Starts to settle the file after `bytes` bytes in all; [`Completion::Settled`] follows. `false` when the
    /// thread is gone.
    pub fn settle(&mut self, bytes: u64) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        let kept = std::mem::take(&mut self.kept);
        self.requests.send(SettleRequest { bytes, kept }).is_ok()
    }
}

fn run_sink(
    pipe: PipeId,
    made: Result<(Prepared, FileMap), Reason>,
    requests: &Receiver<SettleRequest>,
    results: &queue::Sender<Completion>,
    counters: &Counters,
) {
    let (ready, map) = match made {
        Ok((ready, map)) => (Some(ready), Ok(map)),
        Err(reason) => (None, Err(reason)),
    };
    results.send(Completion::Prepared(pipe, map));
    // when the agent ends, the note stays: the host may still write
    let Ok(request) = requests.recv() else {
        return;
    };
    let done = ready.map_or(Ok(()), |ready| ready.settle(request.bytes, &request.kept));
    let errno = match done {
        Ok(()) => 0,
        Err(e) => {
            counters.set_last_detail(format!("a file that could not be settled: {e}"));
            e.raw_os_error().unwrap_or(libc::EIO)
        }
    };
    results.send(Completion::Settled(pipe, errno));
}
