// SPDX-License-Identifier: Apache-2.0
//! Reads a BPF ring buffer (kernel: Documentation/bpf/ringbuf.rst) without allocation.
//!
//! libbpf's reader takes a callback and an allocated list of rings; a slot controller needs a plain loop over one ring.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::layout::{Event, RING_BYTES};
use super::maps::MapError;

const BUSY: u32 = 1 << 31;
const DISCARD: u32 = 1 << 30;
const HEADER: u64 = 8;

/// The consumer's end of an event ring.
pub struct Ring {
    consumer: NonNull<u8>,
    producer: NonNull<u8>,
    data_bytes: usize,
    page: usize,
}

// SAFETY: the mapped memory stays valid until drop; one consumer at a time by `&mut self`.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps a ring that [`super::Acct::prepare_core`] created.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
        let page = rustix::param::page_size();
        let bytes = RING_BYTES as usize;
        let fail = |e: rustix::io::Errno| MapError {
            what: "event ring",
            source: e.into(),
        };
        let null = || MapError {
            what: "event ring",
            source: io::Error::from(io::ErrorKind::InvalidData),
        };
        // SAFETY: fresh mappings at addresses of the kernel's choice; it checks length and access.
        let (consumer, producer) = unsafe {
            (
                mmap(
                    std::ptr::null_mut(),
                    page,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    fd,
                    0,
                )
                .map_err(fail)?,
                mmap(
                    std::ptr::null_mut(),
                    page + 2 * bytes,
                    ProtFlags::READ,
                    MapFlags::SHARED,
                    fd,
                    page as u64,
                )
                .map_err(fail)?,
            )
        };
        Ok(Self {
            consumer: NonNull::new(consumer.cast()).ok_or_else(null)?,
            producer: NonNull::new(producer.cast()).ok_or_else(null)?,
            data_bytes: bytes,
            page,
        })
    }

    /// Removes and returns the next event, if there is one.
    pub fn pop(&mut self) -> Option<Event> {
        // SAFETY: both positions are aligned words at the start of pages that stay mapped.
        let (consumed, produced) = unsafe {
            (
                &*self.consumer.as_ptr().cast::<AtomicU64>(),
                &*self.producer.as_ptr().cast::<AtomicU64>(),
            )
        };
        loop {
            let at = consumed.load(Ordering::Relaxed);
            if at >= produced.load(Ordering::Acquire) {
                return None;
            }
            let offset = self.page + (at as usize & (self.data_bytes - 1));
            // SAFETY: offset is inside the data, which is mapped twice in a row so that records never wrap.
            let record = unsafe { self.producer.as_ptr().add(offset) };
            // SAFETY: records are eight-byte aligned and start with their length.
            let header = unsafe { &*record.cast::<AtomicU32>() }.load(Ordering::Acquire);
            if header & BUSY != 0 {
                return None;
            }
            let len = header & !(BUSY | DISCARD);
            let mut event = None;
            if header & DISCARD == 0 && len as usize >= Event::BYTES {
                let mut bytes = [0; Event::BYTES];
                // SAFETY: the record holds at least that many bytes after its header.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        record.add(HEADER as usize),
                        bytes.as_mut_ptr(),
                        Event::BYTES,
                    );
                }
                event = Event::parse(&bytes);
            }
            consumed.store(
                at + (u64::from(len) + HEADER).next_multiple_of(8),
                Ordering::Release,
            );
            if event.is_some() {
                return event;
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mappings made in `open`, not used after this.
        unsafe {
            let _ = munmap(self.consumer.as_ptr().cast(), self.page);
            let _ = munmap(
                self.producer.as_ptr().cast(),
                self.page + 2 * self.data_bytes,
            );
        }
    }
}
