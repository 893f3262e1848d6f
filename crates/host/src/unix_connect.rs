// SPDX-License-Identifier: Apache-2.0
//! Connects to unix sockets of other processes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects without ever waiting: a full queue of other clients is [`io::ErrorKind::WouldBlock`]. The socket is opened
/// by a descriptor, so that neither the length of its path nor the way through `/proc/PID/root` matters.
///
/// # Errors
/// Whatever the kernel says.
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
