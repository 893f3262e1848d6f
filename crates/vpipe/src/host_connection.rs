// SPDX-License-Identifier: Apache-2.0
//! A VM's connection in a socket of the host.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use viola_handover::{SocketBuffers, TcpState};

use crate::{Error, Flow, FlowTable, HoldQueue, Result};

/// A connection that the host has restored for a VM, until it extracts it again.
///
/// If it is dropped before that, or its process ends, the kernel resets the connection: a peer must
/// never take a truncated stream for a complete one.
#[derive(Debug)]
pub struct HostConnection {
    flow: Flow,
    socket: OwnedFd,
    /// The peer sent a FIN to the VM's socket; the host's socket does not know.
    peer_finished: bool,
    /// Buffers of the VM's socket.
    buffers: SocketBuffers,
    vm_window: u32,
    /// The limit of the receive buffer, and how many bytes were left when it was set.
    bound: Option<(u64, u64)>,
    is_clamped: bool,
}

/// Smallest window that the VM's socket is assumed to have: a new socket announces as much.
const MIN_WINDOW_BYTES: u32 = 64 << 10;
/// Most bytes that arrive between two calls of [`HostConnection::limit_window_near_end`].
const MAX_BYTES_BETWEEN_POLLS: u64 = 2 << 20;
/// Bytes before the end from which on the kernel does not tune the receive buffer: the most that it lets a peer send
/// ahead (`net.ipv4.tcp_rmem`), and what arrives between two calls.
const NEAR_END_BYTES: u64 = (32 << 20) + MAX_BYTES_BETWEEN_POLLS;

impl HostConnection {
    /// Restores a held and extracted connection in `socket`: a new socket in the VM's [`crate::VmNetns`], which has
    /// the VM's address and is behind `veth`. `hold` is the queue with held packets of the connection, which are
    /// delivered first, and the veth to it.
    ///
    /// # Errors
    /// What the kernel refused. The connection stays held, and the peer has received nothing.
    pub fn restore(
        flows: &FlowTable,
        veth: u32,
        socket: OwnedFd,
        flow: Flow,
        state: &TcpState,
        hold: Option<(&mut HoldQueue, u32)>,
    ) -> Result<Self> {
        let ready = viola_handover::restore(socket.as_fd(), state).map_err(Error::Connection)?;
        match hold {
            None => {
                flows.redirect(&flow, veth)?;
                ready.activate().map_err(Error::Connection)?;
            }
            Some((hold_queue, hold_veth)) => {
                // the socket's acknowledgements must reach the peer, which may wait for them
                flows.hold_incoming(&flow, hold_veth)?;
                ready.activate().map_err(Error::Connection)?;
                hold_queue.redirect(flows, &flow, veth)?;
            }
        }
        // from here on, closing the socket resets the connection
        let option = |step: &str| Error::kernel(step.to_owned());
        rustix::net::sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO))
            .map_err(|e| option("SO_LINGER")(e.into()))?;
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| option("FIONBIO")(e.into()))?;
        Ok(Self {
            flow,
            socket,
            peer_finished: state.peer_finished,
            buffers: state.buffers,
            // a busy socket may announce a small window now, as may a new one with a large buffer
            vm_window: (state.window.rcv_wnd.min(state.buffers.receive / 2)).max(MIN_WINDOW_BYTES),
            bound: None,
            is_clamped: false,
        })
    }

    /// Limits what the peer may send near the end of a transfer. Call it from time to time while `left` bytes are
    /// still wanted.
    ///
    /// The host's socket lets a peer send many megabytes ahead. Bytes behind the last wanted one go to the VM's
    /// socket, which has no room for them and drops them. So near the end this sets the receive buffer to the bytes
    /// still wanted: the kernel could otherwise grow it by tens of megabytes between two calls, and an announced
    /// window cannot be taken back. At the end the peer may send no further than the VM's own socket would let it.
    pub fn limit_window_near_end(&mut self, left: u64) {
        if self.is_clamped || left > NEAR_END_BYTES {
            return;
        }
        let bound = match self.bound {
            Some((bound, before)) => bound.saturating_sub(before.saturating_sub(left)),
            None => {
                let own = viola_handover::buffers(self.socket()).map_or(0, |own| own.receive);
                // a smaller buffer might not hold the announced window
                left.saturating_sub(MAX_BYTES_BETWEEN_POLLS).max(own.into())
            }
        };
        self.bound = Some((bound, left));
        let reach = viola_handover::receivable_bytes(self.socket());
        // if the kernel refuses, the VM drops some packets
        if bound <= self.vm_window.into()
            || reach.is_ok_and(|reach| left <= reach + MAX_BYTES_BETWEEN_POLLS)
        {
            let _ = viola_handover::clamp_window(self.socket(), self.vm_window);
            self.is_clamped = true;
        } else {
            let bound = u32::try_from(bound).unwrap_or(u32::MAX);
            let _ = viola_handover::limit_receive_buffer(self.socket(), bound);
        }
    }

    /// The connection.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Bytes that the peer has not acknowledged.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn unacknowledged_bytes(&self) -> Result<usize> {
        viola_handover::unacknowledged_bytes(self.socket()).map_err(Error::Connection)
    }

    /// Bytes in the receive queue; 0 when the kernel does not tell.
    pub fn unread_bytes(&self) -> u64 {
        rustix::io::ioctl_fionread(self.socket()).unwrap_or(0)
    }

    /// Sends the peer this end's sequence number and asks for the peer's. Call it when the socket
    /// was silent for a while.
    pub fn send_window_probe(&self) {
        // if it fails, the socket does so itself half a second later
        let _ = viola_handover::send_window_probe(self.socket());
    }

    /// Whether the peer sent a FIN before the host had the connection. The host's socket does not know of it.
    pub fn peer_finished(&self) -> bool {
        self.peer_finished
    }

    /// Extracts the connection from the host's socket, for the VM; `None` when the peer has reset it. The connection
    /// is held until [`FlowTable::release`], and its peer's packets leave through `hold_veth`, if given.
    ///
    /// # Errors
    /// What the kernel refused; the connection is reset then.
    pub fn extract(self, flows: &FlowTable, hold_veth: Option<u32>) -> Result<Option<TcpState>> {
        flows.hold(&self.flow, None, hold_veth)?;
        match viola_handover::extract(self.socket.as_fd()) {
            Ok(taken) => {
                let mut state = taken.detach();
                state.peer_finished |= self.peer_finished;
                // the receive buffer must hold what the peer may send: more than before when a pipe ends early
                let unread = u32::try_from(state.unread.len()).unwrap_or(u32::MAX);
                let receive = (state.window.rcv_wnd.saturating_add(unread)).saturating_mul(2);
                let receive = self.buffers.receive.max(receive);
                state.buffers.receive = receive;
                state.buffers.locked = self.buffers.locked;
                Ok(Some(state))
            }
            // the peer has reset it in the meantime
            Err(viola_handover::Error::NotTransferable(_)) => Ok(None),
            Err(e) => Err(Error::Connection(e)),
        }
    }
}
