// SPDX-License-Identifier: Apache-2.0
//! A daemon for a test with its own folder, socket and lock. It ends with the test.

#![allow(dead_code, clippy::unwrap_used)]

pub mod guests;
pub mod hdfs;
pub mod hosts;
pub mod qemu;
pub mod steps;

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use viola_lab::testing::lab_program;

/// Timeout of an expected change.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
/// The ID of a user without any privilege.
pub const NOBODY: u32 = 65534;

/// The program under test.
pub fn viola() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_viola"));
    c.env_remove("VIOLA_SOCKET")
        .env_remove("JOURNAL_STREAM")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null());
    c
}

/// Runs the program to its end.
pub fn output(args: &[&str]) -> Output {
    viola().args(args).output().unwrap()
}

/// Runs the command as an unprivileged user.
pub fn as_nobody(command: &mut Command) -> &mut Command {
    command.uid(NOBODY).gid(NOBODY)
}

/// The command's standard error as text.
pub fn stderr(o: &Output) -> String {
    String::from_utf8_lossy(&o.stderr).into_owned()
}

/// The command's standard output as text.
pub fn stdout(o: &Output) -> String {
    String::from_utf8_lossy(&o.stdout).into_owned()
}

/// Asserts that a command failed with this status and printed one sentence. Returns the sentence.
pub fn refusal(o: &Output, status: i32) -> String {
    let said = stderr(o);
    assert_eq!(o.status.code(), Some(status), "{said}");
    let line = said
        .strip_prefix("viola: ")
        .unwrap_or_else(|| panic!("the output is no error message of viola: {said}"));
    assert_eq!(
        said.lines().count(),
        1,
        "the message has more than one line: {said}"
    );
    line.trim_end().to_owned()
}

/// A running `viola run`.
pub struct Daemon {
    /// Its folder: configuration, socket, run_dir and state_dir.
    pub dir: tempfile::TempDir,
    child: Child,
}

impl Daemon {
    /// Starts a daemon with `config` (without `[daemon]`, which is added) and waits until it answers.
    pub fn start(config: &str) -> Self {
        Self::start_with(config, &[])
    }

    /// The same with more arguments.
    pub fn start_with(config: &str, args: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_config(dir.path(), config);
        Self::in_folder(dir, args)
    }

    /// Starts a daemon in a folder that holds its configuration.
    pub fn in_folder(dir: tempfile::TempDir, args: &[&str]) -> Self {
        let mut command = viola();
        command
            .args(["run", "-c"])
            .arg(dir.path().join("viola.toml"))
            .args(args);
        Self::spawn(dir, &mut command)
    }

    /// Starts a daemon with the given command.
    pub fn spawn(dir: tempfile::TempDir, command: &mut Command) -> Self {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(dir.path().join("log"))
            .unwrap();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut daemon = Self { dir, child };
        daemon.wait("answer", |d| {
            if let Some(status) = d.child.try_wait().unwrap() {
                panic!("the daemon ended ({status}): {}", d.log());
            }
            d.ask(&["status"]).status.success()
        });
        daemon
    }

    /// Kills it with SIGKILL, so that it cannot clean up.
    pub fn kill(&mut self) {
        self.signal(rustix::process::Signal::KILL);
        self.ended();
    }

    /// Starts the daemon again in the same folder, after the previous one has ended.
    pub fn restart(&mut self) {
        self.start_again_with(&[]);
        self.wait("answer", |d| d.ask(&["status"]).status.success());
    }

    /// Starts it again in the same folder with these variables in its environment, and does not wait until it answers.
    pub fn start_again_with(&mut self, environment: &[(&str, &std::ffi::OsStr)]) {
        let log = fs::OpenOptions::new()
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        self.child = viola()
            .args(["run", "-c"])
            .arg(self.config())
            .envs(environment.iter().copied())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
    }

    /// Its exit status, if it has ended.
    pub fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its control socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("viola.sock")
    }

    /// Its configuration.
    pub fn config(&self) -> PathBuf {
        self.dir.path().join("viola.toml")
    }

    /// Its run_dir.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Runs a command against this daemon.
    pub fn ask(&self, args: &[&str]) -> Output {
        viola()
            .args(args)
            .arg("--socket")
            .arg(self.socket())
            .output()
            .unwrap()
    }

    /// Runs a command against this daemon and parses its JSON output.
    pub fn json<T: DeserializeOwned>(&self, args: &[&str]) -> T {
        let o = self.ask(&[args, &["--json"]].concat());
        assert!(o.status.success(), "{}", stderr(&o));
        serde_json::from_slice(&o.stdout).unwrap_or_else(|e| panic!("{e}: {}", stdout(&o)))
    }

    /// Waits until the condition is true.
    pub fn wait(&mut self, what: &str, mut happened: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !happened(self) {
            assert!(
                Instant::now() < deadline,
                "no {what} within {WAIT_TIMEOUT:?}; the daemon's log: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal)
            .unwrap();
    }

    /// Stops it as systemd does and returns its exit status.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.ended()
    }

    /// Waits until it has ended and returns its exit status.
    pub fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "the daemon does not end: {}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Daemon {
    /// A failed assertion leaves nothing behind, either: the daemon gets SIGTERM, then SIGKILL, then `restore` runs.
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_child(&self.child),
                rustix::process::Signal::TERM,
            );
            let deadline = Instant::now() + Duration::from_secs(10);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let run_dir = self.run_dir();
        let socket = self.socket();
        let _ = viola()
            .arg("restore")
            .arg("--run-dir")
            .arg(run_dir)
            .arg("--socket")
            .arg(socket)
            .output();
        if std::thread::panicking() {
            eprintln!("the daemon said:\n{}", self.log());
        }
    }
}

/// Writes a configuration whose daemon keeps all its files in one folder.
pub fn write_config(dir: &Path, rest: &str) -> PathBuf {
    let file = dir.join("viola.toml");
    let d = dir.display();
    let text = format!(
        "[daemon]\nsocket = \"{d}/viola.sock\"\ngroup = \"root\"\nrun_dir = \"{d}/run\"\nstate_dir = \"{d}/state\"\n{rest}"
    );
    fs::write(&file, text).unwrap();
    file
}

/// Sends bytes to a socket and returns the answer, which may be empty.
pub fn raw(socket: &Path, bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut s = std::os::unix::net::UnixStream::connect(socket).unwrap();
    s.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let _ = s.write_all(bytes);
    let _ = s.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = s.read_to_end(&mut answer);
    answer
}

/// A process that the daemon recognizes as a VM.
pub struct Vm(Child);

impl Vm {
    pub fn start(dir: &Path, name: &str) -> Self {
        let program = dir.join("qemu-system-x86_64");
        if !program.exists() {
            // Not by this process: another test's child would inherit the open file, and nobody can run a file that is written.
            let mut copy = Command::new("cp");
            copy.arg(lab_program(Path::new(env!("CARGO_BIN_EXE_viola"))));
            assert!(copy.arg(&program).status().unwrap().success());
        }
        let mut command = Command::new(program);
        command.args(["internal", "stand", "vm", "1", "50", "20000", "-name", name]);
        Self(command.stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The sockets of a process that packets can reach: lines of `/proc/PID/net/tcp` and its like.
pub fn network_sockets(pid: u32) -> Vec<String> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = open.filter_map(|fd| fs::read_link(fd.path()).ok());
    let inodes: Vec<String> = targets
        .filter_map(|t| {
            let inode = t.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(inode.to_owned())
        })
        .collect();
    let kinds = ["tcp", "tcp6", "udp", "udp6", "raw", "raw6"];
    let tables = kinds.map(|kind| fs::read_to_string(format!("/proc/{pid}/net/{kind}")));
    let lines = tables
        .iter()
        .flatten()
        .flat_map(|table| table.lines().skip(1));
    let is_open = |line: &&str| {
        let inode = line.split_whitespace().nth(9);
        inode.is_some_and(|inode| inodes.iter().any(|i| i == inode))
    };
    lines.filter(is_open).map(str::to_owned).collect()
}
