// SPDX-License-Identifier: Apache-2.0
//! Memory that a reader worker shares with the peer worker: bytes of other hosts' blocks arrive in it.
//!
//! The peer worker only writes and the reader worker only reads. Both treat the content as plain bytes, so neither
//! can misguide the other.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};

use super::wire::MAX_READ;
use crate::shared_words::SharedWords;

/// Number of slots: answers that can be pending or kept at a time.
pub const SLOT_COUNT: usize = 32;
/// Size of a slot, bytes.
pub const SLOT_BYTES: usize = MAX_READ as usize;
/// Size of the header before the first slot, bytes.
const HEADER_BYTES: usize = 4096;
const MEMORY_BYTES: usize = HEADER_BYTES + SLOT_COUNT * SLOT_BYTES;
const MEMORY_WORDS: usize = MEMORY_BYTES / size_of::<u64>();

/// Creates the memory, 32 MiB that are allocated on first use. The daemon calls it and passes it to both workers.
///
/// # Errors
/// Errors of the system calls.
pub fn new_memory() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("viola-peer", flags)?;
    rustix::fs::ftruncate(&file, MEMORY_BYTES as u64)?;
    // The seals keep either side from shrinking the file under the other.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A mapping of the shared memory. The heartbeat is its first word; bytes of slots are reached through pointers only.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    words: SharedWords,
    writable: bool,
}

impl SharedMemory {
    /// Maps a memory that [`new_memory`] created.
    ///
    /// # Errors
    /// When the file has another size or no seals.
    pub(crate) fn map(file: impl AsFd, writable: bool) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the file has the seals {seals:?}, so it is no shared memory of viola"),
            ));
        }
        let words = SharedWords::map(file, writable, MEMORY_WORDS, MEMORY_WORDS)?;
        Ok(Self { words, writable })
    }

    /// The heartbeat: it changes while the peer worker is alive and requests are pending.
    pub(crate) fn heartbeat(&self) -> u64 {
        self.words.all()[0].load(Ordering::Relaxed)
    }

    /// Increments the heartbeat.
    pub(crate) fn bump_heartbeat(&self) {
        debug_assert!(self.writable);
        self.words.all()[0].fetch_add(1, Ordering::Relaxed);
    }

    /// Address of a slot of [`SLOT_BYTES`] bytes; `None` for an invalid number.
    pub(crate) fn slot(&self, slot: usize) -> Option<*mut u8> {
        // SAFETY: within the mapping.
        (slot < SLOT_COUNT)
            .then(|| unsafe { self.words.start().add(HEADER_BYTES + slot * SLOT_BYTES) })
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
