// SPDX-License-Identifier: Apache-2.0
//! Connects to unix sockets of other processes, and finds out who is connected to whom.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::netns;
use crate::proc;
use crate::proc::unix_diag::{FileId, accepted, listeners};
use crate::proc::unix_sockets::socket_inodes;
use crate::thread::Tid;

/// Connects without waiting: returns [`io::ErrorKind::WouldBlock`] when the server's queue is full. Opens the socket by a
/// descriptor, so that paths of any length and paths through `/proc/PID/root` work.
///
/// `owner` is the process that has to listen there; `None` for a socket that the operator has named. A socket that another
/// process made and passed to `owner` counts.
///
/// # Errors
/// The kernel's error; [`io::ErrorKind::PermissionDenied`] when another process than `owner` listens there.
pub fn connect(reach: &Path, owner: Option<Tid>) -> io::Result<UnixStream> {
    let node = open(reach)?;
    let Some(owner) = owner else {
        return connect_node(&node);
    };
    let is_owners = is_listener(owner, &node).unwrap_or(false);
    let stream = connect_node(&node)?;
    // On some file systems (overlayfs) the kernel shows another device.
    if is_owners || peer(&stream)? == owner {
        return Ok(stream);
    }
    let what = "another process than the VM's listens there";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

fn open(reach: &Path) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(reach, flags, Mode::empty())?))
}

fn connect_node(node: &File) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", node.as_raw_fd()))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The process that called listen(2) at the other end (`SO_PEERCRED`, unix(7)); 0 for one of another PID namespace.
fn peer(stream: &UnixStream) -> io::Result<Tid> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut size = size_of_val(&peer) as libc::socklen_t;
    let (fd, level, to) = (stream.as_raw_fd(), libc::SOL_SOCKET, (&raw mut peer).cast());
    // SAFETY: the kernel writes at most `size` bytes to `peer`, any of which are valid numbers, and to `size` how many.
    match unsafe { libc::getsockopt(fd, level, libc::SO_PEERCRED, to, &raw mut size) } {
        0 => Ok(u32::try_from(peer.pid).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a process has a listening socket that is bound to this file. The socket may be of the process's network namespace or
/// of this one, where a management program made it.
fn is_listener(pid: Tid, node: &File) -> io::Result<bool> {
    let file = FileId::of(node)?;
    let own = sockets(pid)?;
    is_any(pid, listeners, |(s, f)| *f == file && own.contains(s))
}

/// Whether `client` has the other end of a connection to a file's socket that `server` has accepted.
///
/// # Errors
/// The kernel's error.
pub fn is_connected(client: Tid, server: Tid) -> io::Result<bool> {
    let (clients, servers) = (sockets(client)?, sockets(server)?);
    is_any(client, accepted, |(one, other)| {
        servers.contains(one) && clients.contains(other)
    })
}

/// The inode numbers of a process's sockets, as far as sock_diag(7) shows them.
fn sockets(pid: Tid) -> io::Result<Vec<u32>> {
    Ok(socket_inodes(pid)?.into_iter().map(|i| i as u32).collect())
}

/// Whether one of the sockets that `list` finds in this network namespace or in the process's is meant.
fn is_any<T: Send>(
    pid: Tid,
    list: fn() -> io::Result<Vec<T>>,
    is_it: impl Fn(&T) -> bool,
) -> io::Result<bool> {
    if list()?.iter().any(&is_it) {
        return Ok(true);
    }
    match proc::netns(pid).ok().flatten() {
        Some(netns) => Ok(netns::within(pid, netns, list)?.iter().any(is_it)),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    #[test]
    fn a_process_is_connected_while_it_has_an_end_of_an_accepted_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        rustix::io::fcntl_setfd(&client, rustix::io::FdFlags::empty()).unwrap();
        let mut heir = Command::new("sleep").arg("600").spawn().unwrap();
        drop(client);
        let (heirs, own) = (heir.id(), std::process::id());
        assert!(!is_connected(heirs, own).unwrap(), "nobody accepted it");
        let accepted = listener.accept().unwrap();
        assert!(is_connected(heirs, own).unwrap());
        assert!(!is_connected(other.id(), own).unwrap());
        drop(accepted);
        assert!(!is_connected(heirs, own).unwrap());
        for child in [&mut heir, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn only_the_process_that_listens_is_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        assert!(connect(&path, Some(std::process::id())).is_ok());
        let mut other = Command::new("sleep").arg("600").spawn().unwrap();
        let refused = connect(&path, Some(other.id())).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        other.kill().unwrap();
        other.wait().unwrap();
        // A socket that was passed to the process is its own.
        rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
        let mut heir = Command::new("sleep").arg("600").spawn().unwrap();
        let connected = connect(&path, Some(heir.id()));
        heir.kill().unwrap();
        heir.wait().unwrap();
        assert!(connected.is_ok(), "{connected:?}");
    }
}
