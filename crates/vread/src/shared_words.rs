// SPDX-License-Identifier: Apache-2.0
//! A file of 64-bit atomic words that processes share.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
pub(crate) use std::sync::atomic::{AtomicU64, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A shared mapping of a whole file, seen as 64-bit words.
#[derive(Debug)]
pub(crate) struct SharedWords {
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the mapping is only reached through atomics, and stays until `SharedWords` is dropped.
unsafe impl Send for SharedWords {}
// SAFETY: as above.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Maps `file`, whose size must be between `min_count` and `max_count` words.
    pub(crate) fn map(
        file: impl AsFd,
        writable: bool,
        min_count: usize,
        max_count: usize,
    ) -> io::Result<Self> {
        let size = rustix::fs::fstat(&file)?.st_size;
        let count = usize::try_from(size).unwrap_or(usize::MAX) / size_of::<u64>();
        if count < min_count || count > max_count {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the file has {size} bytes, which is not a valid size"),
            ));
        }
        let protection = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                count * size_of::<u64>(),
                protection,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, count })
    }

    /// Address of the first word.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start.as_ptr().cast()
    }

    /// All words. A read-only mapping allows loads only.
    pub(crate) fn all(&self) -> &[AtomicU64] {
        // SAFETY: `count` words are mapped as long as `self` lives, page aligned; other processes
        // write them by atomics too.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped; no reference outlives `self`.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.count * size_of::<u64>()) };
    }
}
