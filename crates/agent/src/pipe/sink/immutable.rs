// SPDX-License-Identifier: Apache-2.0
//! `FS_IMMUTABLE_FL`: ext4 then refuses every write, truncation, hole punch, defragmentation and unlink, also through
//! descriptors that were open before.

use std::fs::File;
use std::io;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

/// Whether the file is immutable or append-only.
///
/// # Errors
/// The kernel's error.
pub fn is_write_protected(file: &File) -> io::Result<bool> {
    let fixed = IFlags::IMMUTABLE | IFlags::APPEND;
    Ok(ioctl_getflags(file)?.intersects(fixed))
}

/// Sets the immutable flag.
///
/// # Errors
/// The kernel's error.
pub fn set(file: &File) -> io::Result<()> {
    let flags = ioctl_getflags(file)?;
    Ok(ioctl_setflags(file, flags | IFlags::IMMUTABLE)?)
}

/// Clears the immutable flag. Returns whether it was set.
///
/// # Errors
/// The kernel's error.
pub fn clear(file: &File) -> io::Result<bool> {
    let flags = ioctl_getflags(file)?;
    let was = flags.contains(IFlags::IMMUTABLE);
    if was {
        ioctl_setflags(file, flags - IFlags::IMMUTABLE)?;
    }
    Ok(was)
}
