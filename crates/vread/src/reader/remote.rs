// SPDX-License-Identifier: Apache-2.0
//! Reads blocks of other hosts through this host's peer worker.
//!
//! A thread sends its request at once, even if it may not wait for the answer. The peer worker
//! writes the bytes into a slot of the shared memory, and the thread copies them into the VM's
//! memory. For a sequential reader the thread requests further bytes ahead, into further slots.
//! Threads that wait take turns at receiving.
//!
//! The host with the disk checks the lease before and after the read. Bytes fetched ahead are at
//! most [`UNREAD_TIMEOUT`](super::slots::UNREAD_TIMEOUT) old when the VM gets them; a block of one
//! name never changes.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fuse_backend_rs::api::filesystem::ZeroCopyWriter;
use fuse_backend_rs::file_buf::FileVolatileSlice;
use rustix::event::{PollFd, PollFlags};
use viola_proto::agent::BlockKey;

use super::guest_buffers::{
    FillGuest, GuestBuffers, ReadOnly, must_not_wait, will_be_retried, would_wait,
};
use super::slots::{ReadRange, Slots};
use crate::lock::lock;
use crate::peer::datagram::Datagram;
use crate::peer::shared_memory::{SLOT_BYTES, SharedMemory};
use crate::peer::wire::{ErrorCode, Located, Message};
use crate::poll;

/// Time limit for a look-up. The peer worker answers earlier when a host does not.
const FIND_TIMEOUT: Duration = Duration::from_millis(1000);
/// Longest sleep.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A peer worker without a heartbeat for this long counts as dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(600);
/// Time for which the reader does not ask a dead peer worker again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// A block is looked up again when its last look-up or read is older than this.
const MAX_LOOKUP_AGE: Duration = Duration::from_secs(1);
/// Slots that requests ahead leave free for reads.
const RESERVED_SLOTS: usize = 8;

/// The reader's link to the peer worker.
#[derive(Debug)]
pub(super) struct PeerLink {
    socket: OwnedFd,
    memory: SharedMemory,
    state: Mutex<State>,
    more: Condvar,
    closed: AtomicBool,
    reads: AtomicU64,
    errors: AtomicU64,
    bytes: Mutex<BTreeMap<String, u64>>,
}

/// The host that has a block, or why none is known.
type FindResult = Result<(u16, Located), ErrorCode>;

#[derive(Debug)]
struct State {
    next: u64,
    slots: Slots,
    finds: Vec<(u64, Option<FindResult>)>,
    receiving: bool,
    /// Time before which the peer worker is not asked.
    retry_at: Option<Instant>,
    heartbeat: u64,
    heartbeat_at: Instant,
}

/// A block of another host.
#[derive(Debug)]
pub(super) struct RemoteBlock {
    link: Arc<PeerLink>,
    host: u16,
    key: Arc<BlockKey>,
    located: Located,
    stale: AtomicBool,
    found_at: Instant,
    /// Time of the last successful look-up or read, milliseconds after `found_at`.
    confirmed_ms: AtomicU64,
}

impl PeerLink {
    pub(super) fn new(socket: OwnedFd, memory: OwnedFd) -> io::Result<Self> {
        let memory = SharedMemory::map(memory, false)?;
        let state = State {
            next: 1,
            slots: Slots::default(),
            finds: Vec::new(),
            receiving: false,
            retry_at: None,
            heartbeat: memory.heartbeat(),
            heartbeat_at: Instant::now(),
        };
        Ok(Self {
            socket,
            memory,
            state: Mutex::new(state),
            more: Condvar::new(),
            closed: AtomicBool::new(false),
            reads: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            bytes: Mutex::default(),
        })
    }

    /// Takes over the counts of the previous link.
    pub(super) fn take_counts(&self, old: &Self) {
        self.reads.store(old.reads(), Ordering::Relaxed);
        self.errors.store(old.errors(), Ordering::Relaxed);
        *lock(&self.bytes) = old.bytes();
    }

    pub(super) fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    pub(super) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    pub(super) fn bytes(&self) -> BTreeMap<String, u64> {
        let bytes = lock(&self.bytes);
        bytes.clone()
    }

    /// Closes the link and fails all requests.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.more.notify_all();
    }

    /// Finds the host that has a block. Waits for the answer.
    pub(super) fn find(remote: &Arc<Self>, key: &BlockKey) -> Option<RemoteBlock> {
        let mut state = remote.lock();
        if !remote.may_ask(&mut state) {
            return None;
        }
        let begun = Instant::now();
        let id = state.next_id();
        let question = Datagram {
            host: 0,
            slot: 0,
            id,
            message: Message::Find { key: key.clone() },
        };
        if let Err(e) = question.send(&remote.socket) {
            remote.handle_send_error(&e);
            return None;
        }
        state.finds.push((id, None));
        let answer = loop {
            let place = state.finds.iter().position(|find| find.0 == id);
            match place.map(|i| (i, state.finds[i].1.is_some())) {
                None => break None,
                Some((i, true)) => break state.finds.swap_remove(i).1,
                Some((i, false)) if begun.elapsed() > FIND_TIMEOUT => {
                    state.finds.swap_remove(i);
                    break None;
                }
                Some(_) => {}
            }
            let (now, alive) = remote.wait(state, begun);
            state = now;
            if !alive {
                state.finds.retain(|find| find.0 != id);
                break None;
            }
        };
        let (host, located) = answer?.ok()?;
        Some(RemoteBlock {
            link: remote.clone(),
            host,
            key: Arc::new(key.clone()),
            located,
            stale: AtomicBool::new(false),
            found_at: begun,
            confirmed_ms: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn may_ask(&self, state: &mut State) -> bool {
        if state.retry_at.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        state.retry_at = None;
        !self.closed.load(Ordering::SeqCst)
    }

    /// Closes the link unless the socket is only full.
    fn handle_send_error(&self, e: &io::Error) {
        if e.kind() != io::ErrorKind::WouldBlock {
            self.close();
        }
    }

    /// Requests bytes into a free slot; false when no slot is free or the socket is full.
    fn request(&self, state: &mut State, range: ReadRange, ahead: bool) -> Result<bool, ErrorCode> {
        if !self.may_ask(state) {
            return Err(ErrorCode::Gone);
        }
        let Some(slot) = state
            .slots
            .take_free(if ahead { RESERVED_SLOTS } else { 0 })
        else {
            return Ok(false);
        };
        let id = state.next_id();
        let datagram = Datagram {
            host: range.host,
            slot: slot as u16,
            id,
            message: Message::Read {
                key: (*range.key).clone(),
                meta: range.meta,
                offset: range.offset,
                length: range.length,
            },
        };
        match datagram.send(&self.socket) {
            Ok(()) => {
                state.slots.mark_requested(slot, id, range, ahead);
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(_) => {
                self.close();
                Err(ErrorCode::Gone)
            }
        }
    }

    /// Receives pending answers.
    fn receive(&self, state: &mut State) {
        loop {
            match Datagram::receive(&self.socket) {
                Ok(Some(answer)) => state.handle_answer(answer),
                Ok(None) => return,
                Err(_) => return self.close(),
            }
        }
    }

    /// Waits up to [`POLL_INTERVAL`] for answers; false when none will come.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        begun: Instant,
    ) -> (MutexGuard<'a, State>, bool) {
        if state.receiving {
            let waited = self.more.wait_timeout(state, POLL_INTERVAL);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        } else {
            state.receiving = true;
            drop(state);
            // If the wait fails, the caller checks again.
            let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
            let _ = poll::wait(&mut socket, Some(POLL_INTERVAL));
            state = self.lock();
            self.receive(&mut state);
            state.receiving = false;
            self.more.notify_all();
        }
        let (now, heartbeat) = (Instant::now(), self.memory.heartbeat());
        if heartbeat != state.heartbeat {
            (state.heartbeat, state.heartbeat_at) = (heartbeat, now);
        }
        if now.saturating_duration_since(state.heartbeat_at.max(begun)) > HEARTBEAT_TIMEOUT {
            state.retry_at = Some(now + RETRY_INTERVAL);
            return (state, false);
        }
        let alive = !self.closed.load(Ordering::SeqCst);
        (state, alive)
    }

    /// Fills the buffers with bytes of a block.
    fn fill(
        &self,
        block: &RemoteBlock,
        meta: bool,
        offset: u64,
        room: &mut GuestBuffers<'_>,
    ) -> Result<usize, ErrorCode> {
        let (mut at, end) = (offset, offset + room.left as u64);
        let begun = Instant::now();
        let mut state = self.lock();
        self.receive_if_free(&mut state);
        while at < end {
            if self.closed.load(Ordering::SeqCst) {
                return Err(ErrorCode::Gone);
            }
            let range = ReadRange {
                host: block.host,
                key: block.key.clone(),
                meta,
                offset: at,
                length: (end - at).min(SLOT_BYTES as u64) as u32,
            };
            match state.slots.find(&range) {
                super::slots::SlotContent::Arrived(slot, skip, length) => {
                    let length = length.min(range.length);
                    state.slots.begin_copy(slot);
                    drop(state);
                    if let Some(start) = self.memory.slot(slot) {
                        // SAFETY: `skip` and `length` are within the slot, as they were when it was asked for.
                        unsafe { room.copy_from(start.add(skip as usize), length as usize) };
                    }
                    at += u64::from(length);
                    state = self.lock();
                    state.slots.end_copy(slot, length);
                    continue;
                }
                super::slots::SlotContent::Failed(code) => return Err(code),
                super::slots::SlotContent::Requested => {}
                super::slots::SlotContent::Absent => {
                    self.request(&mut state, range, false)?;
                }
            }
            if must_not_wait() {
                let _ = would_wait();
                return Err(ErrorCode::Gone);
            }
            let (now, alive) = self.wait(state, begun);
            state = now;
            if !alive {
                return Err(ErrorCode::Gone);
            }
        }
        Ok((at - offset) as usize)
    }

    fn receive_if_free(&self, state: &mut State) {
        if !state.receiving {
            self.receive(state);
        }
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn handle_answer(&mut self, answer: Datagram) {
        let (id, host) = (answer.id, answer.host);
        if let Some(find) = self.finds.iter_mut().find(|find| find.0 == id) {
            find.1 = Some(match answer.message {
                Message::Found(located) => Ok((host, located)),
                Message::Failed(code) => Err(code),
                _ => Err(ErrorCode::Io),
            });
            return;
        }
        self.slots.complete(
            id,
            match answer.message {
                Message::Data { length } => Ok(length),
                Message::Failed(code) => Err(code),
                _ => Err(ErrorCode::Io),
            },
        );
    }
}

impl RemoteBlock {
    pub(super) fn len(&self, meta: bool) -> u64 {
        match meta {
            true => self.located.meta,
            false => self.located.data,
        }
    }

    /// Whether the block counts as named without another look-up.
    pub(super) fn holds(&self) -> bool {
        let confirmed_ms = Duration::from_millis(self.confirmed_ms.load(Ordering::Relaxed));
        !self.stale.load(Ordering::SeqCst)
            && !self.link.closed.load(Ordering::SeqCst)
            && self.found_at.elapsed() < confirmed_ms + MAX_LOOKUP_AGE
    }

    /// Requests bytes ahead. Bytes that do not get a slot are requested when they are read.
    pub(super) fn prefetch(&self, meta: bool, range: Range<u64>) {
        let mut state = self.link.lock();
        for offset in range.clone().step_by(SLOT_BYTES) {
            let range = ReadRange {
                host: self.host,
                key: self.key.clone(),
                meta,
                offset,
                length: (range.end - offset).min(SLOT_BYTES as u64) as u32,
            };
            if !matches!(self.link.request(&mut state, range, true), Ok(true)) {
                return;
            }
        }
    }

    /// Reads into an answer to the VM. ESTALE: the block is no longer there; EKEYREVOKED: it was withdrawn during the
    /// read.
    pub(super) fn read(
        &self,
        meta: bool,
        writer: &mut dyn ZeroCopyWriter,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        let mut fetch = RemoteFile {
            block: self,
            meta,
            failed: None,
        };
        let written = writer.write_from(&mut ReadOnly(&mut fetch), length, offset);
        let remote = &self.link;
        let Some(code) = fetch.failed else {
            let length = written?;
            self.confirmed_ms.store(
                self.found_at.elapsed().as_millis() as u64,
                Ordering::Relaxed,
            );
            remote.reads.fetch_add(1, Ordering::Relaxed);
            let mut bytes = lock(&remote.bytes);
            match bytes.get_mut(&self.located.datanode) {
                Some(sum) => *sum += length as u64,
                None => drop(bytes.insert(self.located.datanode.clone(), length as u64)),
            }
            return Ok(length);
        };
        if will_be_retried() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.stale.store(true, Ordering::SeqCst);
        Err(io::Error::from_raw_os_error(match code {
            ErrorCode::Unknown => libc::ESTALE,
            ErrorCode::Withdrawn => libc::EKEYREVOKED,
            ErrorCode::Io | ErrorCode::Refused | ErrorCode::Gone => {
                remote.errors.fetch_add(1, Ordering::Relaxed);
                libc::EIO
            }
        }))
    }
}

/// The data or checksum file of a remote block.
struct RemoteFile<'a> {
    block: &'a RemoteBlock,
    meta: bool,
    failed: Option<ErrorCode>,
}

impl FillGuest for RemoteFile<'_> {
    fn fill(&mut self, slices: &[FileVolatileSlice<'_>], offset: u64) -> io::Result<usize> {
        let mut room = GuestBuffers::new(slices);
        let block = self.block;
        let filled = block.link.fill(block, self.meta, offset, &mut room);
        filled.map_err(|code| {
            self.failed = Some(code);
            match will_be_retried() {
                true => io::ErrorKind::WouldBlock.into(),
                false => io::Error::other(code.to_string()),
            }
        })
    }
}
