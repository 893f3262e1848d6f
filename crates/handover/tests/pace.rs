// SPDX-License-Identifier: Apache-2.0
//! A restored connection keeps the pacing rate and congestion control of its source socket where the host's kernel has them.
#![allow(clippy::unwrap_used)]

mod wire;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use viola_handover::{
    TcpState, apply_pacing, disconnect_silently, extract, from_wire, restore, to_wire,
};
use wire::{Route, Wire};

const RATE: u64 = 3_000_000;

fn connected() -> (Wire, TcpStream, TcpStream) {
    let (client, server) = ([10, 99, 0, 1].into(), [10, 99, 0, 2].into());
    let wire = Wire::new(client, server);
    let address = SocketAddr::new(server, 8080);
    let listener = wire.old.run(move || TcpListener::bind(address).unwrap());
    let client = wire
        .client
        .run(move || TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap());
    let (server, _) = listener.accept().unwrap();
    (wire, client, server)
}

fn get(socket: &impl AsRawFd, level: i32, name: i32, to: &mut [u8]) {
    let mut size = to.len() as u32;
    // SAFETY: the buffer is ours and has the given size.
    let done = unsafe {
        let to = to.as_mut_ptr().cast();
        libc::getsockopt(socket.as_raw_fd(), level, name, to, &raw mut size)
    };
    assert_eq!(done, 0);
}

fn set(socket: &impl AsRawFd, level: i32, name: i32, value: &[u8]) {
    let size = value.len() as u32;
    // SAFETY: the kernel reads the bytes of `value`.
    let done = unsafe {
        let from = value.as_ptr().cast();
        libc::setsockopt(socket.as_raw_fd(), level, name, from, size)
    };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

fn congestion(socket: &impl AsRawFd) -> String {
    let mut name = [0; 16];
    get(socket, libc::IPPROTO_TCP, libc::TCP_CONGESTION, &mut name);
    let name = name.split(|&byte| byte == 0).next().unwrap();
    String::from_utf8(name.to_vec()).unwrap()
}

fn pacing(socket: &impl AsRawFd) -> u64 {
    let mut rate = [0; 8];
    get(
        socket,
        libc::SOL_SOCKET,
        libc::SO_MAX_PACING_RATE,
        &mut rate,
    );
    u64::from_ne_bytes(rate)
}

/// `tcpi_pacing_rate`: the rate at which the socket really sends, in bytes per second.
fn paced(socket: &impl AsRawFd) -> u64 {
    let mut info = [0; 112];
    get(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info);
    u64::from_ne_bytes(info[104..].try_into().unwrap())
}

/// The state that an agent reports to the host for a connection without unacknowledged bytes.
fn extract_idle(wire: &Wire, from: &TcpStream) -> TcpState {
    let begun = Instant::now();
    let mut left = 1;
    while left > 0 {
        // SAFETY: SIOCOUTQ, which has the number of TIOCOUTQ, writes one int.
        let done = unsafe { libc::ioctl(from.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
        assert!(done == 0 && begun.elapsed() < Duration::from_secs(20));
    }
    wire.route_to(Route::Nowhere);
    let state = extract(from.as_fd()).unwrap().detach();
    wire.settle();
    from_wire(to_wire(state).unwrap())
}

fn exchange(mut from: &TcpStream, mut to: &TcpStream) {
    let bytes = vec![7; 100_000];
    let mut got = vec![0; bytes.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(&bytes).unwrap());
        to.read_exact(&mut got).unwrap();
    });
    assert!(got == bytes);
}

#[test]
fn pacing_moves_with_the_connection_and_the_first_socket_keeps_its_own() {
    let (wire, client, server) = connected();
    // Uses another algorithm than the system's default, so that the test sees which socket set it.
    let ours = if congestion(&server) == "reno" {
        "cubic"
    } else {
        "reno"
    };
    set(
        &server,
        libc::IPPROTO_TCP,
        libc::TCP_CONGESTION,
        ours.as_bytes(),
    );
    set(
        &server,
        libc::SOL_SOCKET,
        libc::SO_MAX_PACING_RATE,
        &RATE.to_ne_bytes(),
    );
    let state = extract_idle(&wire, &server);
    assert_eq!(
        (state.congestion.as_str(), state.pacing),
        (ours, Some(RATE))
    );
    disconnect_silently(server.as_fd()).unwrap();
    let there = wire.new.socket(state.local);
    assert!(apply_pacing(there.as_fd(), &state, &[ours.to_owned()]).unwrap());
    let ready = restore(there.as_fd(), &state).unwrap();
    wire.route_to(Route::New);
    ready.activate().unwrap();
    let there = TcpStream::from(there);
    exchange(&there, &client);
    assert_eq!((congestion(&there).as_str(), pacing(&there)), (ours, RATE));
    assert!(paced(&there) <= RATE, "{}", paced(&there));
    // Moves the connection back.
    let mut state = extract_idle(&wire, &there);
    (state.congestion, state.pacing) = (String::new(), None);
    let ready = restore(server.as_fd(), &state).unwrap();
    wire.route_to(Route::Old);
    ready.activate().unwrap();
    exchange(&server, &client);
    assert_eq!(
        (congestion(&server).as_str(), pacing(&server)),
        (ours, RATE)
    );
}

#[test]
fn a_congestion_control_that_is_not_allowed_keeps_the_hosts_default() {
    let (wire, _client, server) = connected();
    let state = extract_idle(&wire, &server);
    assert_eq!(
        (state.congestion, state.pacing),
        (congestion(&server), None)
    );
    let there = wire.new.socket(server.local_addr().unwrap());
    let own = congestion(&there);
    let other = if own == "reno" { "cubic" } else { "reno" };
    for name in [other, "viola_no_such"] {
        let state = TcpState {
            congestion: name.into(),
            ..extract_idle(&wire, &server)
        };
        assert!(!apply_pacing(there.as_fd(), &state, &[]).unwrap());
        assert_eq!(
            (congestion(&there), pacing(&there)),
            (own.clone(), u64::MAX)
        );
    }
    // The host's own algorithm and a missing one need no change.
    for name in [own.as_str(), ""] {
        let state = TcpState {
            congestion: name.into(),
            ..extract_idle(&wire, &server)
        };
        assert!(apply_pacing(there.as_fd(), &state, &[]).unwrap());
        assert_eq!(congestion(&there), own);
    }
    // A pacing rate of 0 becomes 1, so that the connection still makes progress.
    let state = TcpState {
        pacing: Some(0),
        ..extract_idle(&wire, &server)
    };
    apply_pacing(there.as_fd(), &state, &[]).unwrap();
    assert_eq!(pacing(&there), 1);
}
