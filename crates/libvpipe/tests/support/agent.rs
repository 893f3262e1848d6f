// SPDX-License-Identifier: Apache-2.0
//! A stand-in for the agent. It moves the bytes itself, between the descriptors that it receives.
#![allow(dead_code)]

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, recv,
    recvmsg, send, sendmsg, shutdown, socket_with, sockopt,
};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections, PACKET_BYTES};

/// The behaviour of the stand-in.
#[derive(Debug, Clone, Copy)]
pub struct Behaviour {
    /// Bytes between two progress messages.
    pub piece: u64,
    /// Delay between two pieces.
    pub pause: Duration,
    /// The errno with which it refuses every pipe.
    pub refuse: Option<i32>,
    /// Exits after this many bytes of a pipe.
    pub die_after: Option<u64>,
    /// Ends each pipe after this many bytes, without an error.
    pub end_after: Option<u64>,
    /// The duration of a hand-over without the host's transfer. It is reported only when it is not zero.
    pub hand_over_time: Duration,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            piece: 1 << 20,
            pause: Duration::from_millis(2),
            refuse: None,
            die_after: None,
            end_after: None,
            hand_over_time: Duration::ZERO,
        }
    }
}

impl Behaviour {
    /// The behaviour for real servers and large files.
    pub fn quick() -> Self {
        Self {
            pause: Duration::from_millis(1),
            piece: 4 << 20,
            ..Self::default()
        }
    }
}

#[derive(Default)]
struct Shared {
    path: PathBuf,
    behaviour: Mutex<Behaviour>,
    ended: AtomicBool,
    closed: AtomicBool,
    programs: Mutex<Vec<Arc<OwnedFd>>>,
    accepted: AtomicU64,
    pipes: AtomicU64,
    refused: AtomicU64,
    sent: AtomicU64,
    resets: AtomicU64,
    stops: AtomicU64,
}

/// A listening stand-in.
pub struct Agent {
    shared: Arc<Shared>,
}

impl Agent {
    pub fn start(path: &Path, behaviour: Behaviour) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let _ = std::fs::remove_file(path);
        bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&socket, 16).unwrap();
        let shared = Arc::new(Shared {
            path: path.to_path_buf(),
            behaviour: Mutex::new(behaviour),
            ..Shared::default()
        });
        let theirs = shared.clone();
        thread::spawn(move || accepting(socket, &theirs));
        Self { shared }
    }

    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    pub fn set_behaviour(&self, behaviour: Behaviour) {
        *self.shared.behaviour.lock().unwrap() = behaviour;
    }

    /// Bytes that it has moved.
    pub fn sent(&self) -> u64 {
        self.shared.sent.load(SeqCst)
    }

    /// Pipes that programs requested and it accepted.
    pub fn pipes(&self) -> u64 {
        self.shared.pipes.load(SeqCst)
    }

    /// Pipes that it refused.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(SeqCst)
    }

    pub fn resets(&self) -> u64 {
        self.shared.resets.load(SeqCst)
    }

    /// Waits until it has received `n` resets: programs send them without waiting for an answer.
    pub fn wait_for_resets(&self, n: u64) {
        let begun = Instant::now();
        while self.resets() < n && begun.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn stops(&self) -> u64 {
        self.shared.stops.load(SeqCst)
    }

    /// Programs that have connected.
    pub fn programs(&self) -> u64 {
        self.shared.accepted.load(SeqCst)
    }

    /// Whether it was killed or has exited.
    pub fn is_gone(&self) -> bool {
        self.shared.ended.load(SeqCst)
    }

    /// Ends it and removes its socket.
    pub fn kill(&self) {
        self.shared.kill();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Shared {
    fn kill(&self) {
        if !self.ended.swap(true, SeqCst) {
            let _ = std::fs::remove_file(&self.path);
        }
        // The socket goes first, so that no program can connect again when it notices the end.
        while !self.closed.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        for program in self.programs.lock().unwrap().drain(..) {
            let _ = shutdown(&program, Shutdown::Both);
        }
    }
}

fn ready(fd: impl AsFd, what: PollFlags) -> bool {
    let time = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    matches!(poll(&mut [PollFd::new(&fd, what)], Some(&time)), Ok(1))
}

fn accepting(socket: OwnedFd, shared: &Arc<Shared>) {
    while !shared.ended.load(SeqCst) {
        if !ready(&socket, PollFlags::IN) {
            continue;
        }
        let program = Arc::new(accept_with(&socket, SocketFlags::CLOEXEC).unwrap());
        shared.accepted.fetch_add(1, SeqCst);
        shared.programs.lock().unwrap().push(program.clone());
        let shared = shared.clone();
        thread::spawn(move || hearing(&program, &shared));
    }
    drop(socket);
    shared.closed.store(true, SeqCst);
}

const GO: u8 = 0;
const STOP: u8 = 1;
const RESET: u8 = 2;

fn hearing(program: &Arc<OwnedFd>, shared: &Arc<Shared>) {
    let mut wishes: HashMap<u64, Arc<AtomicU8>> = HashMap::new();
    loop {
        let mut bytes = [0; PACKET_BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let n = match recvmsg(program, &mut parts, &mut control, flags) {
            Ok(message) => message.bytes,
            Err(_) => 0,
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        if n == 0 {
            break;
        }
        let (id, from, to, length) = match LibraryRequest::decode(&bytes[..n]).unwrap() {
            LibraryRequest::Send { id, offset, length } => (id, Some(offset), None, length),
            LibraryRequest::Receive { id, offset, length } => (id, None, Some(offset), length),
            LibraryRequest::Copy {
                id,
                offset,
                length,
                to,
            } => (id, Some(offset), Some(to), length),
            LibraryRequest::Relay { id, length } => (id, None, None, length),
            LibraryRequest::Stop { id } => {
                shared.stops.fetch_add(1, SeqCst);
                wishes[&id].store(STOP, SeqCst);
                continue;
            }
            LibraryRequest::Reset { id } => {
                shared.resets.fetch_add(1, SeqCst);
                wishes[&id].store(RESET, SeqCst);
                continue;
            }
        };
        let [source, sink]: [OwnedFd; 2] = fds.try_into().unwrap();
        let behaviour = *shared.behaviour.lock().unwrap();
        if let Some(errno) = behaviour.refuse {
            shared.refused.fetch_add(1, SeqCst);
            drop((source, sink));
            answer(program, LibraryReply::Refused { id, errno });
            continue;
        }
        shared.pipes.fetch_add(1, SeqCst);
        let wish = Arc::new(AtomicU8::new(GO));
        wishes.insert(id, wish.clone());
        let (program, shared) = (program.clone(), shared.clone());
        thread::spawn(move || {
            let job = Job {
                program,
                shared,
                behaviour,
                wish,
                id,
                source,
                sink,
                from,
                to,
            };
            job.run(length);
        });
    }
    for wish in wishes.values() {
        wish.store(RESET, SeqCst);
    }
}

fn answer(program: &OwnedFd, answer: LibraryReply) {
    let bytes = answer.encode();
    let mut control = SendAncillaryBuffer::default();
    let parts = [IoSlice::new(&bytes)];
    let _ = sendmsg(program, &parts, &mut control, SendFlags::NOSIGNAL);
}

struct Job {
    program: Arc<OwnedFd>,
    shared: Arc<Shared>,
    behaviour: Behaviour,
    wish: Arc<AtomicU8>,
    id: u64,
    source: OwnedFd,
    sink: OwnedFd,
    /// Offsets of the files.
    from: Option<u64>,
    to: Option<u64>,
}

impl Job {
    fn run(self, length: u64) {
        let (id, behaviour) = (self.id, self.behaviour);
        let length = behaviour.end_after.map_or(length, |n| n.min(length));
        let (mut sent, mut errno, mut lost) = (0, 0, LostConnections::NONE);
        let begun = Instant::now();
        while sent < length && self.continues() {
            if behaviour.die_after.is_some_and(|n| sent >= n) {
                self.shared.kill();
                return;
            }
            let bytes = match self.pull(sent, behaviour.piece.min(length - sent) as usize) {
                Ok(bytes) if bytes.is_empty() => break,
                Ok(bytes) => bytes,
                Err(e) => {
                    errno = e.raw_os_error();
                    lost.source = true;
                    break;
                }
            };
            let (n, failed) = self.push(sent, &bytes);
            sent += n;
            if let Some(e) = failed {
                errno = e.raw_os_error();
                lost.sink = self.to.is_none();
                break;
            }
            if sent < length {
                answer(&self.program, LibraryReply::Progress { id, sent });
            }
            thread::sleep(behaviour.pause);
        }
        if self.wish.load(SeqCst) == RESET {
            for (fd, place) in [(&self.source, self.from), (&self.sink, self.to)] {
                if place.is_none() {
                    let _ = sockopt::set_socket_linger(fd, Some(Duration::ZERO));
                    if self.from.is_none() && self.to.is_none() {
                        let _ = shutdown(fd, Shutdown::Both);
                    }
                }
            }
            return;
        }
        let Self {
            source,
            sink,
            program,
            ..
        } = self;
        drop((source, sink));
        let spent = match behaviour.hand_over_time {
            Duration::ZERO => 0,
            _ => begun.elapsed().as_micros().max(1) as u64,
        };
        thread::sleep(behaviour.hand_over_time);
        let over = LibraryReply::Finished {
            id,
            sent,
            errno,
            lost,
            host_us: spent,
        };
        answer(&program, over);
    }

    fn continues(&self) -> bool {
        self.wish.load(SeqCst) == GO
    }

    /// Returns None at the end of the source or when the pipe is to stop.
    fn pull(&self, sent: u64, most: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; most];
        if let Some(offset) = self.from {
            let n = rustix::io::pread(&self.source, &mut bytes, offset + sent).unwrap();
            assert!(n > 0, "the file is shorter than the announced length");
            bytes.truncate(n);
            return Ok(bytes);
        }
        while self.continues() {
            match recv(&self.source, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((n, _)) => {
                    bytes.truncate(n);
                    return Ok(bytes);
                }
                Err(Errno::AGAIN) => drop(ready(&self.source, PollFlags::IN)),
                Err(e) => return Err(e),
            }
        }
        Ok(Vec::new())
    }

    fn push(&self, at: u64, bytes: &[u8]) -> (u64, Option<Errno>) {
        let mut done = 0;
        // Bytes that were taken from a socket are always passed on.
        while done < bytes.len() && (self.continues() || self.from.is_none()) {
            let rest = &bytes[done..];
            if self.wish.load(SeqCst) == RESET {
                break;
            }
            // Counts the bytes before the client can have them.
            self.shared.sent.fetch_add(rest.len() as u64, SeqCst);
            let sent = match self.to {
                Some(to) => rustix::io::pwrite(&self.sink, rest, to + at + done as u64),
                None => send(&self.sink, rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            };
            let unsent = rest.len() - sent.unwrap_or(0);
            self.shared.sent.fetch_sub(unsent as u64, SeqCst);
            match sent {
                Ok(n) => done += n,
                Err(Errno::AGAIN) => drop(ready(&self.sink, PollFlags::OUT)),
                Err(e) => return (done as u64, Some(e)),
            }
        }
        (done as u64, None)
    }
}
