// SPDX-License-Identifier: Apache-2.0
//! The daemon's side of a VM that reads by a byte stream. The test plays the VM's agent. Needs root.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use common::guests::{signal, within};
use common::{Daemon, stdout};
use rustix::process::Signal;
use viola_proto::fuse_stream::{self, FrameKind, FrameReader, Hello};
use viola_proto::vread::{Reader, Vread};

const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
const LOOKUP: u32 = 1;

/// An agent without a kernel, at the other end of the port.
struct Agent {
    stream: UnixStream,
    frames: FrameReader,
    session: u64,
}

impl Agent {
    /// Accepts the daemon's connection and begins a session. Returns whether the worker knew the mount.
    fn accept_session(port: &UnixListener, session: u64) -> (Self, bool) {
        let (stream, _) = port.accept().unwrap();
        stream.set_read_timeout(Some(CHANGE_TIMEOUT)).unwrap();
        let mut agent = Self {
            stream,
            frames: FrameReader::from_worker(),
            session,
        };
        let (kind, nonce, _) = agent.receive();
        assert_eq!(kind, FrameKind::Challenge);
        let hello = Hello {
            version: fuse_stream::VERSION,
            session,
            mount: 7,
        };
        agent.send(FrameKind::Hello, nonce, &hello.encode());
        let (kind, own, kept) = agent.receive();
        assert_eq!((kind, own), (FrameKind::Welcome, session));
        (agent, kept == [1])
    }

    fn send(&mut self, kind: FrameKind, session: u64, payload: &[u8]) {
        let mut bytes = Vec::new();
        fuse_stream::push_frame(&mut bytes, kind, session, payload);
        self.stream.write_all(&bytes).unwrap();
    }

    fn receive(&mut self) -> (FrameKind, u64, Vec<u8>) {
        loop {
            if let Some(f) = self.frames.next(false).unwrap() {
                return (f.kind, f.session, f.payload.to_vec());
            }
            let heard = self.frames.fill(&mut self.stream).unwrap();
            assert!(heard.is_some_and(|n| n > 0), "the stream has ended");
        }
    }

    /// Looks a name up in the root. Returns the errno, or 0.
    fn look_up(&mut self, name: &str) -> i32 {
        let body = [name.as_bytes(), b"\0"].concat();
        let mut request = vec![0; fuse_stream::FUSE_IN_HEADER_BYTES];
        request[..4].copy_from_slice(
            &((fuse_stream::FUSE_IN_HEADER_BYTES + body.len()) as u32).to_le_bytes(),
        );
        request[4..8].copy_from_slice(&LOOKUP.to_le_bytes());
        request[8..16].copy_from_slice(&99u64.to_le_bytes());
        request[16..24].copy_from_slice(&1u64.to_le_bytes());
        request.extend_from_slice(&body);
        self.send(FrameKind::Request, self.session, &request);
        let (kind, session, reply) = self.receive();
        assert_eq!((kind, session), (FrameKind::Reply, self.session));
        assert_eq!(fuse_stream::reply_unique(&reply), Some(99));
        -i32::from_le_bytes(reply[4..8].try_into().unwrap())
    }
}

fn shown(daemon: &Daemon) -> Reader {
    let all: Vread = daemon.json(&["vread", "stat"]);
    all.readers.first().cloned().unwrap_or_default()
}

#[test]
fn a_stream_survives_the_daemon_and_is_reopened_for_a_new_worker() {
    let folder = tempfile::tempdir().unwrap();
    let port = UnixListener::bind(folder.path().join("port")).unwrap();
    let mut daemon = Daemon::start(&format!(
        "[slices]\nenabled = false\n[vread]\nallow = [{{ reader = \"st-rd\", datanode = \"st-dn\" }}]\n\
         [[vm]]\nname = \"st-rd\"\n[vm.vread]\ntransport = \"stream\"\nstream = \"{}\"\n",
        folder.path().join("port").display()
    ));
    let (mut agent, kept) = Agent::accept_session(&port, 1);
    assert!(!kept);
    assert_eq!(agent.look_up("BP-1-10.0.0.1-2"), 0);
    assert_eq!(agent.look_up("etc"), 2);
    within(CHANGE_TIMEOUT, "the transport is shown", || {
        shown(&daemon).transport == "stream"
    });
    let before = shown(&daemon);
    assert!(before.connected && before.running && before.why.is_empty());
    let ls = stdout(&daemon.ask(&["vread", "ls"]));
    assert!(ls.contains("st-rd   yes        stream     "), "{ls}");
    assert!(!daemon.run_dir().join("mounts/st-rd.sock").exists());

    // The daemon dies: no client notices, and the next daemon leaves the stream alone.
    daemon.kill();
    assert_eq!(agent.look_up("BP-1-10.0.0.1-2"), 0);
    daemon.restart();
    within(CHANGE_TIMEOUT, "the next daemon finds the worker", || {
        shown(&daemon).transport == "stream"
    });
    assert_eq!(shown(&daemon).pid, before.pid);
    assert_eq!(agent.look_up("BP-1-10.0.0.1-3"), 0);

    // The stream ends. A new one begins, and the worker still knows the mount.
    drop(agent);
    let (mut agent, kept) = Agent::accept_session(&port, 2);
    assert!(kept);
    assert_eq!(agent.look_up("BP-1-10.0.0.1-2"), 0);

    // The worker is killed. Its successor does not know the mount.
    signal(before.pid, Signal::KILL);
    let (mut agent, kept) = Agent::accept_session(&port, 3);
    assert!(!kept);
    assert_eq!(agent.look_up("BP-1-10.0.0.1-2"), 0);
    assert_ne!(shown(&daemon).pid, before.pid);
}
