// SPDX-License-Identifier: Apache-2.0
//! Out of a socket.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use crate::state::{RepairWindow, TcpState, WindowScale};
use crate::sys::{self, Queue};
use crate::{Error, Result};

/// How often a queue may change under the reader's eyes; each time it is for a segment that was under way.
const TRIES: usize = 100;

// include/net/tcp_states.h
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;

// tcpi_options, include/uapi/linux/tcp.h
const TIMESTAMPS: u8 = 1;
const SACK: u8 = 2;
const WSCALE: u8 = 4;

// tcpi_rcv_wnd, behind it all that older kernels know
const RCV_WND: usize = 232;

/// A socket in repair mode: it sends nothing and its end is silent. Dropped, it goes on as before.
#[derive(Debug)]
pub struct Extracted<'a> {
    repair: Repair<'a>,
    state: TcpState,
}

impl Extracted<'_> {
    /// What it consists of.
    pub fn state(&self) -> &TcpState {
        &self.state
    }

    /// Leaves the socket in repair mode; the connection is somebody else's now.
    pub fn detach(self) -> TcpState {
        std::mem::forget(self.repair);
        self.state
    }
}

/// Ends repair mode when dropped.
#[derive(Debug)]
struct Repair<'a>(BorrowedFd<'a>);

impl Drop for Repair<'_> {
    fn drop(&mut self) {
        // nothing can be done about a failure: the socket is as good as closed then
        let _ = leave_repair_mode(self.0);
    }
}

/// The parts of `struct tcp_info` that matter here. Two that are equal were read of a connection on which nothing has happened in
/// between: what is written is sent at once or counts as not sent, and what is sent is acknowledged or counts as not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Info {
    state: u8,
    options: u8,
    scale: WindowScale,
    /// Segments that were sent and are not acknowledged.
    unacked: u32,
    /// Cap of the pacing in bytes a second, if there is one.
    pacing: Option<u64>,
    /// Bytes in all: acknowledged by the peer, received, sent (again, too).
    acked: u64,
    received: u64,
    sent: u64,
    /// Bytes that were written and not sent.
    unsent: u32,
}

/// Up to `tcpi_bytes_sent`, which came last (Linux 4.19).
const INFO: usize = 208;

impl Info {
    fn read(fd: BorrowedFd<'_>) -> Result<Self> {
        let mut bytes = [0; INFO];
        let got = sys::get_tcp(fd, sys::INFO, &mut bytes, "TCP_INFO")?;
        if got < bytes.len() {
            return Err(Error::NotTransferable(
                "the kernel is too old: it does not count the bytes that are sent",
            ));
        }
        Ok(Self::of(&bytes))
    }

    fn of(bytes: &[u8; INFO]) -> Self {
        let half = |at: usize| {
            let mut four = [0; 4];
            four.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(four)
        };
        let whole = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(eight)
        };
        // two bit fields of four bits in one byte, the first one in the lower half on little endian
        let scale = bytes[6];
        let (low, high) = (scale & 15, scale >> 4);
        let (peer, own) = if cfg!(target_endian = "little") {
            (low, high)
        } else {
            (high, low)
        };
        let pacing = whole(112);
        Self {
            state: bytes[0],
            options: bytes[5],
            scale: WindowScale { peer, own },
            unacked: half(24),
            pacing: (pacing != u64::MAX).then_some(pacing),
            acked: whole(120),
            received: whole(128),
            sent: whole(200),
            unsent: half(144),
        }
    }
}

/// Bytes that were written and are not acknowledged. A connection that is taken with such bytes works, but what was under
/// way is sent again only after the retransmission timeout of 200 ms and more: better wait until nothing is.
///
/// # Errors
/// What the kernel refused.
pub fn unacknowledged_bytes(fd: BorrowedFd<'_>) -> Result<usize> {
    sys::queued(fd, Queue::Written)
}

/// How many bytes further than what was read the peer may send: those that nobody has read, and the window announced.
///
/// # Errors
/// What the kernel refused; [`Error::NotTransferable`] before Linux 6.2.
pub fn receivable_bytes(fd: BorrowedFd<'_>) -> Result<u64> {
    let mut info = [0; RCV_WND + 4];
    if sys::get_tcp(fd, sys::INFO, &mut info, "TCP_INFO")? < info.len() {
        return Err(Error::NotTransferable(
            "the kernel does not tell its window",
        ));
    }
    let mut window = [0; 4];
    window.copy_from_slice(&info[RCV_WND..]);
    let unread = sys::queued(fd, Queue::Unread)?;
    Ok(unread as u64 + u64::from(u32::from_ne_bytes(window)))
}

/// Lets the peer send no further than it [may now](receivable_bytes), or `window` bytes beyond what has come, whichever is more.
///
/// # Errors
/// What the kernel refused.
pub fn clamp_window(fd: BorrowedFd<'_>, window: u32) -> Result<()> {
    sys::clamp(fd, window)
}

/// Lets what nobody has read and what the peer may still send be `bytes` together at most, but for what it [may
/// already](receivable_bytes); the kernel tunes that no more.
///
/// # Errors
/// What the kernel refused: this needs `CAP_NET_ADMIN`.
pub fn limit_receive_buffer(fd: BorrowedFd<'_>, bytes: u32) -> Result<()> {
    sys::set_receive(fd, bytes)?;
    sys::clamp(fd, bytes)
}

/// Takes the connection out of a socket, which is in repair mode from then on. Its packets have to be held back.
///
/// The receive queue is read first: only when the send queue is chosen does a socket in repair mode stop
/// to send acknowledgements, paced segments and what the small-queue tasklet had left.
///
/// # Errors
/// [`Error::NotTransferable`] for what is no established TCP connection, or has said that it will write no more.
pub fn extract(fd: BorrowedFd<'_>) -> Result<Extracted<'_>> {
    let ends = endpoints(fd)?;
    extract_between(fd, ends)
}

/// This end of a connection, and the other one, as the socket has them.
///
/// # Errors
/// [`Error::NotTransferable`] for what is no connection of TCP.
pub fn endpoints(fd: BorrowedFd<'_>) -> Result<(SocketAddr, SocketAddr)> {
    match (address(fd, false)?, address(fd, true)?) {
        (Some(local), Some(peer)) => Ok((local, peer)),
        _ => Err(Error::NotTransferable(
            "it is no connection of TCP over IPv4 or IPv6",
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
    // from here on the socket is let go again whatever happens
    let repair = Repair(fd);
    let state = read(fd, ends, info)?;
    Ok(Extracted { repair, state })
}

/// Lets a socket whose connection was [kept](Extracted::detach) go on by itself: nobody else has the connection now.
///
/// # Errors
/// What the kernel refused.
pub fn leave_repair_mode(fd: BorrowedFd<'_>) -> Result<()> {
    sys::set_tcp(fd, sys::REPAIR, sys::OFF, "TCP_REPAIR")
}

/// Sends the peer the number up to which all has been received, and makes it answer with its own: the kernel does so for a socket
/// that leaves repair mode (`tcp_send_window_probe`).
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
            "it is not established, or will write no more",
        )),
    }
}

/// `before` is what the kernel said a moment ago. Each question is a system call, so nothing is asked twice that the kernel's counts
/// tell to be as it was.
fn read(
    fd: BorrowedFd<'_>,
    (local, peer): (SocketAddr, SocketAddr),
    mut before: Info,
) -> Result<TcpState> {
    let mss = sys::get_u32(fd, sys::MAXSEG, "TCP_MAXSEG")?;
    for _ in 0..TRIES {
        sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::RECV_QUEUE, "TCP_REPAIR_QUEUE")?;
        let received = sys::get_u32(fd, sys::QUEUE_SEQ, "TCP_QUEUE_SEQ")?;
        let unread = sys::queued(fd, Queue::Unread)?;
        if unread > 0 && !sys::peeks_from_start(fd)? {
            return Err(Error::NotTransferable(
                "a look at what is there begins elsewhere",
            ));
        }
        let unread_bytes = sys::peek(fd, unread, "the receive queue")?;

        sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::SEND_QUEUE, "TCP_REPAIR_QUEUE")?;
        let written = sys::get_u32(fd, sys::QUEUE_SEQ, "TCP_QUEUE_SEQ")?;
        let unsent = before.unsent as usize;
        // without a segment under way the rest is what was not sent
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
        // a FIN takes a number of its own; the peer's counts for nobody but the one who reads the end
        let peer_finished = after.state == CLOSE_WAIT;
        let fin = u32::from(peer_finished);
        window.rcv_wup = window.rcv_wup.wrapping_sub(fin);
        // What has come behind a gap stays behind, and its windows count as not heard: where they are beyond what this end
        // would take, the kernel would not have them (tcp_repair_set_window). A later segment says them again.
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
            congestion: sys::congestion(fd)?,
            pacing: after.pacing,
        });
    }
    Err(Error::NotTransferable(
        "its packets are not held back: its queues keep changing",
    ))
}
