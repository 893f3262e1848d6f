// SPDX-License-Identifier: Apache-2.0
//! One connection of a VM in the host's hands.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use viola_handover::{SocketBuffers, TcpState};

use crate::{Error, Flow, FlowTable, HoldQueue, Result};

/// A connection that the host has, from the moment at which the VM gave it until it is given back.
///
/// Dropped before that, or with its process, it is reset: a peer must never take a cut stream for a whole one.
#[derive(Debug)]
pub struct HostConnection {
    flow: Flow,
    socket: OwnedFd,
    /// The peer had said before that it sends no more; the host's socket has not heard it.
    peer_finished: bool,
    /// Of the VM's socket: its buffers, and what it lets a peer send.
    buffers: SocketBuffers,
    window: u32,
    /// What the host's socket may have to hold, at so many bytes from the end.
    bound: Option<(u64, u64)>,
    is_clamped: bool,
}

/// Least that a VM's socket is held to have room for, in bytes: a fresh one announces as much.
const MIN_WINDOW_BYTES: u32 = 64 << 10;
/// So many bytes may come between two looks.
const MAX_BYTES_BETWEEN_POLLS: u64 = 2 << 20;
/// So near the end the kernel does not tune the receive buffer any more, in bytes: the most that it would have let a peer send
/// ahead (`net.ipv4.tcp_rmem`), and what may come between two looks.
const NEAR_END_BYTES: u64 = (32 << 20) + MAX_BYTES_BETWEEN_POLLS;

impl HostConnection {
    /// Takes over a connection that was held and taken out of the VM's socket. `socket` is a fresh one in the VM's
    /// [`crate::VmNetns`], which has the VM's address and is behind that `veth`. What was kept of the connection comes first; with
    /// it goes the interface through which that leaves.
    ///
    /// # Errors
    /// What the kernel refused. The connection stays held; nothing was said to the peer.
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
                // what it acknowledges of that has to get to the peer, which may wait for nothing else
                flows.hold_incoming(&flow, hold_veth)?;
                ready.activate().map_err(Error::Connection)?;
                hold_queue.redirect(flows, &flow, veth)?;
            }
        }
        // from here on a death is told to the peer, and as what it is
        let option = |step: &str| Error::kernel(step.to_owned());
        rustix::net::sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO))
            .map_err(|e| option("SO_LINGER")(e.into()))?;
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| option("FIONBIO")(e.into()))?;
        Ok(Self {
            flow,
            socket,
            peer_finished: state.peer_finished,
            buffers: state.buffers,
            // one that was busy may announce little at the moment, and one with a large buffer little as yet
            window: (state.window.rcv_wnd.min(state.buffers.receive / 2)).max(MIN_WINDOW_BYTES),
            bound: None,
            is_clamped: false,
        })
    }

    /// To be called now and then while `left` bytes are still wanted of the peer.
    ///
    /// The host's socket lets a peer send many megabytes ahead. What of that comes behind the last byte that is wanted comes to
    /// the VM, whose socket has no room for it and drops it. So near the end the buffer is what is still wanted and no larger: the
    /// kernel could otherwise make tens of megabytes of it between two looks, and what is promised stays promised. At the end the
    /// peer is let send no further beyond it than the VM's own socket had let it.
    pub fn limit_window_near_end(&mut self, left: u64) {
        if self.is_clamped || left > NEAR_END_BYTES {
            return;
        }
        let bound = match self.bound {
            Some((bound, before)) => bound.saturating_sub(before.saturating_sub(left)),
            None => {
                let own = viola_handover::buffers(self.socket()).map_or(0, |own| own.receive);
                // a smaller one might not hold what was promised already
                left.saturating_sub(MAX_BYTES_BETWEEN_POLLS).max(own.into())
            }
        };
        self.bound = Some((bound, left));
        let reach = viola_handover::receivable_bytes(self.socket());
        // a kernel that refuses costs the VM some packets
        if bound <= self.window.into()
            || reach.is_ok_and(|reach| left <= reach + MAX_BYTES_BETWEEN_POLLS)
        {
            let _ = viola_handover::clamp_window(self.socket(), self.window);
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

    /// To read, to write, and to wait on.
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

    /// Bytes that the peer has sent and nobody has read; as if there were none when the kernel does not say.
    pub fn unread_bytes(&self) -> u64 {
        rustix::io::ioctl_fionread(self.socket()).unwrap_or(0)
    }

    /// Lets the peer hear at once of a socket that could not say anything for a while, and say how far it is.
    pub fn send_window_probe(&self) {
        // else it does so by itself, half a second later
        let _ = viola_handover::send_window_probe(self.socket());
    }

    /// Whether the peer will send no more: said before the host had the connection, so the socket does not know.
    pub fn peer_finished(&self) -> bool {
        self.peer_finished
    }

    /// Takes the connection back from the host's socket, for the VM; `None` when the peer has reset it. It is held until
    /// [`FlowTable::release`], and what the peer says leaves through `park`, if there is one.
    ///
    /// # Errors
    /// What the kernel refused; the connection is reset then.
    pub fn extract(self, flows: &FlowTable, hold_veth: Option<u32>) -> Result<Option<TcpState>> {
        flows.hold(&self.flow, None, hold_veth)?;
        match viola_handover::extract(self.socket.as_fd()) {
            Ok(taken) => {
                let mut state = taken.detach();
                state.peer_finished |= self.peer_finished;
                // room for what the peer may send, which is more than it was where a pipe ends early
                let unread = u32::try_from(state.unread.len()).unwrap_or(u32::MAX);
                let receive = (state.window.rcv_wnd.saturating_add(unread)).saturating_mul(2);
                let receive = self.buffers.receive.max(receive);
                state.buffers.receive = receive;
                state.buffers.locked = self.buffers.locked;
                Ok(Some(state))
            }
            // the peer has ended it in the meantime
            Err(viola_handover::Error::NotTransferable(_)) => Ok(None),
            Err(e) => Err(Error::Connection(e)),
        }
    }
}
