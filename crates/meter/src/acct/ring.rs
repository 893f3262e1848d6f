// SPDX-License-Identifier: Apache-2.0
//! Reads a BPF ring buffer (kernel: Documentation/bpf/ringbuf.rst) without allocation.
//!
//! libbpf's reader takes a callback and an allocated list of rings; a slot controller needs a plain loop over one ring.

#[cfg(loom)]
#[cfg(test)]
mod loom_models;
#[cfg(not(loom))]
mod memory;
#[cfg(loom)]
#[path = "ring/memory_loom.rs"]
mod memory;

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use self::memory::Memory;
use super::layout::Event;
use super::maps::MapError;

const BUSY: u32 = 1 << 31;
const DISCARD: u32 = 1 << 30;
const HEADER: u64 = 8;

/// The consumer's end of an event ring.
pub struct Ring {
    memory: Memory,
}

impl Ring {
    /// Maps a ring that [`super::Acct::prepare_core`] created.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        Memory::map(fd).map(|memory| Self { memory })
    }

    /// Removes and returns the next event, if there is one.
    pub fn pop(&mut self) -> Option<Event> {
        loop {
            let at = self.memory.position();
            if at >= self.memory.produced().load(Ordering::Acquire) {
                return None;
            }
            let header = self.memory.header(at).load(Ordering::Acquire);
            if header & BUSY != 0 {
                return None;
            }
            let len = header & !(BUSY | DISCARD);
            let mut event = None;
            if header & DISCARD == 0 && len as usize >= Event::BYTES {
                event = Event::parse(&self.memory.event(at));
            }
            self.memory.consumed().store(
                at + (u64::from(len) + HEADER).next_multiple_of(8),
                Ordering::Release,
            );
            if event.is_some() {
                return event;
            }
        }
    }
}
