// SPDX-License-Identifier: Apache-2.0
//! A file that the host writes to: made ready before, and given back after.
//!
//! | module | does |
//! |---|---|
//! | `fill` | written blocks for every byte |
//! | `flag` | keeps everybody from moving or freeing them |
//! | `note` | what must be undone after a kill, where the next run finds it |
//! | `cache` | what the kernel has in memory of it |
//! | `ready` | all of that in its request |
//!
//! It waits for disks, so each such file has a thread of its own.

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
use super::{Completion, CompletionSender};
use note::Notes;
use prepared::Prepared;

/// A thread's stack in bytes.
const STACK: usize = 256 << 10;

/// What is to be done with a file that was made ready.
#[derive(Debug)]
struct SettleRequest {
    /// So many bytes have come.
    bytes: u64,
    /// The first of them, which the host has not written.
    kept: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Target {
    /// Which file.
    pub key: FileKey,
    /// First byte.
    pub offset: u64,
    /// Where its bytes are, once it is ready.
    pub map: Option<FileMap>,
    /// Bytes that were received before the host had the connection: the first ones.
    pub kept: Vec<u8>,
    requests: Sender<SettleRequest>,
    stop: Arc<AtomicBool>,
}

/// What a program may have written to: its device's and inode's numbers.
///
/// # Errors
/// [`Reason::BadFile`] when it is no regular file, or the program could not write anywhere in it.
pub fn writable(program_file: BorrowedFd<'_>) -> Result<FileKey, Reason> {
    let flags = rustix::fs::fcntl_getfl(program_file).map_err(|_| Reason::BadFile)?;
    let stat = rustix::fs::fstat(program_file).map_err(|_| Reason::BadFile)?;
    let way = flags & OFlags::RWMODE;
    // the agent may write what the program may not
    let good = (way == OFlags::WRONLY || way == OFlags::RDWR)
        && !flags.intersects(OFlags::PATH | OFlags::APPEND)
        && FileType::from_raw_mode(stat.st_mode).is_file();
    match good {
        true => Ok((stat.st_dev, stat.st_ino)),
        false => Err(Reason::BadFile),
    }
}

impl Target {
    /// Begins to make a file ready for `length` bytes at `offset`; [`Completion::Prepared`] follows.
    ///
    /// # Errors
    /// As [`writable`], or there is no room for a thread.
    pub fn begin(
        pipe: PipeId,
        program_file: OwnedFd,
        (offset, length): (u64, u64),
        notes: Notes,
        (results, counters): (&CompletionSender, &Arc<Counters>),
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

    /// The host is done, or was never asked, and so many bytes have come in all; [`Completion::Settled`] follows. `false` when
    /// there is nobody to do it.
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
    results: &CompletionSender,
    counters: &Counters,
) {
    let (ready, map) = match made {
        Ok((ready, map)) => (Some(ready), Ok(map)),
        Err(reason) => (None, Err(reason)),
    };
    results.send(Completion::Prepared(pipe, map));
    // an agent that ends leaves a note: the host may still write
    let Ok(request) = requests.recv() else {
        return;
    };
    let done = ready.map_or(Ok(()), |ready| ready.settle(request.bytes, &request.kept));
    let errno = match done {
        Ok(()) => 0,
        Err(e) => {
            counters.set_last_detail(format!("a file that was written to: {e}"));
            e.raw_os_error().unwrap_or(libc::EIO)
        }
    };
    results.send(Completion::Settled(pipe, errno));
}
