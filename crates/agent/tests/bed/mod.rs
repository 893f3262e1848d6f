// SPDX-License-Identifier: Apache-2.0
//! A test bed: an agent in a network namespace, with an ext4 image that it takes for a disk of its own, a client of a
//! program in that namespace, and the host. Needs root, loop devices, TAP devices, iproute2, e2fsprogs and unshare.
#![allow(dead_code, clippy::unwrap_used)]

pub mod files;
pub mod handover;
pub mod wire;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use viola_agent::pipe::report::PipeReport;
use viola_agent::status;
use viola_proto::agent::{
    CHALLENGE_BYTES, Challenge, FileMap, FrameReader, FromAgent, Limits, ToAgent, VERSION, encode,
};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, PACKET_BYTES};
use viola_proto::pipe::{Endpoint, PipeReply, PipeRequest};

use wire::{GUEST, Wire, sh};

const TIMEOUT: Duration = Duration::from_secs(20);

/// The test bed.
pub struct Bed {
    pub wire: Wire,
    pub host: Host,
    agent: Child,
    device: String,
    folder: tempfile::TempDir,
}

impl Bed {
    /// Starts the agent, and waits until the host knows the disk.
    pub fn new(more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display().to_string();
        sh(&format!(
            "cd {at}; truncate -s 64M disk; mkfs.ext4 -q disk; mkdir srv; \
             losetup -f --show disk >device; mount $(cat device) srv"
        ));
        let device = std::fs::read_to_string(folder.path().join("device")).unwrap();
        let device = device.trim().trim_start_matches("/dev/").to_owned();
        // a loop device would be refused, so the agent sees a disk in its place
        sh(&format!(
            "cd {at}; mkdir -p sys/dev/block sys/devices/pci0/block/{device}; \
             echo $((64 << 11)) >sys/devices/pci0/block/{device}/size; \
             ln -s ../../devices/pci0/block/{device} sys/dev/block/$(cat /sys/block/{device}/dev)"
        ));
        let host = Host::new(&folder.path().join("host"), &folder.path().join("disk"));
        std::fs::write(
            folder.path().join("agent.toml"),
            format!(
                "channel = 'unix:{at}/host'\nstatus = '{at}/status'\n\
                 [pipe]\nfiles = ['{at}/srv']\nsocket = '{at}/run/pipe'\n{}\n",
                more.replace("AT", &at)
            ),
        )
        .unwrap();
        let wire = Wire::new();
        let agent = start(&wire, &at);
        let bed = Self {
            wire,
            host,
            agent,
            device,
            folder,
        };
        bed.begin_session();
        bed
    }

    /// With every kind of pipe.
    pub fn full() -> Self {
        Self::new("into = ['AT/srv']\nrelay = true")
    }

    /// Opens a session, and waits until the host knows the disk.
    pub fn begin_session(&self) {
        let proofs = self.host.proofs.load(Ordering::SeqCst);
        self.host.welcome();
        // proofs from before belong to the earlier session
        self.wait("the disk is shown", |bed| {
            bed.host.proofs.load(Ordering::SeqCst) > proofs
        });
        self.wait("the disk is known", |bed| {
            let status = status::request(&bed.folder.path().join("status"), "status");
            status.is_ok_and(|s| s.volumes.iter().any(|v| v.state.contains("reads its disk")))
        });
    }

    /// Kills the agent with SIGKILL.
    pub fn kill_agent(&mut self) {
        self.agent.kill().unwrap();
        self.agent.wait().unwrap();
    }

    /// Whether the agent answers.
    pub fn is_there(&self) -> bool {
        status::request(&self.path("status"), "status").is_ok()
    }

    /// Starts another agent, which has no session yet.
    pub fn start_agent(&mut self) {
        self.agent = start(&self.wire, &self.folder.path().display().to_string());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn wait(&self, what: &str, wanted: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !wanted(self) {
            assert!(begun.elapsed() < TIMEOUT, "not in time: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Makes a file that is not open; returns its path and bytes.
    pub fn file(&self, name: &str, length: usize) -> (PathBuf, Vec<u8>) {
        let path = self.path("srv").join(name);
        let mut bytes = vec![0; length];
        let mut at = length as u32 | 1;
        for byte in &mut bytes {
            at = at.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (at >> 24) as u8;
        }
        std::fs::write(&path, &bytes).unwrap();
        (path, bytes)
    }

    /// A connection: the client's end, and the program's end in the guest.
    pub fn connection(&self) -> (TcpStream, TcpStream) {
        static PORT: AtomicU16 = AtomicU16::new(8080);
        let port = PORT.fetch_add(1, Ordering::SeqCst);
        let address = SocketAddr::new(GUEST.1.parse().unwrap(), port);
        let listener = self.wire.guest.run(|| TcpListener::bind(address).unwrap());
        let client = self
            .wire
            .client
            .run(|| TcpStream::connect_timeout(&address, Duration::from_secs(20)).unwrap());
        let server = listener.unwrap().accept().unwrap().0;
        let client = client.unwrap();
        for end in [&client, &server] {
            end.set_read_timeout(Some(TIMEOUT)).unwrap();
        }
        (client, server)
    }

    pub fn program(&self) -> Program {
        Program::connect(&self.path("run/pipe"))
    }

    pub fn status(&self) -> PipeReport {
        self.ask("status").pipe.unwrap()
    }

    fn ask(&self, wish: &str) -> status::Report {
        status::request(&self.path("status"), wish).unwrap()
    }

    /// Leases and pipes by which the host may read.
    pub fn outstanding(&self) -> u64 {
        self.ask("status").outstanding
    }

    /// Pauses the agent; the answer is what is outstanding then.
    pub fn pause(&self) -> u64 {
        self.ask("pause").outstanding
    }

    pub fn resume(&self) {
        self.ask("resume");
    }

    pub fn terminate_agent(&self) {
        sh(&format!("kill {}", self.agent.id()));
    }

    pub fn wait_for_end(&mut self) {
        let begun = Instant::now();
        while self.agent.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < TIMEOUT, "the agent does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
        let (at, device) = (self.folder.path().display(), &self.device);
        let script = format!("umount -l {at}/srv; losetup -d /dev/{device}");
        let _ = Command::new("sh").args(["-c", &script]).status();
    }
}

fn start(wire: &Wire, at: &str) -> Child {
    let script = format!(
        "mount --bind {at}/sys /sys; exec {} --config {at}/agent.toml",
        env!("CARGO_BIN_EXE_viola-agent")
    );
    let agent = wire.guest.run(|| {
        Command::new("unshare")
            .args(["--mount", "sh", "-ec", &script])
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    });
    agent.unwrap()
}

/// A program that asks for pipes.
pub struct Program(OwnedFd);

impl Program {
    pub fn connect(path: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::sockopt::set_socket_timeout(
            &socket,
            rustix::net::sockopt::Timeout::Recv,
            Some(TIMEOUT),
        )
        .unwrap();
        Self(socket)
    }

    pub fn ask(&self, ask: LibraryRequest) {
        assert_eq!(
            rustix::io::write(&self.0, &ask.encode()).unwrap(),
            PACKET_BYTES
        );
    }

    pub fn send(&self, id: u64, range: (u64, u64), file: impl AsFd, socket: impl AsFd) {
        let (offset, length) = range;
        self.request(LibraryRequest::Send { id, offset, length }, file, socket);
    }

    /// Sends a request with its two descriptors.
    pub fn request(&self, ask: LibraryRequest, source: impl AsFd, sink: impl AsFd) {
        let ask = ask.encode();
        let fds = [source.as_fd(), sink.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(
            &self.0,
            &[IoSlice::new(&ask)],
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
    }

    /// The next answer; `None` when the agent has disconnected.
    pub fn answer(&self) -> Option<LibraryReply> {
        let mut bytes = [0; PACKET_BYTES + 1];
        let (got, _) = recv(&self.0, &mut bytes[..], RecvFlags::empty()).unwrap();
        (got > 0).then(|| LibraryReply::decode(&bytes[..got]).unwrap())
    }

    pub fn end(&self) -> LibraryReply {
        loop {
            match self.answer().unwrap() {
                LibraryReply::Progress { .. } => {}
                end => return end,
            }
        }
    }
}

/// The host's end of the channel, driven by the test.
pub struct Host {
    listener: UnixListener,
    image: PathBuf,
    heard: Receiver<PipeRequest>,
    tell: Sender<PipeRequest>,
    /// Number of accepted proofs.
    proofs: Arc<AtomicU64>,
    stream: std::sync::Mutex<Option<UnixStream>>,
}

impl Host {
    fn new(path: &Path, image: &Path) -> Self {
        let (tell, heard) = channel();
        Self {
            listener: UnixListener::bind(path).unwrap(),
            image: image.into(),
            heard,
            tell,
            proofs: Arc::default(),
            stream: std::sync::Mutex::new(None),
        }
    }

    /// Takes the agent's next connection and begins a session.
    pub fn welcome(&self) {
        let stream = self.listener.accept().unwrap().0;
        *self.stream.lock().unwrap() = Some(stream.try_clone().unwrap());
        let (image, tell) = (File::open(&self.image).unwrap(), self.tell.clone());
        let proofs = Arc::clone(&self.proofs);
        std::thread::spawn(move || listen(stream, &image, &tell, &proofs));
    }

    /// Ends the session.
    pub fn hang_up(&self) {
        let stream = self.stream.lock().unwrap().take().unwrap();
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    }

    pub fn say(&self, message: PipeReply) {
        let stream = self.stream.lock().unwrap();
        let bytes = encode(&ToAgent::Pipe(message)).unwrap();
        stream.as_ref().unwrap().write_all(&bytes).unwrap();
    }

    pub fn hear(&self) -> PipeRequest {
        self.hear_in_time().unwrap()
    }

    pub fn hear_in_time(&self) -> Option<PipeRequest> {
        self.heard.recv_timeout(TIMEOUT).ok()
    }

    /// Whether no message comes for a while.
    pub fn is_quiet(&self) -> bool {
        let a_while = Duration::from_millis(300);
        self.heard.recv_timeout(a_while).is_err()
    }

    /// Writes bytes of a file into the image.
    pub fn write(&self, map: &FileMap, offset: u64, bytes: &[u8]) {
        let image = File::options().write(true).open(&self.image).unwrap();
        let (mut at, mut rest) = (offset, bytes);
        for e in &map.extents {
            assert!(!e.zero, "a block that was never written: {e:?}");
            if rest.is_empty() || at < e.logical || at >= e.logical + e.length {
                continue;
            }
            let count = rest.len().min((e.logical + e.length - at) as usize);
            let physical = e.physical + (at - e.logical);
            image.write_all_at(&rest[..count], physical).unwrap();
            (at, rest) = (at + count as u64, &rest[count..]);
        }
        assert!(rest.is_empty(), "no place for {} bytes at {at}", rest.len());
    }

    /// Bytes of a file, from the image.
    pub fn bytes(&self, map: &FileMap, offset: u64, length: u64) -> Vec<u8> {
        let image = File::open(&self.image).unwrap();
        let mut whole = read(&image, map);
        whole.truncate((offset + length) as usize);
        whole.split_off(offset as usize)
    }
}

fn read(image: &File, map: &FileMap) -> Vec<u8> {
    let mut bytes = vec![0; map.size as usize];
    for e in map.extents.iter().filter(|e| !e.zero) {
        let end = (e.logical + e.length).min(map.size) as usize;
        let to = &mut bytes[e.logical as usize..end];
        image.read_exact_at(to, e.physical).unwrap();
    }
    bytes
}

/// The challenge of a session.
fn challenge(session: u64) -> Challenge {
    Challenge([session as u8; CHALLENGE_BYTES])
}

fn listen(mut stream: UnixStream, image: &File, tell: &Sender<PipeRequest>, proofs: &AtomicU64) {
    let mut reader = FrameReader::new();
    let mut proven = BTreeMap::new();
    let mut current = 0;
    while let Ok(Some(message)) = reader.wait::<FromAgent>(&mut stream) {
        let answer = match message.unwrap() {
            FromAgent::Hello { session, .. } => {
                current = session;
                ToAgent::Welcome {
                    version: VERSION,
                    session,
                    epoch: session,
                    limits: Limits {
                        blocks: 1000,
                        extents: 5000,
                        names_per_s: 100,
                    },
                    challenge: challenge(session),
                }
            }
            FromAgent::Proof { fs, map, .. } => {
                let content = challenge(current).proof_content(fs);
                assert_eq!(read(image, &map), content);
                proven.insert(fs, ());
                let _ = stream.write_all(&encode(&ToAgent::ProofOk { fs }).unwrap());
                proofs.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            FromAgent::Pipe(message) => {
                if let PipeRequest::Start { source, sink, .. } = &message {
                    for end in [source, sink] {
                        if let Endpoint::File { fs, .. } = end {
                            assert!(proven.contains_key(fs), "a disk that was not proven");
                        }
                    }
                }
                let _ = tell.send(message);
                continue;
            }
            _ => continue,
        };
        let _ = stream.write_all(&encode(&answer).unwrap());
    }
}
