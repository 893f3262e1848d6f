// SPDX-License-Identifier: Apache-2.0
//! Values of descriptors.

use std::os::fd::RawFd;
use std::sync::OnceLock;

const CHUNK_LEN: usize = 1024;
const MAX_CHUNKS: usize = 1024;

/// A value per descriptor below 2^20. Reading takes no lock.
pub struct FdSlots<T>(Box<[OnceLock<Box<[T]>>]>);

impl<T> Default for FdSlots<T> {
    fn default() -> Self {
        Self((0..MAX_CHUNKS).map(|_| OnceLock::new()).collect())
    }
}

impl<T: Default> FdSlots<T> {
    /// The value of a descriptor, if its chunk exists. A signal handler may call this.
    pub fn get(&self, fd: RawFd) -> Option<&T> {
        let fd = usize::try_from(fd).ok()?;
        self.0.get(fd / CHUNK_LEN)?.get()?.get(fd % CHUNK_LEN)
    }

    /// The value of a descriptor, made if needed; `None` for a number that is too large.
    pub fn get_or_make(&self, fd: RawFd) -> Option<&T> {
        let fd = usize::try_from(fd).ok()?;
        let chunk = self.0.get(fd / CHUNK_LEN)?;
        let chunk = chunk.get_or_init(|| (0..CHUNK_LEN).map(|_| T::default()).collect());
        chunk.get(fd % CHUNK_LEN)
    }
}
