// SPDX-License-Identifier: Apache-2.0
//! Which descriptors can be piped.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
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

/// Whether somebody between the program and TCP changes the bytes, as the kernel's TLS does.
fn is_layered(socket: BorrowedFd<'_>) -> bool {
    let mut name = [0_u8; 16];
    let mut length = name.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes of the name, and how many there are.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_ULP,
            name.as_mut_ptr().cast(),
            &mut length,
        )
    };
    result == 0 && length > 0
}

/// Looks whether `file` is a regular file that may be read, and `socket` one of plain TCP. `None` also when they cannot be looked at: the system call
/// that is made instead says why.
pub fn candidate(file: BorrowedFd<'_>, socket: BorrowedFd<'_>) -> Option<Candidate> {
    let stat = fstat(file).ok()?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return None;
    }
    let flags = fcntl_getfl(file).ok()?;
    if flags.contains(OFlags::PATH) || flags & OFlags::ACCMODE == OFlags::WRONLY {
        return None; // the host would send what the program may not read
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
    if is_layered(socket) {
        return None;
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
    use std::net::{TcpListener, TcpStream, UdpSocket};
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

    #[test]
    fn not_a_file_that_may_not_be_read() {
        use rustix::fs::{Mode, open};
        let file = tempfile::NamedTempFile::new().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        for (flags, fits) in [
            (OFlags::RDONLY, true),
            (OFlags::RDWR, true),
            (OFlags::WRONLY, false),
            (OFlags::PATH, false),
        ] {
            let fd = open(file.path(), flags, Mode::empty()).unwrap();
            let found = candidate(fd.as_fd(), tcp.as_fd());
            assert_eq!(found.is_some(), fits, "{flags:?}");
        }
    }

    #[test]
    fn not_a_socket_whose_bytes_the_kernel_changes() {
        let file = tempfile::tempfile().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(candidate(file.as_fd(), tcp.as_fd()).is_some());
        // SAFETY: three bytes.
        let result = unsafe {
            let name = b"tls".as_ptr().cast();
            libc::setsockopt(tcp.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_ULP, name, 3)
        };
        // a kernel without it has none of these sockets
        assert_eq!(candidate(file.as_fd(), tcp.as_fd()).is_some(), result != 0);
    }
}
