// SPDX-License-Identifier: Apache-2.0
//! Tests of hostile and of correct byte streams.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use viola_proto::fuse_stream::{self, FrameKind, FrameReader, Hello};

use super::StreamServer;
use super::tests::{
    FORGET, LOOKUP, OPEN, POOL, READ, TABLE, TestBed, answer, bed, expected, request,
};
use crate::control::StreamState;

/// An agent without a kernel.
struct Agent {
    stream: UnixStream,
    frames: FrameReader,
    session: u64,
}

impl Agent {
    fn connect(streams: &StreamServer) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        streams.replace(theirs.into()).unwrap();
        Self {
            stream: ours,
            frames: FrameReader::from_worker(),
            session: 0,
        }
    }

    fn send(&mut self, kind: FrameKind, session: u64, payload: &[u8]) {
        let mut bytes = Vec::new();
        fuse_stream::push_frame(&mut bytes, kind, session, payload);
        self.stream.write_all(&bytes).unwrap();
    }

    /// The next frame; `None` at the end of the stream.
    fn try_receive(&mut self) -> io::Result<Option<(FrameKind, u64, Vec<u8>)>> {
        loop {
            if let Some(f) = self
                .frames
                .next(false)
                .expect("the worker's frames are whole")
            {
                return Ok(Some((f.kind, f.session, f.payload.to_vec())));
            }
            match self.frames.fill(&mut self.stream)? {
                Some(0) => return Ok(None),
                Some(_) => {}
                None => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }

    fn receive(&mut self) -> (FrameKind, u64, Vec<u8>) {
        self.try_receive().unwrap().unwrap()
    }

    /// Starts a session; returns whether the worker knew the mount.
    fn start_session(&mut self, mount: u64, session: u64) -> bool {
        let nonce = loop {
            match self.receive() {
                (FrameKind::Challenge, nonce, _) => break nonce,
                other => assert_eq!(other.0, FrameKind::Reply),
            }
        };
        let hello = Hello {
            version: fuse_stream::VERSION,
            session,
            mount,
        };
        self.send(FrameKind::Hello, nonce, &hello.encode());
        loop {
            match self.receive() {
                (FrameKind::Welcome, own, kept) if own == session => {
                    self.session = session;
                    return kept == [1];
                }
                // one that was on its way
                (kind, ..) => assert_eq!(kind, FrameKind::Challenge),
            }
        }
    }

    fn restart_session(&mut self, mount: u64, session: u64) -> bool {
        // Wait longer than the interval between two hello requests.
        std::thread::sleep(Duration::from_millis(120));
        self.send(FrameKind::Probe, 0, &[]);
        self.start_session(mount, session)
    }

    fn ask(&mut self, opcode: u32, node: u64, body: &[u8]) -> (i32, Vec<u8>) {
        self.send(
            FrameKind::Request,
            self.session,
            &request(opcode, node, body),
        );
        let (kind, session, bytes) = self.receive();
        assert_eq!((kind, session), (FrameKind::Reply, self.session));
        assert_eq!(bytes[..4], (bytes.len() as u32).to_le_bytes());
        let (error, body) = answer(&bytes);
        (error, body.to_vec())
    }

    fn look_up(&mut self, parent: u64, name: &str) -> Result<u64, i32> {
        match self.ask(LOOKUP, parent, &[name.as_bytes(), b"\0"].concat()) {
            (0, entry) => Ok(u64::from_le_bytes(entry[..8].try_into().unwrap())),
            (error, _) => Err(error),
        }
    }

    fn block(&mut self, id: u64) -> u64 {
        let pool = self.look_up(1, POOL).unwrap();
        self.look_up(pool, &format!("blk_{id}_5")).unwrap()
    }

    fn read(&mut self, node: u64, offset: u64, size: u32) -> (i32, Vec<u8>) {
        let body = read_body(offset, size);
        self.ask(READ, node, &body)
    }
}

fn read_body(offset: u64, size: u32) -> Vec<u8> {
    let head = [&[0; 8][..], &offset.to_le_bytes(), &size.to_le_bytes()];
    [&head.concat()[..], &[0; 20]].concat()
}

fn streams(bed: &TestBed) -> StreamServer {
    StreamServer::new(bed.service.clone(), 1000)
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(5);
    while !done() {
        assert!(Instant::now() < limit, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_block_is_read_to_its_last_byte() {
    let bed = bed();
    let streams = streams(&bed);
    assert_eq!(bed.service.stat().stream, StreamState::NoStream);
    let mut agent = Agent::connect(&streams);
    assert_eq!(bed.service.stat().stream, StreamState::Silent);
    assert!(!agent.start_session(1, 11));
    assert_eq!(bed.service.stat().stream, StreamState::Connected);
    assert!(bed.service.stat().connected);
    let node = agent.block(3);
    assert_eq!(agent.ask(OPEN, node, &[0; 8]).0, 0);
    let whole = expected(&bed.disk);
    for (offset, size) in [(0, 1 << 20), (1, 7), (131_000, 70_000), (299_999, 4096)] {
        let end = whole.len().min(offset + size);
        let (error, bytes) = agent.read(node, offset as u64, size as u32);
        assert_eq!(error, 0);
        assert!(bytes == whole[offset..end], "{offset} {size}");
    }
    assert_eq!(agent.read(node, 1 << 40, 5), (0, Vec::new()));
    drop(agent);
    wait_until("the stream ends", || {
        bed.service.stat().stream == StreamState::NoStream
    });
}

#[test]
fn a_worker_that_goes_on_knows_its_numbers_and_another_one_knows_none_of_them() {
    let bed = bed();
    let first = streams(&bed);
    let mut agent = Agent::connect(&first);
    agent.start_session(1, 11);
    let node = agent.block(3);
    // the agent has lost the stream
    let mut agent = Agent::connect(&first);
    assert!(agent.start_session(1, 12));
    assert_eq!(agent.read(node, 0, 10).0, 0);
    // The agent restarts its session within the same stream.
    assert!(agent.restart_session(1, 13));
    assert_eq!(agent.read(node, 0, 10).0, 0);
    // another mount
    assert!(!agent.restart_session(2, 14));
    assert_eq!(agent.read(node, 0, 10).0, libc::ESTALE);
    // another worker never takes one of these numbers for one of its own
    let second = streams(&bed);
    let mut agent = Agent::connect(&second);
    assert!(!agent.start_session(1, 15));
    let other = agent.block(4);
    assert_ne!(node, other);
    assert_eq!(agent.read(node, 0, 10).0, libc::ESTALE);
    assert_eq!(agent.read(other, 0, 10).0, 0);
}

#[test]
fn requests_of_another_session_or_version_are_not_served() {
    let bed = bed();
    let streams = streams(&bed);
    let mut agent = Agent::connect(&streams);
    agent.start_session(1, 11);
    let node = agent.block(3);
    agent.send(
        FrameKind::Request,
        10,
        &request(READ, node, &read_body(0, 10)),
    );
    assert_eq!(agent.receive().0, FrameKind::Challenge);
    // and the session is over
    std::thread::sleep(Duration::from_millis(120));
    agent.send(
        FrameKind::Request,
        11,
        &request(READ, node, &read_body(0, 10)),
    );
    let (kind, nonce, _) = agent.receive();
    assert_eq!(kind, FrameKind::Challenge);
    let hello = Hello {
        version: 99,
        session: 5,
        mount: 1,
    };
    agent.send(FrameKind::Hello, nonce, &hello.encode());
    let (kind, _, why) = agent.receive();
    assert_eq!(kind, FrameKind::Refused);
    assert!(String::from_utf8(why).unwrap().contains("99 in the agent"));
}

#[test]
fn a_malformed_request_gets_an_answer() {
    let bed = bed();
    let streams = streams(&bed);
    let mut agent = Agent::connect(&streams);
    agent.start_session(1, 11);
    // a body that is too short, an opcode that does not exist
    assert_eq!(agent.ask(READ, 1, &[0; 3]).0, libc::EIO);
    assert_eq!(agent.ask(4000, 1, &[]).0, libc::ENOSYS);
    assert!(bed.service.stat().refusals.contains_key("malformed"));
    // one that has no answer
    agent.send(FrameKind::Request, 11, &request(FORGET, 2, &[0; 8]));
    assert!(agent.look_up(1, POOL).is_ok());
    // a header that lies about its length ends the session
    let mut short = request(READ, 1, &[0; 40]);
    short.pop();
    agent.send(FrameKind::Request, 11, &short);
    assert_eq!(agent.receive().0, FrameKind::Challenge);
}

#[test]
fn a_vm_that_does_not_read_its_replies_holds_up_no_withdrawal_and_no_other_stream() {
    let bed = bed();
    let streams = streams(&bed);
    let mut agent = Agent::connect(&streams);
    agent.start_session(1, 11);
    let node = agent.block(3);
    let mut frame = Vec::new();
    let body = read_body(0, 300_000);
    fuse_stream::push_frame(
        &mut frame,
        FrameKind::Request,
        11,
        &request(READ, node, &body),
    );
    agent.stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while agent.stream.write_all(&frame).is_ok() {
        sent += 1;
        assert!(sent < 100_000, "the worker reads without limit");
    }
    // what it was reading it has read
    wait_until("no read is in flight", || {
        !bed.hazards.is_reading_any(TABLE)
    });
    bed.table.withdraw(3);
    assert!(!bed.hazards.is_reading(TABLE, 3));
    let mut other = Agent::connect(&streams);
    assert!(other.start_session(1, 12));
    assert!(other.look_up(1, POOL).is_ok());
}

#[test]
fn a_block_that_is_withdrawn_is_not_read_by_the_stream_either() {
    let bed = bed();
    let streams = streams(&bed);
    let mut agent = Agent::connect(&streams);
    agent.start_session(1, 11);
    let node = agent.block(3);
    *bed.named.lock().unwrap() = false;
    bed.table.withdraw(3);
    assert_eq!(agent.read(node, 0, 4096).0, libc::ESTALE);
    *bed.named.lock().unwrap() = true;
    assert_eq!(agent.read(node, 0, 4096).0, 0);
}

#[derive(Debug, Clone)]
enum Step {
    Junk(Vec<u8>),
    Framed(FrameKind, bool, Vec<u8>),
    Shaped(u32, u64, Vec<u8>),
    Cut(usize),
    StartSession(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..200);
    let kind = prop_oneof![
        Just(FrameKind::Probe),
        Just(FrameKind::Hello),
        Just(FrameKind::Request),
        Just(FrameKind::Ping),
        Just(FrameKind::Reply),
    ];
    prop_oneof![
        bytes().prop_map(Step::Junk),
        (kind, any::<bool>(), bytes()).prop_map(|(kind, own, mut bytes)| {
            bytes.truncate(kind.max_payload_bytes());
            Step::Framed(kind, own, bytes)
        }),
        (0u32..60, 0u64..9, bytes()).prop_map(|(o, n, b)| Step::Shaped(o, n, b)),
        (1usize..60).prop_map(Step::Cut),
        (1u64..4).prop_map(Step::StartSession),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_bytes_panic_or_cost_memory_or_keep_the_next_session_out(steps in prop::collection::vec(step(), 1..40)) {
        let bed = bed();
        let streams = streams(&bed);
        let mut agent = Agent::connect(&streams);
        agent.start_session(1, 11);
        // Read all answers, so that the worker reads all input.
        let mut reading = agent.stream.try_clone().unwrap();
        let drain = std::thread::spawn(move || io::copy(&mut reading, &mut io::sink()));
        for step in steps {
            let mut bytes = Vec::new();
            match step {
                Step::Junk(junk) => bytes = junk,
                Step::Framed(kind, own, payload) => {
                    fuse_stream::push_frame(&mut bytes, kind, if own { 11 } else { 12 }, &payload);
                }
                Step::Shaped(opcode, node, body) => {
                    fuse_stream::push_frame(&mut bytes, FrameKind::Request, 11, &request(opcode, node, &body));
                }
                Step::Cut(lost) => {
                    fuse_stream::push_frame(&mut bytes, FrameKind::Request, 11, &request(READ, 2, &read_body(0, 9)));
                    bytes.truncate(bytes.len() - lost);
                }
                Step::StartSession(mount) => {
                    let hello = Hello { version: fuse_stream::VERSION, session: 11, mount };
                    fuse_stream::push_frame(&mut bytes, FrameKind::Hello, 11, &hello.encode());
                }
            }
            agent.stream.write_all(&bytes).unwrap();
        }
        agent.stream.shutdown(std::net::Shutdown::Both).unwrap();
        drain.join().unwrap().ok();
        let mut agent = Agent::connect(&streams);
        prop_assert!(agent.start_session(1, 21), "the mount is still known, unless another one was welcomed");
        let node = agent.block(3);
        prop_assert_eq!(agent.read(node, 0, 10).0, 0);
        prop_assert!(!bed.hazards.is_reading_any(TABLE));
    }
}
