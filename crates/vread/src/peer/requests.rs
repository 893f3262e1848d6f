// SPDX-License-Identifier: Apache-2.0
//! Answers requests of another host: in the connection's thread if that needs no waiting, else in the pool.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};
use viola_proto::agent::BlockKey;

use super::hosts::{Host, add};
use super::wire::{ErrorCode, HEADER, Located, Message, data_header};
use crate::lock::lock;
use crate::reader::{BlockHandle, ReadError, Service};

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    Find {
        key: BlockKey,
    },
    Read {
        key: BlockKey,
        meta: bool,
        offset: u64,
        length: u32,
    },
}

impl Request {
    pub(super) fn key(&self) -> &BlockKey {
        match self {
            Self::Find { key } | Self::Read { key, .. } => key,
        }
    }

    /// Memory that the request needs until its answer is sent, bytes.
    pub(super) fn cost(&self) -> usize {
        match self {
            Self::Find { .. } => 1024,
            Self::Read { length, .. } => *length as usize + HEADER,
        }
    }
}

/// The host and the reader on whose behalf it asks.
#[derive(Debug, Clone)]
pub(super) struct Requester {
    pub(super) host: Arc<Host>,
    pub(super) reader: Arc<str>,
}

impl Requester {
    fn may<'a>(&'a self, key: &'a BlockKey) -> impl Fn(&str) -> bool + 'a {
        |datanode: &str| self.host.may(&self.reader, datanode, key.pool())
    }

    /// The requested block, if it is known without waiting.
    pub(super) fn known(&self, service: &Service, key: &BlockKey) -> Option<BlockHandle> {
        service.cached_local(key, &self.may(key))
    }

    /// Carries out a request and returns the answer's frame. Returns `None` when that needs waiting and `waits` is
    /// false; the buffer is kept then.
    pub(super) fn answer(
        &self,
        service: &Service,
        id: u64,
        request: &Request,
        buffer: &mut Vec<u8>,
        waits: bool,
    ) -> Option<Vec<u8>> {
        buffer.clear();
        let done = self.try_answer(service, id, request, buffer, waits);
        if done == Err(ReadError::WouldWait) {
            return None;
        }
        let counts = &self.host.counts;
        add(&counts.answered, 1);
        if let Err(failed) = done {
            let code = match failed {
                ReadError::Ended => ErrorCode::Unknown,
                ReadError::Withdrawn => ErrorCode::Withdrawn,
                ReadError::WouldWait | ReadError::Io => ErrorCode::Io,
            };
            counts.failed(code);
            buffer.clear();
            Message::Failed(code).encode(id, buffer);
        } else if let Request::Read { length, .. } = request {
            add(&counts.bytes_out, (*length).into());
        }
        Some(std::mem::take(buffer))
    }

    fn try_answer(
        &self,
        service: &Service,
        id: u64,
        request: &Request,
        buffer: &mut Vec<u8>,
        waits: bool,
    ) -> Result<(), ReadError> {
        let may = self.may(request.key());
        let find = || match waits {
            true => service
                .find_local(request.key(), &may)
                .ok_or(ReadError::Ended),
            false => service
                .cached_local(request.key(), &may)
                .ok_or(ReadError::WouldWait),
        };
        match request {
            Request::Find { .. } => {
                let block = find()?;
                let located = Located {
                    data: block.len(false),
                    meta: block.len(true),
                    datanode: block.datanode().to_owned(),
                    name: self.host.plain_name(block.datanode()),
                };
                Message::Found(located).encode(id, buffer);
                Ok(())
            }
            Request::Read {
                meta,
                offset,
                length,
                ..
            } => {
                buffer.extend_from_slice(&data_header(id, *length));
                buffer.resize(HEADER + *length as usize, 0);
                let room = &mut buffer[HEADER..];
                // The agent may have named the block again, perhaps at another place.
                match service.read_local(&find()?, *meta, *offset, room, waits) {
                    Err(ReadError::Ended) => {
                        service.read_local(&find()?, *meta, *offset, room, waits)
                    }
                    done => done,
                }
            }
        }
    }
}

/// Answer frames that the pool has made for a connection.
#[derive(Debug)]
pub(super) struct FinishedFrames {
    frames: Mutex<Vec<(usize, Vec<u8>)>>,
    event: OwnedFd,
}

impl AsFd for FinishedFrames {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl FinishedFrames {
    pub(super) fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            frames: Mutex::default(),
            event: eventfd(0, flags)?,
        })
    }

    fn add(&self, cost: usize, frame: Vec<u8>) {
        let mut frames = lock(&self.frames);
        frames.push((cost, frame));
        drop(frames);
        self.wake();
    }

    /// Wakes the connection's thread.
    pub(super) fn wake(&self) {
        // The write fails only when the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes all frames, each with the cost of its request.
    pub(super) fn take(&self) -> Vec<(usize, Vec<u8>)> {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        std::mem::take(&mut *lock(&self.frames))
    }
}

/// A request for the pool.
pub(super) struct Job {
    pub(super) service: Arc<Service>,
    pub(super) requester: Requester,
    pub(super) id: u64,
    pub(super) request: Request,
    pub(super) buffer: Vec<u8>,
    pub(super) finished: Arc<FinishedFrames>,
}

impl Job {
    pub(super) fn work(mut self) {
        let frame = self.requester.answer(
            &self.service,
            self.id,
            &self.request,
            &mut self.buffer,
            true,
        );
        // With `waits` the answer is never `None`.
        let frame = frame.unwrap_or_default();
        self.finished.add(self.request.cost(), frame);
    }
}
