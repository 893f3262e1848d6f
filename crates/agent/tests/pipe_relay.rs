// SPDX-License-Identifier: Apache-2.0
//! Two connections of a program that the host relays: real sockets, the agent's own program.
#![allow(clippy::unwrap_used)]

mod bed;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections};
use viola_proto::pipe::{PipeId, PipeReply, PipeRequest};

use bed::Bed;
use bed::handover::{extract_one, hold, over, release, restore_one, sent_again};

/// The byte at a position of the stream.
fn bytes(from: usize, count: usize) -> Vec<u8> {
    (from..from + count)
        .map(|at| ((at as u32).wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect()
}

/// Writes `count` bytes without a pause.
fn speak(mut to: TcpStream, count: usize) -> JoinHandle<TcpStream> {
    std::thread::spawn(move || {
        let mut at = 0;
        while at < count {
            let piece = bytes(at, (count - at).min(50_000));
            to.write_all(&piece).unwrap();
            at += piece.len();
        }
        to
    })
}

/// Waits until the peer's end has arrived; its sender may pace what goes before.
fn wait_for_end(of: &TcpStream) {
    let mut fds = [PollFd::new(of, PollFlags::RDHUP)];
    let limit = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "no end in 10 s");
}

/// Reads bytes and checks them.
fn listen(from: &TcpStream, begin: usize, count: usize) -> JoinHandle<()> {
    let mut from = from.try_clone().unwrap();
    std::thread::spawn(move || {
        let mut all = vec![0; count];
        from.read_exact(&mut all).unwrap();
        assert!(all == bytes(begin, count), "other bytes");
    })
}

/// Number of bytes that can be read.
fn readable(stream: &TcpStream) -> u64 {
    rustix::io::ioctl_fionread(stream).unwrap()
}

fn port(stream: &TcpStream) -> u16 {
    stream.local_addr().unwrap().port()
}

/// The program's two connections, and the clients' ends.
struct Proxy {
    bed: Bed,
    speaker: TcpStream,
    source: TcpStream,
    hearer: TcpStream,
    sink: TcpStream,
}

impl Proxy {
    fn new() -> Self {
        let bed = Bed::full();
        let (speaker, source) = bed.connection();
        let (hearer, sink) = bed.connection();
        Self {
            bed,
            speaker,
            source,
            hearer,
            sink,
        }
    }

    fn given(&self, held: PipeId) -> Given {
        match self.bed.host.hear() {
            PipeRequest::Start {
                pipe,
                source,
                sink,
                length,
            } => {
                assert_eq!(pipe, held);
                let sink = TcpStream::from(restore_one(&self.bed, sink));
                let source = TcpStream::from(restore_one(&self.bed, source));
                Given {
                    pipe,
                    source,
                    sink,
                    length,
                }
            }
            other => panic!("{other:?}"),
        }
    }

    /// Checks both connections.
    fn talk(&self) {
        for (client, server) in [(&self.speaker, &self.source), (&self.hearer, &self.sink)] {
            let mut five = [0; 5];
            for (mut from, mut to) in [(client, server), (server, client)] {
                from.write_all(b"hello").unwrap();
                to.read_exact(&mut five).unwrap();
                assert_eq!(&five, b"hello");
            }
        }
    }

    fn return_connection(&self, given: Given, sent: u64) {
        let (from, to) = (port(&self.source), port(&self.sink));
        let Given {
            pipe, source, sink, ..
        } = given;
        let sink = Some(extract_one(&self.bed, sink.into(), to));
        let source = Some(extract_one(&self.bed, source.into(), from));
        self.bed.host.say(PipeReply::Finished {
            pipe,
            source,
            sink,
            sent,
            errno: 0,
            host_us: 0,
        });
        assert_eq!(self.bed.host.hear(), PipeRequest::Restored { pipe });
        release(&self.bed, from);
        release(&self.bed, to);
    }
}

/// A relay that was handed to the host.
struct Given {
    pipe: PipeId,
    source: TcpStream,
    sink: TcpStream,
    length: u64,
}

impl Given {
    /// Moves bytes, all or at most `max_pipes`; returns how many.
    fn work(&mut self, most: u64) -> u64 {
        let (mut sent, most) = (0, most.min(self.length));
        let mut piece = vec![0; 64 << 10];
        while sent < most {
            let want = piece.len().min((most - sent) as usize);
            let got = self.source.read(&mut piece[..want]).unwrap();
            if got == 0 {
                break;
            }
            self.sink.write_all(&piece[..got]).unwrap();
            sent += got as u64;
        }
        sent
    }
}

#[test]
fn a_sender_that_never_stops_loses_nothing() {
    let mut proxy = Proxy::new();
    let program = proxy.bed.program();
    const FIRST: usize = 100_000;
    const HOST: usize = 30_000_000;
    const ALL: usize = FIRST + HOST + 5_000_000;
    let sender = speak(proxy.speaker.try_clone().unwrap(), ALL);
    let hearer = listen(&proxy.hearer, FIRST, HOST);
    // the client sends at full speed before the hand-over
    let mut first = vec![0; FIRST];
    proxy.source.read_exact(&mut first).unwrap();
    assert!(first == bytes(0, FIRST));
    proxy.bed.wait("more has come", |_| {
        rustix::io::ioctl_fionread(&proxy.source).unwrap() > 0
    });
    let length = HOST as u64;
    let ask = LibraryRequest::Relay { id: 1, length };
    program.request(ask, &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    let mut given = proxy.given(pipe);
    let by_agent = length - given.length;
    assert!(by_agent > 0, "something was there when it was held");
    let sent = given.work(u64::MAX);
    assert_eq!(sent, given.length);
    hearer.join().unwrap();
    proxy.bed.host.say(PipeReply::Progress { pipe, sent: 1 });
    let sent_by_one = LibraryReply::Progress {
        id: 1,
        sent: by_agent + 1,
    };
    assert_eq!(program.answer(), Some(sent_by_one));
    // the client continues: bytes that the host does not read any more go back to the program
    let (from, mut rest) = (port(&proxy.source), Vec::new());
    proxy.bed.wire.redirect_port(from, bed::wire::Route::Held);
    proxy.bed.wire.settle();
    given.source.set_nonblocking(true).unwrap();
    let _ = given.source.read_to_end(&mut rest);
    proxy.return_connection(given, sent);
    assert_eq!(program.end(), over(1, length, LostConnections::NONE));
    let mut last = vec![0; ALL - FIRST - HOST - rest.len()];
    proxy.source.read_exact(&mut last).unwrap();
    let speaker = sender.join().unwrap();
    assert!([rest, last].concat() == bytes(FIRST + HOST, ALL - FIRST - HOST));
    let again = sent_again(&speaker);
    // a few segments overtake others; a lost window would be more than a thousand
    assert!(again < 300, "{again} segments were sent again");
    proxy.talk();
    let status = proxy.bed.status();
    assert_eq!((status.pipes, status.bytes), (1, length));
}

#[test]
fn a_peer_that_does_not_read_is_refused_after_a_timeout() {
    let mut proxy = Proxy::new();
    let program = proxy.bed.program();
    proxy.speaker.write_all(&bytes(0, 20_000)).unwrap();
    // the sink is full, since its peer does not read
    proxy.sink.set_nonblocking(true).unwrap();
    let mut full = 0;
    for _ in 0..20 {
        while let Ok(sent) = proxy.sink.write(&[7; 65_536]) {
            full += sent;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let length = 1 << 30;
    let ask = LibraryRequest::Relay { id: 1, length };
    program.request(ask, &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Stop { pipe });
    release(&proxy.bed, port(&proxy.source));
    let errno = libc::EAGAIN;
    assert_eq!(program.end(), LibraryReply::Refused { id: 1, errno });
    proxy.sink.set_nonblocking(false).unwrap();
    std::io::copy(
        &mut proxy.hearer.try_clone().unwrap().take(full as u64),
        &mut std::io::sink(),
    )
    .unwrap();
    let mut all = vec![0; 20_000];
    proxy.source.read_exact(&mut all).unwrap();
    assert!(all == bytes(0, 20_000));
    proxy.talk();
}

#[test]
fn a_peer_that_reads_slowly_gets_everything_in_its_order() {
    let mut proxy = Proxy::new();
    let program = proxy.bed.program();
    let mut full = 0;
    proxy.sink.set_nonblocking(true).unwrap();
    while let Ok(sent) = proxy.sink.write(&bytes(full, 10_000)) {
        full += sent;
    }
    proxy.sink.set_nonblocking(false).unwrap();
    const ALL: usize = 1_000_000;
    let sender = std::thread::spawn({
        let mut speaker = proxy.speaker.try_clone().unwrap();
        move || speaker.write_all(&bytes(full, ALL)).unwrap()
    });
    proxy
        .bed
        .wait("it has come", |_| readable(&proxy.source) > 50_000);
    let length = ALL as u64;
    program.request(
        LibraryRequest::Relay { id: 1, length },
        &proxy.source,
        &proxy.sink,
    );
    let pipe = hold(&proxy.bed);
    assert!(proxy.bed.host.is_quiet(), "given with full queues");
    let hearer = std::thread::spawn({
        let mut hearer = proxy.hearer.try_clone().unwrap();
        move || {
            let mut all = Vec::new();
            let mut piece = vec![0; 30_000];
            while all.len() < full + ALL {
                let got = hearer.read(&mut piece).unwrap();
                all.extend_from_slice(&piece[..got]);
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(all == bytes(0, full + ALL), "other bytes");
        }
    });
    let mut given = proxy.given(pipe);
    let sent = given.work(u64::MAX);
    assert_eq!(sent, given.length);
    sender.join().unwrap();
    hearer.join().unwrap();
    proxy.return_connection(given, sent);
    assert_eq!(program.end(), over(1, length, LostConnections::NONE));
    proxy.talk();
}

#[test]
fn the_end_of_the_source_ends_the_pipe_in_every_state() {
    // before the hand-over
    let mut proxy = Proxy::new();
    let program = proxy.bed.program();
    let hearer = listen(&proxy.hearer, 0, 20_000);
    proxy.speaker.write_all(&bytes(0, 20_000)).unwrap();
    proxy.speaker.shutdown(Shutdown::Write).unwrap();
    wait_for_end(&proxy.source);
    let relay = |id| LibraryRequest::Relay {
        id,
        length: 1 << 40,
    };
    program.request(relay(1), &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Stop { pipe });
    release(&proxy.bed, port(&proxy.source));
    assert_eq!(program.end(), over(1, 20_000, LostConnections::NONE));
    hearer.join().unwrap();
    assert_eq!(proxy.source.read(&mut [0; 1]).unwrap(), 0);

    // while the host has it
    let (speaker, source) = proxy.bed.connection();
    (proxy.speaker, proxy.source) = (speaker, source);
    program.request(relay(2), &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    let mut given = proxy.given(pipe);
    let hearer = listen(&proxy.hearer, 0, 3_000_000);
    let sender = speak(proxy.speaker.try_clone().unwrap(), 3_000_000);
    let end = std::thread::spawn(|| sender.join().unwrap().shutdown(Shutdown::Write).unwrap());
    assert_eq!(given.work(u64::MAX), 3_000_000);
    end.join().unwrap();
    hearer.join().unwrap();
    proxy.return_connection(given, 3_000_000);
    assert_eq!(program.end(), over(2, 3_000_000, LostConnections::NONE));
    assert_eq!(proxy.source.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn a_program_may_stop_or_go_in_every_state() {
    let proxy = Proxy::new();
    let relay = |id| LibraryRequest::Relay {
        id,
        length: 1 << 40,
    };
    let program = proxy.bed.program();
    // while the host is asked to hold it
    program.request(relay(1), &proxy.source, &proxy.sink);
    let PipeRequest::Hold { pipe, .. } = proxy.bed.host.hear() else {
        panic!("not held");
    };
    program.ask(LibraryRequest::Stop { id: 1 });
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Stop { pipe });
    assert_eq!(program.end(), over(1, 0, LostConnections::NONE));
    proxy.talk();
    // while the host has it
    program.request(relay(2), &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    let given = proxy.given(pipe);
    program.ask(LibraryRequest::Stop { id: 2 });
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Stop { pipe });
    proxy.return_connection(given, 0);
    assert_eq!(program.end(), over(2, 0, LostConnections::NONE));
    proxy.talk();
    // a gone program, while the source is held
    program.request(relay(3), &proxy.source, &proxy.sink);
    let PipeRequest::Hold { pipe, .. } = proxy.bed.host.hear() else {
        panic!("not held");
    };
    drop(program);
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Stop { pipe });
    proxy.talk();
    // a gone program, while the host has it
    let program = proxy.bed.program();
    program.request(relay(4), &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    let _given = proxy.given(pipe);
    drop(program);
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Reset { pipe });
    let (source, sink) = (None, None);
    proxy.bed.host.say(PipeReply::Finished {
        pipe,
        source,
        sink,
        sent: 0,
        errno: libc::ECONNRESET,
        host_us: 0,
    });
    proxy
        .bed
        .wait("it is forgotten", |bed| bed.outstanding() == 0);
    assert!((&proxy.source).write(b"x").is_err() && (&proxy.sink).write(b"x").is_err());
}

#[test]
fn a_side_that_is_not_returned_is_lost_and_the_other_continues() {
    let proxy = Proxy::new();
    let program = proxy.bed.program();
    let ask = LibraryRequest::Relay {
        id: 1,
        length: 1 << 20,
    };
    program.request(ask, &proxy.source, &proxy.sink);
    let pipe = hold(&proxy.bed);
    let given = proxy.given(pipe);
    let from = port(&proxy.source);
    let source = Some(extract_one(&proxy.bed, given.source.into(), from));
    proxy.bed.host.say(PipeReply::Finished {
        pipe,
        source,
        sink: None,
        sent: 0,
        errno: libc::EPIPE,
        host_us: 0,
    });
    assert_eq!(proxy.bed.host.hear(), PipeRequest::Restored { pipe });
    release(&proxy.bed, from);
    let (source, sink) = (false, true);
    assert_eq!(program.end(), over(1, 0, LostConnections { source, sink }));
    assert!((&proxy.sink).write(b"x").is_err());
    (&proxy.speaker).write_all(b"hello").unwrap();
    let mut five = [0; 5];
    (&proxy.source).read_exact(&mut five).unwrap();
    // the end of the session loses both
    let (_client, other) = proxy.bed.connection();
    let ask = LibraryRequest::Relay {
        id: 2,
        length: 1 << 20,
    };
    program.request(ask, &proxy.source, &other);
    hold(&proxy.bed);
    let PipeRequest::Start { .. } = proxy.bed.host.hear() else {
        panic!("not given");
    };
    proxy.bed.host.hang_up();
    let (source, sink) = (true, true);
    assert_eq!(program.end(), over(2, 0, LostConnections { source, sink }));
    assert!((&proxy.source).write(b"x").is_err() && (&other).write(b"x").is_err());
}

#[test]
fn relays_that_cannot_be_made_are_refused() {
    let bed = Bed::new("");
    let (_client, one) = bed.connection();
    let (_client, two) = bed.connection();
    let program = bed.program();
    let relay = |id, length| LibraryRequest::Relay { id, length };
    program.request(relay(1, 1), &one, &two);
    let errno = libc::EOPNOTSUPP;
    assert_eq!(program.end(), LibraryReply::Refused { id: 1, errno });
    drop(bed);
    let bed = Bed::full();
    let (_client, one) = bed.connection();
    let (_client, two) = bed.connection();
    let program = bed.program();
    program.request(relay(1, 1), &one, one.try_clone().unwrap());
    assert_eq!(program.end(), LibraryReply::Refused { id: 1, errno });
    program.request(relay(2, 0), &one, &two);
    let errno = libc::EINVAL;
    assert_eq!(program.end(), LibraryReply::Refused { id: 2, errno });
    // the host may refuse it
    program.request(relay(3, 1), &one, &two);
    let PipeRequest::Hold { pipe, .. } = bed.host.hear() else {
        panic!("not held");
    };
    let why = "no".to_owned();
    bed.host.say(PipeReply::Refused { pipe, why });
    let errno = libc::EAGAIN;
    assert_eq!(program.end(), LibraryReply::Refused { id: 3, errno });
    assert!(bed.host.is_quiet());
}
