// SPDX-License-Identifier: Apache-2.0
//! SharedMemory that a reader's worker shares with the peer worker: bytes of other hosts' blocks arrive in it.
//!
//! The peer worker only writes, the reader's worker only reads. Neither takes what it finds there for anything but
//! bytes, so neither can be led astray by the other.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::wire::MAX_READ;

/// Answers that can be awaited or kept at a time.
pub const SLOT_COUNT: usize = 32;
/// Bytes of one.
pub const SLOT_BYTES: usize = MAX_READ as usize;
/// Before the first one.
const HEADER_BYTES: usize = 4096;
const MEMORY_BYTES: usize = HEADER_BYTES + SLOT_COUNT * SLOT_BYTES;

/// Makes such a memory, 32 MiB that cost nothing until they are used: for the daemon, which hands it to both workers.
///
/// # Errors
/// Whatever the kernel says.
pub fn new_memory() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("viola-peer", flags)?;
    rustix::fs::ftruncate(&file, MEMORY_BYTES as u64)?;
    // Nobody may take it away from under the other.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A mapping of it.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    start: NonNull<u8>,
    writable: bool,
}

// SAFETY: the mapping stays until this is dropped, and is reached through pointers only.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; whoever copies at the same time gets some of the bytes of either.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps what [`new_memory`] has made.
    ///
    /// # Errors
    /// When it is something else.
    pub(crate) fn map(file: impl AsFd, writable: bool) -> io::Result<Self> {
        let size = rustix::fs::fstat(&file)?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if size != MEMORY_BYTES as i64 || !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{size} bytes with seals {seals:?} are not such a memory"),
            ));
        }
        let protection = match writable {
            true => ProtFlags::READ | ProtFlags::WRITE,
            false => ProtFlags::READ,
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                MEMORY_BYTES,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, writable })
    }

    fn heartbeat_word(&self) -> &AtomicU64 {
        // SAFETY: the first eight bytes are mapped as long as `self` lives, page aligned, and both sides use them by
        // atomics only.
        unsafe { self.start.cast::<AtomicU64>().as_ref() }
    }

    /// A number that changes as long as the peer worker is alive and answers are awaited from it.
    pub(crate) fn heartbeat(&self) -> u64 {
        self.heartbeat_word().load(Ordering::Relaxed)
    }

    /// Says that the peer worker is alive.
    pub(crate) fn bump_heartbeat(&self) {
        debug_assert!(self.writable);
        self.heartbeat_word().fetch_add(1, Ordering::Relaxed);
    }

    /// Where a slot begins; [`SLOT_BYTES`] bytes are mapped there. `None` when there is no such slot.
    pub(crate) fn slot(&self, slot: usize) -> Option<*mut u8> {
        // SAFETY: within the mapping.
        (slot < SLOT_COUNT)
            .then(|| unsafe { self.start.as_ptr().add(HEADER_BYTES + slot * SLOT_BYTES) })
    }

    /// Writes bytes into a slot; false when they do not fit.
    pub(crate) fn write(&self, slot: usize, at: usize, bytes: &[u8]) -> bool {
        let fits = at
            .checked_add(bytes.len())
            .is_some_and(|end| end <= SLOT_BYTES);
        let (Some(start), true) = (self.slot(slot), fits && self.writable) else {
            return false;
        };
        // SAFETY: it fits, and this process has no references into the mapping.
        unsafe {
            start
                .add(at)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        true
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), MEMORY_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_writes_the_other_reads_and_nothing_beyond_a_slot() {
        let file = new_memory().unwrap();
        let (there, here) = (
            SharedMemory::map(&file, true).unwrap(),
            SharedMemory::map(&file, false).unwrap(),
        );
        assert!(there.write(31, SLOT_BYTES - 3, b"end"));
        assert!(!there.write(31, SLOT_BYTES - 2, b"end"));
        assert!(!there.write(32, 0, b"x"));
        assert!(!there.write(0, usize::MAX, b"x"));
        assert!(!here.write(0, 0, b"x"));
        // SAFETY: three bytes of a slot.
        let read =
            unsafe { std::slice::from_raw_parts(here.slot(31).unwrap().add(SLOT_BYTES - 3), 3) };
        assert_eq!(read, b"end");
        let before = here.heartbeat();
        there.bump_heartbeat();
        assert_ne!(here.heartbeat(), before);
    }

    #[test]
    fn it_cannot_be_made_smaller_and_other_files_are_refused() {
        let file = new_memory().unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let other = tempfile::tempfile().unwrap();
        other.set_len(MEMORY_BYTES as u64).unwrap();
        assert!(SharedMemory::map(&other, false).is_err());
        let open = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, MEMORY_BYTES as u64).unwrap();
        assert!(SharedMemory::map(&open, false).is_err());
    }
}
