// SPDX-License-Identifier: Apache-2.0
//! Hosts with a wrong identity, or that violate the protocol.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, poll};
use viola_proto::agent::BlockKey;

use super::super::frames::{FrameParser, FrameSink};
use super::super::hosts::Hosts;
use super::super::tls::{Identity, accept, parse_fingerprint};
use super::super::tls_channel::{ChannelError, TlsChannel};
use super::super::versions::{VERSIONS, Versions};
use super::super::wire::*;
use super::datanode::*;
use super::reader::*;
use super::support::*;

/// One end of a connection that sends what the test wants.
struct RawPeer {
    channel: TlsChannel,
    frames: FrameParser,
    received: ReceivedMessages,
}

#[derive(Default)]
struct ReceivedMessages(Vec<(u64, Message)>);

impl FrameSink for ReceivedMessages {
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
        self.0.push((id, message));
        Ok(())
    }

    fn data(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), ProtocolError> {
        Ok(())
    }
}

impl RawPeer {
    fn to(address: SocketAddr, id: &KeyPair, other: &str) -> Self {
        Self::over(TcpStream::connect(address).unwrap(), id, other)
    }

    fn over(socket: TcpStream, id: &KeyPair, other: &str) -> Self {
        socket.set_nonblocking(true).unwrap();
        let identity = Identity::new(&id.certificate, &id.key).unwrap();
        let pins = [parse_fingerprint(other).unwrap()].into_iter().collect();
        Self::with(TlsChannel::client(socket, identity.connect(pins).unwrap()))
    }

    fn with(channel: TlsChannel) -> Self {
        Self {
            channel,
            frames: FrameParser::default(),
            received: ReceivedMessages::default(),
        }
    }

    fn send(&mut self, id: u64, message: &Message) {
        let mut frame = Vec::new();
        message.encode(id, &mut frame);
        self.channel.send(frame);
    }

    fn turn(&mut self) -> Result<(), ChannelError> {
        let (frames, received) = (&mut self.frames, &mut self.received);
        self.channel
            .receive(&mut |bytes| frames.feed(bytes, received))?;
        self.channel.flush()?;
        let mut flags = PollFlags::IN;
        if self.channel.wants_write() {
            flags |= PollFlags::OUT;
        }
        let tick = Duration::from_millis(20).try_into().unwrap();
        poll(&mut [PollFd::new(&self.channel, flags)], Some(&tick)).unwrap();
        Ok(())
    }

    /// Receives until there are `messages` messages.
    fn until(&mut self, messages: usize) -> Result<(), ChannelError> {
        let begun = Instant::now();
        while self.received.0.len() < messages {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{:?}",
                self.received.0
            );
            let turned = self.turn();
            if self.received.0.len() < messages {
                turned?;
            }
        }
        Ok(())
    }

    /// Waits for the end of the connection and returns the reason.
    fn end(&mut self) -> ChannelError {
        match self.until(usize::MAX) {
            Err(broken) => broken,
            Ok(()) => unreachable!(),
        }
    }

    fn hello(&mut self) {
        self.send(
            0,
            &Message::Hello {
                versions: VERSIONS,
                reader: "client1".into(),
            },
        );
        self.until(1).unwrap();
        assert!(matches!(self.received.0[0].1, Message::Welcome { .. }));
    }
}

fn key(id: i64) -> BlockKey {
    BlockKey::new(POOL, id, 5).unwrap()
}

#[test]
fn a_host_with_another_certificate_gets_no_connection() {
    let (a, b, _datanode, reader) = two_hosts();
    reader.wait();
    // A host that b does not know.
    let stranger = KeyPair::new();
    let mut peer = RawPeer::to(b.address, &stranger, &b.id.fingerprint());
    peer.send(1, &Message::Ping);
    let broken = peer.end();
    assert!(matches!(broken, ChannelError::Tls(_)), "{broken}");
    wait_until("it is counted", || b.stat().strangers == 1);
    // A host with another key at b's address.
    a.set_peers(vec![spec(
        "b",
        stranger.fingerprint(),
        Some(b.address),
        vec![],
    )]);
    wait_until("it is refused", || {
        counts(&a.stat(), "b").why.contains("TLS")
    });
    let begun = Instant::now();
    assert_eq!(reader.queue().open(2, false), Err(libc::ENOENT));
    assert!(begun.elapsed() < MAX_ERROR_DELAY);
    // b without a: the connection ends, and no other one is made.
    a.set_peers(vec![spec("b", b.id.fingerprint(), Some(b.address), vec![])]);
    reader.wait();
    b.set_peers(vec![]);
    wait_until("it is refused", || reader.queue().open(1, false).is_err());
    assert!(b.stat().peers.is_empty());
}

#[test]
fn a_certificate_without_its_key_is_refused() {
    let (one, other) = (KeyPair::new(), KeyPair::new());
    assert!(super::super::check_identity(&one.certificate, &one.key).is_ok());
    assert!(super::super::check_identity(&one.certificate, &other.key).is_err());
    assert!(super::super::check_identity("", &one.key).is_err());
    assert!(super::super::check_identity(&one.certificate, "x").is_err());
    assert_ne!(one.fingerprint(), other.fingerprint());
}

#[test]
fn only_connections_that_violate_the_protocol_are_closed() {
    let (a, b, _datanode, reader) = two_hosts();
    reader.wait();
    let peer = || RawPeer::to(b.address, &a.id, &b.id.fingerprint());
    let read = |id: i64, offset| Message::Read {
        key: key(id),
        meta: false,
        offset,
        length: 1 << 20,
    };
    // No hello.
    let mut rude = peer();
    rude.send(1, &Message::Find { key: key(1) });
    rude.end();
    // Another version.
    let mut old = peer();
    old.send(
        0,
        &Message::Hello {
            versions: Versions {
                lowest: 200,
                highest: 201,
            },
            reader: "client1".into(),
        },
    );
    old.until(1).unwrap();
    assert_eq!(old.received.0[0].1, Message::Failed(ErrorCode::Refused));
    old.end();
    // Hello twice, an answer, garbage, too many requests.
    type Violation<'a> = &'a dyn Fn(&mut RawPeer);
    let violations: [Violation<'_>; 4] = [
        &|peer| {
            let reader = "client2".into();
            let versions = VERSIONS;
            peer.send(1, &Message::Hello { versions, reader });
        },
        &|peer| peer.send(1, &Message::Pong),
        &|peer| peer.channel.send(vec![0xa5; 4096]),
        &|peer| {
            for id in 0..2 * MAX_OUTSTANDING as u64 {
                peer.send(id, &read(1, 0));
            }
        },
    ];
    for violation in violations {
        let mut peer = peer();
        peer.hello();
        violation(&mut peer);
        peer.end();
    }
    // A range outside the file is an error, but does not end the connection.
    let mut peer = peer();
    peer.hello();
    peer.send(7, &read(1, LENGTH as u64 - 5));
    peer.send(8, &read(1, u64::MAX - (2 << 20)));
    peer.send(9, &read(99, 0));
    peer.until(4).unwrap();
    let mut answers: Vec<_> = peer.received.0[1..].to_vec();
    answers.sort_by_key(|answer| answer.0);
    assert_eq!(
        answers,
        [
            (7, Message::Failed(ErrorCode::Io)),
            (8, Message::Failed(ErrorCode::Io)),
            (9, Message::Failed(ErrorCode::Unknown)),
        ]
    );
    // A client without TLS.
    let mut plain = TcpStream::connect(b.address).unwrap();
    let _ = plain.write_all(b"GET / HTTP/1.1\r\n\r\n");
    reader.queue().open_retrying(2, false);
}

#[test]
fn silent_connections_of_one_address_leave_places_to_others() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let to = lines.clone();
    let b = Host::with(
        "b",
        VERSIONS,
        Box::new(move |_, line| to.lock().unwrap().push(line.to_owned())),
    );
    let a = KeyPair::new();
    b.set_peers(vec![spec("a", a.fingerprint(), None, vec![])]);
    let silent: Vec<_> = (0..64)
        .map(|_| TcpStream::connect(b.address).unwrap())
        .collect();
    wait_until("most are refused", || b.stat().over_limit == 64 - 8);
    let lines = lines.lock().unwrap().clone();
    assert_eq!(
        lines,
        ["a connection from 127.0.0.1 is refused: 8 of its connections have not said hello"]
    );
    // Another address is still served.
    let socket = from(Ipv4Addr::new(127, 0, 0, 2), b.address);
    let mut peer = RawPeer::over(socket, &a, &b.id.fingerprint());
    peer.hello();
    // So is the first one, once its silent connections are closed.
    drop(silent);
    wait_until("there is room again", || b.stat().strangers == 8);
    RawPeer::to(b.address, &a, &b.id.fingerprint()).hello();
}

/// A connection from an address of this host.
fn from(address: Ipv4Addr, to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&socket, &SocketAddr::from((address, 0))).unwrap();
    connect(&socket, &to).unwrap();
    socket.into()
}

#[test]
fn unread_answers_cost_bounded_memory() {
    let (a, b, _datanode, reader) = two_hosts();
    reader.wait();
    let mut peer = RawPeer::to(b.address, &a.id, &b.id.fingerprint());
    peer.hello();
    for id in 1..MAX_OUTSTANDING as u64 {
        peer.send(
            id,
            &Message::Read {
                key: key(1),
                meta: false,
                offset: 0,
                length: 1 << 20,
            },
        );
    }
    while peer.channel.queued() > 0 {
        peer.channel.flush().unwrap();
    }
    let before = counts(&b.stat(), "a").answered;
    std::thread::sleep(Duration::from_millis(500));
    let answered = counts(&b.stat(), "a").answered - before;
    // 8 MiB, what TLS and the sockets of both sides hold, and one more.
    assert!(answered < 40, "{answered} answers of 1 MiB");
    peer.until(2 * MAX_OUTSTANDING / 2).unwrap();
    reader.queue().open_retrying(2, false);
}

/// The answer of the first release to hello.
fn first_release(versions: Versions) -> Message {
    match (versions.lowest, versions.highest) {
        (1, 1) => Message::Welcome { version: 1 },
        _ => Message::Failed(ErrorCode::Refused),
    }
}

/// A host that answers as the test wants.
fn answers(
    id: &KeyPair,
    other: &str,
    welcome: fn(Versions) -> Message,
    answer: impl Fn(&mut RawPeer, u64, &Message) + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let identity = Identity::new(&id.certificate, &id.key).unwrap();
    let hosts = Hosts::default();
    hosts.set(&[spec("a", other.into(), None, vec![])]).unwrap();
    std::thread::spawn(move || {
        let tls = identity.server(&hosts.pins).unwrap();
        for socket in listener.incoming() {
            let socket = socket.unwrap();
            socket.set_nonblocking(true).unwrap();
            let mut peer = RawPeer::with(TlsChannel::server(socket, accept(&tls).unwrap()));
            while peer.turn().is_ok() {
                for (id, message) in std::mem::take(&mut peer.received.0) {
                    match message {
                        Message::Hello { versions, .. } => {
                            peer.send(id, &welcome(versions));
                        }
                        Message::Ping => peer.send(id, &Message::Pong),
                        message => answer(&mut peer, id, &message),
                    }
                }
            }
        }
    });
    address
}

#[test]
fn a_host_of_several_versions_reads_from_the_first_release() {
    let a = Host::speaking("a", 1, 3);
    let b = KeyPair::new();
    let address = answers(&b, &a.id.fingerprint(), first_release, |peer, id, _| {
        peer.send(id, &Message::Failed(ErrorCode::Unknown))
    });
    a.set_peers(vec![spec("b", b.fingerprint(), Some(address), vec![])]);
    let _reader = Reader::new(&a, "client1", &["b"]);
    wait_until("they are connected", || {
        counts(&a.stat(), "b").links_out == 1
    });
}

#[test]
fn a_connection_with_invalid_answers_is_closed_at_once() {
    let located = |data| {
        Message::Found(Located {
            data,
            meta: 7,
            datanode: "dn1".into(),
            name: "dn1".into(),
        })
    };
    type Reply = fn(&mut RawPeer, u64);
    let replies: [Reply; 6] = [
        |peer, id| peer.send(id + 1, &Message::Data { length: 4096 }),
        |peer, id| peer.send(id, &Message::Data { length: 4097 }),
        |peer, id| peer.send(id, &Message::Data { length: 0 }),
        |peer, id| {
            let mut frame = data_header(id, 4096).to_vec();
            frame.extend_from_slice(&[1; 8192]);
            peer.channel.send(frame);
        },
        |peer, id| peer.send(id, &Message::Ping),
        |peer, _| peer.channel.send(vec![0xff; 64]),
    ];
    for (number, reply) in replies.into_iter().enumerate() {
        let (a, b) = (Host::new("a"), KeyPair::new());
        let address = answers(
            &b,
            &a.id.fingerprint(),
            first_release,
            move |peer, id, message| match message {
                Message::Find { .. } => peer.send(id, &located(1 << 20)),
                _ => reply(peer, id),
            },
        );
        a.set_peers(vec![spec("b", b.fingerprint(), Some(address), vec![])]);
        let reader = Reader::new(&a, "client1", &["b"]);
        reader.wait();
        let queue = reader.queue();
        let (node, _) = queue.open_retrying(1, false);
        let begun = Instant::now();
        let read = queue.read(node, 900_000, 4096).map(|bytes| bytes.len());
        // The fourth one has answered in full before it goes on.
        assert!(read == Err(libc::EIO) || number == 3, "{number}: {read:?}");
        assert!(begun.elapsed() < MAX_ERROR_DELAY);
        wait_until("the connection is closed", || {
            counts(&a.stat(), "b").broken > 0
        });
    }
    // A length that no file has.
    let (a, b) = (Host::new("a"), KeyPair::new());
    let address = answers(
        &b,
        &a.id.fingerprint(),
        first_release,
        move |peer, id, _| {
            peer.send(id, &located(u64::MAX));
        },
    );
    a.set_peers(vec![spec("b", b.fingerprint(), Some(address), vec![])]);
    let reader = Reader::new(&a, "client1", &["b"]);
    wait_until("it is connected", || counts(&a.stat(), "b").links_out == 1);
    assert_eq!(reader.queue().open(1, false), Err(libc::ENOENT));
    wait_until("the connection is closed", || {
        counts(&a.stat(), "b").broken > 0
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_bytes_after_hello_end_a_connection_or_are_answered(
        bytes in prop::collection::vec(any::<u8>(), 1..3000), kind in 0u8..6, short: bool,
    ) {
        use std::sync::{LazyLock, Mutex};
        static BED: LazyLock<Mutex<(Host, Host, Datanode, Reader)>> = LazyLock::new(|| Mutex::new(two_hosts()));
        let bed = BED.lock().unwrap();
        let (a, b, _, reader) = &*bed;
        let mut peer = RawPeer::to(b.address, &a.id, &b.id.fingerprint());
        peer.hello();
        let mut frame = bytes;
        if short && frame.len() >= HEADER {
            // A valid header, so that the body is parsed.
            let length = (frame.len() - HEADER).min(512);
            frame[..HEADER].copy_from_slice(&header(3, kind, 0, length as u32));
            frame.truncate(HEADER + length);
        }
        peer.channel.send(frame);
        for _ in 0..3 {
            if peer.turn().is_err() {
                break;
            }
        }
        wait_until("others are served", || reader.queue().open(1, false).is_ok());
    }
}
