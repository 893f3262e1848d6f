// SPDX-License-Identifier: Apache-2.0
//! The state of a TCP connection, as agent and host exchange it.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::{MAX_BUFFER_BYTES, MAX_CONGESTION_NAME_BYTES};
use crate::agent::Bytes;

/// State of a TCP connection on its way from one socket to another. The fields are those of the kernel's `TCP_REPAIR`
/// (`include/uapi/linux/tcp.h`); sequence numbers are modulo 2^32.
///
/// On the wire it is an array without names, and fields that are rarely set are left out: a guest may read its serial
/// line byte by byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WireConnection", into = "WireConnection")]
pub struct Connection {
    /// The VM's end.
    pub local: SocketAddr,
    /// The other end, of the same family.
    pub peer: SocketAddr,
    /// Largest segment that the peer accepts, in bytes.
    pub mss: u32,
    /// Whether both ends use selective acknowledgements (RFC 2018).
    pub sack: bool,
    /// Window scales (RFC 7323) of the peer and of this end, 0 to 14.
    pub window_scale: Option<(u8, u8)>,
    /// This end's timestamp clock (RFC 7323).
    pub timestamp: Option<u32>,
    /// Sequence number after the last byte of `unread`, without a FIN.
    pub rcv_nxt: u32,
    /// Sequence number after the last byte of `unacked` and `unsent`.
    pub write_seq: u32,
    /// `snd_wl1`, `snd_wnd`, `max_window`, `rcv_wnd`, `rcv_wup` of `struct tcp_repair_window`.
    pub window: [u32; 5],
    /// Send buffer and receive buffer in bytes, and which of them the kernel must not tune (`SO_BUF_LOCK`: 1 send, 2
    /// receive).
    pub buffers: [u32; 3],
    /// Received and not read; at most [`super::MAX_QUEUE_BYTES`], as the other two.
    pub unread: Bytes,
    /// Sent and not acknowledged.
    pub unacked: Bytes,
    /// Written and not sent.
    pub unsent: Bytes,
    /// Whether the peer has sent a FIN.
    pub peer_finished: bool,
    /// This end's congestion control: at most [`MAX_CONGESTION_NAME_BYTES`] bytes of `a-z0-9_`; empty when unknown.
    pub congestion: String,
    /// This end's pacing limit in bytes per second (`SO_MAX_PACING_RATE`), if it has one.
    pub pacing: Option<u64>,
}

/// A [`Connection`] on the wire.
#[derive(Serialize, Deserialize)]
struct WireConnection(SocketAddr, SocketAddr, WireOptions, WireState, WireOptional);

/// `mss`, `sack`, `window_scale`.
#[derive(Serialize, Deserialize)]
struct WireOptions(u32, bool, Option<(u8, u8)>);

/// `timestamp`, `rcv_nxt`, `write_seq`, `window`, `buffers`.
#[derive(Serialize, Deserialize)]
struct WireState(Option<u32>, u32, u32, [u32; 5], [u32; 3]);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireOptional {
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    unread: Bytes,
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    unacked: Bytes,
    #[serde(default, skip_serializing_if = "Bytes::is_empty")]
    unsent: Bytes,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    peer_finished: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    congestion: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pacing: Option<u64>,
}

impl From<WireConnection> for Connection {
    fn from(row: WireConnection) -> Self {
        let WireConnection(local, peer, WireOptions(mss, sack, window_scale), numbers, more) = row;
        let WireState(timestamp, rcv_nxt, write_seq, window, buffers) = numbers;
        Self {
            local,
            peer,
            mss,
            sack,
            window_scale,
            timestamp,
            rcv_nxt,
            write_seq,
            window,
            buffers,
            unread: more.unread,
            unacked: more.unacked,
            unsent: more.unsent,
            peer_finished: more.peer_finished,
            congestion: more.congestion,
            pacing: more.pacing,
        }
    }
}

impl From<Connection> for WireConnection {
    fn from(c: Connection) -> Self {
        Self(
            c.local,
            c.peer,
            WireOptions(c.mss, c.sack, c.window_scale),
            WireState(c.timestamp, c.rcv_nxt, c.write_seq, c.window, c.buffers),
            WireOptional {
                unread: c.unread,
                unacked: c.unacked,
                unsent: c.unsent,
                peer_finished: c.peer_finished,
                congestion: c.congestion,
                pacing: c.pacing,
            },
        )
    }
}

impl Connection {
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if self.local.is_ipv4() != self.peer.is_ipv4() {
            return Err("ends of different families");
        }
        if self.window_scale.is_some_and(|(a, b)| a > 14 || b > 14) {
            return Err("a window scale above 14");
        }
        if !(48..=65_535).contains(&self.mss) {
            return Err("a segment size outside of 48..=65535");
        }
        if self.buffers[0] > MAX_BUFFER_BYTES
            || self.buffers[1] > MAX_BUFFER_BYTES
            || self.buffers[2] > 3
        {
            return Err("socket buffers above the limit, or an unknown lock");
        }
        let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if self.congestion.len() > MAX_CONGESTION_NAME_BYTES
            || !self.congestion.bytes().all(is_part)
        {
            return Err("an invalid name of a congestion control");
        }
        Ok(())
    }
}
