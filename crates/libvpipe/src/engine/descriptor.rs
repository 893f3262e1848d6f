// SPDX-License-Identifier: Apache-2.0
//! Descriptors of the library itself. It closes them by a direct system call, which the preload
//! library's `close` does not see.
//!
//! The library may close them while the table is locked. The preload library's `close` would lock
//! the table again when the number still has a mark.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};

/// A descriptor that is closed by a direct system call.
#[derive(Debug)]
pub(crate) struct Descriptor(ManuallyDrop<OwnedFd>);

impl From<OwnedFd> for Descriptor {
    fn from(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(fd))
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: no code uses it after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) }.into_raw_fd();
        // SAFETY: it was owned here only.
        unsafe { rustix::io::close(fd) };
    }
}
