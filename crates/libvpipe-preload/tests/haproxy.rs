// SPDX-License-Identifier: Apache-2.0
//! Unmodified haproxy forwards responses that the host relays.
#![allow(clippy::unwrap_used)]

#[path = "../../libvpipe/tests/support/agent.rs"]
mod agent;
#[path = "support/programs.rs"]
mod programs;
#[path = "support/room.rs"]
mod room;

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use agent::Behaviour;
use programs::preloaded;
use room::{PORT, Room};

const SIZE: usize = 64 << 20;
/// The port of the backend server.
const BACKEND_PORT: u16 = 8081;

/// The backend server: `/N` is a response of N bytes, `/cut` one that ends in the middle.
struct Backend {
    connections: Arc<AtomicU64>,
}

impl Backend {
    fn start(room: &Room) -> Self {
        let listener =
            room.inside(|| TcpListener::bind((Ipv4Addr::LOCALHOST, BACKEND_PORT)).unwrap());
        let connections = Arc::new(AtomicU64::new(0));
        let count = connections.clone();
        let bytes: Arc<[u8]> = room.bytes.clone().into();
        thread::spawn(move || {
            for stream in listener.incoming() {
                count.fetch_add(1, SeqCst);
                let bytes = bytes.clone();
                thread::spawn(move || answer(stream.unwrap(), &bytes));
            }
        });
        Self { connections }
    }
}

fn answer(mut stream: TcpStream, bytes: &[u8]) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    loop {
        let Some(Ok(first)) = lines.next() else {
            return;
        };
        for line in lines.by_ref() {
            match line {
                Ok(line) if line.is_empty() => break,
                Ok(_) => (),
                Err(_) => return,
            }
        }
        let path = first.split(' ').nth(1).unwrap();
        let (head, body) = match path {
            "/cut" => (
                format!("Content-Length: {}", bytes.len()),
                &bytes[..bytes.len() / 2],
            ),
            // A response without a length.
            "/open" => ("Connection: close".to_string(), bytes),
            "/chunks" => ("Transfer-Encoding: chunked".to_string(), bytes),
            number => {
                let n = number[1..].parse().unwrap();
                (format!("Content-Length: {n}"), &bytes[..n])
            }
        };
        let head = format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n");
        if stream.write_all(head.as_bytes()).is_err() {
            return;
        }
        let said = match path {
            "/chunks" => body.chunks(100_000).try_for_each(|chunk| {
                write!(stream, "{:x}\r\n", chunk.len())?;
                stream.write_all(chunk)?;
                stream.write_all(b"\r\n")
            }),
            _ => stream.write_all(body),
        };
        if path == "/chunks" {
            let _ = stream.write_all(b"0\r\n\r\n");
        }
        if said.is_err() || path == "/cut" || path == "/open" {
            return;
        }
    }
}

fn serve(room: &Room, more: &str) -> Backend {
    let backend = Backend::start(room);
    let text = format!(
        "global\n  maxconn 200\n  nbthread 2\n{more}\n\
         defaults\n  mode http\n  option splice-auto\n  option splice-response\n  option splice-request\n\
           timeout connect 5s\n  timeout client 1s\n  timeout server 1s\n  http-reuse always\n\
         listen all\n  bind 127.0.0.1:{PORT}\n  server one 127.0.0.1:{BACKEND_PORT}\n"
    );
    let at = room.folder.path().join("haproxy.cfg");
    std::fs::write(&at, text).unwrap();
    let mut server = preloaded("haproxy");
    server.arg("-db").arg("-f").arg(at);
    drop(room.serve(server));
    backend
}

#[test]
fn answers_of_all_sizes_on_one_connection() {
    let room = Room::new(SIZE, Behaviour::quick());
    let backend = serve(&room, "");
    let mut client = room.connect();
    for round in 0..3 {
        for size in [4096, 1 << 20, SIZE] {
            let response = client.get(&format!("/{size}"));
            assert!(
                response.status == 200 && response.body == room.bytes[..size],
                "{round}: {size}"
            );
        }
    }
    let large = 3 * SIZE as u64;
    let relayed = room.agent.sent();
    assert!(
        (large / 10 * 9..large + (3 << 20)).contains(&relayed),
        "{relayed}"
    );
    // One connection of the readiness check, and one for all requests.
    assert!(backend.connections.load(SeqCst) <= 2);
    assert_eq!(room.agent.resets(), 0);
}

#[test]
fn many_connections() {
    let room = Room::new(SIZE, Behaviour::quick());
    let backend = serve(&room, "");
    thread::scope(|scope| {
        for _ in 0..16 {
            let room = &room;
            scope.spawn(move || {
                let mut client = room.connect();
                for size in [1 << 20, 4096, SIZE / 4, 8 << 20, 4096] {
                    let response = client.get(&format!("/{size}"));
                    assert!(response.body == room.bytes[..size], "{size}");
                }
            });
        }
    });
    assert!(room.agent.pipes() >= 32 && room.agent.resets() == 0);
    assert!(backend.connections.load(SeqCst) <= 17);
}

#[test]
fn a_long_relay_is_no_timeout() {
    // The relay takes 3 s in all. haproxy's timeouts allow 1 s without a byte.
    let slow = Behaviour {
        pause: Duration::from_millis(200),
        piece: 4 << 20,
        ..Behaviour::default()
    };
    let room = Room::new(SIZE, slow);
    let _behind = serve(&room, "");
    let mut client = room.connect();
    for _ in 0..2 {
        assert!(client.get(&format!("/{SIZE}")).body == room.bytes);
    }
    assert_eq!(room.agent.pipes(), 2);
}

#[test]
fn a_backend_that_breaks_off_gives_a_cut_body() {
    let room = Room::new(SIZE, Behaviour::quick());
    let _behind = serve(&room, "");
    for _ in 0..3 {
        let mut client = room.connect();
        client.ask("GET", "/cut", "");
        assert_eq!(client.head(), (200, SIZE));
        let rest = client.rest();
        assert!(rest.len() <= SIZE / 2 && rest == room.bytes[..rest.len()]);
        assert!(rest.len() > SIZE / 4, "{}", rest.len());
    }
    assert!(room.connect().get("/8388608").body == room.bytes[..8 << 20]);
    assert!(room.agent.pipes() >= 4);
}

#[test]
fn a_client_that_closes_does_not_affect_others() {
    let room = Room::new(SIZE, Behaviour::quick());
    let _behind = serve(&room, "");
    thread::scope(|scope| {
        for _ in 0..8 {
            let room = &room;
            scope.spawn(move || {
                for _ in 0..2 {
                    let mut client = room.connect();
                    client.ask("GET", &format!("/{SIZE}"), "");
                    client.head();
                    client.some(5 << 20);
                    drop(client);
                    let mut client = room.connect();
                    assert!(client.get("/8388608").body == room.bytes[..8 << 20]);
                }
            });
        }
    });
    assert!(room.agent.pipes() >= 16);
}

#[test]
fn an_agent_that_dies_cuts_what_it_had_and_haproxy_continues() {
    let dies = Behaviour {
        die_after: Some(20 << 20),
        ..Behaviour::quick()
    };
    let room = Room::new(SIZE, dies);
    let _behind = serve(&room, "");
    let mut client = room.connect();
    client.ask("GET", &format!("/{SIZE}"), "");
    client.head();
    let rest = client.rest();
    assert!(rest.len() < SIZE && rest == room.bytes[..rest.len()]);
    for _ in 0..2 {
        assert!(room.connect().get(&format!("/{SIZE}")).body == room.bytes);
    }
    assert_eq!(room.agent.pipes(), 1);
}

#[test]
fn haproxy_forwards_refused_and_early_ended_relays() {
    for (behaviour, most) in [
        (
            Behaviour {
                refuse: Some(libc::EOPNOTSUPP),
                ..Behaviour::quick()
            },
            0,
        ),
        (
            Behaviour {
                end_after: Some(10_000_000),
                ..Behaviour::quick()
            },
            20,
        ),
    ] {
        let room = Room::new(SIZE, behaviour);
        let _behind = serve(&room, "");
        let mut client = room.connect();
        for _ in 0..2 {
            assert!(client.get(&format!("/{SIZE}")).body == room.bytes);
        }
        assert!(room.agent.pipes() <= most && room.agent.refused() <= 2);
        assert!((most > 0) == (room.agent.pipes() >= 4));
    }
}

#[test]
fn answers_of_unknown_length_are_not_relayed() {
    let room = Room::new(SIZE, Behaviour::quick());
    let _behind = serve(&room, "");
    let mut client = room.connect();
    client.ask("GET", "/open", "");
    client.head();
    assert!(client.rest() == room.bytes);
    let mut client = room.connect();
    client.ask("GET", "/chunks", "Connection: close\r\n");
    client.head();
    assert!(client.rest().len() > SIZE);
    assert_eq!(room.agent.pipes(), 0);
}

#[test]
fn haproxy_with_poll_is_served_too() {
    let room = Room::new(8 << 20, Behaviour::quick());
    let _behind = serve(&room, "  noepoll");
    let mut client = room.connect();
    for _ in 0..3 {
        assert!(client.get("/8388608").body == room.bytes);
    }
    assert_eq!(room.agent.pipes(), 3);
}
