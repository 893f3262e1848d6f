// SPDX-License-Identifier: Apache-2.0
//! `scripts/with-rt.sh` lifts real-time throttling while a command runs and restores it however the command ends. The tests use
//! a file instead of the sysctl.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn with(value: &str) -> Self {
        let host = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        fs::write(host.knob(), value).unwrap();
        host
    }

    fn knob(&self) -> PathBuf {
        self.folder.path().join("knob")
    }

    fn value(&self) -> String {
        fs::read_to_string(self.knob()).unwrap().trim().to_owned()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/with-rt.sh");
        let mut command = Command::new(script);
        command
            .args(arguments)
            .env("VIOLA_RT_KNOB", self.knob())
            .env("VIOLA_RT_STATE", self.folder.path().join("state"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Starts a command that ends with its standard input and waits until it runs.
    fn begin(&self) -> Child {
        let mut command = self.command(&["sh", "-c", "echo begun; cat >/dev/null"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = [0; 6];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut line)
            .unwrap();
        child
    }

    fn wait_for(&self, value: &str) {
        let begun = Instant::now();
        while self.value() != value {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "still {}",
                self.value()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, signal).unwrap();
}

fn end(mut child: Child) {
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn throttling_is_lifted_while_the_command_runs() {
    if !is_root() {
        return;
    }
    let host = Host::with("950000");
    let output = host.run(&["cat", host.knob().to_str().unwrap()]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "-1\n");
    assert_eq!(host.value(), "950000");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn the_script_returns_the_commands_exit_status() {
    if !is_root() {
        return;
    }
    let output = Host::with("950000").run(&["sh", "-c", "exit 7"]);
    assert_eq!(output.status.code(), Some(7));
}

#[test]
fn the_last_of_two_runs_restores_throttling() {
    if !is_root() {
        return;
    }
    let host = Host::with("950000");
    let (first, second) = (host.begin(), host.begin());
    end(first);
    assert_eq!(host.value(), "-1");
    end(second);
    assert_eq!(host.value(), "950000");
}

#[test]
fn a_signalled_run_restores_throttling() {
    if !is_root() {
        return;
    }
    let host = Host::with("950000");
    let mut child = host.begin();
    signal(&child, rustix::process::Signal::TERM);
    child.wait().unwrap();
    host.wait_for("950000");
}

#[test]
fn after_a_killed_run_the_next_one_restores_the_value() {
    if !is_root() {
        return;
    }
    let host = Host::with("950000");
    let mut child = host.begin();
    signal(&child, rustix::process::Signal::KILL);
    drop(child.stdin.take());
    child.wait().unwrap();
    assert_eq!(host.value(), "-1");
    assert!(host.run(&["true"]).status.success());
    assert_eq!(host.value(), "950000");
}

#[test]
fn throttling_that_the_operator_lifted_stays_lifted() {
    if !is_root() {
        return;
    }
    let host = Host::with("-1");
    let output = host.run(&["true"]);
    assert_eq!(host.value(), "-1");
    assert!(output.stderr.is_empty());
}

#[test]
fn a_value_that_the_operator_sets_meanwhile_stays() {
    if !is_root() {
        return;
    }
    let host = Host::with("950000");
    let child = host.begin();
    fs::write(host.knob(), "900000").unwrap();
    end(child);
    assert_eq!(host.value(), "900000");
}
