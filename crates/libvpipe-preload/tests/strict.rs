// SPDX-License-Identifier: Apache-2.0
//! Transfers below the pipe minimum cost no extra system call: a seccomp filter kills the program at the first one.
#![allow(clippy::unwrap_used)]

#[path = "../../libvpipe/tests/support/agent.rs"]
mod agent;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

use agent::{Agent, Behaviour};

/// The library, built beside the test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libvpipe_preload.so");
    assert!(library.exists(), "{}", library.display());
    library
}

fn run(mode: &str, set: &[(&str, &str)]) -> ExitStatus {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("strict");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/strict.c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"]);
    let built = cc.arg(&program).arg(source).output().unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    let file = folder.path().join("file");
    std::fs::write(&file, [7; 4096]).unwrap();
    let mut strict = Command::new(&program);
    strict.arg(mode).arg(&file).env("LD_PRELOAD", library());
    // No agent listens.
    strict.env("VIOLA_PIPE_SOCKET", folder.path().join("none"));
    strict.envs(set.iter().copied()).status().unwrap()
}

#[test]
fn small_and_endless_transfers_make_no_extra_system_call() {
    for mode in ["answers", "tunnel", "counted", "beside", "copies"] {
        let ended = run(mode, &[]);
        assert!(ended.success(), "{mode}: {ended}");
    }
}

#[test]
fn the_filter_kills_the_program_when_the_library_acts() {
    // Every size is above the pipe minimum.
    for mode in ["answers", "copies"] {
        let ended = run(mode, &[("VIOLA_PIPE_MIN", "1")]);
        assert_eq!(ended.signal(), Some(libc::SIGSYS), "{mode}: {ended}");
    }
}

#[test]
fn small_answers_after_a_relay_make_no_extra_system_call() {
    let folder = tempfile::tempdir().unwrap();
    let agent = Agent::start(&folder.path().join("agent"), Behaviour::default());
    let at = agent.path().display().to_string();
    let set = [
        ("VIOLA_PIPE_SOCKET", at.as_str()),
        ("VIOLA_PIPE_MIN", "1048576"),
    ];
    let ended = run("after", &set);
    assert!(ended.success(), "{ended}");
    assert!(agent.pipes() == 1 && agent.sent() > 4 << 20);
    // The same after a relay that was cut in the middle.
    let ended = run("broken", &set);
    assert!(ended.success(), "{ended}");
    assert_eq!(agent.pipes(), 2);
}
