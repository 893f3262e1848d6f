// SPDX-License-Identifier: Apache-2.0
//! Restores connections in sockets.

use std::os::fd::BorrowedFd;

use rustix::net::sockopt::{set_tcp_congestion, tcp_congestion};

use crate::extract::leave_repair_mode;
use crate::state::{SocketBuffers, TcpState};
use crate::sys::{self, failed};
use crate::{Error, Result};

// Codes of TCP options (RFC 9293, 2018, 7323).
const MSS: u32 = 2;
const WSCALE: u32 = 3;
const SACK_PERMITTED: u32 = 4;
const TIMESTAMPS: u32 = 8;

/// A restored connection that sends nothing yet. When it is dropped, the socket stays in repair
/// mode, and closing the socket sends nothing to the peer.
#[derive(Debug)]
#[must_use = "the connection is silent until `activate`"]
pub struct RestoredConnection<'a> {
    fd: BorrowedFd<'a>,
    unsent: Vec<u8>,
    /// The final buffer sizes, if they must be set.
    buffers: Option<SocketBuffers>,
}

impl RestoredConnection<'_> {
    /// Leaves repair mode: the socket may send. From now on the peer's packets must come to this socket.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn activate(self) -> Result<()> {
        leave_repair_mode(self.fd)?;
        sys::write(self.fd, &self.unsent, "the bytes that were not sent")?;
        match self.buffers {
            Some(buffers) => sys::set_buffers(self.fd, buffers),
            None => Ok(()),
        }
    }
}

/// One option, `struct tcp_repair_opt`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Opt {
    code: u32,
    value: u32,
}

/// Ends the connection of a socket without a packet to the peer. The descriptor stays open, and
/// [`restore`] can put a connection into it. Until then poll reports a hang-up.
///
/// # Errors
/// What the kernel refused.
pub fn disconnect_silently(fd: BorrowedFd<'_>) -> Result<()> {
    sys::set_tcp(fd, sys::REPAIR, sys::ON, "TCP_REPAIR")?;
    sys::disconnect(fd)
}

/// Resets the connection of a socket that was [detached](crate::Extracted::detach) and that no
/// other socket has. The descriptor stays open; poll reports a hang-up.
///
/// # Errors
/// What the kernel refused.
pub fn disconnect_with_reset(fd: BorrowedFd<'_>) -> Result<()> {
    leave_repair_mode(fd)?;
    sys::disconnect(fd)
}

/// Buffer sizes that hold the queues, however the kernel splits them into segments.
fn buffers_for_restore(state: &TcpState) -> SocketBuffers {
    let room = |bytes: usize| u32::try_from(4 * bytes + (256 << 10)).unwrap_or(u32::MAX);
    SocketBuffers {
        send: state.buffers.send.max(room(state.queued())),
        receive: state.buffers.receive.max(room(state.unread.len())),
        locked: state.buffers.locked,
    }
}

/// Gives a new socket the congestion control of the former one, if that is in `allowed`, and its pacing limit. Call
/// this before [`restore`]. Returns whether the socket has the former congestion control now.
///
/// `allowed` must have only names that the kernel has loaded: for a process with CAP_NET_ADMIN the kernel loads a
/// module for any other name.
///
/// # Errors
/// What the kernel refused.
pub fn apply_pacing(fd: BorrowedFd<'_>, state: &TcpState, allowed: &[String]) -> Result<bool> {
    if let Some(rate) = state.pacing {
        sys::set_pacing(fd, rate)?;
    }
    let name = &state.congestion;
    if name.is_empty() || *name == tcp_congestion(fd).map_err(failed("TCP_CONGESTION"))? {
        return Ok(true);
    }
    if !allowed.contains(name) {
        return Ok(false);
    }
    set_tcp_congestion(fd, name).map_err(failed("TCP_CONGESTION"))?;
    Ok(true)
}

/// Restores a connection in a socket that has none: a new one, or one after [`disconnect_silently`].
///
/// The network namespace must have the local address. A FIN of the peer (`peer_finished`) is not restored: the peer
/// or the caller must send it to the socket again.
///
/// # Errors
/// The step that the kernel refused. The caller must close the socket then, which is silent.
pub fn restore<'a>(fd: BorrowedFd<'a>, state: &TcpState) -> Result<RestoredConnection<'a>> {
    check_families(state)?;
    sys::set_tcp(fd, sys::REPAIR, sys::ON, "TCP_REPAIR")?;
    sys::set_buffers(fd, buffers_for_restore(state))?;
    build(fd, state, Some(state.buffers))
}

/// Restores a connection in the socket that it was [extracted from](crate::Extracted::detach), as
/// [`disconnect_silently`] and [`restore`] do. `own` are the socket's buffer sizes. The function
/// keeps them if they are large enough, which saves system calls.
///
/// # Errors
/// As [`restore`].
pub fn restore_in_place<'a>(
    fd: BorrowedFd<'a>,
    state: &TcpState,
    own: SocketBuffers,
) -> Result<RestoredConnection<'a>> {
    check_families(state)?;
    // the socket is in repair mode and stays in it
    sys::disconnect(fd)?;
    let is_empty = state.queued() == 0 && state.unread.is_empty();
    // the announced window must fit into the buffer
    if is_empty && state.buffers.receive <= own.receive {
        return build(fd, state, None);
    }
    sys::set_buffers(fd, buffers_for_restore(state))?;
    build(fd, state, Some(state.buffers))
}

fn check_families(state: &TcpState) -> Result<()> {
    match state.local.is_ipv4() == state.peer.is_ipv4() {
        true => Ok(()),
        false => Err(Error::NotTransferable(
            "its ends are of different address families",
        )),
    }
}

/// Rebuilds the connection in a socket in repair mode without a peer.
fn build<'a>(
    fd: BorrowedFd<'a>,
    state: &TcpState,
    buffers: Option<SocketBuffers>,
) -> Result<RestoredConnection<'a>> {
    let rcv_begin = state.rcv_nxt.wrapping_sub(state.unread.len() as u32);
    let write_begin = state.write_seq.wrapping_sub(state.queued() as u32);
    sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::RECV_QUEUE, "TCP_REPAIR_QUEUE")?;
    sys::set_tcp(fd, sys::QUEUE_SEQ, rcv_begin as i32, "TCP_QUEUE_SEQ")?;
    sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::SEND_QUEUE, "TCP_REPAIR_QUEUE")?;
    sys::set_tcp(fd, sys::QUEUE_SEQ, write_begin as i32, "TCP_QUEUE_SEQ")?;
    // before connecting, otherwise queued bytes leave in segments of 524 bytes
    sys::set_tcp(fd, sys::MAXSEG, state.mss as i32, "TCP_MAXSEG")?;
    // needed even if getsockname reports the address: after a disconnect the socket is not bound
    match sys::bind(fd, &state.local) {
        Err(Error::Kernel { source, .. })
            if source.raw_os_error() == Some(libc::EINVAL)
                && sys::address(fd, false)? == Some(state.local) => {}
        bound => bound?,
    }
    sys::connect(fd, &state.peer)?;

    let mut options = Vec::with_capacity(4);
    if state.sack {
        options.push(Opt {
            code: SACK_PERMITTED,
            value: 0,
        });
    }
    if let Some(scale) = state.window_scale {
        let value = u32::from(scale.peer) | u32::from(scale.own) << 16;
        options.push(Opt {
            code: WSCALE,
            value,
        });
    }
    if state.timestamp.is_some() {
        options.push(Opt {
            code: TIMESTAMPS,
            value: 0,
        });
    }
    options.push(Opt {
        code: MSS,
        value: state.mss,
    });
    sys::set(
        fd,
        libc::IPPROTO_TCP,
        sys::REPAIR_OPTIONS,
        &options,
        "TCP_REPAIR_OPTIONS",
    )?;
    if let Some(timestamp) = state.timestamp {
        sys::set_tcp(fd, sys::TIMESTAMP, timestamp as i32, "TCP_TIMESTAMP")?;
    }

    // the send queue is selected
    if !state.unread.is_empty() {
        sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::RECV_QUEUE, "TCP_REPAIR_QUEUE")?;
        sys::write(fd, &state.unread, "the receive queue")?;
        sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::SEND_QUEUE, "TCP_REPAIR_QUEUE")?;
    }
    sys::write(fd, &state.unacked, "the send queue")?;
    sys::set(
        fd,
        libc::IPPROTO_TCP,
        sys::REPAIR_WINDOW,
        &[state.window],
        "TCP_REPAIR_WINDOW",
    )?;
    Ok(RestoredConnection {
        fd,
        unsent: state.unsent.clone(),
        buffers,
    })
}
