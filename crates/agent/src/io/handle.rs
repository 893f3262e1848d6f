// SPDX-License-Identifier: Apache-2.0
//! File handles (`name_to_handle_at(2)`): they name a file of a mounted file system by its inode.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::OFlags;

/// `MAX_HANDLE_SZ`
pub const MAX_HANDLE_BYTES: usize = 128;

/// `struct file_handle`
#[repr(C)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    size: u32,
    kind: i32,
    bytes: [u8; MAX_HANDLE_BYTES],
}

impl Handle {
    /// A handle of this kind; `None` when it has more than [`MAX_HANDLE_BYTES`].
    pub fn new(kind: i32, content: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_HANDLE_BYTES];
        bytes.get_mut(..content.len())?.copy_from_slice(content);
        let size = content.len() as u32;
        Some(Self { size, kind, bytes })
    }

    /// The handle of an open file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let mut handle = Self {
            size: MAX_HANDLE_BYTES as u32,
            kind: 0,
            bytes: [0; MAX_HANDLE_BYTES],
        };
        let mut mount = 0_i32;
        // SAFETY: the path is empty and ends in NUL; the kernel writes at most `size` bytes behind the head of `handle`, for
        // which it has room, and one int to `mount`.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                file.as_fd().as_raw_fd(),
                c"".as_ptr(),
                &raw mut handle,
                &raw mut mount,
                libc::AT_EMPTY_PATH,
            )
        };
        match done {
            0 => Ok(handle),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Opens the file; `mount` is any open file or directory of the same file system.
    ///
    /// # Errors
    /// The kernel's; `ESTALE` when the file is gone.
    pub fn open(&self, mount: impl AsFd, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = (flags | OFlags::CLOEXEC).bits() as libc::c_int;
        // SAFETY: the kernel reads a struct file_handle of `size` bytes, which `self` is laid out as and has room for.
        let raw = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                mount.as_fd().as_raw_fd(),
                std::ptr::from_ref(self),
                flags,
            )
        };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(raw as i32) })
    }

    /// Its kind, which the file system chose.
    pub fn kind(&self) -> i32 {
        self.kind
    }

    /// Its content.
    pub fn content(&self) -> &[u8] {
        &self.bytes[..(self.size as usize).min(MAX_HANDLE_BYTES)]
    }
}
