// SPDX-License-Identifier: Apache-2.0
//! Connects to unix sockets of other processes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects without waiting: returns [`io::ErrorKind::WouldBlock`] when the server's queue is full. Opens the socket by a
/// descriptor, so that paths of any length and paths through `/proc/PID/root` work.
///
/// # Errors
/// The kernel's error.
pub fn connect(reach: &Path) -> io::Result<UnixStream> {
    let node = File::from(rustix::fs::open(
        reach,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
    )?);
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", node.as_raw_fd()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
