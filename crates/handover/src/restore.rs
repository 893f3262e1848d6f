// SPDX-License-Identifier: Apache-2.0
//! Into a socket.

use std::os::fd::BorrowedFd;

use crate::extract::leave_repair_mode;
use crate::state::{SocketBuffers, TcpState};
use crate::sys;
use crate::{Error, Result};

// Codes of TCP options (RFC 9293, 2018, 7323).
const MSS: u32 = 2;
const WSCALE: u32 = 3;
const SACK_PERMITTED: u32 = 4;
const TIMESTAMPS: u32 = 8;

/// A connection that is complete and says nothing yet. Dropped, it stays in repair mode, and closing it is silent.
#[derive(Debug)]
#[must_use = "the connection is silent until `go`"]
pub struct RestoredConnection<'a> {
    fd: BorrowedFd<'a>,
    unsent: Vec<u8>,
    /// What it has in the end, where that is to be set.
    buffers: Option<SocketBuffers>,
}

impl RestoredConnection<'_> {
    /// Begins to speak: its packets have to come to this socket from now on.
    pub fn activate(self) -> Result<()> {
        sys::set_tcp(self.fd, sys::REPAIR, sys::OFF, "TCP_REPAIR")?;
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

/// Ends the connection of a socket, without a word; the descriptor stays and can get a connection by [`restore`].
///
/// Whoever polls it sees an error and a hang-up until then.
pub fn disconnect_silently(fd: BorrowedFd<'_>) -> Result<()> {
    sys::set_tcp(fd, sys::REPAIR, sys::ON, "TCP_REPAIR")?;
    sys::disconnect(fd)?;
    // what poll says of the end is nobody's business
    sys::forget_error(fd)
}

/// Ends the connection of a socket that was taken, with a reset to the peer: for one that nobody has any more. The descriptor
/// stays, and whoever polls it sees an error and a hang-up.
pub fn disconnect_with_reset(fd: BorrowedFd<'_>) -> Result<()> {
    leave_repair_mode(fd)?;
    sys::disconnect(fd)?;
    sys::forget_error(fd)
}

/// SocketBuffers that hold the queues however the kernel cuts them into segments.
fn roomy(state: &TcpState) -> SocketBuffers {
    let room = |bytes: usize| u32::try_from(4 * bytes + (256 << 10)).unwrap_or(u32::MAX);
    SocketBuffers {
        send: state.buffers.send.max(room(state.queued())),
        receive: state.buffers.receive.max(room(state.unread.len())),
        locked: state.buffers.locked,
    }
}

/// Lets a fresh socket send at the pace at which the one before did: with its congestion control, if that is one of `allowed`, and
/// with the cap of its pacing. To be called before [`restore`]; whether it has the same congestion control now.
///
/// Only names that the kernel has already belong into `allowed`: for a process with CAP_NET_ADMIN it loads a module for any other one.
///
/// # Errors
/// What the kernel refused.
pub fn apply_pacing(fd: BorrowedFd<'_>, state: &TcpState, allowed: &[String]) -> Result<bool> {
    if let Some(rate) = state.pacing {
        sys::set_pacing(fd, rate)?;
    }
    let name = &state.congestion;
    if name.is_empty() || *name == sys::congestion(fd)? {
        return Ok(true);
    }
    if !allowed.contains(name) {
        return Ok(false);
    }
    let (level, name) = (libc::IPPROTO_TCP, name.as_bytes());
    sys::set(fd, level, libc::TCP_CONGESTION, name, "TCP_CONGESTION")?;
    Ok(true)
}

/// Puts a connection into a socket that has none: a fresh one, or one after [`disconnect_silently`].
///
/// The local address has to be one of the namespace's own. A FIN of the peer (`peer_finished`) is not put: somebody has to
/// send it to the socket again.
///
/// # Errors
/// The step that the kernel refused. The socket has to be closed then, which is silent.
pub fn restore<'a>(fd: BorrowedFd<'a>, state: &TcpState) -> Result<RestoredConnection<'a>> {
    of_one_family(state)?;
    sys::set_tcp(fd, sys::REPAIR, sys::ON, "TCP_REPAIR")?;
    sys::set_buffers(fd, roomy(state))?;
    build(fd, state, Some(state.buffers))
}

/// Puts a connection back into the socket that it was [taken from](crate::Extracted::detach), in place of what was left there: as
/// [`disconnect_silently`] and [`restore`]. `own` are the buffers that the socket has; they stay where they are large enough, since each
/// step is a system call.
///
/// # Errors
/// As of [`restore`].
pub fn restore_in_place<'a>(
    fd: BorrowedFd<'a>,
    state: &TcpState,
    own: SocketBuffers,
) -> Result<RestoredConnection<'a>> {
    of_one_family(state)?;
    // it is in repair mode, and stays so when it has no peer any more
    sys::disconnect(fd)?;
    sys::forget_error(fd)?;
    let is_empty = state.queued() == 0 && state.unread.is_empty();
    // the window that the peer was told has to fit into the buffer
    if is_empty && state.buffers.receive <= own.receive {
        return build(fd, state, None);
    }
    sys::set_buffers(fd, roomy(state))?;
    build(fd, state, Some(state.buffers))
}

fn of_one_family(state: &TcpState) -> Result<()> {
    match state.local.is_ipv4() == state.peer.is_ipv4() {
        true => Ok(()),
        false => Err(Error::NotTransferable("its ends are of different families")),
    }
}

/// In a socket that is in repair mode and has no peer.
fn build<'a>(
    fd: BorrowedFd<'a>,
    state: &TcpState,
    buffers: Option<SocketBuffers>,
) -> Result<RestoredConnection<'a>> {
    let begin_received = state.rcv_nxt.wrapping_sub(state.unread.len() as u32);
    let begin_written = state.write_seq.wrapping_sub(state.queued() as u32);
    sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::RECV_QUEUE, "TCP_REPAIR_QUEUE")?;
    sys::set_tcp(fd, sys::QUEUE_SEQ, begin_received as i32, "TCP_QUEUE_SEQ")?;
    sys::set_tcp(fd, sys::REPAIR_QUEUE, sys::SEND_QUEUE, "TCP_REPAIR_QUEUE")?;
    sys::set_tcp(fd, sys::QUEUE_SEQ, begin_written as i32, "TCP_QUEUE_SEQ")?;
    // before connecting, else what is queued goes out in segments of 524 bytes
    sys::set_tcp(fd, sys::MAXSEG, state.mss as i32, "TCP_MAXSEG")?;
    // also where the name says that it is bound: after a disconnect it is not
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

    // the send queue is chosen still
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
