// SPDX-License-Identifier: Apache-2.0
//! Directories and sockets of the daemon, with their modes.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::umask;
use serde::Serialize;
use viola_host::replace::{Survives, replace};

/// Creates a directory and its parents, unless they exist.
///
/// # Errors
/// When the kernel refuses.
pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true).mode(mode).create(path)
}

/// Replaces a file of `state_dir` by JSON: the new one is on the disk before it gets the name. Makes the folder if need be.
///
/// # Errors
/// When the kernel refuses.
pub fn replace_json(file: &Path, content: &impl Serialize) -> io::Result<()> {
    make_dir(file.parent().unwrap_or(Path::new("/")), 0o700)?;
    replace(file, &serde_json::to_vec_pretty(content)?, Survives::Reboot)
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
