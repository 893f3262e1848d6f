// SPDX-License-Identifier: Apache-2.0
//! The event loops of a C program, of each kind, do not notice that the host sends.
#![allow(clippy::unwrap_used)]

#[path = "../../libvpipe/tests/support/agent.rs"]
mod agent;
#[path = "support/room.rs"]
mod room;

use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};
use std::sync::LazyLock;
use std::time::Duration;

use agent::Behaviour;
use room::{PORT, Room, library};

const SIZE: usize = 6_000_001;
const MODES: [&str; 4] = ["level", "edge", "poll", "block"];

static PROGRAM: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("server");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/server.c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program);
    let built = cc.arg(source).output().unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    (folder, program)
});

type Output = Lines<BufReader<ChildStdout>>;

fn serve(room: &Room, mode: &str, piece: usize, set: &[(&str, &str)]) -> Output {
    let mut server = Command::new(&PROGRAM.1);
    server
        .args([mode, &PORT.to_string()])
        .arg(room.file())
        .arg(piece.to_string());
    server
        .env("LD_PRELOAD", library())
        .envs(set.iter().copied());
    let mut output = BufReader::new(room.serve(server)).lines();
    assert_eq!(output.next().unwrap().unwrap(), "ready");
    output
}

/// Reads the next line of output that reports a response, and returns how often the response woke the server.
fn wakes(output: &mut Output) -> u32 {
    let line = next(output);
    line.strip_prefix("sent, wakes ")
        .unwrap_or_else(|| panic!("{line}"))
        .parse()
        .unwrap()
}

fn next(output: &mut Output) -> String {
    loop {
        let line = output.next().unwrap().unwrap();
        if !line.starts_with("end") && !line.starts_with("recv") {
            return line;
        }
    }
}

#[test]
fn responses_follow_each_other_on_a_connection() {
    for mode in MODES {
        for piece in [SIZE, 300_000] {
            let room = Room::new(SIZE, Behaviour::default());
            let mut output = serve(&room, mode, piece, &[]);
            let mut client = room.connect();
            for _ in 0..3 {
                assert!(client.get("/").body == room.bytes, "{mode} {piece}");
                // About two wakes for each of the six progress messages.
                let wakes = wakes(&mut output);
                assert!(wakes < 40, "{mode} {piece}: {wakes}");
            }
            assert_eq!(
                (room.agent.sent(), room.agent.pipes()),
                (3 * SIZE as u64, 3)
            );
        }
    }
}

#[test]
fn without_piping_ahead_each_piece_is_piped() {
    for mode in MODES {
        let room = Room::new(SIZE, Behaviour::default());
        let off = [("VIOLA_PIPE_AHEAD", "0"), ("VIOLA_PIPE_MIN", "1000000")];
        let _output = serve(&room, mode, 2_000_000, &off);
        let mut client = room.connect();
        assert!(
            client.get("/").body == room.bytes && client.get("/").body == room.bytes,
            "{mode}"
        );
        // The last byte is below the minimum for a pipe.
        assert_eq!(
            (room.agent.sent(), room.agent.pipes()),
            (2 * SIZE as u64 - 2, 6)
        );
    }
}

#[test]
fn a_slow_host_does_not_make_a_loop_spin() {
    for mode in ["level", "edge", "poll"] {
        let slow = Behaviour {
            pause: Duration::from_millis(300),
            piece: 3 << 20,
            ..Behaviour::default()
        };
        let room = Room::new(SIZE, slow);
        let mut output = serve(&room, mode, 300_000, &[]);
        let mut client = room.connect();
        assert!(client.get("/").body == room.bytes);
        let wakes = wakes(&mut output);
        // poll wakes every 10 ms for 600 ms.
        let most = if mode == "poll" { 90 } else { 30 };
        assert!(wakes < most, "{mode}: {wakes}");
    }
}

#[test]
fn a_request_that_comes_early_is_answered() {
    for mode in MODES {
        let room = Room::new(SIZE, Behaviour::default());
        let _output = serve(&room, mode, 300_000, &[]);
        let mut client = room.connect();
        for _ in 0..4 {
            client.ask("GET", "/", "");
        }
        for _ in 0..4 {
            assert!(client.response().body == room.bytes, "{mode}");
        }
        assert_eq!(room.agent.sent(), 4 * SIZE as u64);
    }
}

#[test]
fn a_client_that_closes_early_does_not_affect_others() {
    for mode in MODES {
        let room = Room::new(SIZE, Behaviour::default());
        let mut output = serve(&room, mode, 300_000, &[]);
        for _ in 0..3 {
            let mut client = room.connect();
            client.ask("GET", "/", "");
            client.head();
            client.some(100_000);
            drop(client);
            let line = next(&mut output);
            assert!(line.starts_with("sendfile: "), "{mode}: {line}");
        }
        let mut client = room.connect();
        assert!(client.get("/").body == room.bytes, "{mode}");
    }
}

#[test]
fn many_at_once() {
    for mode in ["level", "edge", "poll", "threads"] {
        let room = Room::new(SIZE, Behaviour::default());
        let _output = serve(&room, mode, 300_000, &[]);
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    let mut client = room.connect();
                    for _ in 0..3 {
                        assert!(client.get("/").body == room.bytes, "{mode}");
                    }
                });
            }
        });
        assert_eq!(room.agent.sent(), 36 * SIZE as u64);
    }
}

#[test]
fn the_program_sends_what_the_agent_refuses() {
    for errno in [libc::EOPNOTSUPP, libc::EAGAIN, libc::EPERM] {
        for mode in MODES {
            let refuse = Behaviour {
                refuse: Some(errno),
                ..Behaviour::default()
            };
            let room = Room::new(SIZE, refuse);
            let _output = serve(&room, mode, 300_000, &[]);
            let mut client = room.connect();
            assert!(client.get("/").body == room.bytes && client.get("/").body == room.bytes);
            assert_eq!((room.agent.sent(), room.agent.programs()), (0, 1), "{mode}");
        }
    }
}

#[test]
fn without_an_agent_the_program_sends() {
    for mode in MODES {
        let room = Room::new(SIZE, Behaviour::default());
        room.agent.kill();
        let _output = serve(&room, mode, 300_000, &[]);
        let mut client = room.connect();
        assert!(client.get("/").body == room.bytes && client.get("/").body == room.bytes);
    }
}

#[test]
fn an_agent_that_dies_cuts_its_connections_and_the_program_continues() {
    for mode in MODES {
        let dies = Behaviour {
            die_after: Some(2 << 20),
            ..Behaviour::default()
        };
        let room = Room::new(SIZE, dies);
        let mut output = serve(&room, mode, 300_000, &[]);
        let mut client = room.connect();
        client.ask("GET", "/", "");
        client.head();
        assert_eq!(
            next(&mut output),
            "sendfile: Connection reset by peer",
            "{mode}"
        );
        assert!(client.rest() == room.bytes[..2 << 20], "{mode}");
        let mut client = room.connect();
        assert!(client.get("/").body == room.bytes, "{mode}");
        assert_eq!(room.agent.pipes(), 1);
    }
}

#[test]
fn an_early_end_is_not_the_end_of_the_body() {
    for mode in MODES {
        let early = Behaviour {
            end_after: Some(2_500_000),
            ..Behaviour::default()
        };
        let room = Room::new(SIZE, early);
        let _output = serve(&room, mode, 1_000_000, &[]);
        let mut client = room.connect();
        assert!(client.get("/").body == room.bytes, "{mode}");
        assert!(client.get("/").body == room.bytes, "{mode}");
        assert!(room.agent.pipes() > 2);
    }
}

#[test]
fn a_program_that_changes_its_mind_gets_an_error_and_never_wrong_bytes() {
    for mode in MODES {
        // The client does not read. The program must learn of the first piece before the stand-in agent has filled the socket:
        // afterwards the socket is not writable, and a late edge is lost.
        let slow = Behaviour {
            pause: Duration::from_millis(50),
            ..Behaviour::default()
        };
        let room = Room::new(SIZE, slow);
        let mut output = serve(&room, mode, 300_000, &[]);
        let mut client = room.connect();
        client.ask("GET", "/bad", "");
        client.head();
        assert_eq!(
            next(&mut output),
            "sendfile: Connection reset by peer",
            "{mode}"
        );
        let rest = client.rest();
        assert!(
            rest.len() < SIZE && rest == room.bytes[..rest.len()],
            "{mode}"
        );
        assert_eq!(room.agent.stops(), 1);
    }
}

#[test]
fn a_program_that_closes_early_resets_the_connection() {
    for mode in MODES {
        for (path, said) in [
            ("/close", "closed"),
            ("/shut", "shut"),
            ("/range", "ranged"),
            ("/dup", "replaced"),
        ] {
            let slow = Behaviour {
                pause: Duration::from_millis(50),
                ..Behaviour::default()
            };
            let room = Room::new(SIZE, slow);
            let mut output = serve(&room, mode, 300_000, &[]);
            let mut client = room.connect();
            client.ask("GET", path, "");
            client.head();
            assert!(next(&mut output).starts_with(said), "{mode} {path}");
            let rest = client.rest();
            assert!(
                rest.len() < SIZE && rest == room.bytes[..rest.len()],
                "{mode} {path}"
            );
            room.agent.wait_for_resets(1);
            assert_eq!(
                (room.agent.resets(), room.agent.pipes()),
                (1, 1),
                "{mode} {path}"
            );
            // The kernel reuses the descriptor number.
            assert!(room.connect().get("/").body == room.bytes, "{mode} {path}");
            assert_eq!(
                (room.agent.resets(), room.agent.pipes()),
                (1, 2),
                "{mode} {path}"
            );
        }
    }
}

#[test]
fn a_new_socket_with_a_reused_number_is_not_mistaken_for_the_old_one() {
    for mode in MODES {
        let slow = Behaviour {
            pause: Duration::from_millis(50),
            ..Behaviour::default()
        };
        let room = Room::new(SIZE, slow);
        let _output = serve(&room, mode, 300_000, &[]);
        let mut gone = room.connect();
        gone.ask("GET", "/vanish", "");
        gone.head();
        gone.some(1_200_000);
        let mut client = room.connect();
        assert!(client.get("/").body == room.bytes, "{mode}");
        assert!(client.get("/").body == room.bytes, "{mode}");
        assert_eq!((room.agent.resets(), room.agent.pipes()), (1, 3), "{mode}");
        assert!(gone.rest().len() < SIZE - 1_200_000);
    }
}

#[test]
fn children_that_close_their_descriptors_do_not_end_transfers() {
    for mode in MODES {
        let room = Room::new(SIZE, Behaviour::default());
        let _output = serve(&room, mode, 300_000, &[]);
        let mut client = room.connect();
        for _ in 0..2 {
            assert!(client.get("/fork").body == room.bytes, "{mode}");
        }
        assert_eq!(
            (room.agent.resets(), room.agent.sent()),
            (0, 2 * SIZE as u64)
        );
    }
}
