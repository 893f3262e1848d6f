// SPDX-License-Identifier: Apache-2.0
//! Programs that ask, each by a connection of its own.

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
use viola_proto::pipe::library::{Answer, Ask, PACKET};

/// Most programs at a time that may ask.
const MOST: usize = 64;
/// Most that may not, and are told so.
const STRANGERS: usize = 8;

/// A program's number; never used twice.
pub type ProgramId = u64;

/// What has come from a program.
#[derive(Debug)]
pub enum Heard {
    /// It asks; with [`Ask::Send`] come the file and the socket.
    Ask(Ask, Option<(OwnedFd, OwnedFd)>),
    /// Nothing now.
    Nothing,
    /// It is gone, or has sent what is no packet.
    Gone,
}

#[derive(Debug)]
struct Program {
    socket: OwnedFd,
    allowed: bool,
}

/// The socket at which they ask, and all of them.
#[derive(Debug)]
pub struct Programs {
    path: PathBuf,
    listener: OwnedFd,
    uids: BTreeSet<u32>,
    all: BTreeMap<ProgramId, Program>,
    next: ProgramId,
}

impl Programs {
    /// Listens. Everybody may connect; who may ask is seen by its uid.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn listen(path: &Path, uids: BTreeSet<u32>) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true).mode(0o755).create(folder)?;
        }
        // of an agent that is dead; anything else stays, and is said to be in use
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

    /// Readable when somebody wants to connect.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The sockets of all programs.
    pub fn sockets(&self) -> impl Iterator<Item = (ProgramId, BorrowedFd<'_>)> {
        self.all
            .iter()
            .map(|(id, program)| (*id, program.socket.as_fd()))
    }

    /// Takes one more; beyond the most that there may be it is hung up on.
    pub fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = match accept_with(&self.listener, flags) {
            Ok(socket) => socket,
            Err(_) => {
                // without descriptors it stays to be accepted: not in a circle
                std::thread::sleep(std::time::Duration::from_millis(10));
                return;
            }
        };
        let allowed =
            socket_peercred(&socket).is_ok_and(|who| self.uids.contains(&who.uid.as_raw()));
        let most = if allowed { MOST } else { STRANGERS };
        let like = self.all.values().filter(|p| p.allowed == allowed).count();
        if like < most {
            self.all.insert(self.next, Program { socket, allowed });
            self.next += 1;
        }
    }

    /// Whether a program may ask.
    pub fn is_allowed(&self, id: ProgramId) -> bool {
        self.all.get(&id).is_some_and(|program| program.allowed)
    }

    /// Reads one packet.
    pub fn hear(&self, id: ProgramId) -> Heard {
        match self.all.get(&id) {
            Some(program) => receive(program.socket.as_fd()),
            None => Heard::Gone,
        }
    }

    /// Answers; `false` when the program does not take it.
    pub fn answer(&self, id: ProgramId, answer: &Answer) -> bool {
        let Some(program) = self.all.get(&id) else {
            return false;
        };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // how far it is will be said again
        send(&program.socket, &answer.encode(), flags).is_ok()
            || matches!(answer, Answer::Progress { .. })
    }

    /// Hangs up.
    pub fn remove(&mut self, id: ProgramId) {
        self.all.remove(&id);
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn receive(socket: BorrowedFd<'_>) -> Heard {
    // one byte more, to see that there is none
    let mut bytes = [0; PACKET + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut into = [IoSliceMut::new(&mut bytes)];
    let message = match recvmsg(socket, &mut into, &mut control, flags) {
        Ok(message) => message,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Heard::Nothing,
        Err(_) => return Heard::Gone,
    };
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = part {
            fds.extend(some);
        }
    }
    let cut = ReturnFlags::CTRUNC | ReturnFlags::TRUNC;
    if message.flags.intersects(cut) || message.bytes != PACKET {
        return Heard::Gone;
    }
    let (second, first) = (fds.pop(), fds.pop());
    // there may be room for one more than was wanted
    if !fds.is_empty() {
        return Heard::Gone;
    }
    match (Ask::decode(&bytes[..PACKET]), first, second) {
        (Some(ask @ (Ask::Stop { .. } | Ask::Reset { .. })), None, None) => Heard::Ask(ask, None),
        (Some(Ask::Stop { .. } | Ask::Reset { .. }), ..) => Heard::Gone,
        (Some(ask), Some(source), Some(sink)) => Heard::Ask(ask, Some((source, sink))),
        _ => Heard::Gone,
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
    fn a_wish_comes_with_its_two_descriptors_and_rubbish_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        let (mut programs, path) = programs(&folder);
        let send = Ask::Send {
            id: 1,
            offset: 2,
            length: 3,
        };
        let stop = Ask::Stop { id: 1 };
        let mut long = send.encode().to_vec();
        long.push(0);
        let rubbish: [(&[u8], usize); 7] = [
            (&send.encode(), 0),
            (&send.encode(), 1),
            (&send.encode(), 3),
            (&stop.encode(), 2),
            (&long, 2),
            (b"hello", 0),
            (&[0xff; PACKET], 0),
        ];
        for (n, (bytes, fds)) in rubbish.into_iter().enumerate() {
            let program = connected(&path);
            programs.accept();
            let id = n as ProgramId + 1;
            assert!(programs.is_allowed(id));
            assert!(matches!(programs.hear(id), Heard::Nothing));
            give(&program, &send.encode(), 2);
            assert!(matches!(programs.hear(id), Heard::Ask(ask, Some(_)) if ask == send));
            give(&program, &stop.encode(), 0);
            assert!(matches!(programs.hear(id), Heard::Ask(ask, None) if ask == stop));
            give(&program, bytes, fds);
            assert!(matches!(programs.hear(id), Heard::Gone), "{n}");
            programs.remove(id);
        }
        let program = connected(&path);
        programs.accept();
        let answer = Answer::Refused { id: 1, errno: 11 };
        let (id, _) = programs.sockets().next().unwrap();
        assert!(programs.answer(id, &answer));
        let mut bytes = [0; PACKET];
        rustix::io::read(&program, &mut bytes).unwrap();
        assert_eq!(Answer::decode(&bytes), Some(answer));
        drop(program);
        assert!(matches!(programs.hear(id), Heard::Gone));
        drop(programs);
        assert!(!path.exists());
    }

    #[test]
    fn there_are_only_so_many() {
        let folder = tempfile::tempdir().unwrap();
        let (mut programs, path) = programs(&folder);
        let mut clients = Vec::new();
        for _ in 0..MOST + 2 {
            clients.push(connected(&path));
            programs.accept();
        }
        assert_eq!(programs.all.len(), MOST);
        programs.uids.clear();
        for _ in 0..STRANGERS + 2 {
            clients.push(connected(&path));
            programs.accept();
        }
        assert_eq!(programs.all.len(), MOST + STRANGERS);
        assert!(!programs.is_allowed(MOST as ProgramId + 1));
    }
}
