// SPDX-License-Identifier: Apache-2.0
//! The programs that ask for pipes, each by a connection of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, recvmsg, send, socket_with,
    sockopt::socket_peercred,
};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, PACKET_BYTES};

/// Maximum number of connected programs that may ask.
const MAX_PROGRAMS: usize = 64;
/// Maximum number of connected programs that may not ask; they get an error.
const MAX_REFUSED_PROGRAMS: usize = 8;

/// Identifies a connected program; never reused.
pub type ProgramId = u64;

/// What was received from a program.
#[derive(Debug)]
pub enum Incoming {
    /// A request. A new pipe comes with its source and its sink.
    Ask(LibraryRequest, Option<(OwnedFd, OwnedFd)>),
    /// No packet is waiting.
    Nothing,
    /// The program has hung up or sent an invalid packet.
    Gone,
}

#[derive(Debug)]
struct Program {
    socket: OwnedFd,
    allowed: bool,
}

/// The listening socket and the connected programs.
#[derive(Debug)]
pub struct Programs {
    path: PathBuf,
    listener: OwnedFd,
    uids: BTreeSet<u32>,
    all: BTreeMap<ProgramId, Program>,
    next: ProgramId,
}

impl Programs {
    /// Listens at `path`. Every user may connect; requests are accepted from `uids` only.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn listen(path: &Path, uids: BTreeSet<u32>) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true).mode(0o755).create(folder)?;
        }
        // left by a dead agent; anything but a socket stays, and bind reports it
        if std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
            let _ = std::fs::remove_file(path);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o666))?;
        listen(&listener, 64)?;
        Ok(Self {
            path: path.into(),
            listener,
            uids,
            all: BTreeMap::new(),
            next: 1,
        })
    }

    /// Readable when a program connects.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The sockets of all connected programs.
    pub fn sockets(&self) -> impl Iterator<Item = (ProgramId, BorrowedFd<'_>)> {
        self.all
            .iter()
            .map(|(id, program)| (*id, program.socket.as_fd()))
    }

    /// Accepts a connection, and closes it when there are too many.
    pub fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(_) => {
                // without free descriptors the connection stays pending: do not spin
                std::thread::sleep(std::time::Duration::from_millis(10));
                return;
            }
        };
        let allowed =
            socket_peercred(&socket).is_ok_and(|who| self.uids.contains(&who.uid.as_raw()));
        let most = if allowed {
            MAX_PROGRAMS
        } else {
            MAX_REFUSED_PROGRAMS
        };
        let like = self.all.values().filter(|p| p.allowed == allowed).count();
        if like < most {
            self.all.insert(self.next, Program { socket, allowed });
            self.next += 1;
        }
    }

    /// Whether a program may ask for pipes.
    pub fn is_allowed(&self, id: ProgramId) -> bool {
        self.all.get(&id).is_some_and(|program| program.allowed)
    }

    /// Receives one packet.
    pub fn receive_from(&self, id: ProgramId) -> Incoming {
        match self.all.get(&id) {
            Some(program) => receive(program.socket.as_fd()),
            None => Incoming::Gone,
        }
    }

    /// Sends an answer; `false` when the program does not take it.
    pub fn answer(&self, id: ProgramId, answer: &LibraryReply) -> bool {
        let Some(program) = self.all.get(&id) else {
            return false;
        };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // progress is sent again later
        send(&program.socket, &answer.encode(), flags).is_ok()
            || matches!(answer, LibraryReply::Progress { .. })
    }

    /// Closes a program's connection.
    pub fn remove(&mut self, id: ProgramId) {
        self.all.remove(&id);
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Receives one packet from a connected program.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> Incoming {
    // one byte more, to detect longer packets
    let mut bytes = [0; PACKET_BYTES + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut into = [IoSliceMut::new(&mut bytes)];
    let message = match recvmsg(socket, &mut into, &mut control, flags) {
        Ok(message) => message,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Incoming::Nothing,
        Err(_) => return Incoming::Gone,
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    let cut = ReturnFlags::CTRUNC | ReturnFlags::TRUNC;
    if message.flags.intersects(cut) || message.bytes != PACKET_BYTES {
        return Incoming::Gone;
    }
    let (second, first) = (fds.pop(), fds.pop());
    // the control buffer may have room for one more than wanted
    if !fds.is_empty() {
        return Incoming::Gone;
    }
    match (
        LibraryRequest::decode(&bytes[..PACKET_BYTES]),
        first,
        second,
    ) {
        (Some(ask @ (LibraryRequest::Stop { .. } | LibraryRequest::Reset { .. })), None, None) => {
            Incoming::Ask(ask, None)
        }
        (Some(LibraryRequest::Stop { .. } | LibraryRequest::Reset { .. }), ..) => Incoming::Gone,
        (Some(ask), Some(source), Some(sink)) => Incoming::Ask(ask, Some((source, sink))),
        _ => Incoming::Gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, connect, sendmsg};

    fn connected(path: &Path) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        socket
    }

    fn programs(folder: &tempfile::TempDir) -> (Programs, PathBuf) {
        let path = folder.path().join("below/pipe.sock");
        let uid = rustix::process::getuid().as_raw();
        let programs = Programs::listen(&path, BTreeSet::from([uid])).unwrap();
        (programs, path)
    }

    fn give(to: &OwnedFd, bytes: &[u8], count: usize) {
        let null = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![null.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if count > 0 {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let from = [io::IoSlice::new(bytes)];
        sendmsg(to, &from, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn a_request_has_two_descriptors_and_an_invalid_packet_disconnects() {
        let folder = tempfile::tempdir().unwrap();
        let (mut programs, path) = programs(&folder);
        let send = LibraryRequest::Send {
            id: 1,
            offset: 2,
            length: 3,
        };
        let stop = LibraryRequest::Stop { id: 1 };
        let mut long = send.encode().to_vec();
        long.push(0);
        let rubbish: [(&[u8], usize); 7] = [
            (&send.encode(), 0),
            (&send.encode(), 1),
            (&send.encode(), 3),
            (&stop.encode(), 2),
            (&long, 2),
            (b"hello", 0),
            (&[0xff; PACKET_BYTES], 0),
        ];
        for (n, (bytes, fds)) in rubbish.into_iter().enumerate() {
            let program = connected(&path);
            programs.accept();
            let id = n as ProgramId + 1;
            assert!(programs.is_allowed(id));
            assert!(matches!(programs.receive_from(id), Incoming::Nothing));
            give(&program, &send.encode(), 2);
            assert!(
                matches!(programs.receive_from(id), Incoming::Ask(ask, Some(_)) if ask == send)
            );
            give(&program, &stop.encode(), 0);
            assert!(matches!(programs.receive_from(id), Incoming::Ask(ask, None) if ask == stop));
            give(&program, bytes, fds);
            assert!(matches!(programs.receive_from(id), Incoming::Gone), "{n}");
            programs.remove(id);
        }
        let program = connected(&path);
        programs.accept();
        let answer = LibraryReply::Refused { id: 1, errno: 11 };
        let (id, _) = programs.sockets().next().unwrap();
        assert!(programs.answer(id, &answer));
        let mut bytes = [0; PACKET_BYTES];
        rustix::io::read(&program, &mut bytes).unwrap();
        assert_eq!(LibraryReply::decode(&bytes), Some(answer));
        drop(program);
        assert!(matches!(programs.receive_from(id), Incoming::Gone));
        drop(programs);
        assert!(!path.exists());
    }

    #[test]
    fn the_number_of_connected_programs_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let (mut programs, path) = programs(&folder);
        let mut clients = Vec::new();
        for _ in 0..MAX_PROGRAMS + 2 {
            clients.push(connected(&path));
            programs.accept();
        }
        assert_eq!(programs.all.len(), MAX_PROGRAMS);
        programs.uids.clear();
        for _ in 0..MAX_REFUSED_PROGRAMS + 2 {
            clients.push(connected(&path));
            programs.accept();
        }
        assert_eq!(programs.all.len(), MAX_PROGRAMS + MAX_REFUSED_PROGRAMS);
        assert!(!programs.is_allowed(MAX_PROGRAMS as ProgramId + 1));
    }
}
