// SPDX-License-Identifier: Apache-2.0
//! Which descriptors can be piped.

use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, ipproto, sockopt};

/// What a descriptor names, whatever its number. A socket has one too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device.
    pub device: u64,
    /// Inode on it.
    pub inode: u64,
}

/// Two descriptors of which the first can be piped into the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The file.
    pub file: FileId,
    /// Its size in bytes, now.
    pub size: u64,
    /// The socket.
    pub socket: FileId,
}

/// What the descriptor names.
///
/// # Errors
/// Those of `fstat(2)`.
pub fn file_id(fd: BorrowedFd<'_>) -> Result<FileId, Errno> {
    let stat = fstat(fd)?;
    Ok(FileId {
        device: stat.st_dev,
        inode: stat.st_ino,
    })
}

/// Looks whether `file` is a regular file and `socket` one of TCP. `None` also when they cannot be looked at: the system call
/// that is made instead says why.
pub fn candidate(file: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> Option<Candidate> {
    let stat = fstat(file).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    if sockopt::socket_type(socket).ok()? != SocketType::STREAM
        || sockopt::socket_protocol(socket).ok()? != Some(ipproto::TCP)
    {
        return None;
    }
    match sockopt::socket_domain(socket).ok()? {
        AddressFamily::INET | AddressFamily::INET6 => (),
        _ => return None,
    }
    Some(Candidate {
        file: FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        },
        size: u64::try_from(stat.st_size).ok()?,
        socket: file_id(socket).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn only_a_file_into_a_tcp_socket() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"abc").unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let found = candidate(file.as_fd(), tcp.as_fd()).unwrap();
        assert_eq!(found.size, 3);
        assert_ne!(found.file, found.socket);
        for (from, to) in [
            (file.as_fd(), udp.as_fd()),
            (file.as_fd(), unix.as_fd()),
            (file.as_fd(), file.as_fd()),
            (tcp.as_fd(), tcp.as_fd()),
        ] {
            assert_eq!(candidate(from, to), None);
        }
    }
}
