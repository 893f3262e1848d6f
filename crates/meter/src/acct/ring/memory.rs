// SPDX-License-Identifier: Apache-2.0
//! The memory of a BPF ring buffer, mapped.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::super::layout::{Event, RING_BYTES};
use super::super::maps::MapError;
use super::HEADER;

/// The positions of consumer and producer, each in a page of its own, and the data behind them, twice in a row.
pub(super) struct Memory {
    consumer: NonNull<u8>,
    producer: NonNull<u8>,
    data_bytes: usize,
    page: usize,
}

// SAFETY: the mapped memory stays valid until drop; one consumer at a time by `&mut` of `Ring`.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) fn map(fd: BorrowedFd<'_>) -> Result<Self, MapError> {
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

    /// The consumer's position: where it reads next.
    pub(super) fn consumed(&self) -> &AtomicU64 {
        // SAFETY: an aligned word at the start of a page that stays mapped.
        unsafe { &*self.consumer.as_ptr().cast() }
    }

    /// The value of [`Memory::consumed`], which only the consumer changes.
    pub(super) fn position(&self) -> u64 {
        self.consumed().load(Ordering::Relaxed)
    }

    /// The producer's position: where it writes next.
    pub(super) fn produced(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { &*self.producer.as_ptr().cast() }
    }

    fn record(&self, at: u64) -> NonNull<u8> {
        let offset = self.page + (at as usize & (self.data_bytes - 1));
        // SAFETY: offset is inside the data, which is mapped twice in a row so that records never wrap.
        unsafe { self.producer.add(offset) }
    }

    /// Length and state of the record at a position.
    pub(super) fn header(&self, at: u64) -> &AtomicU32 {
        // SAFETY: records are eight-byte aligned and start with their length.
        unsafe { &*self.record(at).as_ptr().cast() }
    }

    /// The first bytes of the record at a position, which must be committed and at least as long.
    pub(super) fn event(&self, at: u64) -> [u8; Event::BYTES] {
        let mut bytes = [0; Event::BYTES];
        // SAFETY: the record holds at least that many bytes after its header.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.record(at).as_ptr().add(HEADER as usize),
                bytes.as_mut_ptr(),
                Event::BYTES,
            );
        }
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mappings made in `map`, not used after this.
        unsafe {
            let _ = munmap(self.consumer.as_ptr().cast(), self.page);
            let _ = munmap(
                self.producer.as_ptr().cast(),
                self.page + 2 * self.data_bytes,
            );
        }
    }
}
