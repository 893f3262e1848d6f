// SPDX-License-Identifier: Apache-2.0
//! Memory that a reader's worker shares with the peer worker: bytes of other hosts' blocks arrive in it.
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
pub const SLOTS: usize = 32;
/// Bytes of one.
pub const SLOT: usize = MAX_READ as usize;
/// Before the first one.
const HEAD: usize = 4096;
const SIZE: usize = HEAD + SLOTS * SLOT;

/// Makes such a memory, 32 MiB that cost nothing until they are used: for the daemon, which hands it to both workers.
///
/// # Errors
/// Whatever the kernel says.
pub fn new_memory() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("viola-peer", flags)?;
    rustix::fs::ftruncate(&file, SIZE as u64)?;
    // Nobody may take it away from under the other.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A mapping of it.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    writable: bool,
}

// SAFETY: the mapping stays until this is dropped, and is reached through pointers only.
unsafe impl Send for Memory {}
// SAFETY: as above; whoever copies at the same time gets some of the bytes of either.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps what [`new_memory`] has made.
    ///
    /// # Errors
    /// When it is something else.
    pub(crate) fn map(file: impl AsFd, writable: bool) -> io::Result<Self> {
        let size = rustix::fs::fstat(&file)?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        if size != SIZE as i64 || !seals.contains(SealFlags::SHRINK) {
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
                SIZE,
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, writable })
    }

    fn sign(&self) -> &AtomicU64 {
        // SAFETY: the first eight bytes are mapped as long as `self` lives, page aligned, and both sides use them by
        // atomics only.
        unsafe { self.start.cast::<AtomicU64>().as_ref() }
    }

    /// A number that changes as long as the peer worker is alive and answers are awaited from it.
    pub(crate) fn beat(&self) -> u64 {
        self.sign().load(Ordering::Relaxed)
    }

    /// Says that the peer worker is alive.
    pub(crate) fn live(&self) {
        debug_assert!(self.writable);
        self.sign().fetch_add(1, Ordering::Relaxed);
    }

    /// Where a slot begins; [`SLOT`] bytes are mapped there. `None` when there is no such slot.
    pub(crate) fn slot(&self, slot: usize) -> Option<*mut u8> {
        // SAFETY: within the mapping.
        (slot < SLOTS).then(|| unsafe { self.start.as_ptr().add(HEAD + slot * SLOT) })
    }

    /// Writes bytes into a slot; false when they do not fit.
    pub(crate) fn put(&self, slot: usize, at: usize, bytes: &[u8]) -> bool {
        let fits = at.checked_add(bytes.len()).is_some_and(|end| end <= SLOT);
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

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), SIZE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_writes_the_other_reads_and_nothing_beyond_a_slot() {
        let file = new_memory().unwrap();
        let (there, here) = (
            Memory::map(&file, true).unwrap(),
            Memory::map(&file, false).unwrap(),
        );
        assert!(there.put(31, SLOT - 3, b"end"));
        assert!(!there.put(31, SLOT - 2, b"end"));
        assert!(!there.put(32, 0, b"x"));
        assert!(!there.put(0, usize::MAX, b"x"));
        assert!(!here.put(0, 0, b"x"));
        // SAFETY: three bytes of a slot.
        let read = unsafe { std::slice::from_raw_parts(here.slot(31).unwrap().add(SLOT - 3), 3) };
        assert_eq!(read, b"end");
        let before = here.beat();
        there.live();
        assert_ne!(here.beat(), before);
    }

    #[test]
    fn it_cannot_be_made_smaller_and_other_files_are_refused() {
        let file = new_memory().unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let other = tempfile::tempfile().unwrap();
        other.set_len(SIZE as u64).unwrap();
        assert!(Memory::map(&other, false).is_err());
        let open = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, SIZE as u64).unwrap();
        assert!(Memory::map(&open, false).is_err());
    }
}
