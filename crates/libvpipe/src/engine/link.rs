// SPDX-License-Identifier: Apache-2.0
//! A connection to the agent.

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

/// How long an agent that reads nothing is waited for when it must hear something.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

#[derive(Debug, Clone)]
pub(super) struct Link {
    socket: Arc<Descriptor>,
    /// Tells one link of the process from the next.
    pub number: u64,
}

impl Link {
    /// Waits for nobody.
    pub fn connect(path: &Path, number: u64) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        fcntl_setfl(&socket, OFlags::empty())?; // the helper waits in recv
        let socket = Arc::new(socket.into());
        Ok(Self { socket, number })
    }

    fn packet(&self, ask: LibraryRequest, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::INVAL);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let bytes = ask.encode();
        loop {
            match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, flags) {
                Err(Errno::INTR) => (),
                other => return other.map(drop),
            }
        }
    }

    /// Hands over descriptors; fails at once when the agent is busy.
    pub fn give(&self, ask: LibraryRequest, fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.packet(ask, fds)
    }

    /// Says what must not be lost. When it cannot be said the link is cut, and the agent resets all that it has from here.
    pub fn tell(&self, ask: LibraryRequest) {
        let said = match self.packet(ask, &[]) {
            Err(Errno::AGAIN) => {
                let mut ready = [PollFd::new(&self.socket, PollFlags::OUT)];
                let _ = poll(&mut ready, Some(&PATIENCE));
                self.packet(ask, &[])
            }
            other => other,
        };
        if said.is_err() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// Waits for an answer; `None` when the agent is gone or talks nonsense.
    pub fn hear(&self) -> Option<LibraryReply> {
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
