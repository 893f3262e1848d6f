// SPDX-License-Identifier: Apache-2.0
//! Hosts that are not who they say, or not what they should be.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, poll};
use viola_proto::agent::BlockKey;

use super::super::channel::{Broken, Channel};
use super::super::frames::{Frames, Sink};
use super::super::hosts::Hosts;
use super::super::tls::{Identity, accept, parse_fingerprint};
use super::super::wire::*;
use super::support::*;

/// One end of a connection, by hand.
struct Hand {
    channel: Channel,
    frames: Frames,
    got: Got,
}

#[derive(Default)]
struct Got(Vec<(u64, Message)>);

impl Sink for Got {
    fn message(&mut self, id: u64, message: Message) -> Result<(), Bad> {
        self.0.push((id, message));
        Ok(())
    }

    fn data(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), Bad> {
        Ok(())
    }
}

impl Hand {
    fn to(address: SocketAddr, id: &Id, other: &str) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nonblocking(true).unwrap();
        let identity = Identity::new(&id.certificate, &id.key).unwrap();
        let pins = [parse_fingerprint(other).unwrap()].into_iter().collect();
        Self::with(Channel::client(socket, identity.connect(pins).unwrap()))
    }

    fn with(channel: Channel) -> Self {
        Self {
            channel,
            frames: Frames::default(),
            got: Got::default(),
        }
    }

    fn say(&mut self, id: u64, message: &Message) {
        let mut frame = Vec::new();
        message.put(id, &mut frame);
        self.channel.send(frame);
    }

    fn turn(&mut self) -> Result<(), Broken> {
        let (frames, got) = (&mut self.frames, &mut self.got);
        self.channel.receive(&mut |bytes| frames.feed(bytes, got))?;
        self.channel.flush()?;
        let mut flags = PollFlags::IN;
        if self.channel.wants_write() {
            flags |= PollFlags::OUT;
        }
        let tick = Duration::from_millis(20).try_into().unwrap();
        poll(&mut [PollFd::new(&self.channel, flags)], Some(&tick)).unwrap();
        Ok(())
    }

    /// Goes on until there are so many messages.
    fn until(&mut self, messages: usize) -> Result<(), Broken> {
        let begun = Instant::now();
        while self.got.0.len() < messages {
            assert!(
                begun.elapsed() < Duration::from_secs(30),
                "{:?}",
                self.got.0
            );
            let turned = self.turn();
            if self.got.0.len() < messages {
                turned?;
            }
        }
        Ok(())
    }

    /// Why the other side has ended it.
    fn end(&mut self) -> Broken {
        match self.until(usize::MAX) {
            Err(broken) => broken,
            Ok(()) => unreachable!(),
        }
    }

    fn hello(&mut self) {
        self.say(
            0,
            &Message::Hello {
                version: WIRE_VERSION,
                reader: "client1".into(),
            },
        );
        self.until(1).unwrap();
        assert!(matches!(self.got.0[0].1, Message::Welcome { .. }));
    }
}

fn key(id: i64) -> BlockKey {
    BlockKey::new(POOL, id, 5).unwrap()
}

#[test]
fn a_host_with_another_certificate_gets_no_connection() {
    let (a, b, _datanode, reader) = two();
    reader.wait();
    // Somebody whom b does not know.
    let stranger = Id::new();
    let mut hand = Hand::to(b.address, &stranger, &b.id.fingerprint());
    hand.say(1, &Message::Ping);
    let broken = hand.end();
    assert!(matches!(broken, Broken::Tls(_)), "{broken}");
    wait("it is counted", || b.stat().strangers == 1);
    // Somebody who answers where b should be.
    a.know(vec![spec(
        "b",
        stranger.fingerprint(),
        Some(b.address),
        vec![],
    )]);
    wait("it is refused", || {
        counts(&a.stat(), "b").why.contains("TLS")
    });
    let begun = Instant::now();
    assert_eq!(reader.queue().open(2, false), Err(libc::ENOENT));
    assert!(begun.elapsed() < SOON);
    // b without a: the connection ends, and no other one is made.
    a.know(vec![spec("b", b.id.fingerprint(), Some(b.address), vec![])]);
    reader.wait();
    b.know(vec![]);
    wait("it is refused", || reader.queue().open(1, false).is_err());
    assert!(b.stat().peers.is_empty());
}

#[test]
fn a_certificate_without_its_key_is_refused() {
    let (one, other) = (Id::new(), Id::new());
    assert!(super::super::check_identity(&one.certificate, &one.key).is_ok());
    assert!(super::super::check_identity(&one.certificate, &other.key).is_err());
    assert!(super::super::check_identity("", &one.key).is_err());
    assert!(super::super::check_identity(&one.certificate, "x").is_err());
    assert_ne!(one.fingerprint(), other.fingerprint());
}

#[test]
fn whoever_does_not_keep_to_the_protocol_is_hung_up_on_and_nobody_else() {
    let (a, b, _datanode, reader) = two();
    reader.wait();
    let hand = || Hand::to(b.address, &a.id, &b.id.fingerprint());
    let read = |id: i64, offset| Message::Read {
        key: key(id),
        meta: false,
        offset,
        length: 1 << 20,
    };
    // No hello.
    let mut rude = hand();
    rude.say(1, &Message::Find { key: key(1) });
    rude.end();
    // Another version.
    let mut old = hand();
    old.say(
        0,
        &Message::Hello {
            version: 999,
            reader: "client1".into(),
        },
    );
    old.until(1).unwrap();
    assert_eq!(old.got.0[0].1, Message::Failed(Code::Refused));
    old.end();
    // Hello twice, an answer, garbage, too many requests.
    type Deed<'a> = &'a dyn Fn(&mut Hand);
    let deeds: [Deed<'_>; 4] = [
        &|hand| {
            let reader = "client2".into();
            hand.say(1, &Message::Hello { version: 1, reader });
        },
        &|hand| hand.say(1, &Message::Pong),
        &|hand| hand.channel.send(vec![0xa5; 4096]),
        &|hand| {
            for id in 0..2 * MAX_OUTSTANDING as u64 {
                hand.say(id, &read(1, 0));
            }
        },
    ];
    for deed in deeds {
        let mut hand = hand();
        hand.hello();
        deed(&mut hand);
        hand.end();
    }
    // What lies outside of the file is an error, no end.
    let mut hand = hand();
    hand.hello();
    hand.say(7, &read(1, LENGTH as u64 - 5));
    hand.say(8, &read(1, u64::MAX - (2 << 20)));
    hand.say(9, &read(99, 0));
    hand.until(4).unwrap();
    let mut answers: Vec<_> = hand.got.0[1..].to_vec();
    answers.sort_by_key(|answer| answer.0);
    assert_eq!(
        answers,
        [
            (7, Message::Failed(Code::Io)),
            (8, Message::Failed(Code::Io)),
            (9, Message::Failed(Code::Unknown)),
        ]
    );
    // Somebody without TLS.
    let mut plain = TcpStream::connect(b.address).unwrap();
    let _ = plain.write_all(b"GET / HTTP/1.1\r\n\r\n");
    reader.queue().open_surely(2, false);
}

#[test]
fn who_asks_and_does_not_take_the_answers_costs_bounded_memory() {
    let (a, b, _datanode, reader) = two();
    reader.wait();
    let mut hand = Hand::to(b.address, &a.id, &b.id.fingerprint());
    hand.hello();
    for id in 1..MAX_OUTSTANDING as u64 {
        hand.say(
            id,
            &Message::Read {
                key: key(1),
                meta: false,
                offset: 0,
                length: 1 << 20,
            },
        );
    }
    while hand.channel.queued() > 0 {
        hand.channel.flush().unwrap();
    }
    let before = counts(&b.stat(), "a").answered;
    std::thread::sleep(Duration::from_millis(500));
    let answered = counts(&b.stat(), "a").answered - before;
    // 8 MiB, what TLS and the sockets of both sides hold, and one more.
    assert!(answered < 40, "{answered} answers of 1 MiB");
    hand.until(2 * MAX_OUTSTANDING / 2).unwrap();
    reader.queue().open_surely(2, false);
}

/// A host that answers as the test wants.
fn answers(
    id: &Id,
    other: &str,
    answer: impl Fn(&mut Hand, u64, &Message) + Send + 'static,
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
            let mut hand = Hand::with(Channel::server(socket, accept(&tls).unwrap()));
            while hand.turn().is_ok() {
                for (id, message) in std::mem::take(&mut hand.got.0) {
                    match message {
                        Message::Hello { version, .. } => {
                            hand.say(id, &Message::Welcome { version });
                        }
                        Message::Ping => hand.say(id, &Message::Pong),
                        message => answer(&mut hand, id, &message),
                    }
                }
            }
        }
    });
    address
}

#[test]
fn a_host_that_answers_nonsense_is_hung_up_on_at_once() {
    let located = |data| {
        Message::Found(Located {
            data,
            meta: 7,
            datanode: "dn1".into(),
            name: "dn1".into(),
        })
    };
    type Reply = fn(&mut Hand, u64);
    let replies: [Reply; 6] = [
        |hand, id| hand.say(id + 1, &Message::Data { length: 4096 }),
        |hand, id| hand.say(id, &Message::Data { length: 4097 }),
        |hand, id| hand.say(id, &Message::Data { length: 0 }),
        |hand, id| {
            let mut frame = data_header(id, 4096).to_vec();
            frame.extend_from_slice(&[1; 8192]);
            hand.channel.send(frame);
        },
        |hand, id| hand.say(id, &Message::Ping),
        |hand, _| hand.channel.send(vec![0xff; 64]),
    ];
    for (number, reply) in replies.into_iter().enumerate() {
        let (a, b) = (Host::new("a"), Id::new());
        let address = answers(
            &b,
            &a.id.fingerprint(),
            move |hand, id, message| match message {
                Message::Find { .. } => hand.say(id, &located(1 << 20)),
                _ => reply(hand, id),
            },
        );
        a.know(vec![spec("b", b.fingerprint(), Some(address), vec![])]);
        let reader = Reader::new(&a, "client1", &["b"]);
        reader.wait();
        let queue = reader.queue();
        let (node, _) = queue.open_surely(1, false);
        let begun = Instant::now();
        let read = queue.read(node, 900_000, 4096).map(|bytes| bytes.len());
        // The fourth one has answered in full before it goes on.
        assert!(read == Err(libc::EIO) || number == 3, "{number}: {read:?}");
        assert!(begun.elapsed() < SOON);
        wait("it is hung up on", || counts(&a.stat(), "b").broken > 0);
    }
    // A length that no file has.
    let (a, b) = (Host::new("a"), Id::new());
    let address = answers(&b, &a.id.fingerprint(), move |hand, id, _| {
        hand.say(id, &located(u64::MAX));
    });
    a.know(vec![spec("b", b.fingerprint(), Some(address), vec![])]);
    let reader = Reader::new(&a, "client1", &["b"]);
    wait("it is connected", || counts(&a.stat(), "b").links_out == 1);
    assert_eq!(reader.queue().open(1, false), Err(libc::ENOENT));
    wait("it is hung up on", || counts(&a.stat(), "b").broken > 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_bytes_after_hello_end_a_connection_or_are_answered(
        bytes in prop::collection::vec(any::<u8>(), 1..3000), kind in 0u8..6, short: bool,
    ) {
        use std::sync::{LazyLock, Mutex};
        static BED: LazyLock<Mutex<(Host, Host, Datanode, Reader)>> = LazyLock::new(|| Mutex::new(two()));
        let bed = BED.lock().unwrap();
        let (a, b, _, reader) = &*bed;
        let mut hand = Hand::to(b.address, &a.id, &b.id.fingerprint());
        hand.hello();
        let mut frame = bytes;
        if short && frame.len() >= HEADER {
            // A good header, so that more than that is looked at.
            let length = (frame.len() - HEADER).min(512);
            frame[..HEADER].copy_from_slice(&header(3, kind, 0, length as u32));
            frame.truncate(HEADER + length);
        }
        hand.channel.send(frame);
        for _ in 0..3 {
            if hand.turn().is_err() {
                break;
            }
        }
        wait("others are served", || reader.queue().open(1, false).is_ok());
    }
}
