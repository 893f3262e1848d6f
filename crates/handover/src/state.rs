// SPDX-License-Identifier: Apache-2.0
//! The state of a connection.

use std::net::SocketAddr;

/// The state that moves from one socket to the other. Sequence numbers are modulo 2^32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpState {
    /// This end. Both ends are of the same address family.
    pub local: SocketAddr,
    /// The peer's end.
    pub peer: SocketAddr,
    /// Largest segment that the peer accepts, in bytes.
    pub mss: u32,
    /// Whether both ends use selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// Window scaling (RFC 7323), if both ends use it.
    pub window_scale: Option<WindowScale>,
    /// This end's timestamp clock (RFC 7323), if both ends use timestamps.
    pub timestamp: Option<u32>,
    /// Sequence number after the last byte of `unread`, without a FIN.
    pub rcv_nxt: u32,
    /// Sequence number after the last byte of `unacked` and `unsent`.
    pub write_seq: u32,
    /// The windows.
    pub window: RepairWindow,
    /// Bytes from the peer that the program has not read.
    pub unread: Vec<u8>,
    /// Bytes that were sent and not acknowledged.
    pub unacked: Vec<u8>,
    /// Bytes that were written after those and not sent.
    pub unsent: Vec<u8>,
    /// The socket buffers.
    pub buffers: SocketBuffers,
    /// Whether the peer has sent a FIN.
    pub peer_finished: bool,
    /// This end's congestion control; empty when unknown.
    pub congestion: String,
    /// This end's pacing limit in bytes per second, if it has one.
    pub pacing: Option<u64>,
}

/// Shift counts of the windows, 0 to 14.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowScale {
    /// Of windows that the peer announces.
    pub peer: u8,
    /// Of windows that this end announces.
    pub own: u8,
}

/// `struct tcp_repair_window`: kernel `include/uapi/linux/tcp.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct RepairWindow {
    /// Sequence number of the segment that announced the peer's window last.
    pub snd_wl1: u32,
    /// Window that the peer announced, in bytes.
    pub snd_wnd: u32,
    /// Largest window that the peer ever announced, in bytes.
    pub max_window: u32,
    /// Window that this end announced, in bytes.
    pub rcv_wnd: u32,
    /// Sequence number at which this end announced it.
    pub rcv_wup: u32,
}

/// Buffer sizes of a socket, the kernel's own structures included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SocketBuffers {
    /// Send buffer in bytes (`sk_sndbuf`).
    pub send: u32,
    /// Receive buffer in bytes (`sk_rcvbuf`).
    pub receive: u32,
    /// Buffers that the kernel must not tune: 1 send, 2 receive (`SO_BUF_LOCK`).
    pub locked: u32,
}

impl TcpState {
    /// Bytes in the send queue: sent and not acknowledged, or not sent.
    pub fn queued(&self) -> usize {
        self.unacked.len() + self.unsent.len()
    }
}
