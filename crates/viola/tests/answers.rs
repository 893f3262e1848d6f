// SPDX-License-Identifier: Apache-2.0
//! The processes that read what a guest answers about a VF, and what an emulator's monitor answers: what they may do, and what
//! they tell the daemon.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::guests::within;
use rustix::process::Signal;
use viola_host::confirm::registrations;
use viola_proto::VmList;
use viola_proto::agent::encode;
use viola_proto::lanes::guest::LaneReply;

const REQUEST: u64 = 7;

/// Starts the process for the reply to [`REQUEST`], and returns it with the guest's end of the way.
fn start(timeout: Duration) -> (Child, UnixStream) {
    let (guest, host) = UnixStream::pair().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_viola"))
        .args(["worker", "agent-answer", &REQUEST.to_string()])
        .arg(timeout.as_millis().to_string())
        .stdin(Stdio::from(OwnedFd::from(host)))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    (child, guest)
}

/// What the process says.
fn answer(mut child: Child) -> String {
    let mut text = String::new();
    let mut from = child.stdout.take().unwrap();
    from.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    text
}

fn reply(n: u64, failed: Option<&str>) -> Vec<u8> {
    let failed = failed.map(str::to_owned);
    encode(&LaneReply { n, failed }).unwrap()
}

#[test]
fn only_the_reply_to_the_request_is_told() {
    let (child, mut guest) = start(Duration::from_secs(20));
    guest
        .write_all(&reply(REQUEST - 1, Some("an old one")))
        .unwrap();
    guest.write_all(&reply(REQUEST, None)).unwrap();
    assert_eq!(answer(child), "d");
    let (child, mut guest) = start(Duration::from_secs(20));
    guest
        .write_all(&reply(REQUEST, Some("no bond\n here")))
        .unwrap();
    assert_eq!(answer(child), "rno bond here");
}

#[test]
fn garbage_silence_and_an_end_are_told() {
    let (child, mut guest) = start(Duration::from_millis(300));
    guest.write_all(&[0xff; 4096]).unwrap();
    assert!(["t", "f"].contains(&&answer(child)[..1]));
    let (child, _guest) = start(Duration::from_millis(100));
    assert_eq!(answer(child), "t");
    let (child, guest) = start(Duration::from_secs(20));
    drop(guest);
    assert_eq!(answer(child), "c");
}

#[test]
fn a_guests_answer_is_read_without_privilege() {
    let (child, mut guest) = start(Duration::from_secs(60));
    let end = Instant::now() + Duration::from_secs(20);
    while !is_without_privilege(child.id()) {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    guest.write_all(&reply(REQUEST, None)).unwrap();
    assert_eq!(answer(child), "d");
}

/// Whether a process has entered its sandbox.
fn is_without_privilege(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut wanted = vec!["NoNewPrivs:\t1", "Seccomp:\t2"];
    if rustix::process::geteuid().is_root() {
        wanted.extend([
            "Uid:\t65534\t65534\t65534",
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
        ]);
    }
    wanted.iter().all(|line| status.contains(line))
}

#[test]
fn a_monitor_is_read_in_the_sandbox() {
    let (mut qemu, emulator) = UnixStream::pair().unwrap();
    let (mut daemon, theirs) = UnixStream::pair().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_viola"))
        .args(["worker", "monitor"])
        .stdin(Stdio::from(OwnedFd::from(emulator)))
        .stdout(Stdio::from(OwnedFd::from(theirs)))
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(daemon.try_clone().unwrap()).lines();
    daemon
        .write_all(b"{\"Open\":{\"secs\":20,\"nanos\":0}}\n\"Memory\"\n")
        .unwrap();
    qemu.write_all(b"{\"QMP\": {}}\n{\"return\": {}, \"id\": 1}\n")
        .unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), r#"{"Answer":{"Ok":null}}"#);
    assert!(is_without_privilege(child.id()));
    qemu.write_all(b"{\"return\": {\"base-memory\": 512}, \"id\": 2}\n")
        .unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), r#"{"Answer":{"Ok":512}}"#);
    drop((daemon, lines));
    assert!(child.wait().unwrap().success());
}

/// A real QEMU, whose vCPU never starts. Killed on drop.
struct Emulator {
    child: Child,
    name: String,
    _folder: tempfile::TempDir,
}

impl Emulator {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let name = format!("monitor-{}", std::process::id());
        let socket = folder.path().join("qmp");
        let line = format!(
            "-accel tcg -S -nodefaults -display none -machine q35 -m 32 -name guest={name} -qmp unix:{},server=on,wait=off",
            socket.display()
        );
        let child = Command::new("qemu-system-x86_64")
            .args(line.split(' '))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let emulator = Self {
            child,
            name,
            _folder: folder,
        };
        within(Duration::from_secs(30), "QEMU has its socket", || {
            socket.exists()
        });
        let registrations = Path::new(registrations::FOLDER);
        registrations::write(registrations, emulator.child.id(), &emulator.name).unwrap();
        emulator
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        let registration = Path::new(registrations::FOLDER).join(self.child.id().to_string());
        let _ = std::fs::remove_file(registration);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The daemon's processes that read monitors.
fn monitor_processes(daemon: u32) -> Vec<u32> {
    let children = std::fs::read_dir(format!("/proc/{daemon}/task")).unwrap();
    let children = children.flatten().flat_map(|task| {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let numbers = children.split(' ').filter_map(|pid| pid.parse().ok());
        numbers.collect::<Vec<u32>>()
    });
    let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    children
        .filter(|pid| name(pid) == "viola-monitor-w\n")
        .collect()
}

#[test]
fn the_daemon_does_not_read_a_monitor_itself() {
    let emulator = Emulator::start();
    let pid = emulator.child.id();
    // It does not answer for now.
    common::guests::signal(pid, Signal::STOP);
    let daemon = common::Daemon::start("[slices]\nenabled = false\n");
    within(
        Duration::from_secs(30),
        "a process reads the monitor",
        || {
            let found = monitor_processes(daemon.pid());
            found.into_iter().any(is_without_privilege)
        },
    );
    common::guests::signal(pid, Signal::CONT);
    // Without names of threads, only the monitor tells which one is a vCPU.
    within(Duration::from_secs(30), "its vCPU is known", || {
        let list: VmList = daemon.json(&["vms"]);
        let mut vms = list.vms.iter();
        vms.any(|vm| vm.pid == pid && vm.vcpus == 1)
    });
    within(Duration::from_secs(10), "the process ends", || {
        monitor_processes(daemon.pid()).is_empty()
    });
}
