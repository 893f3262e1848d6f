// SPDX-License-Identifier: Apache-2.0
//! Socket options of TCP repair.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::state::SocketBuffers;
use crate::{Error, Result};

// include/uapi/linux/tcp.h
pub const MAXSEG: i32 = 2;
pub const INFO: i32 = 11;
pub const REPAIR: i32 = 19;
pub const REPAIR_QUEUE: i32 = 20;
pub const QUEUE_SEQ: i32 = 21;
pub const REPAIR_OPTIONS: i32 = 22;
pub const TIMESTAMP: i32 = 24;
pub const REPAIR_WINDOW: i32 = 29;

// include/uapi/asm-generic/socket.h
const SO_PEEK_OFF: i32 = 42;
/// Since Linux 4.12.
const SO_MEMINFO: i32 = 55;
/// Since Linux 5.15.
const SO_BUF_LOCK: i32 = 72;
/// `SOCK_RCVBUF_LOCK`
const LOCKED_RECEIVE: u32 = 2;

/// Values of [`REPAIR`].
pub const OFF: i32 = 0;
pub const ON: i32 = 1;

/// Values of [`REPAIR_QUEUE`].
pub const RECV_QUEUE: i32 = 1;
pub const SEND_QUEUE: i32 = 2;

// include/uapi/linux/sockios.h
const SIOCINQ: u64 = 0x541b;
const SIOCOUTQ: u64 = 0x5411;

/// A queue of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// Received and not read.
    Unread,
    /// Written and not acknowledged.
    Written,
}

pub fn failed(step: &'static str) -> Error {
    Error::Kernel {
        step,
        source: io::Error::last_os_error(),
    }
}

pub fn set<T: Copy>(
    fd: BorrowedFd<'_>,
    level: i32,
    name: i32,
    values: &[T],
    step: &'static str,
) -> Result<()> {
    let size = size_of_val(values) as libc::socklen_t;
    // SAFETY: the kernel reads `size` bytes of plain integers from `values`, which outlives the call.
    match unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, values.as_ptr().cast(), size) } {
        0 => Ok(()),
        _ => Err(failed(step)),
    }
}

/// Sets a TCP option.
pub fn set_tcp(fd: BorrowedFd<'_>, name: i32, value: i32, step: &'static str) -> Result<()> {
    set(fd, libc::IPPROTO_TCP, name, &[value], step)
}

/// Reads a TCP option into `out` and returns its size in bytes.
pub fn get_tcp(fd: BorrowedFd<'_>, name: i32, out: &mut [u8], step: &'static str) -> Result<usize> {
    let mut size = out.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to `out`, and to `size` how many.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            name,
            out.as_mut_ptr().cast(),
            &mut size,
        )
    };
    match result {
        0 => Ok(size as usize),
        _ => Err(failed(step)),
    }
}

/// Reads a TCP option of 32 bits.
pub fn get_u32(fd: BorrowedFd<'_>, name: i32, step: &'static str) -> Result<u32> {
    let mut value = [0; 4];
    get_tcp(fd, name, &mut value, step)?;
    Ok(u32::from_ne_bytes(value))
}

fn get_socket(fd: BorrowedFd<'_>, name: i32, step: &'static str) -> Result<u32> {
    let mut value: i32 = 0;
    let mut size = size_of_val(&value) as libc::socklen_t;
    let (to, length) = ((&raw mut value).cast(), &raw mut size);
    // SAFETY: the kernel writes one int to `value`.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, to, length) } {
        0 => Ok(value.max(0) as u32),
        _ => Err(failed(step)),
    }
}

/// Clears the pending error of a socket.
pub fn forget_error(fd: BorrowedFd<'_>) -> Result<()> {
    get_socket(fd, libc::SO_ERROR, "SO_ERROR").map(drop)
}

/// Reads the name of a socket's congestion control.
pub fn congestion(fd: BorrowedFd<'_>) -> Result<String> {
    // TCP_CA_NAME_MAX
    let mut name = [0; 16];
    get_tcp(fd, libc::TCP_CONGESTION, &mut name, "TCP_CONGESTION")?;
    let end = name.iter().position(|&byte| byte == 0);
    let name = &name[..end.unwrap_or(name.len())];
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Limits a socket's pacing, in bytes per second. A limit of 0 would stop the socket, so it becomes 1.
pub fn set_pacing(fd: BorrowedFd<'_>, rate: u64) -> Result<()> {
    let (level, name) = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
    set(fd, level, name, &[rate.max(1)], "SO_MAX_PACING_RATE")
}

/// Limits the window that the kernel announces from now on; what it has announced stays. This also locks the receive
/// buffer, because tuning would lift the limit.
pub fn clamp(fd: BorrowedFd<'_>, bytes: u32) -> Result<()> {
    let locked = get_socket(fd, SO_BUF_LOCK, "SO_BUF_LOCK")?;
    let (level, locked) = (libc::SOL_SOCKET, locked | LOCKED_RECEIVE);
    set(fd, level, SO_BUF_LOCK, &[locked], "SO_BUF_LOCK")?;
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    set_tcp(fd, libc::TCP_WINDOW_CLAMP, bytes, "TCP_WINDOW_CLAMP")
}

/// Reads both buffer sizes with one system call.
///
/// # Errors
/// What the kernel refused.
pub fn buffers(fd: BorrowedFd<'_>) -> Result<SocketBuffers> {
    // up to SK_MEMINFO_SNDBUF, include/uapi/linux/sock_diag.h
    let mut memory = [0_u32; 4];
    let mut size = size_of_val(&memory) as libc::socklen_t;
    let (to, length) = (memory.as_mut_ptr().cast(), &raw mut size);
    // SAFETY: the kernel writes at most `size` bytes to `memory`, and to `size` how many.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, SO_MEMINFO, to, length) } {
        0 if size as usize == size_of_val(&memory) => {}
        0 => {
            return Err(Error::NotTransferable(
                "SO_MEMINFO does not have the buffer sizes",
            ));
        }
        _ => return Err(failed("SO_MEMINFO")),
    }
    let [_, receive, _, send] = memory;
    Ok(SocketBuffers {
        send,
        receive,
        locked: get_socket(fd, SO_BUF_LOCK, "SO_BUF_LOCK")?,
    })
}

/// Sets both sizes regardless of the system's limits, and the locks.
pub fn set_buffers(fd: BorrowedFd<'_>, to: SocketBuffers) -> Result<()> {
    let level = libc::SOL_SOCKET;
    let send = [half(to.send)];
    set(fd, level, libc::SO_SNDBUFFORCE, &send, "SO_SNDBUFFORCE")?;
    set_receive(fd, to.receive)?;
    set(fd, level, SO_BUF_LOCK, &[to.locked], "SO_BUF_LOCK")
}

/// Sets the receive buffer. The kernel no longer tunes it.
pub fn set_receive(fd: BorrowedFd<'_>, bytes: u32) -> Result<()> {
    let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE);
    set(fd, level, name, &[half(bytes)], "SO_RCVBUFFORCE")
}

/// Half of a size: the kernel doubles the value that it receives.
fn half(bytes: u32) -> i32 {
    i32::try_from(bytes / 2).unwrap_or(i32::MAX)
}

pub fn queued(fd: BorrowedFd<'_>, queue: Queue) -> Result<usize> {
    let (request, step) = match queue {
        Queue::Unread => (SIOCINQ, "SIOCINQ"),
        Queue::Written => (SIOCOUTQ, "SIOCOUTQ"),
    };
    let mut count: libc::c_int = 0;
    // SAFETY: each of these requests writes one int to the address given.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request as _, &mut count) } {
        0 => Ok(count.max(0) as usize),
        _ => Err(failed(step)),
    }
}

/// Whether a peek at the receive queue (`MSG_PEEK`) begins at the first unread byte, as a read does. TCP before Linux
/// 6.9 has no other way.
///
/// # Errors
/// What the kernel refused.
pub fn peeks_from_start(fd: BorrowedFd<'_>) -> Result<bool> {
    let mut value: i32 = 0;
    let mut size = size_of_val(&value) as libc::socklen_t;
    let (to, length) = ((&raw mut value).cast(), &raw mut size);
    // SAFETY: the kernel writes one int to `value`.
    match unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, SO_PEEK_OFF, to, length) } {
        0 => Ok(value == -1),
        _ => match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
            _ => Err(failed("SO_PEEK_OFF")),
        },
    }
}

/// Peeks at the selected queue; may return fewer bytes than `count`.
pub fn peek(fd: BorrowedFd<'_>, count: usize, step: &'static str) -> Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    if count == 0 {
        return Ok(bytes);
    }
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes at most `count` bytes to `bytes`.
    let got = unsafe { libc::recv(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), count, flags) };
    if got < 0 {
        return Err(failed(step));
    }
    bytes.truncate(got as usize);
    Ok(bytes)
}

/// Writes all of `bytes` to the selected queue, or to the connection.
pub fn write(fd: BorrowedFd<'_>, bytes: &[u8], step: &'static str) -> Result<()> {
    /// Largest write into a receive queue under repair.
    const MAX_WRITE_BYTES: usize = 64 << 10;
    let mut done = 0;
    while done < bytes.len() {
        let piece = &bytes[done..bytes.len().min(done + MAX_WRITE_BYTES)];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the kernel reads `piece.len()` bytes from `piece`.
        let sent = unsafe { libc::send(fd.as_raw_fd(), piece.as_ptr().cast(), piece.len(), flags) };
        if sent <= 0 {
            return Err(failed(step));
        }
        done += sent as usize;
    }
    Ok(())
}

/// A `struct sockaddr` of the kernel.
pub struct SocketAddress {
    storage: libc::sockaddr_storage,
    size: libc::socklen_t,
}

impl SocketAddress {
    fn empty() -> Self {
        Self {
            // SAFETY: all zeros is a valid sockaddr_storage, of no family.
            storage: unsafe { std::mem::zeroed() },
            size: size_of::<libc::sockaddr_storage>() as libc::socklen_t,
        }
    }

    fn of(address: &SocketAddr) -> Self {
        let mut raw = Self::empty();
        match address {
            SocketAddr::V4(v4) => {
                let value = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(v4.ip().octets()),
                    },
                    sin_zero: [0; 8],
                };
                raw.size = size_of_val(&value) as libc::socklen_t;
                // SAFETY: a sockaddr_storage has room and alignment for every socket address.
                unsafe {
                    (&raw mut raw.storage)
                        .cast::<libc::sockaddr_in>()
                        .write(value)
                };
            }
            SocketAddr::V6(v6) => {
                let value = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                };
                raw.size = size_of_val(&value) as libc::socklen_t;
                // SAFETY: as above.
                unsafe {
                    (&raw mut raw.storage)
                        .cast::<libc::sockaddr_in6>()
                        .write(value)
                };
            }
        }
        raw
    }

    fn address(&self) -> Option<SocketAddr> {
        match i32::from(self.storage.ss_family) {
            libc::AF_INET => {
                // SAFETY: the family says that the storage holds a sockaddr_in.
                let v4 = unsafe { (&raw const self.storage).cast::<libc::sockaddr_in>().read() };
                let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
                Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that the storage holds a sockaddr_in6.
                let v6 = unsafe {
                    (&raw const self.storage)
                        .cast::<libc::sockaddr_in6>()
                        .read()
                };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// Reads the address of this end (`peer` false) or of the peer.
pub fn address(fd: BorrowedFd<'_>, peer: bool) -> Result<Option<SocketAddr>> {
    let mut raw = SocketAddress::empty();
    let (call, step): (unsafe extern "C" fn(_, _, _) -> _, _) = match peer {
        true => (libc::getpeername, "getpeername"),
        false => (libc::getsockname, "getsockname"),
    };
    // SAFETY: the kernel writes at most `size` bytes to the storage, and to `size` how many.
    match unsafe {
        call(
            fd.as_raw_fd(),
            (&raw mut raw.storage).cast(),
            &raw mut raw.size,
        )
    } {
        0 => Ok(raw.address()),
        _ => Err(failed(step)),
    }
}

pub fn bind(fd: BorrowedFd<'_>, address: &SocketAddr) -> Result<()> {
    let raw = SocketAddress::of(address);
    // SAFETY: the kernel reads `size` bytes of an address.
    match unsafe { libc::bind(fd.as_raw_fd(), (&raw const raw.storage).cast(), raw.size) } {
        0 => Ok(()),
        _ => Err(failed("bind")),
    }
}

pub fn connect(fd: BorrowedFd<'_>, address: &SocketAddr) -> Result<()> {
    let raw = SocketAddress::of(address);
    // SAFETY: the kernel reads `size` bytes of an address.
    match unsafe { libc::connect(fd.as_raw_fd(), (&raw const raw.storage).cast(), raw.size) } {
        0 => Ok(()),
        _ => Err(failed("connect")),
    }
}

/// Disconnects a socket from its peer.
pub fn disconnect(fd: BorrowedFd<'_>) -> Result<()> {
    let none = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    let size = size_of_val(&none) as libc::socklen_t;
    // SAFETY: the kernel reads `size` bytes of an address of no family.
    match unsafe { libc::connect(fd.as_raw_fd(), &raw const none, size) } {
        0 => Ok(()),
        _ => Err(failed("disconnect")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peeks_begin_at_the_first_byte_unless_peek_off_is_set() {
        use std::os::fd::{AsFd, FromRawFd, OwnedFd};
        let begins = |fd: BorrowedFd<'_>| peeks_from_start(fd).unwrap();
        // SAFETY: a plain system call, and a new descriptor that nobody else owns.
        let netlink = unsafe {
            let raw = libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
            assert!(raw >= 0);
            OwnedFd::from_raw_fd(raw)
        };
        assert!(begins(netlink.as_fd()));
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(begins(unix.as_fd()));
        set(
            unix.as_fd(),
            libc::SOL_SOCKET,
            SO_PEEK_OFF,
            &[7],
            "SO_PEEK_OFF",
        )
        .unwrap();
        assert!(!begins(unix.as_fd()));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(peeks_from_start(null.as_fd()).is_err());
    }

    #[test]
    fn addresses_are_read_back() {
        for text in ["10.0.0.1:80", "[fd00::1:2]:65535", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(SocketAddress::of(&address).address(), Some(address));
        }
        assert_eq!(SocketAddress::empty().address(), None);
    }
}
