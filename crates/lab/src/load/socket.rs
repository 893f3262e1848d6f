// SPDX-License-Identifier: Apache-2.0
//! Socket options and calls that std lacks: receive time stamps, pacing, TCP_INFO.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// The clock of receive time stamps, in microseconds since the epoch.
pub(super) fn now_us() -> f64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
}

/// Turns on the kernel's receive time stamps.
pub(super) fn stamp_arrivals(socket: &impl AsFd) -> io::Result<()> {
    set_option(socket, libc::SO_TIMESTAMPNS, 1)
}

/// Limits a connection's rate in bytes per second; the kernel spaces its packets.
pub(super) fn set_pace(socket: &impl AsFd, pace: u32) -> io::Result<()> {
    set_option(socket, libc::SO_MAX_PACING_RATE, pace)
}

fn set_option(socket: &impl AsFd, option: libc::c_int, value: u32) -> io::Result<()> {
    // SAFETY: both options that are set here take four bytes, the size of `value`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_ref(&value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Share of its busy time in which a connection waited for the receiver's window (0 to 1), and
/// number of retransmitted packets.
pub(super) fn window_share_and_retransmits(socket: &impl AsFd) -> io::Result<(f64, u32)> {
    /// Offsets of `tcpi_total_retrans`, `tcpi_busy_time` and `tcpi_rwnd_limited` in `struct
    /// tcp_info` (linux/tcp.h), and the size up to there.
    const RETRANSMITS: usize = 100;
    const BUSY: usize = 168;
    const WINDOW: usize = 176;
    const INFO: usize = 184;
    let mut info = [0_u8; INFO];
    let mut size = INFO as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes, the buffer's length.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut size,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let whole = |at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&info[at..at + 8]);
        u64::from_ne_bytes(eight)
    };
    let mut four = [0; 4];
    four.copy_from_slice(&info[RETRANSMITS..RETRANSMITS + 4]);
    let part = whole(WINDOW) as f64 / whole(BUSY).max(1) as f64;
    Ok((part.min(1.0), u32::from_ne_bytes(four)))
}

/// Receives into `data`. Returns the number of bytes and their arrival by [`now_us`]'s clock (now,
/// if the kernel did not stamp them).
pub(super) fn receive(socket: &impl AsFd, data: &mut [u8]) -> io::Result<(usize, f64)> {
    let mut control = [0_u64; 16];
    let mut part = libc::iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: data.len(),
    };
    // SAFETY: all zeros is an empty message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the header points to buffers of the given lengths that live through the call.
    let count = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut message, 0) };
    let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
    let mut arrived = None;
    // SAFETY: walks the control messages that the kernel has just written; a time stamp's data is a
    // timespec, read unaligned.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET
                && (*header).cmsg_type == libc::SCM_TIMESTAMPNS
            {
                let stamp = libc::CMSG_DATA(header)
                    .cast::<libc::timespec>()
                    .read_unaligned();
                arrived = Some(stamp.tv_sec as f64 * 1e6 + stamp.tv_nsec as f64 / 1e3);
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok((count, arrived.unwrap_or_else(now_us)))
}

/// Waits until the socket is readable. Returns false after `limit`.
pub(super) fn wait_readable(socket: &impl AsFd, limit: Duration) -> io::Result<bool> {
    let limit = Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: limit.subsec_nanos().into(),
    };
    let mut fds = [PollFd::new(socket, PollFlags::IN)];
    match poll(&mut fds, Some(&limit)) {
        Ok(count) => Ok(count > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(e) => Err(e.into()),
    }
}
