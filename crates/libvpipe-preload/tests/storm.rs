// SPDX-License-Identifier: Apache-2.0
//! Signal handlers, threads and forks never make the library wait for itself; sockets that the program can use past the
//! library are never handed over.
#![allow(clippy::unwrap_used)]

#[path = "../../libvpipe/tests/support/agent.rs"]
mod agent;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use agent::{Agent, Behaviour};

const TIMEOUT: Duration = Duration::from_secs(30);
const SKIPPED: i32 = 77;

static PROGRAM: LazyLock<(tempfile::TempDir, PathBuf)> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("storm");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/storm.c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-pthread", "-Wall", "-Wextra", "-Werror", "-o"]);
    let built = cc.arg(&program).arg(source).output().unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    (folder, program)
});

/// The library, built beside the test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libvpipe_preload.so");
    assert!(library.exists(), "{}", library.display());
    library
}

/// Runs the program with an agent of this behaviour. A program that does not end has locked itself out.
fn run(mode: &str, behaviour: Behaviour) -> (ExitStatus, Agent) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    let agent = Agent::start(&folder.path().join("agent"), behaviour);
    let mut storm = Command::new(&PROGRAM.1);
    storm.arg(mode).arg(&file).env("LD_PRELOAD", library());
    storm.env("VIOLA_PIPE_SOCKET", agent.path());
    storm.env("VIOLA_PIPE_MIN", "65536");
    let mut storm = storm.spawn().unwrap();
    let begun = Instant::now();
    loop {
        if let Some(ended) = storm.try_wait().unwrap() {
            return (ended, agent);
        }
        if begun.elapsed() > TIMEOUT {
            let _ = storm.kill();
            let _ = storm.wait();
            panic!("{mode}: the program does not end");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_storm_of_handlers_in_threads_that_fork_ends() {
    let slow = Behaviour {
        piece: 64 << 10,
        pause: Duration::from_millis(1),
        ..Behaviour::default()
    };
    let (ended, agent) = run("signals", slow);
    assert!(ended.success(), "{ended}");
    assert!(
        agent.pipes() > 10 && agent.resets() > 0,
        "{}",
        agent.pipes()
    );
}

#[test]
fn a_socket_with_two_descriptors_is_never_handed_over() {
    for mode in ["duplicate", "sent"] {
        let (ended, agent) = run(mode, Behaviour::default());
        assert!(ended.success(), "{mode}: {ended}");
        assert_eq!(agent.pipes(), 0, "{mode}");
    }
    let (ended, agent) = run("plain", Behaviour::default());
    assert!(ended.success() && agent.pipes() == 1, "{ended}");
}

#[test]
fn a_process_with_a_ring_hands_nothing_over() {
    let (ended, agent) = run("ring", Behaviour::default());
    if ended.code() != Some(SKIPPED) {
        assert!(ended.success() && agent.pipes() == 0, "{ended}");
    }
}

#[test]
fn no_call_touches_a_socket_whose_connection_the_host_has() {
    let slow = Behaviour {
        piece: 64 << 10,
        pause: Duration::from_millis(300),
        ..Behaviour::default()
    };
    let (ended, agent) = run("held", slow);
    assert!(ended.success(), "{ended}");
    agent.wait_for_resets(1);
    assert_eq!((agent.pipes(), agent.resets()), (1, 1));
}
