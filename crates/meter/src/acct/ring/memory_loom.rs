// SPDX-License-Identifier: Apache-2.0
//! `memory.rs` for loom: a small ring whose words are atomics of the model.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};

use super::super::layout::Event;
use super::super::maps::MapError;
use super::HEADER;

/// Bytes of a record: header and event.
pub(super) const RECORD: u64 = HEADER + Event::BYTES as u64;

#[derive(Default)]
struct Place {
    header: AtomicU32,
    event: UnsafeCell<[u8; Event::BYTES]>,
}

struct Shared {
    consumed: AtomicU64,
    produced: AtomicU64,
    places: Box<[Place]>,
}

// SAFETY: loom checks the order of all uses of an event's bytes.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// The memory of a ring; consumer and producers have a clone each.
#[derive(Clone)]
pub(super) struct Memory(Arc<Shared>);

impl Memory {
    /// An empty ring with room for `places` records.
    #[cfg(test)]
    pub(super) fn new(places: usize) -> Self {
        Self(Arc::new(Shared {
            consumed: AtomicU64::new(0),
            produced: AtomicU64::new(0),
            places: (0..places).map(|_| Place::default()).collect(),
        }))
    }

    /// Size of the data, bytes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.0.places.len() as u64 * RECORD
    }

    /// No model uses a ring of the kernel.
    pub(super) fn map(_fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        Err(MapError {
            what: "event ring",
            source: io::ErrorKind::Unsupported.into(),
        })
    }

    pub(super) fn consumed(&self) -> &AtomicU64 {
        &self.0.consumed
    }

    /// It is no load for loom, which forgets the loads of other threads when a thread loads before it stores, and then leaves
    /// orders out.
    pub(super) fn position(&self) -> u64 {
        // SAFETY: the only writer is the thread that calls this.
        unsafe { self.0.consumed.unsync_load() }
    }

    pub(super) fn produced(&self) -> &AtomicU64 {
        &self.0.produced
    }

    /// The value of [`Memory::produced`] for producers, which change it under a lock.
    #[cfg(test)]
    pub(super) fn producer_position(&self) -> u64 {
        // SAFETY: the caller holds the lock.
        unsafe { self.0.produced.unsync_load() }
    }

    fn place(&self, at: u64) -> &Place {
        assert!(at.is_multiple_of(RECORD), "no record begins at {at}");
        &self.0.places[(at / RECORD) as usize % self.0.places.len()]
    }

    pub(super) fn header(&self, at: u64) -> &AtomicU32 {
        &self.place(at).header
    }

    pub(super) fn event(&self, at: u64) -> [u8; Event::BYTES] {
        // SAFETY: the pointer is valid during the call; loom reports a write beside it.
        self.place(at).event.with(|event| unsafe { *event })
    }

    /// Writes a record's bytes, as the kernel's programs do.
    #[cfg(test)]
    pub(super) fn write(&self, at: u64, bytes: [u8; Event::BYTES]) {
        // SAFETY: the pointer is valid during the call; loom reports an access beside it.
        self.place(at)
            .event
            .with_mut(|event| unsafe { *event = bytes });
    }
}
