// SPDX-License-Identifier: Apache-2.0
//! What a connection consists of.

use std::net::SocketAddr;

/// All that goes from one socket to the other. Sequence numbers are the kernel's, modulo 2^32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpState {
    /// This end. Both ends are of the same family.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
    /// Largest segment that the peer takes, in bytes.
    pub mss: u32,
    /// Whether both agreed on selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// RepairWindow scaling (RFC 7323), if both agreed on it.
    pub window_scale: Option<WindowScale>,
    /// This end's timestamp clock (RFC 7323), if both agreed on timestamps.
    pub timestamp: Option<u32>,
    /// Sequence number after the last byte of `unread`, without a FIN.
    pub rcv_nxt: u32,
    /// Sequence number after the last byte of `unacked` and `unsent`.
    pub write_seq: u32,
    /// The windows.
    pub window: RepairWindow,
    /// Bytes from the peer that nobody has read.
    pub unread: Vec<u8>,
    /// Bytes that were sent, and not acknowledged.
    pub unacked: Vec<u8>,
    /// Bytes that were written after those, and not sent.
    pub unsent: Vec<u8>,
    /// The buffers.
    pub buffers: SocketBuffers,
    /// Whether the peer has said that it will send no more.
    pub peer_finished: bool,
    /// Name of this end's congestion control; empty where it is not known.
    pub congestion: String,
    /// Cap of this end's pacing in bytes a second, if there is one.
    pub pacing: Option<u64>,
}

/// Shift counts of the windows, 0 to 14.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowScale {
    /// Of windows that the peer announces.
    pub peer: u8,
    /// Of those that this end announces.
    pub own: u8,
}

/// `struct tcp_repair_window`: kernel `include/uapi/linux/tcp.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct RepairWindow {
    /// Sequence number of the segment that announced the peer's window last.
    pub snd_wl1: u32,
    /// What the peer lets this end send, in bytes.
    pub snd_wnd: u32,
    /// The largest of those ever.
    pub max_window: u32,
    /// What this end lets the peer send, in bytes.
    pub rcv_wnd: u32,
    /// Sequence number up to which that was announced.
    pub rcv_wup: u32,
}

/// How much the kernel lets the queues of a socket hold, its own structures included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SocketBuffers {
    /// Of the send queue, in bytes (`sk_sndbuf`).
    pub send: u32,
    /// Of the receive queue, in bytes (`sk_rcvbuf`).
    pub receive: u32,
    /// Which of them the kernel must not tune: 1 send, 2 receive (`SO_BUF_LOCK`).
    pub locked: u32,
}

impl TcpState {
    /// Bytes of this end that are not acknowledged.
    pub fn queued(&self) -> usize {
        self.unacked.len() + self.unsent.len()
    }
}
