// SPDX-License-Identifier: Apache-2.0
//! The unix sockets of a network namespace, by sock_diag(7): the files that listening ones are bound to, and the clients of
//! accepted ones.
//!
//! Unlike the paths of `/proc/net/unix`, which a process chooses and may leave stale, these are the files themselves.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{fstat, major, minor};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// include/uapi/linux/sock_diag.h, unix_diag.h and netlink.h
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const UDIAG_SHOW_VFS: u32 = 2;
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_VFS: u16 = 1;
const UNIX_DIAG_PEER: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `TCP_ESTABLISHED` and `TCP_LISTEN`, which unix sockets have, too (include/net/tcp_states.h).
const ESTABLISHED: u32 = 1;
const LISTEN: u32 = 10;
const MESSAGE_HEADER_BYTES: usize = 16;
const REQUEST_BYTES: usize = MESSAGE_HEADER_BYTES + 24;
/// `struct unix_diag_msg`, before the attributes.
const ANSWER_BYTES: usize = 16;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// Netlink's parts of a dump are at most this long.
const MAX_PART_BYTES: usize = 64 << 10;

/// A file: its file system, and its number there, as far as the kernel shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device: u32,
    inode: u32,
}

impl FileId {
    /// The file that is open.
    pub(crate) fn of(file: impl AsFd) -> io::Result<Self> {
        let stat = fstat(file)?;
        Ok(Self {
            // the kernel's own form: 12 bits and 20 bits
            device: major(stat.st_dev) << 20 | minor(stat.st_dev),
            inode: stat.st_ino as u32,
        })
    }
}

/// The listening sockets of the calling thread's network namespace that are bound to files: inode numbers of the sockets, and
/// the files.
///
/// # Errors
/// The kernel's; it has no such list without `CONFIG_UNIX_DIAG`.
pub(crate) fn listeners() -> io::Result<Vec<(u32, FileId)>> {
    dump(LISTEN, UDIAG_SHOW_VFS, |message| {
        let value = attribute(message, UNIX_DIAG_VFS)?;
        let file = FileId {
            inode: u32_at(value, 0)?,
            device: u32_at(value, 4)?,
        };
        Some((u32_at(message, 4)?, file))
    })
}

/// The accepted connections of listening sockets that are bound to files, in the calling thread's network namespace: inode numbers
/// of the accepted socket and of the client's.
///
/// # Errors
/// As [`listeners`].
pub(crate) fn accepted() -> io::Result<Vec<(u32, u32)>> {
    dump(ESTABLISHED, UDIAG_SHOW_VFS | UDIAG_SHOW_PEER, |message| {
        // Only an accepted socket has the file of its listener.
        attribute(message, UNIX_DIAG_VFS)?;
        let client = attribute(message, UNIX_DIAG_PEER)?;
        Some((u32_at(message, 4)?, u32_at(client, 0)?))
    })
}

/// Asks for the sockets in one state, and what `read` finds in the kernel's answer for each.
fn dump<T>(state: u32, show: u32, read: impl Fn(&[u8]) -> Option<T>) -> io::Result<Vec<T>> {
    let (kind, flags) = (SocketType::RAW, SocketFlags::CLOEXEC);
    let protocol = Some(netlink::SOCK_DIAG);
    let socket: OwnedFd = socket_with(AddressFamily::NETLINK, kind, flags, protocol)?;
    send(&socket, &request(state, show), SendFlags::empty())?;
    let mut found = Vec::new();
    let mut part = vec![0; MAX_PART_BYTES];
    loop {
        let (length, _) = recv(&socket, &mut part[..], RecvFlags::empty())?;
        if read_part(&part[..length], &read, &mut found)? {
            return Ok(found);
        }
    }
}

fn request(state: u32, show: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&(REQUEST_BYTES as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&(NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes());
    bytes[16] = libc::AF_UNIX as u8;
    bytes[20..24].copy_from_slice(&(1_u32 << state).to_ne_bytes());
    bytes[28..32].copy_from_slice(&show.to_ne_bytes());
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Reads the messages of one part; `true` after the last one.
fn read_part<T>(
    mut part: &[u8],
    read: impl Fn(&[u8]) -> Option<T>,
    found: &mut Vec<T>,
) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (u32_at(part, 0), u16_at(part, 4)) {
        let Some(message) = part.get(MESSAGE_HEADER_BYTES..length as usize) else {
            break;
        };
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let error = u32_at(message, 0).map_or(libc::EPROTO, |e| -e.cast_signed());
                return Err(io::Error::from_raw_os_error(error));
            }
            _ => found.extend(read(message)),
        }
        // messages are aligned to four bytes
        let next = (length as usize).next_multiple_of(4);
        part = part.get(next..).unwrap_or_default();
    }
    Ok(false)
}

/// The value of an attribute of a socket; `None` for a socket without it.
fn attribute(message: &[u8], kind: u16) -> Option<&[u8]> {
    let mut rest = message.get(ANSWER_BYTES..)?;
    loop {
        let length = usize::from(u16_at(rest, 0)?);
        let value = rest.get(ATTRIBUTE_HEADER_BYTES..length)?;
        if u16_at(rest, 2)? == kind {
            return Some(value);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_listening_socket_is_listed_with_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        let node =
            rustix::fs::open(&path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        let file = FileId::of(&node).unwrap();
        let inode = rustix::fs::fstat(&listener).unwrap().st_ino as u32;
        let found = listeners().unwrap();
        assert!(found.contains(&(inode, file)), "{file:?} in {found:?}");
        drop(listener);
        assert!(!listeners().unwrap().iter().any(|(_, f)| *f == file));
    }

    #[test]
    fn a_connection_is_listed_once_it_is_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let inode = |fd: &dyn AsFd| fstat(fd.as_fd()).unwrap().st_ino as u32;
        let of_client = inode(&client);
        let is_listed = |found: &[(u32, u32)]| found.iter().any(|&(_, peer)| peer == of_client);
        assert!(!is_listed(&accepted().unwrap()));
        let (server, _) = listener.accept().unwrap();
        let found = accepted().unwrap();
        assert!(found.contains(&(inode(&server), of_client)), "{found:?}");
        assert!(!found.contains(&(of_client, inode(&server))), "{found:?}");
    }

    #[test]
    fn parts_that_end_too_early_name_nothing() {
        let mut found = Vec::new();
        let read = |message: &[u8]| attribute(message, UNIX_DIAG_VFS).map(<[u8]>::len);
        for length in 0..64 {
            let mut part = vec![0xff; length];
            assert!(!read_part(&part, read, &mut found).unwrap());
            if let Some(first) = part.get_mut(..4) {
                first.copy_from_slice(&(length as u32).to_ne_bytes());
                let _ = read_part(&part, read, &mut found);
            }
        }
        assert!(found.is_empty());
    }
}
