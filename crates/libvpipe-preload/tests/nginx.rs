// SPDX-License-Identifier: Apache-2.0
//! Unmodified nginx serves files that the host sends.
#![allow(clippy::unwrap_used)]

#[path = "../../libvpipe/tests/support/agent.rs"]
mod agent;
#[path = "support/programs.rs"]
mod programs;
#[path = "support/room.rs"]
mod room;

use std::time::Duration;

use agent::Behaviour;
use programs::preloaded;
use room::{PORT, Room};

const SIZE: usize = 64 << 20;

fn serve(room: &Room, http: &str, set: &[(&str, &str)]) {
    let folder = room.folder.path();
    let at = folder.display();
    let text = format!(
        "daemon off; user root; worker_processes 2; pid {at}/pid; error_log {at}/error.log info;\n\
         events {{ worker_connections 512; }}\n\
         http {{ access_log off; sendfile on; {http}\n\
           client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3;\n\
           uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
           keepalive_requests 100000; reset_timedout_connection on;\n\
           server {{ listen 127.0.0.1:{PORT}; root {at}; }} }}\n"
    );
    std::fs::write(folder.join("nginx.conf"), text).unwrap();
    let mut server = preloaded("nginx");
    server
        .arg("-p")
        .arg(folder)
        .arg("-c")
        .arg(folder.join("nginx.conf"));
    server.arg("-e").arg(folder.join("error.log"));
    server.envs(set.iter().copied());
    drop(room.serve(server));
}

fn errors(room: &Room) -> String {
    let log = std::fs::read_to_string(room.folder.path().join("error.log")).unwrap();
    let bad = |line: &&str| {
        ["[alert]", "[crit]", "[emerg]"]
            .iter()
            .any(|level| line.contains(level))
    };
    log.lines().filter(bad).collect::<Vec<_>>().join("\n")
}

#[test]
fn whole_files_ranges_and_heads_on_one_connection() {
    for http in [
        "",
        "tcp_nopush on;",
        "tcp_nopush on; sendfile_max_chunk 256k;",
    ] {
        let room = Room::new(SIZE, Behaviour::quick());
        serve(&room, http, &[]);
        let mut client = room.connect();
        for _ in 0..3 {
            let response = client.get("/file");
            assert!(
                response.status == 200 && response.body == room.bytes,
                "{http}"
            );
        }
        client.ask("HEAD", "/file", "");
        assert_eq!(client.head(), (200, SIZE));
        client.ask("GET", "/file", "Range: bytes=1000000-40000000\r\n");
        let response = client.response();
        assert_eq!(response.status, 206);
        assert!(response.body == room.bytes[1_000_000..=40_000_000]);
        // This range is below the minimum size for a pipe.
        client.ask("GET", "/file", "Range: bytes=-1000\r\n");
        assert!(client.response().body == room.bytes[SIZE - 1000..]);
        assert_eq!(client.get("/none").status, 404);
        // Two ranges make a multipart body.
        client.ask("GET", "/file", "Range: bytes=0-999999,2000000-3999999\r\n");
        let many = client.response();
        assert_eq!(many.status, 206);
        let parts = [&room.bytes[..1_000_000], &room.bytes[2_000_000..4_000_000]];
        for part in parts {
            let mut ends = many
                .body
                .windows(4)
                .enumerate()
                .filter(|(_, end)| end == b"\r\n\r\n");
            assert!(
                ends.any(|(at, _)| many.body[at + 4..].starts_with(part)),
                "{http}"
            );
        }
        assert!(client.get("/file").body == room.bytes);
        let whole = 4 * SIZE as u64 + 39_000_001;
        let pieces = if http.contains("256k") {
            0..=3_000_000
        } else {
            3_000_000..=3_000_000
        };
        assert!(
            pieces.contains(&(room.agent.sent() - whole)),
            "{http}: {}",
            room.agent.sent()
        );
        assert_eq!(errors(&room), "");
    }
}

#[test]
fn pieces_are_piped_by_themselves_when_nothing_is_begun_ahead() {
    let room = Room::new(SIZE, Behaviour::quick());
    serve(&room, "", &[("VIOLA_PIPE_AHEAD", "0")]);
    let mut client = room.connect();
    for _ in 0..2 {
        assert!(client.get("/file").body == room.bytes);
    }
    assert_eq!(
        (room.agent.sent(), room.agent.pipes()),
        (2 * SIZE as u64, 64)
    );
    assert_eq!(errors(&room), "");
}

#[test]
fn many_clients_some_of_which_close_early() {
    let room = Room::new(8 << 20, Behaviour::quick());
    serve(&room, "", &[]);
    std::thread::scope(|scope| {
        for n in 0..16 {
            let room = &room;
            scope.spawn(move || {
                for _ in 0..4 {
                    let mut client = room.connect();
                    for _ in 0..3 {
                        assert!(client.get("/file").body == room.bytes);
                    }
                    if n % 2 == 0 {
                        client.ask("GET", "/file", "");
                        client.head();
                        client.some(10_000);
                    }
                }
            });
        }
    });
    assert!(room.agent.sent() >= (192 * 8) << 20);
    let mut client = room.connect();
    assert!(client.get("/file").body == room.bytes);
    assert_eq!(errors(&room), "");
}

#[test]
fn a_request_that_comes_while_the_host_sends_is_answered() {
    let room = Room::new(8 << 20, Behaviour::quick());
    serve(&room, "", &[]);
    let mut client = room.connect();
    for _ in 0..5 {
        client.ask("GET", "/file", "");
    }
    for _ in 0..5 {
        assert!(client.response().body == room.bytes);
    }
    assert_eq!(room.agent.sent(), 5 * (8 << 20));
}

#[test]
fn an_agent_that_dies_cuts_what_it_had_and_nginx_continues() {
    let dies = Behaviour {
        die_after: Some(20 << 20),
        ..Behaviour::quick()
    };
    let room = Room::new(SIZE, dies);
    serve(&room, "", &[]);
    let mut client = room.connect();
    client.ask("GET", "/file", "");
    client.head();
    let rest = client.rest();
    assert!(rest.len() < SIZE && rest == room.bytes[..rest.len()]);
    let mut client = room.connect();
    for _ in 0..3 {
        assert!(client.get("/file").body == room.bytes);
    }
    assert_eq!((errors(&room), room.agent.pipes()), (String::new(), 1));
}

#[test]
fn a_worker_that_ends_leaves_no_connection_open() {
    let slow = Behaviour {
        pause: Duration::from_millis(200),
        ..Behaviour::quick()
    };
    let room = Room::new(SIZE, slow);
    serve(&room, "", &[]);
    let mut client = room.connect();
    client.ask("GET", "/file", "");
    client.head();
    client.some(1 << 20);
    let path = room.folder.path().join("pid");
    let master: i32 = std::fs::read_to_string(path)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    // SAFETY: a signal to the server that this test started.
    unsafe { libc::kill(master, libc::SIGTERM) };
    let rest = client.rest();
    assert!(rest.len() < SIZE - (1 << 20));
}
