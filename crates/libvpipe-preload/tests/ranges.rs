// SPDX-License-Identifier: Apache-2.0
//! Unmodified cp copies files through the host.
#![allow(clippy::unwrap_used)]

#[path = "../../libvpipe/tests/support/agent.rs"]
mod agent;
#[path = "support/room.rs"]
mod room;

use std::process::Command;

use agent::Behaviour;
use room::{Room, library};

const SIZE: usize = 20_000_003;

/// Copies with `cp` and returns whether it succeeded.
fn cp(room: &Room, how: &str, to: &str) -> bool {
    let mut cp = Command::new("cp");
    cp.arg(how).arg(room.file());
    cp.arg(room.folder.path().join(to));
    cp.env("LD_PRELOAD", library());
    cp.env("VIOLA_PIPE_SOCKET", room.agent.path());
    cp.env("VIOLA_PIPE_MIN", "262144");
    cp.output().unwrap().status.success()
}

/// Copies with a program that calls `copy_file_range` as coreutils 9 does.
fn range(room: &Room, to: &str) -> bool {
    let source = room.folder.path().join("copy.c");
    std::fs::write(
        &source,
        "#define _GNU_SOURCE\n#include <fcntl.h>\n#include <unistd.h>\n#include <errno.h>\n\
         int main(int n, char **arg)\n{\n\
           int from = open(arg[1], O_RDONLY), to = open(arg[2], O_WRONLY | O_CREAT | O_TRUNC, 0600);\n\
           off_t at = 0, into = 0;\n\
           for (;;) {\n\
             ssize_t n = copy_file_range(from, &at, to, &into, 0x7fffffffc0000000, 0);\n\
             if (n <= 0) return n ? errno : at != into;\n\
           }\n}\n",
    )
    .unwrap();
    let program = room.folder.path().join("copy");
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&source);
    assert!(cc.status().unwrap().success());
    let mut copy = Command::new(program);
    copy.arg(room.file()).arg(room.folder.path().join(to));
    copy.env("LD_PRELOAD", library());
    copy.env("VIOLA_PIPE_SOCKET", room.agent.path());
    copy.env("VIOLA_PIPE_MIN", "262144");
    copy.status().unwrap().success()
}

fn is_copied(room: &Room, to: &str) -> bool {
    std::fs::read(room.folder.path().join(to)).unwrap() == room.bytes
}

#[test]
fn a_large_file_is_copied_by_the_host() {
    let room = Room::new(SIZE, Behaviour::default());
    assert!(range(&room, "to") && is_copied(&room, "to"));
    assert_eq!((room.agent.pipes(), room.agent.sent()), (1, SIZE as u64));
}

#[test]
fn the_program_copies_refused_and_small_files() {
    let refuse = Behaviour {
        refuse: Some(libc::EOPNOTSUPP),
        ..Behaviour::default()
    };
    let room = Room::new(SIZE, refuse);
    assert!(range(&room, "to") && is_copied(&room, "to"));
    assert_eq!((room.agent.refused(), room.agent.sent()), (1, 0));
    let room = Room::new(100_000, Behaviour::default());
    assert!(range(&room, "to") && is_copied(&room, "to"));
    assert_eq!(room.agent.programs(), 0);
}

#[test]
fn an_agent_that_dies_is_an_error() {
    let dies = Behaviour {
        die_after: Some(2 << 20),
        ..Behaviour::default()
    };
    let room = Room::new(SIZE, dies);
    assert!(!range(&room, "to"));
    // The agent is gone.
    assert!(range(&room, "to") && is_copied(&room, "to"));
}

#[test]
fn cp_copies_with_and_without_an_agent() {
    let room = Room::new(SIZE, Behaviour::default());
    assert!(cp(&room, "--reflink=auto", "to") && is_copied(&room, "to"));
    // A file system that can clone a file does so: a clone is cheaper than any copy.
    if !cp(&room, "--reflink=always", "clone") {
        assert_eq!((room.agent.pipes(), room.agent.sent()), (1, SIZE as u64));
    }
    room.agent.kill();
    assert!(cp(&room, "--reflink=auto", "again") && is_copied(&room, "again"));
}
