// SPDX-License-Identifier: Apache-2.0
//! The table of source connections that the program splices from, and their relays.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vpipe::engine::{ByteRange, Engine, PerProcess, PipeEvent, PipeState, Table};
use vpipe::{FileId, TransferKind, classify, file_id, settings};

use super::Reply;
use crate::guard::{borrow, is_nonblocking};
use crate::{epoll_sets, io_uring};

/// Most connections in the table.
const MAX_CONNECTIONS: usize = 4096;

/// A source connection.
#[derive(Debug, Default)]
pub(super) struct Source {
    pub(super) fd: RawFd,
    /// The next request in bytes if the program counts down.
    pub(super) expected: u64,
    /// The first request had an unknown length.
    pub(super) unbounded: bool,
    /// Bytes left, if the program counts down.
    pub(super) rest: u64,
    /// Its bytes in the kernel pipe.
    pub(super) inside: u64,
    /// Number of its relay.
    pub(super) relay: Option<u64>,
    /// Bytes that the program believes to be in its pipe, and that the sink has.
    pub(super) owed: u64,
}

#[derive(Default)]
pub(super) struct Connections {
    pub(super) sources: HashMap<FileId, Source>,
    /// The source of the bytes in each pipe.
    pub(super) pipes: HashMap<FileId, FileId>,
}

pub(super) static CONNECTIONS: PerProcess<Mutex<Connections>> = PerProcess::new();
/// Number of entries. While it is 0, a small `splice` takes no lock.
pub(super) static ENTRIES: AtomicUsize = AtomicUsize::new(0);
/// Number of small calls that were checked.
pub(super) static SMALL_CALLS: AtomicUsize = AtomicUsize::new(0);
/// Small calls between two checks whether the connections are still open.
pub(super) const SWEEP_INTERVAL_CALLS: usize = 64;

impl Connections {
    pub(super) fn lock() -> MutexGuard<'static, Self> {
        let known = CONNECTIONS.get();
        known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_relayed(&self, source: &FileId) -> bool {
        let source = self.sources.get(source);
        source.is_some_and(Source::is_relayed)
    }

    pub(super) fn count(&self) {
        let entries = self.sources.len() + self.pipes.len();
        ENTRIES.store(entries, Ordering::Relaxed);
    }

    /// Removes closed connections: the library sees only the close of a relayed one.
    pub(super) fn sweep(&mut self) {
        let is_open = |id: &FileId, fd| borrow(fd).is_some_and(|fd| file_id(fd) == Ok(*id));
        self.sources.retain(|id, source| is_open(id, source.fd));
        let sources = &self.sources;
        self.pipes.retain(|_, source| sources.contains_key(source));
        self.count();
    }

    pub(super) fn room(&mut self) {
        if self.sources.len() >= MAX_CONNECTIONS {
            self.sweep();
            self.sources.retain(|_, source| source.is_relayed());
            self.pipes
                .retain(|_, source| self.sources.contains_key(source));
        }
        if self.pipes.len() >= MAX_CONNECTIONS {
            let sources = &self.sources;
            self.pipes
                .retain(|_, id| sources.get(id).is_some_and(|source| source.owed > 0));
        }
    }
}

impl Source {
    /// Whether the host relays it, or the program does not know of all relayed bytes yet.
    pub(super) fn is_relayed(&self) -> bool {
        self.relay.is_some() || self.owed > 0
    }

    /// Reports relayed bytes; `None` when the kernel must answer.
    pub(super) fn report_relayed(&mut self, table: &mut Table, count: u64) -> Option<Reply> {
        let id = self.relay?;
        let Some(record) = table.pipe(id) else {
            self.relay = None;
            return None;
        };
        let n = record.unreported().min(count);
        if n > 0 {
            record.reported += n;
            record.idle_polls = 0;
            self.owed += n;
            self.expected = self.expected.saturating_sub(n);
            return Some(Reply::Bytes(n));
        }
        match record.state {
            PipeState::Active => Some(Reply::Errno(libc::EAGAIN)),
            PipeState::Finished(errno)
                if errno != 0 && (record.lost.source || !record.lost.sink) =>
            {
                self.end(table);
                Some(Reply::Errno(errno))
            }
            PipeState::Finished(_) | PipeState::Refused(_) => {
                self.end(table);
                None
            }
        }
    }

    /// Reports bytes that leave the pipe in the program's view; `None` when these must wait.
    pub(super) fn report_leaving(&mut self, table: &mut Table, count: u64) -> Option<u64> {
        let record = self.relay.and_then(|id| table.pipe(id));
        let waits = record.as_ref().is_some_and(|record| !record.has_update());
        let n = count.min(self.owed - u64::from(waits));
        if waits && n == 0 {
            return None;
        }
        self.owed -= n;
        // the next call of either side reports an error
        if self.owed == 0
            && let Some(record) = record
            && record.unreported() == 0
            && matches!(record.state, PipeState::Finished(0) | PipeState::Refused(_))
        {
            self.end(table);
        }
        Some(n)
    }

    pub(super) fn end(&mut self, table: &mut Table) {
        if let Some(id) = self.relay.take() {
            table.remove(id);
        }
    }

    /// Starts a relay of the rest, if possible.
    pub(super) fn begin(
        &mut self,
        engine: &'static Engine,
        table: &mut Table,
        id: FileId,
        to: RawFd,
    ) -> Option<()> {
        let length = std::mem::take(&mut self.rest);
        if length < settings().min_relay_bytes || self.relay.is_some() {
            return None;
        }
        if table.is_agent_unreachable() || io_uring::is_used() {
            return None;
        }
        let (source, sink): (BorrowedFd<'_>, BorrowedFd<'_>) = (borrow(self.fd)?, borrow(to)?);
        if !is_nonblocking(source) || !is_nonblocking(sink) {
            return None;
        }
        let found = classify(source, sink)
            .filter(|found| found.kind == TransferKind::Relay && found.source == id)?;
        let (from, to) = (source.as_raw_fd(), sink.as_raw_fd());
        let watcher = Box::new(move |news| {
            let over = news != PipeEvent::Progress;
            epoll_sets::add_to_sets(to, over);
            if over {
                epoll_sets::add_to_sets(from, true);
            }
        });
        let part = ByteRange {
            length,
            ..ByteRange::default()
        };
        let begun = engine.start(table, (source, sink), found, part, watcher);
        self.relay = Some(begun.ok()?);
        self.owed = 1;
        // the kernel's socket has no events meanwhile
        if let Some(mut descriptor) = epoll_sets::descriptor(from) {
            descriptor.remove_from_sets(from);
        }
        Some(())
    }
}
