// SPDX-License-Identifier: Apache-2.0
//! The connection to the agent.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketAddrUnix, SocketFlags, SocketType, connect, recv, sendmsg, shutdown, socket_with,
};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, PACKET_BYTES};

use super::descriptor::Descriptor;

/// Time to wait for room in the agent's socket, for a request that must not be lost.
const SEND_TIMEOUT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

#[derive(Debug, Clone)]
pub(super) struct AgentLink {
    socket: Arc<Descriptor>,
    /// Number of the connection in this process.
    pub number: u64,
}

impl AgentLink {
    /// Connects without waiting. Fails when no agent listens, or its backlog is full.
    pub fn connect(path: &Path, number: u64) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        fcntl_setfl(&socket, OFlags::empty())?; // the receiving thread waits in recv
        let socket = Arc::new(socket.into());
        Ok(Self { socket, number })
    }

    fn send_packet(&self, request: LibraryRequest, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let bytes = request.encode();
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags) {
                Err(Errno::INTR) => (),
                other => return other.map(drop),
            }
        }
    }

    /// Sends a request with descriptors; fails at once when the agent's queue is full.
    pub fn send_with_descriptors(
        &self,
        request: LibraryRequest,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        self.send_packet(request, fds)
    }

    /// Sends a request that must not be lost. If that fails it closes the connection, and the agent resets all pipes
    /// of this process.
    pub fn send_or_close(&self, request: LibraryRequest) {
        let said = match self.send_packet(request, &[]) {
            Err(Errno::AGAIN) => {
                let mut ready = [PollFd::new(&self.socket, PollFlags::OUT)];
                let _ = poll(&mut ready, Some(&SEND_TIMEOUT));
                self.send_packet(request, &[])
            }
            other => other,
        };
        if said.is_err() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// Waits for a reply; `None` when the agent is gone, or sends an invalid packet.
    pub fn receive(&self) -> Option<LibraryReply> {
        let mut bytes = [0; PACKET_BYTES + 1];
        loop {
            match recv(&self.socket, &mut bytes, RecvFlags::empty()) {
                Err(Errno::INTR) => (),
                Err(_) | Ok((0, _)) => return None,
                Ok((n, _)) => return LibraryReply::decode(bytes.get(..n)?),
            }
        }
    }
}
