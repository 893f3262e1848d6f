// SPDX-License-Identifier: Apache-2.0
//! One connection of a VM in the host's hands, and the file that goes down it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use viola_handover::State;

use crate::send::{Sending, Turn};
use crate::{Error, Flow, Flows, Result};

/// A connection that the host has, from the moment at which the VM gave it until it is given back.
///
/// Dropped before that, or with its process, it is reset: a peer must never take a cut file for a whole one.
#[derive(Debug)]
pub struct Pipe {
    flow: Flow,
    socket: OwnedFd,
    sending: Option<Sending>,
    /// Bytes of the file that were asked for.
    whole: u64,
    /// The peer had said before that it sends no more; the host's socket has not heard it.
    peer_finished: bool,
}

/// What goes back to the VM.
#[derive(Debug)]
pub struct Returned {
    /// The connection; `None` when the peer has reset it.
    pub state: Option<State>,
    /// Bytes of the file that the peer has, or that are in the connection's queues.
    pub sent: u64,
}

impl Pipe {
    /// Takes over a connection that was held and taken out of the VM's socket. `socket` is a fresh one in the VM's
    /// [`crate::Space`], which has the VM's address and is behind that `veth`. Without anything to send it is there to be reset.
    ///
    /// # Errors
    /// What the kernel refused. The connection stays held; nothing was said to the peer.
    pub fn begin(
        flows: &Flows,
        veth: u32,
        socket: OwnedFd,
        flow: Flow,
        state: &State,
        sending: impl Into<Option<Sending>>,
    ) -> Result<Self> {
        let sending = sending.into();
        let ready = viola_handover::put(socket.as_fd(), state).map_err(Error::Connection)?;
        flows.lead(&flow, veth)?;
        ready.go().map_err(Error::Connection)?;
        // from here on a death is told to the peer, and as what it is
        let option = |step: &str| Error::kernel(step.to_owned());
        rustix::net::sockopt::set_socket_linger(&socket, Some(std::time::Duration::ZERO))
            .map_err(|e| option("SO_LINGER")(e.into()))?;
        rustix::io::ioctl_fionbio(&socket, true).map_err(|e| option("FIONBIO")(e.into()))?;
        Ok(Self {
            flow,
            socket,
            whole: sending.as_ref().map_or(0, Sending::left),
            sending,
            peer_finished: state.peer_finished,
        })
    }

    /// The connection.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// To wait on until it takes more.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends up to `budget` bytes of the file.
    ///
    /// # Errors
    /// Of the connection or of the image; give it back then, or drop it.
    pub fn turn(&mut self, budget: u64) -> io::Result<(u64, Turn)> {
        match &mut self.sending {
            Some(sending) => sending.turn(self.socket.as_fd(), budget),
            None => Ok((0, Turn::Done)),
        }
    }

    /// Whether the peer has acknowledged all that was sent.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn is_drained(&self) -> Result<bool> {
        let outstanding = viola_handover::outstanding(self.socket.as_fd());
        outstanding
            .map(|bytes| bytes == 0)
            .map_err(Error::Connection)
    }

    /// Bytes of the file that are to be sent.
    pub fn length(&self) -> u64 {
        self.whole
    }

    /// Bytes of the file that were given to the socket.
    pub fn sent(&self) -> u64 {
        self.whole - self.sending.as_ref().map_or(0, Sending::left)
    }

    /// Takes the connection back from the host's socket, for the VM. It is held until [`Flows::release`], and what the peer says
    /// leaves through `park`, if there is one.
    ///
    /// # Errors
    /// What the kernel refused; the connection is reset then.
    pub fn give_back(self, flows: &Flows, park: Option<u32>) -> Result<Returned> {
        flows.hold(&self.flow, None, park)?;
        let state = match viola_handover::take(self.socket.as_fd()) {
            Ok(taken) => {
                let mut state = taken.keep();
                state.peer_finished |= self.peer_finished;
                Some(state)
            }
            // the peer has ended it in the meantime
            Err(viola_handover::Error::Unfit(_)) => None,
            Err(e) => return Err(Error::Connection(e)),
        };
        Ok(Returned {
            state,
            sent: self.sent(),
        })
    }
}
