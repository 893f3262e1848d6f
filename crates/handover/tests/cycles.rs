// SPDX-License-Identifier: Apache-2.0
//! Connections of real kernels move between sockets while bytes flow both ways.
#![allow(clippy::unwrap_used)]

mod wire;

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use viola_handover::{
    Error, SocketBuffers, TcpState, disconnect_silently, extract, restore, restore_in_place,
};
use wire::{Route, Wire};

const PORT: u16 = 8080;

/// The expected byte at position `at` of the stream with this seed.
fn byte(at: u64, seed: u64) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 13 ^ at >> 3 ^ seed) as u8
}

/// A wire and a TCP connection over it whose server end is in the namespace `old`.
fn connected(client: &str, server: &str) -> (Wire, TcpStream, TcpStream) {
    let server: IpAddr = server.parse().unwrap();
    let wire = Wire::new(client.parse().unwrap(), server);
    let address = SocketAddr::new(server, PORT);
    let listener = wire.old.run(move || TcpListener::bind(address).unwrap());
    let client = wire
        .client
        .run(move || TcpStream::connect_timeout(&address, Duration::from_secs(20)).unwrap());
    let (server, _) = listener.accept().unwrap();
    (wire, client, server)
}

/// The traffic of one end. The position in each stream determines the bytes to send and to expect.
struct Exchange {
    sent: u64,
    received: u64,
    seeds: (u64, u64),
}

impl Exchange {
    fn send(&mut self, mut stream: &TcpStream, count: usize) -> bool {
        let bytes: Vec<u8> = (0..count as u64)
            .map(|i| byte(self.sent + i, self.seeds.0))
            .collect();
        match stream.write(&bytes) {
            Ok(done) => {
                self.sent += done as u64;
                true
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => false,
            Err(e) => panic!("after {} bytes: {e}", self.sent),
        }
    }

    fn receive(&mut self, mut stream: &TcpStream) -> bool {
        let mut bytes = [0; 65536];
        match stream.read(&mut bytes) {
            Ok(0) => panic!("the connection ended after {} bytes", self.received),
            Ok(got) => {
                for (i, &one) in bytes[..got].iter().enumerate() {
                    let at = self.received + i as u64;
                    assert_eq!(one, byte(at, self.seeds.1), "byte {at}");
                }
                self.received += got as u64;
                true
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => false,
            Err(e) => panic!("after {} bytes: {e}", self.received),
        }
    }
}

/// A client that sends and receives until the flag is set; its thread returns the bytes sent and received and the stream.
fn start_client(client: TcpStream) -> (Arc<AtomicBool>, JoinHandle<(u64, u64, TcpStream)>) {
    let end = Arc::new(AtomicBool::new(false));
    let stop = end.clone();
    client.set_nonblocking(true).unwrap();
    let thread = std::thread::spawn(move || {
        let mut exchange = Exchange {
            sent: 0,
            received: 0,
            seeds: (1, 2),
        };
        while !stop.load(Ordering::SeqCst) {
            exchange.send(&client, 3000);
            exchange.receive(&client);
            // With this pause a hand-over loses a few segments. Without it, hundreds get lost, and the kernel sends them again
            // one by one.
            std::thread::sleep(Duration::from_micros(300));
        }
        (exchange.sent, exchange.received, client)
    });
    (end, thread)
}

/// Extracts the connection from one socket and restores it into the other. The wire drops its packets meanwhile.
fn hand_over(wire: &Wire, from: &OwnedFd, to: &OwnedFd, way: Route) -> TcpState {
    wire.route_to(Route::Nowhere);
    let state = extract(from.as_fd()).unwrap().detach();
    disconnect_silently(from.as_fd()).unwrap();
    // The timers of the old socket ran until the disconnect.
    wire.settle();
    let ready = restore(to.as_fd(), &state).unwrap();
    wire.route_to(way);
    ready.activate().unwrap();
    state
}

fn cycles(client: &str, server: &str, loss: u32, count: usize) {
    let (wire, client, server) = connected(client, server);
    let address = server.local_addr().unwrap();
    let (end, chatter) = start_client(client);
    wire.set_loss(loss);
    server.set_nonblocking(true).unwrap();
    let old = OwnedFd::from(server.try_clone().unwrap());
    let other = wire.new.socket(address);
    let there = TcpStream::from(other.try_clone().unwrap());
    there.set_nonblocking(true).unwrap();
    let mut exchange = Exchange {
        sent: 0,
        received: 0,
        seeds: (2, 1),
    };
    let mut queued = 0;
    let exchange_bytes = |exchange: &mut Exchange, stream: &TcpStream, bytes: u64| {
        let wanted = (exchange.sent + bytes, exchange.received + bytes);
        let begun = Instant::now();
        while exchange.sent < wanted.0 || exchange.received < wanted.1 {
            let moved = exchange.send(stream, 5000) | exchange.receive(stream);
            assert!(begun.elapsed() < Duration::from_secs(20), "no byte arrives");
            if !moved {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    };
    for round in 0..count {
        exchange_bytes(&mut exchange, &server, 40_000);
        let state = hand_over(&wire, &old, &other, Route::New);
        assert_eq!(
            (state.local, state.peer.is_ipv4()),
            (address, address.is_ipv4()),
            "round {round}"
        );
        assert!(state.sack && state.timestamp.is_some() && state.window_scale.is_some());
        queued += state.queued() + state.unread.len();
        exchange_bytes(&mut exchange, &there, 40_000);
        let state = hand_over(&wire, &other, &old, Route::Old);
        queued += state.queued() + state.unread.len();
        // The next round needs a socket that was never bound.
        disconnect_silently(other.as_fd()).unwrap();
    }
    assert!(queued > 0, "no hand-over had bytes in its queues");
    wire.set_loss(0);
    end.store(true, Ordering::SeqCst);
    let (sent, received, client) = chatter.join().unwrap();
    // The remaining bytes arrive, too.
    let begun = Instant::now();
    let mut rest = Exchange {
        sent,
        received,
        seeds: (1, 2),
    };
    while exchange.received < sent || rest.received < exchange.sent {
        exchange.receive(&server);
        rest.receive(&client);
        assert!(
            begun.elapsed() < Duration::from_secs(90),
            "the remaining bytes do not arrive"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(
        wire.unexpected_packets(),
        [],
        "a disconnected end sent packets"
    );
}

#[test]
fn a_connection_moves_there_and_back_while_bytes_flow_both_ways() {
    cycles("10.99.0.1", "10.99.0.2", 0, 15);
}

#[test]
fn a_connection_moves_over_ipv6() {
    cycles("fd99::1", "fd99::2", 0, 8);
}

#[test]
fn a_connection_moves_with_packet_loss() {
    cycles("10.99.0.1", "10.99.0.2", 20, 4);
}

/// Buffer sizes of a socket, and which of them are locked.
fn buffers(stream: &TcpStream) -> SocketBuffers {
    let option = |name: i32| {
        let (mut value, mut size) = (0_i32, 4);
        let to = (&raw mut value).cast();
        // SAFETY: the kernel writes one int and its size.
        let done = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                to,
                &raw mut size,
            )
        };
        assert_eq!(done, 0);
        value as u32
    };
    SocketBuffers {
        send: option(libc::SO_SNDBUF),
        receive: option(libc::SO_RCVBUF),
        locked: option(72),
    }
}

#[test]
fn a_connection_returns_to_its_original_socket() {
    let (wire, mut client, mut server) = connected("10.99.0.1", "10.99.0.2");
    let address = server.local_addr().unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    server
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let mut five = [0; 5];
    for round in 0..6 {
        let own = buffers(&server);
        // Some rounds leave unread bytes in the receive queue before and after the hand-over.
        if round % 3 == 1 {
            client.write_all(b"early").unwrap();
            while server.peek(&mut five).unwrap() < 5 {}
        }
        wire.route_to(Route::Nowhere);
        let state = extract(server.as_fd()).unwrap().detach();
        assert_eq!(state.buffers, own, "round {round}");
        wire.settle();
        let other = wire.new.socket(address);
        let ready = restore(other.as_fd(), &state).unwrap();
        wire.route_to(Route::New);
        ready.activate().unwrap();
        let mut there = TcpStream::from(other);
        there.write_all(b"there").unwrap();
        client.read_exact(&mut five).unwrap();
        assert_eq!(&five, b"there");
        if round % 3 == 2 {
            client.write_all(b"later").unwrap();
            while there.peek(&mut five).unwrap() < 5 {}
        }
        while viola_handover::unacknowledged_bytes(there.as_fd()).unwrap() > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        wire.route_to(Route::Nowhere);
        let back = extract(there.as_fd()).unwrap().detach();
        assert_eq!(back.unread.is_empty(), round % 3 == 0, "round {round}");
        disconnect_silently(there.as_fd()).unwrap();
        wire.settle();
        let ready = restore_in_place(server.as_fd(), &back, own).unwrap();
        wire.route_to(Route::Old);
        ready.activate().unwrap();
        let now = buffers(&server);
        assert_eq!(
            (now.receive, now.locked),
            (own.receive, own.locked),
            "round {round}"
        );
        if round % 3 > 0 {
            server.read_exact(&mut five).unwrap();
            assert_eq!(&five, [b"     ", b"early", b"later"][round % 3]);
        }
        for (mut from, mut to) in [(&server, &client), (&client, &server)] {
            from.write_all(b"hello").unwrap();
            to.read_exact(&mut five).unwrap();
            assert_eq!(&five, b"hello");
        }
    }
    assert_eq!(
        wire.unexpected_packets(),
        [],
        "a disconnected end sent packets"
    );
}

#[test]
fn buffers_grow_to_the_restored_size() {
    let (wire, mut client, server) = connected("10.99.0.1", "10.99.0.2");
    wire.route_to(Route::Nowhere);
    let mut state = extract(server.as_fd()).unwrap().detach();
    let own = state.buffers;
    // The state comes from a socket whose receive buffer has grown.
    state.buffers.receive = 3 * own.receive;
    let ready = restore_in_place(server.as_fd(), &state, own).unwrap();
    wire.route_to(Route::Old);
    ready.activate().unwrap();
    assert_eq!(buffers(&server).receive, state.buffers.receive);
    assert_eq!(buffers(&server).locked, own.locked);
    client.write_all(b"x").unwrap();
    (&server).read_exact(&mut [0]).unwrap();
}

#[test]
fn a_connection_continues_when_its_extracted_state_is_dropped() {
    let (_wire, mut client, mut server) = connected("10.99.0.1", "10.99.0.2");
    server.write_all(b"before").unwrap();
    let mut six = [0; 6];
    client.read_exact(&mut six).unwrap();
    for _ in 0..3 {
        drop(extract(server.as_fd()).unwrap());
        server.write_all(b"behind").unwrap();
        client.read_exact(&mut six).unwrap();
        assert_eq!(&six, b"behind");
        client.write_all(b"answer").unwrap();
        server.read_exact(&mut six).unwrap();
    }
}

#[test]
fn a_fin_of_the_peer_is_reported() {
    let (wire, client, server) = connected("10.99.0.1", "10.99.0.2");
    client.shutdown(Shutdown::Write).unwrap();
    let mut none = [0; 1];
    assert_eq!((&server).read(&mut none).unwrap(), 0);
    wire.route_to(Route::Nowhere);
    let state = extract(server.as_fd()).unwrap().detach();
    assert!(state.peer_finished);
    // The server can still send to the client.
    disconnect_silently(server.as_fd()).unwrap();
    let socket = wire.new.socket(state.local);
    let ready = restore(socket.as_fd(), &state).unwrap();
    wire.route_to(Route::New);
    ready.activate().unwrap();
    TcpStream::from(socket).write_all(b"still here").unwrap();
    let mut ten = [0; 10];
    (&client).read_exact(&mut ten).unwrap();
    assert_eq!(&ten, b"still here");
}

#[test]
fn a_socket_without_an_established_connection_is_refused_unchanged() {
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.connect("127.0.0.1:9").unwrap();
    assert!(extract(udp.as_fd()).is_err());
    let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(
        extract(unix.as_fd()),
        Err(Error::NotTransferable(_))
    ));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(
        extract(listener.as_fd()),
        Err(Error::NotTransferable(_))
    ));
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    assert!(matches!(
        extract(stream.as_fd()),
        Err(Error::NotTransferable(_))
    ));
    // Neither socket is left in repair mode.
    for fd in [listener.as_raw_fd(), stream.as_raw_fd()] {
        let (mut on, mut size) = (1i32, 4);
        // SAFETY: the kernel writes one int and its size.
        unsafe {
            libc::getsockopt(
                fd,
                libc::IPPROTO_TCP,
                19,
                (&raw mut on).cast(),
                &raw mut size,
            )
        };
        assert_eq!(on, 0);
    }
}

/// A server that is started again while connections of its former run still end. `bind` asks all of them.
#[test]
fn a_connection_that_was_away_does_not_block_its_port() {
    let (wire, _client, server) = connected("10.99.0.1", "10.99.0.2");
    let address = server.local_addr().unwrap();
    let listens = || wire.old.run(move || TcpListener::bind(address).map(drop));
    listens().unwrap();
    // Refused, and extracted and restored.
    drop(extract(server.as_fd()).unwrap());
    listens().unwrap();
    hand_over(
        &wire,
        &OwnedFd::from(server.try_clone().unwrap()),
        &OwnedFd::from(server),
        Route::Old,
    );
    listens().unwrap();
}
