// SPDX-License-Identifier: Apache-2.0
//! Socket options of TCP repair.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketAddrAny, sockopt};

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

/// The error of a step that the kernel refused.
pub fn failed<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |source| Error::Kernel {
        step,
        source: source.into(),
    }
}

/// Sets a socket option that `rustix` does not have. `T` is what the kernel expects: integers, or a
/// structure of them.
///
/// # Errors
/// What the kernel refused.
pub fn set_option<T: Copy>(fd: impl AsFd, level: i32, name: i32, values: &[T]) -> io::Result<()> {
    let size = size_of_val(values) as libc::socklen_t;
    let (fd, from) = (fd.as_fd().as_raw_fd(), values.as_ptr().cast());
    // SAFETY: the kernel reads `size` bytes from `values`, which outlives the call.
    match unsafe { libc::setsockopt(fd, level, name, from, size) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Integers that the kernel may fill with any bits.
pub trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u64 {}

/// Reads a socket option that `rustix` does not have into `values`. Returns the length that the
/// kernel reports, in bytes for most options.
///
/// # Errors
/// What the kernel refused.
pub fn get_option<T: Plain>(
    fd: impl AsFd,
    level: i32,
    name: i32,
    values: &mut [T],
) -> io::Result<usize> {
    let mut size = size_of_val(values) as libc::socklen_t;
    let (fd, to) = (fd.as_fd().as_raw_fd(), values.as_mut_ptr().cast());
    // SAFETY: the kernel writes at most `size` bytes to `values`, any of which are valid integers, and to `size` how many.
    match unsafe { libc::getsockopt(fd, level, name, to, &raw mut size) } {
        0 => Ok(size as usize),
        _ => Err(io::Error::last_os_error()),
    }
}

pub fn set<T: Copy>(
    fd: impl AsFd,
    level: i32,
    name: i32,
    values: &[T],
    step: &'static str,
) -> Result<()> {
    set_option(fd, level, name, values).map_err(failed(step))
}

/// Sets a TCP option.
pub fn set_tcp(fd: impl AsFd, name: i32, value: i32, step: &'static str) -> Result<()> {
    set(fd, libc::IPPROTO_TCP, name, &[value], step)
}

/// Reads a TCP option into `out` and returns its size in bytes.
pub fn get_tcp(fd: impl AsFd, name: i32, out: &mut [u8], step: &'static str) -> Result<usize> {
    get_option(fd, libc::IPPROTO_TCP, name, out).map_err(failed(step))
}

/// Reads a TCP option of 32 bits.
pub fn get_u32(fd: impl AsFd, name: i32, step: &'static str) -> Result<u32> {
    let mut value = [0_u32];
    get_option(fd, libc::IPPROTO_TCP, name, &mut value).map_err(failed(step))?;
    Ok(value[0])
}

fn buffer_lock(fd: impl AsFd) -> Result<u32> {
    let mut value = [0_u32];
    get_option(fd, libc::SOL_SOCKET, SO_BUF_LOCK, &mut value).map_err(failed("SO_BUF_LOCK"))?;
    Ok(value[0])
}

/// Limits a socket's pacing, in bytes per second. A limit of 0 would stop the socket, so it becomes 1.
pub fn set_pacing(fd: impl AsFd, rate: u64) -> Result<()> {
    let (level, name) = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
    set(fd, level, name, &[rate.max(1)], "SO_MAX_PACING_RATE")
}

/// Limits the window that the kernel announces from now on; what it has announced stays. This also locks the receive
/// buffer, because tuning would lift the limit.
pub fn clamp(fd: impl AsFd, bytes: u32) -> Result<()> {
    let locked = [buffer_lock(&fd)? | LOCKED_RECEIVE];
    set(&fd, libc::SOL_SOCKET, SO_BUF_LOCK, &locked, "SO_BUF_LOCK")?;
    let bytes = i32::try_from(bytes).unwrap_or(i32::MAX);
    set_tcp(fd, libc::TCP_WINDOW_CLAMP, bytes, "TCP_WINDOW_CLAMP")
}

/// Reads both buffer sizes with one system call, and which of them are locked.
///
/// # Errors
/// What the kernel refused.
pub fn buffers(fd: impl AsFd) -> Result<SocketBuffers> {
    // up to SK_MEMINFO_SNDBUF, include/uapi/linux/sock_diag.h
    let mut memory = [0_u32; 4];
    let size = get_option(&fd, libc::SOL_SOCKET, SO_MEMINFO, &mut memory);
    if size.map_err(failed("SO_MEMINFO"))? != size_of_val(&memory) {
        return Err(Error::NotTransferable(
            "SO_MEMINFO does not have the buffer sizes",
        ));
    }
    let [_, receive, _, send] = memory;
    Ok(SocketBuffers {
        send,
        receive,
        locked: buffer_lock(fd)?,
    })
}

/// Sets both sizes regardless of the system's limits, and the locks.
pub fn set_buffers(fd: impl AsFd, to: SocketBuffers) -> Result<()> {
    sockopt::set_socket_send_buffer_size_force(&fd, half(to.send))
        .map_err(failed("SO_SNDBUFFORCE"))?;
    set_receive(&fd, to.receive)?;
    set(
        fd,
        libc::SOL_SOCKET,
        SO_BUF_LOCK,
        &[to.locked],
        "SO_BUF_LOCK",
    )
}

/// Sets the receive buffer. The kernel no longer tunes it.
pub fn set_receive(fd: impl AsFd, bytes: u32) -> Result<()> {
    sockopt::set_socket_recv_buffer_size_force(fd, half(bytes)).map_err(failed("SO_RCVBUFFORCE"))
}

/// Half of a size: the kernel doubles the value that it receives.
fn half(bytes: u32) -> usize {
    bytes as usize / 2
}

pub fn queued(fd: impl AsFd, queue: Queue) -> Result<usize> {
    let (request, step) = match queue {
        Queue::Unread => (SIOCINQ, "SIOCINQ"),
        Queue::Written => (SIOCOUTQ, "SIOCOUTQ"),
    };
    let mut count: libc::c_int = 0;
    // SAFETY: each of these requests writes one int to the address given.
    match unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, &mut count) } {
        0 => Ok(count.max(0) as usize),
        _ => Err(failed(step)(io::Error::last_os_error())),
    }
}

/// Whether a peek at the receive queue (`MSG_PEEK`) begins at the first unread byte, as a read
/// does. Before Linux 6.9 TCP has no `SO_PEEK_OFF`, so every peek begins there.
///
/// # Errors
/// What the kernel refused.
pub fn peeks_from_start(fd: impl AsFd) -> Result<bool> {
    let mut value = [0_i32];
    match get_option(fd, libc::SOL_SOCKET, SO_PEEK_OFF, &mut value) {
        Ok(_) => Ok(value == [-1]),
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(true),
        Err(e) => Err(failed("SO_PEEK_OFF")(e)),
    }
}

/// Peeks at the selected queue; may return fewer bytes than `count`.
pub fn peek(fd: impl AsFd, count: usize, step: &'static str) -> Result<Vec<u8>> {
    let mut bytes = vec![0; count];
    if count > 0 {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let (got, _) = rustix::net::recv(fd, &mut bytes, flags).map_err(failed(step))?;
        bytes.truncate(got);
    }
    Ok(bytes)
}

/// Writes all of `bytes` to the selected queue, or to the connection.
pub fn write(fd: impl AsFd, bytes: &[u8], step: &'static str) -> Result<()> {
    /// Largest write into a receive queue under repair.
    const MAX_WRITE_BYTES: usize = 64 << 10;
    let mut left = bytes;
    while !left.is_empty() {
        let piece = &left[..left.len().min(MAX_WRITE_BYTES)];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(&fd, piece, flags).map_err(failed(step))? {
            0 => return Err(failed(step)(io::Error::from(io::ErrorKind::WriteZero))),
            sent => left = &left[sent..],
        }
    }
    Ok(())
}

/// Reads the address of this end (`peer` false) or of the peer; `None` when it is no internet address.
pub fn address(fd: impl AsFd, peer: bool) -> Result<Option<SocketAddr>> {
    let address: Option<SocketAddrAny> = match peer {
        true => rustix::net::getpeername(fd).map_err(failed("getpeername"))?,
        false => Some(rustix::net::getsockname(fd).map_err(failed("getsockname"))?),
    };
    Ok(address.and_then(|address| SocketAddr::try_from(address).ok()))
}

pub fn bind(fd: impl AsFd, address: &SocketAddr) -> Result<()> {
    rustix::net::bind(fd, address).map_err(failed("bind"))
}

pub fn connect(fd: impl AsFd, address: &SocketAddr) -> Result<()> {
    rustix::net::connect(fd, address).map_err(failed("connect"))
}

/// Disconnects a socket from its peer, and clears its pending error: poll must not report this end as an error.
pub fn disconnect(fd: impl AsFd) -> Result<()> {
    rustix::net::connect_unspec(&fd).map_err(failed("disconnect"))?;
    let pending: std::result::Result<_, Errno> = sockopt::socket_error(fd);
    pending.map(drop).map_err(failed("SO_ERROR"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peeks_begin_at_the_first_byte_unless_peek_off_is_set() {
        let netlink = rustix::net::socket(
            rustix::net::AddressFamily::NETLINK,
            rustix::net::SocketType::RAW,
            None,
        );
        assert!(peeks_from_start(netlink.unwrap()).unwrap());
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(peeks_from_start(&unix).unwrap());
        set_option(&unix, libc::SOL_SOCKET, SO_PEEK_OFF, &[7]).unwrap();
        assert!(!peeks_from_start(&unix).unwrap());
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(peeks_from_start(null).is_err());
    }
}
