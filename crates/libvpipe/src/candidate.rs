// SPDX-License-Identifier: Apache-2.0
//! Which pairs of descriptors the host can move bytes between.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use rustix::net::{ipproto, sockopt};
use rustix::process::{Resource, getrlimit};

/// Identity of a file or socket, independent of its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device.
    pub device: u64,
    /// Inode number on that device.
    pub inode: u64,
}

/// Source and sink of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferKind {
    /// From a file to a connection.
    Send,
    /// From a connection to a file.
    Receive,
    /// From a file to another file.
    Copy,
    /// From a connection to another connection.
    Relay,
}

/// A pair of descriptors that the host can move bytes between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Kind of the transfer.
    pub kind: TransferKind,
    /// The source.
    pub source: FileId,
    /// Current size of the source in bytes; `u64::MAX` for a socket.
    pub size: u64,
    /// The sink.
    pub sink: FileId,
}

/// Reads the identity of a descriptor.
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

/// Whether the socket is a TCP socket without an upper layer protocol that changes the bytes, such as the kernel's
/// TLS. Only TCP sockets answer `TCP_ULP`; other sockets may name this protocol too, or have a TCP socket below them.
fn is_plain_tcp(socket: BorrowedFd<'_>) -> bool {
    if sockopt::socket_protocol(socket) != Ok(Some(ipproto::TCP)) {
        return false;
    }
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
    result == 0 && length == 0
}

struct End {
    id: FileId,
    /// Size of a file.
    size: Option<u64>,
}

/// Checks one end: a plain TCP socket, or a regular file that the program may read or write.
fn end(fd: BorrowedFd<'_>, written: bool) -> Option<End> {
    let stat = fstat(fd).ok()?;
    let id = FileId {
        device: stat.st_dev,
        inode: stat.st_ino,
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let flags = fcntl_getfl(fd).ok()?;
            // the host would bypass the access mode, and would not do what these flags ask for
            let (other, odd) = match written {
                false => (OFlags::WRONLY, OFlags::PATH),
                true => (
                    OFlags::RDONLY,
                    OFlags::PATH | OFlags::APPEND | OFlags::DSYNC,
                ),
            };
            let fits = flags & OFlags::ACCMODE != other && !flags.intersects(odd);
            let size = Some(u64::try_from(stat.st_size).ok()?);
            (fits && !(written && is_limited())).then_some(End { id, size })
        }
        FileType::Socket => is_plain_tcp(fd).then_some(End { id, size: None }),
        _ => None,
    }
}

/// Whether this process has a file size limit.
fn is_limited() -> bool {
    getrlimit(Resource::Fsize).current.is_some()
}

/// Checks a pair of descriptors: regular files or plain TCP sockets, and not the same one. `None` also when fstat
/// fails: the system call that is made instead reports the error.
pub fn classify(source: BorrowedFd<'_>, sink: BorrowedFd<'_>) -> Option<Candidate> {
    let (source, sink) = (end(source, false)?, end(sink, true)?);
    let kind = match (source.size, sink.size) {
        (Some(_), None) => TransferKind::Send,
        (None, Some(_)) => TransferKind::Receive,
        (Some(_), Some(_)) => TransferKind::Copy,
        (None, None) => TransferKind::Relay,
    };
    (source.id != sink.id).then_some(Candidate {
        kind,
        source: source.id,
        size: source.size.unwrap_or(u64::MAX),
        sink: sink.id,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn files_and_tcp_sockets_in_any_order() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"abc").unwrap();
        let other = tempfile::tempfile().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let another = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        for (from, to, kind, size) in [
            (file.as_fd(), tcp.as_fd(), TransferKind::Send, 3),
            (tcp.as_fd(), file.as_fd(), TransferKind::Receive, u64::MAX),
            (file.as_fd(), other.as_fd(), TransferKind::Copy, 3),
            (tcp.as_fd(), another.as_fd(), TransferKind::Relay, u64::MAX),
        ] {
            let found = classify(from, to).unwrap();
            assert_eq!((found.kind, found.size), (kind, size));
            assert_ne!(found.source, found.sink);
        }
        for (from, to) in [
            (file.as_fd(), udp.as_fd()),
            (unix.as_fd(), file.as_fd()),
            (file.as_fd(), file.as_fd()),
            (tcp.as_fd(), tcp.as_fd()),
            (tcp.as_fd(), unix.as_fd()),
        ] {
            assert_eq!(classify(from, to), None);
        }
    }

    #[test]
    fn not_a_socket_that_only_names_the_protocol() {
        use rustix::net::{AddressFamily, SocketType, socket};
        let file = tempfile::tempfile().unwrap();
        // needs CAP_NET_RAW
        let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::TCP));
        if let Ok(raw) = raw {
            assert_eq!(sockopt::socket_protocol(&raw), Ok(Some(ipproto::TCP)));
            assert_eq!(classify(file.as_fd(), raw.as_fd()), None);
        }
        let tcp = socket(AddressFamily::INET6, SocketType::STREAM, Some(ipproto::TCP)).unwrap();
        assert!(classify(file.as_fd(), tcp.as_fd()).is_some());
        // TCP is below it
        if let Ok(multi) = socket(
            AddressFamily::INET,
            SocketType::STREAM,
            Some(ipproto::MPTCP),
        ) {
            assert_eq!(classify(file.as_fd(), multi.as_fd()), None);
        }
    }

    #[test]
    fn not_into_a_file_that_is_written_another_way() {
        use rustix::fs::{Mode, open};
        let file = tempfile::NamedTempFile::new().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        for (flags, fits) in [
            (OFlags::RDONLY, false),
            (OFlags::RDWR, true),
            (OFlags::WRONLY, true),
            (OFlags::WRONLY | OFlags::APPEND, false),
            (OFlags::WRONLY | OFlags::SYNC, false),
            (OFlags::PATH, false),
        ] {
            let fd = open(file.path(), flags, Mode::empty()).unwrap();
            assert_eq!(
                classify(tcp.as_fd(), fd.as_fd()).is_some(),
                fits,
                "{flags:?}"
            );
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
            let found = classify(fd.as_fd(), tcp.as_fd());
            assert_eq!(found.is_some(), fits, "{flags:?}");
        }
    }

    #[test]
    fn not_a_socket_whose_bytes_the_kernel_changes() {
        let file = tempfile::tempfile().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(classify(file.as_fd(), tcp.as_fd()).is_some());
        // SAFETY: three bytes.
        let result = unsafe {
            let name = b"tls".as_ptr().cast();
            libc::setsockopt(tcp.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_ULP, name, 3)
        };
        // a kernel without it has none of these sockets
        assert_eq!(classify(file.as_fd(), tcp.as_fd()).is_some(), result != 0);
    }
}
