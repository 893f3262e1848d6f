// SPDX-License-Identifier: Apache-2.0
//! Extracts connections from sockets.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use rustix::net::sockopt::{self, tcp_congestion};

use crate::state::{RepairWindow, TcpState, WindowScale};
use crate::sys::{self, Queue};
use crate::{Error, Result};

/// Attempts to read a consistent state. Each attempt may fail for a segment that was under way.
const MAX_ATTEMPTS: usize = 100;

// include/net/tcp_states.h
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;

// tcpi_options, include/uapi/linux/tcp.h
const TIMESTAMPS: u8 = 1;
const SACK: u8 = 2;
const WSCALE: u8 = 4;

// Offset of tcpi_rcv_wnd; older kernels have shorter structures.
const RCV_WND_OFFSET: usize = 232;

/// A socket in repair mode: it sends nothing, not even when it is closed. When this is dropped, the
/// socket leaves repair mode and goes on as before.
#[derive(Debug)]
pub struct Extracted<'a> {
    repair: RepairGuard<'a>,
    state: TcpState,
}

impl Extracted<'_> {
    /// The connection's state.
    pub fn state(&self) -> &TcpState {
        &self.state
    }

    /// Leaves the socket in repair mode and returns the state, for another socket.
    pub fn detach(self) -> TcpState {
        std::mem::forget(self.repair);
        self.state
    }
}

/// Leaves repair mode when dropped.
#[derive(Debug)]
struct RepairGuard<'a>(BorrowedFd<'a>);

impl Drop for RepairGuard<'_> {
    fn drop(&mut self) {
        // if this fails, the socket stays in repair mode and sends nothing
        let _ = leave_repair_mode(self.0);
    }
}

/// The fields of `struct tcp_info` that matter here. Two equal values mean that nothing happened in between: a write
/// is sent at once or counts as not sent, and a sent segment is acknowledged or counts as not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Info {
    state: u8,
    options: u8,
    scale: WindowScale,
    /// Segments sent and not acknowledged.
    unacked: u32,
    /// Pacing limit in bytes per second, if there is one.
    pacing: Option<u64>,
    /// Total bytes: acknowledged by the peer, received, sent (retransmissions included).
    acked: u64,
    received: u64,
    sent: u64,
    /// Bytes written and not sent.
    unsent: u32,
}

/// Size up to `tcpi_bytes_sent` (Linux 4.19).
const INFO_BYTES: usize = 208;

impl Info {
    fn read(fd: BorrowedFd<'_>) -> Result<Self> {
        let mut bytes = [0; INFO_BYTES];
        let got = sys::get_tcp(fd, sys::INFO, &mut bytes, "TCP_INFO")?;
        if got < bytes.len() {
            return Err(Error::NotTransferable(
                "the kernel is older than Linux 4.19: TCP_INFO does not count sent bytes",
            ));
        }
        Ok(Self::of(&bytes))
    }

    fn of(bytes: &[u8; INFO_BYTES]) -> Self {
        let u32_at = |at: usize| {
            let mut four = [0; 4];
            four.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(four)
        };
        let u64_at = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(eight)
        };
        // one byte has two bit fields of four bits, the first one in the lower half on little endian
        let scale = bytes[6];
        let (low, high) = (scale & 15, scale >> 4);
        let (peer, own) = if cfg!(target_endian = "little") {
            (low, high)
        } else {
            (high, low)
        };
        let pacing = u64_at(112);
        Self {
            state: bytes[0],
            options: bytes[5],
            scale: WindowScale { peer, own },
            unacked: u32_at(24),
            pacing: (pacing != u64::MAX).then_some(pacing),
            acked: u64_at(120),
            received: u64_at(128),
            sent: u64_at(200),
            unsent: u32_at(144),
        }
    }
}

/// Bytes that were written and not acknowledged. A connection that is extracted with such bytes works, but segments
/// under way are retransmitted only after 200 ms or more. Better wait until this is 0.
///
/// # Errors
/// What the kernel refused.
pub fn unacknowledged_bytes(fd: BorrowedFd<'_>) -> Result<usize> {
    sys::queued(fd, Queue::Written)
}

/// Bytes that the peer may have delivered or may still send: the receive queue and the announced window.
///
/// # Errors
/// What the kernel refused; [`Error::NotTransferable`] before Linux 6.2.
pub fn receivable_bytes(fd: BorrowedFd<'_>) -> Result<u64> {
    let mut info = [0; RCV_WND_OFFSET + 4];
    if sys::get_tcp(fd, sys::INFO, &mut info, "TCP_INFO")? < info.len() {
        return Err(Error::NotTransferable(
            "the kernel is older than Linux 6.2: TCP_INFO has no receive window",
        ));
    }
    let mut window = [0; 4];
    window.copy_from_slice(&info[RCV_WND_OFFSET..]);
    let unread = sys::queued(fd, Queue::Unread)?;
    Ok(unread as u64 + u64::from(u32::from_ne_bytes(window)))
}

/// Limits the announced window to `window` bytes, or to what the peer [may already send](receivable_bytes), whichever
/// is more.
///
/// # Errors
/// What the kernel refused.
pub fn clamp_window(fd: BorrowedFd<'_>, window: u32) -> Result<()> {
    sys::clamp(fd, window)
}

/// Limits the receive queue and the announced window to `bytes` together, except what the peer [may already
/// send](receivable_bytes). The kernel no longer tunes the buffer.
///
/// # Errors
/// What the kernel refused: this needs `CAP_NET_ADMIN`.
pub fn limit_receive_buffer(fd: BorrowedFd<'_>, bytes: u32) -> Result<()> {
    sys::set_receive(fd, bytes)?;
    sys::clamp(fd, bytes)
}

/// Extracts the connection of a socket, which enters repair mode. The caller must hold the connection's packets.
///
/// The function reads the receive queue first: until the send queue is selected, a socket in repair
/// mode still sends acknowledgements, paced segments and segments that TCP small queues delayed.
///
/// # Errors
/// [`Error::NotTransferable`] unless the socket is an established TCP connection that may still
/// write, or if its queues keep changing; what the kernel refused.
pub fn extract(fd: BorrowedFd<'_>) -> Result<Extracted<'_>> {
    let ends = endpoints(fd)?;
    extract_between(fd, ends)
}

/// Local and peer address of a socket.
///
/// # Errors
/// [`Error::NotTransferable`] unless it is a TCP connection over IPv4 or IPv6.
pub fn endpoints(fd: BorrowedFd<'_>) -> Result<(SocketAddr, SocketAddr)> {
    match (address(fd, false)?, address(fd, true)?) {
        (Some(local), Some(peer)) => Ok((local, peer)),
        _ => Err(Error::NotTransferable(
            "it is no TCP connection over IPv4 or IPv6",
        )),
    }
}

/// As [`extract`], of a connection whose [`endpoints`] were just asked for.
///
/// # Errors
/// As of [`extract`].
pub fn extract_between(
    fd: BorrowedFd<'_>,
    ends: (SocketAddr, SocketAddr),
) -> Result<Extracted<'_>> {
    let info = Info::read(fd)?;
    check(info)?;
    sys::set_tcp(fd, sys::REPAIR, sys::ON, "TCP_REPAIR")?;
    // from here on every error leaves repair mode
    let repair = RepairGuard(fd);
    let state = read(fd, ends, info)?;
    Ok(Extracted { repair, state })
}

/// Leaves repair mode: a socket whose connection was [detached](Extracted::detach) goes on by itself. No other socket
/// may have the connection.
///
/// The kernel takes SO_REUSEADDR from a socket that leaves repair mode. A server could not listen at its port again while
/// such a connection ends, so the socket gets it back. It gets it also if it had none, which changes nothing: a listener
/// without it is refused as before.
///
/// # Errors
/// What the kernel refused.
pub fn leave_repair_mode(fd: BorrowedFd<'_>) -> Result<()> {
    sys::set_tcp(fd, sys::REPAIR, sys::OFF, "TCP_REPAIR")?;
    // A worker's filter refuses it; nothing listens in the worker's namespace.
    let _ = sockopt::set_socket_reuseaddr(fd, true);
    Ok(())
}

/// Sends the peer a window probe, which acknowledges all received bytes and makes the peer answer with its own
/// sequence number. The kernel does so for a socket that leaves repair mode (`tcp_send_window_probe`).
///
/// # Errors
/// What the kernel refused.
pub fn send_window_probe(fd: BorrowedFd<'_>) -> Result<()> {
    sys::set_tcp(fd, sys::REPAIR, sys::ON, "TCP_REPAIR")?;
    leave_repair_mode(fd)
}

fn address(fd: BorrowedFd<'_>, peer: bool) -> Result<Option<SocketAddr>> {
    match sys::address(fd, peer) {
        Err(Error::Kernel { source, .. }) if source.raw_os_error() == Some(libc::ENOTCONN) => {
            Err(Error::NotTransferable("it is not connected"))
        }
        found => found,
    }
}

fn check(info: Info) -> Result<()> {
    match info.state {
        ESTABLISHED | CLOSE_WAIT => Ok(()),
        _ => Err(Error::NotTransferable(
            "it is not established, or has sent a FIN",
        )),
    }
}

/// Reads the state. `before` was read a moment ago. Each read is a system call, so values that the kernel's counters
/// show to be unchanged are not read again.
fn read(
    fd: BorrowedFd<'_>,
    (local, peer): (SocketAddr, SocketAddr),
    mut before: Info,
) -> Result<TcpState> {
    let mss = sys::get_u32(fd, sys::MAXSEG, "TCP_MAXSEG")?;
    for _ in 0..MAX_ATTEMPTS {
        sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::RECV_QUEUE, "TCP_REPAIR_QUEUE")?;
        let received = sys::get_u32(fd, sys::QUEUE_SEQ, "TCP_QUEUE_SEQ")?;
        let unread = sys::queued(fd, Queue::Unread)?;
        if unread > 0 && !sys::peeks_from_start(fd)? {
            return Err(Error::NotTransferable(
                "its program has set SO_PEEK_OFF: a peek does not begin at the first unread byte",
            ));
        }
        let unread_bytes = sys::peek(fd, unread, "the receive queue")?;

        sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::SEND_QUEUE, "TCP_REPAIR_QUEUE")?;
        let written = sys::get_u32(fd, sys::QUEUE_SEQ, "TCP_QUEUE_SEQ")?;
        let unsent = before.unsent as usize;
        // without a segment under way, the send queue is the unsent bytes
        let queued = match before.unacked {
            0 => unsent,
            _ => sys::queued(fd, Queue::Written)?,
        };
        let mut unacked_bytes = sys::peek(fd, queued, "the send queue")?;

        let mut window = [0; size_of::<RepairWindow>()];
        sys::get_tcp(fd, sys::REPAIR_WINDOW, &mut window, "TCP_REPAIR_WINDOW")?;
        let timestamp = match before.options & TIMESTAMPS {
            0 => None,
            _ => Some(sys::get_u32(fd, sys::TIMESTAMP, "TCP_TIMESTAMP")?),
        };
        let after = Info::read(fd)?;
        check(after)?;
        let same = before == after
            && unread_bytes.len() == unread
            && unacked_bytes.len() == queued
            && unsent <= queued;
        before = after;
        if !same {
            continue;
        }
        let word = |at: usize| {
            u32::from_ne_bytes([window[at], window[at + 1], window[at + 2], window[at + 3]])
        };
        let mut window = RepairWindow {
            snd_wl1: word(0),
            snd_wnd: word(4),
            max_window: word(8),
            rcv_wnd: word(12),
            rcv_wup: word(16),
        };
        // a FIN occupies a sequence number, which `rcv_nxt` does not count
        let peer_finished = after.state == CLOSE_WAIT;
        let fin = u32::from(peer_finished);
        window.rcv_wup = window.rcv_wup.wrapping_sub(fin);
        // Segments behind a gap are not moved, and their windows are dropped: the kernel refuses windows beyond what
        // this end would accept (tcp_repair_set_window). The peer announces them again in a later segment.
        let received = received.wrapping_sub(fin);
        if (window.snd_wl1.wrapping_sub(received) as i32) > 0 {
            window.snd_wl1 = received;
        }
        let unsent_bytes = unacked_bytes.split_off(queued - unsent);
        return Ok(TcpState {
            local,
            peer,
            mss,
            sack: after.options & SACK != 0,
            window_scale: (after.options & WSCALE != 0).then_some(after.scale),
            timestamp,
            rcv_nxt: received,
            write_seq: written,
            window,
            unread: unread_bytes,
            unacked: unacked_bytes,
            unsent: unsent_bytes,
            buffers: sys::buffers(fd)?,
            peer_finished,
            congestion: tcp_congestion(fd).map_err(sys::failed("TCP_CONGESTION"))?,
            pacing: after.pacing,
        });
    }
    Err(Error::NotTransferable(
        "its queues keep changing: its packets are not held",
    ))
}
