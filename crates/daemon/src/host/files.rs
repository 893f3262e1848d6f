// SPDX-License-Identifier: Apache-2.0
//! Directories and sockets of the daemon, with their modes.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::umask;

/// Creates a directory and its parents, unless they exist.
///
/// # Errors
/// When the kernel refuses.
pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(mode).create(path)
}

/// Binds a unix socket that only this user can connect to: the umask keeps others out from the first moment.
///
/// # Errors
/// When the kernel refuses.
pub fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let before = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    listener
}
