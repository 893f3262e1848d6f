// SPDX-License-Identifier: Apache-2.0
//! Files that the host sends over a program's connection: real sockets, a real file system, the agent's own program.
#![allow(clippy::unwrap_used)]

mod bed;

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use viola_agent::pipe::Reason;
use viola_agent::pipe::next_hop::next_hop;
use viola_handover::{disconnect_silently, extract, to_wire, unacknowledged_bytes};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, LostConnections};
use viola_proto::pipe::{PipeReply, PipeRequest};

use bed::Bed;
use bed::handover::{given, restore_at_host, return_connection};
use bed::wire::{Route, sh};

/// Number of bytes that can be read.
fn readable(stream: &TcpStream) -> u64 {
    rustix::io::ioctl_fionread(stream).unwrap()
}

/// The program's last answer for a sent file.
fn over(id: u64, sent: u64, errno: i32) -> LibraryReply {
    let lost = LostConnections {
        source: false,
        sink: errno == libc::ECONNRESET,
    };
    LibraryReply::Finished {
        id,
        sent,
        errno,
        lost,
        host_us: 0,
    }
}

/// Checks both directions of a connection.
fn talk(client: &TcpStream, server: &TcpStream) {
    let mut five = [0; 5];
    for (mut from, mut to) in [(client, server), (server, client)] {
        from.write_all(b"hello").unwrap();
        to.read_exact(&mut five).unwrap();
        assert_eq!(&five, b"hello");
    }
}

#[test]
fn a_file_is_sent_by_the_host_and_the_connection_goes_on_in_the_same_descriptor() {
    let bed = Bed::new("");
    let (path, bytes) = bed.file("page", 300_000);
    let (mut client, mut server) = bed.connection();
    let program = bed.program();
    for id in 1..=3 {
        // more than one message holds, except for the first
        let next = &bytes[..6000 * id as usize - 5000];
        talk(&client, &server);
        server.write_all(b"head").unwrap();
        // unread bytes go with the connection and come back with it
        client.write_all(b"early").unwrap();
        bed.wait("it has come", |_| readable(&server) == 5);
        let file = File::open(&path).unwrap();
        program.send(id, (1000, 200_000), &file, &server);
        drop(file);
        let given = given(&bed);
        let pipe = given.pipe;
        assert!(given.bytes == bytes[1000..201_000], "other bytes");
        let there = TcpStream::from(restore_at_host(&bed, &given));
        let sender = {
            let mut there = there.try_clone().unwrap();
            std::thread::spawn(move || there.write_all(&given.bytes).unwrap())
        };
        bed.host.say(PipeReply::Progress { pipe, sent: 1 });
        assert_eq!(
            program.answer(),
            Some(LibraryReply::Progress { id, sent: 1 })
        );
        let mut all = vec![0; 200_004];
        client.read_exact(&mut all).unwrap();
        assert_eq!(&all[..4], b"head");
        assert!(all[4..] == bytes[1000..201_000], "other bytes at the peer");
        // the next request comes while the host still has the connection
        client.write_all(next).unwrap();
        sender.join().unwrap();
        return_connection(&bed, pipe, there.into(), 200_000, 0);
        let (sent, errno) = (200_000, 0);
        assert_eq!(program.answer(), Some(over(id, sent, errno)));
        let mut heard = vec![0; 5 + next.len()];
        server.read_exact(&mut heard).unwrap();
        assert_eq!(&heard[..5], b"early");
        assert!(heard[5..] == *next, "other bytes");
    }
    talk(&client, &server);
    drop(server);
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0, "an orderly end");
    let status = bed.status();
    assert_eq!((status.now, status.pipes, status.bytes), (0, 3, 600_000));
    assert!(status.refused.is_empty() && status.lost == 0, "{status:?}");
}

#[test]
fn the_peers_end_of_file_is_read_after_the_return() {
    let bed = Bed::new("");
    let (path, bytes) = bed.file("page", 5000);
    let (mut client, mut server) = bed.connection();
    client.write_all(b"GET").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut all = Vec::new();
    server.read_to_end(&mut all).unwrap();
    let program = bed.program();
    program.send(1, (0, 5000), File::open(&path).unwrap(), &server);
    let given = given(&bed);
    assert!(given.connection.peer_finished);
    let socket = restore_at_host(&bed, &given);
    let mut there = TcpStream::from(socket.try_clone().unwrap());
    there.write_all(&given.bytes).unwrap();
    while unacknowledged_bytes(socket.as_fd()).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.wire.redirect(Route::Nowhere);
    let mut state = extract(socket.as_fd()).unwrap().detach();
    state.peer_finished = true;
    bed.wire.settle();
    disconnect_silently(socket.as_fd()).unwrap();
    let (pipe, sent, errno) = (given.pipe, 5000, 0);
    let connection = Some(Box::new(to_wire(state).unwrap()));
    bed.host.say(PipeReply::Finished {
        pipe,
        source: None,
        sink: connection,
        sent,
        errno,
        host_us: 0,
    });
    assert_eq!(bed.host.hear(), PipeRequest::Restored { pipe });
    bed.wire.redirect(Route::Guest);
    assert_eq!(program.end(), over(1, sent, errno));
    assert_eq!(server.read(&mut [0; 1]).unwrap(), 0);
    server.write_all(b"end").unwrap();
    drop(server);
    let mut all = Vec::new();
    client.read_to_end(&mut all).unwrap();
    assert!(all == [&bytes[..], b"end"].concat());
}

#[test]
fn files_and_sockets_that_cannot_be_handed_over_are_refused() {
    let bed = Bed::new("max_pipes = 1");
    let (path, _) = bed.file("page", 5000);
    let (client, server) = bed.connection();
    let program = bed.program();
    let page = || File::open(&path).unwrap();
    let udp = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    // a connection of another network namespace
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let elsewhere = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let refusals: [(i32, (u64, u64), File, OwnedFd); 8] = [
        (
            libc::EINVAL,
            (0, 0),
            page(),
            server.try_clone().unwrap().into(),
        ),
        (
            libc::EINVAL,
            (1, 5000),
            page(),
            server.try_clone().unwrap().into(),
        ),
        (
            libc::EINVAL,
            (u64::MAX, 2),
            page(),
            server.try_clone().unwrap().into(),
        ),
        (libc::EOPNOTSUPP, (0, 1), page(), udp.into()),
        (libc::EOPNOTSUPP, (0, 1), page(), elsewhere.into()),
        (
            libc::EOPNOTSUPP,
            (0, 1),
            File::open("/dev/null").unwrap(),
            server.try_clone().unwrap().into(),
        ),
        (
            libc::EOPNOTSUPP,
            (0, 1),
            File::open(bed.path("agent.toml")).unwrap(),
            server.try_clone().unwrap().into(),
        ),
        (
            libc::EOPNOTSUPP,
            (0, 1),
            File::open(bed.path("srv")).unwrap(),
            server.try_clone().unwrap().into(),
        ),
    ];
    for (n, (errno, range, file, socket)) in refusals.into_iter().enumerate() {
        let id = n as u64 + 1;
        program.send(id, range, file, socket);
        assert_eq!(program.answer(), Some(LibraryReply::Refused { id, errno }));
        if !(3..=4).contains(&n) {
            talk(&client, &server);
        }
    }
    let errno = libc::EAGAIN;
    let writer = File::options().append(true).open(&path).unwrap();
    program.send(20, (0, 1), page(), &server);
    assert_eq!(program.end(), LibraryReply::Refused { id: 20, errno });
    drop(writer);

    // the host may refuse it too, and `max_pipes` is one
    program.send(21, (0, 1), page(), &server);
    let given = given(&bed);
    program.send(22, (0, 1), page(), &server);
    assert_eq!(program.end(), LibraryReply::Refused { id: 22, errno });
    let why = "no room".to_owned();
    bed.host.say(PipeReply::Refused {
        pipe: given.pipe,
        why,
    });
    assert_eq!(program.end(), LibraryReply::Refused { id: 21, errno });
    talk(&client, &server);
    let status = bed.status();
    assert_eq!(status.refused.values().sum::<u64>(), 11, "{status:?}");
    assert_eq!(status.refusal.as_deref(), Some("the host: no room"));

    // an invalid packet disconnects its program only
    let odd = bed.program();
    odd.ask(LibraryRequest::Send {
        id: 1,
        offset: 0,
        length: 1,
    });
    assert_eq!(odd.answer(), None);
    program.ask(LibraryRequest::Stop { id: 99 });
    assert!(bed.host.is_quiet());
}

#[test]
fn a_user_that_may_not_ask_gets_an_error() {
    let bed = Bed::new("users = [65533]");
    let (path, _) = bed.file("page", 5000);
    let (_client, server) = bed.connection();
    let program = bed.program();
    program.send(1, (0, 1), File::open(&path).unwrap(), &server);
    let errno = libc::EPERM;
    assert_eq!(program.end(), LibraryReply::Refused { id: 1, errno });
}

#[test]
fn a_writer_waits_until_the_host_has_released_the_file() {
    let bed = Bed::new("");
    let (path, bytes) = bed.file("page", 300_000);
    let (mut client, server) = bed.connection();
    let (_client, other) = bed.connection();
    let page = File::open(&path).unwrap();
    let program = bed.program();
    program.send(1, (0, 300_000), &page, &server);
    let given = given(&bed);
    let socket = restore_at_host(&bed, &given);
    let cut = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(0)
                .unwrap();
            cut.store(true, Ordering::SeqCst);
        });
        let pipe = given.pipe;
        assert_eq!(bed.host.hear(), PipeRequest::Stop { pipe });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!cut.load(Ordering::SeqCst), "changed while it is read");
        // another pipe must wait for the writer
        program.send(2, (0, 1), &page, &other);
        let errno = libc::EAGAIN;
        assert_eq!(
            program.answer(),
            Some(LibraryReply::Refused { id: 2, errno })
        );
        let mut there = TcpStream::from(socket.try_clone().unwrap());
        there.write_all(&given.bytes[..70_000]).unwrap();
        return_connection(&bed, pipe, socket, 70_000, 0);
    });
    assert!(cut.load(Ordering::SeqCst));
    let (sent, errno) = (70_000, 0);
    assert_eq!(program.end(), over(1, sent, errno));
    let mut all = vec![0; 70_000];
    client.read_exact(&mut all).unwrap();
    assert!(all == bytes[..70_000]);
    talk(&client, &server);
}

#[test]
fn a_program_that_stops_gets_its_connection_and_one_that_dies_has_it_reset() {
    let bed = Bed::new("");
    let (path, _) = bed.file("page", 300_000);
    let (mut client, server) = bed.connection();
    let program = bed.program();
    program.send(1, (0, 300_000), File::open(&path).unwrap(), &server);
    let first = given(&bed);
    let socket = restore_at_host(&bed, &first);
    program.ask(LibraryRequest::Stop { id: 1 });
    let pipe = first.pipe;
    assert_eq!(bed.host.hear(), PipeRequest::Stop { pipe });
    return_connection(&bed, pipe, socket, 0, 0);
    let (sent, errno) = (0, 0);
    assert_eq!(program.end(), over(1, sent, errno));
    talk(&client, &server);

    program.send(2, (0, 300_000), File::open(&path).unwrap(), &server);
    let second = given(&bed);
    let socket = restore_at_host(&bed, &second);
    // nothing is left of a dead program
    drop((program, server));
    let pipe = second.pipe;
    assert_eq!(bed.host.hear(), PipeRequest::Reset { pipe });
    assert_eq!(bed.pause(), 1, "the host may still read");
    bed.resume();
    let linger = Some(Duration::ZERO);
    rustix::net::sockopt::set_socket_linger(&socket, linger).unwrap();
    drop(socket);
    let error = client.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    bed.host.say(PipeReply::Finished {
        pipe,
        source: None,
        sink: None,
        sent: 0,
        errno: libc::ECONNRESET,
        host_us: 0,
    });
    bed.wait("it is forgotten", |bed| bed.outstanding() == 0);
    assert_eq!(bed.status().now, 0);
}

#[test]
fn the_end_of_a_session_loses_the_connection_and_keeps_the_file_until_the_next() {
    let bed = Bed::new("");
    let (path, _) = bed.file("page", 300_000);
    let (_client, mut server) = bed.connection();
    let program = bed.program();
    program.send(1, (0, 300_000), File::open(&path).unwrap(), &server);
    let _given = given(&bed);
    bed.host.hang_up();
    let (sent, errno) = (0, libc::ECONNRESET);
    assert_eq!(program.end(), over(1, sent, errno));
    assert!(server.write(b"x").is_err() || server.read(&mut [0; 1]).is_err());
    program.send(2, (0, 1), File::open(&path).unwrap(), &server);
    let errno = libc::EAGAIN;
    assert_eq!(program.end(), LibraryReply::Refused { id: 2, errno });
    let cut = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(0)
                .unwrap();
            cut.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(200));
        assert!(!cut.load(Ordering::SeqCst), "the old host may still read");
        bed.host.welcome();
    });
    assert!(cut.load(Ordering::SeqCst));
}

#[test]
fn an_ending_agent_first_gets_its_pipes_back() {
    let mut bed = Bed::new("");
    let (path, _) = bed.file("page", 300_000);
    let (client, server) = bed.connection();
    let program = bed.program();
    program.send(1, (0, 300_000), File::open(&path).unwrap(), &server);
    let given = given(&bed);
    let socket = restore_at_host(&bed, &given);
    bed.terminate_agent();
    let pipe = given.pipe;
    assert_eq!(bed.host.hear(), PipeRequest::Stop { pipe });
    return_connection(&bed, pipe, socket, 0, 0);
    let (sent, errno) = (0, 0);
    assert_eq!(program.end(), over(1, sent, errno));
    bed.wait_for_end();
    talk(&client, &server);
}

#[test]
fn the_next_hop_is_what_the_kernel_uses() {
    let netns = viola_netdev::Netns::new().unwrap();
    let hop = |local: &str, peer: &str| next_hop(local.parse().unwrap(), peer.parse().unwrap());
    let found = netns.run(|| {
        sh(
            "ip link set lo up; ip link add hop type veth peer name far; ip link set far up; ip link set hop up; \
            ip address add 10.97.0.1/24 dev hop; ip address add fd97::1/64 dev hop nodad; \
            ip neighbour replace 10.97.0.9 lladdr 02:00:00:00:00:09 dev hop nud permanent; \
            ip neighbour replace fd97::9 lladdr 02:00:00:00:00:19 dev hop nud permanent; \
            ip route add default via 10.97.0.9; ip -6 route add default via fd97::9",
        );
        [
            hop("10.97.0.1:80", "10.97.0.9:1"),
            hop("10.97.0.1:80", "192.0.2.1:1"),
            hop("10.97.0.1:80", "10.97.0.8:1"),
            hop("10.97.0.1:80", "10.97.0.1:1"),
            hop("[fd97::1]:80", "[fd97::9]:1"),
            hop("[fd97::1]:80", "[2001:db8::1]:1"),
            hop("[fd97::1]:80", "[fd97::8]:1"),
        ]
    });
    let (four, six) = ([2, 0, 0, 0, 0, 9], [2, 0, 0, 0, 0, 0x19]);
    let (unknown, own) = (Err(Reason::NoNextHop), Err(Reason::BadSocket));
    let wanted = [Ok(four), Ok(four), unknown, own, Ok(six), Ok(six), unknown];
    assert_eq!(found.unwrap(), wanted);
}
