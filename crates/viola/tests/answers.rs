// SPDX-License-Identifier: Apache-2.0
//! The process that reads a guest's answer about a VF: what it may do, and what it tells the daemon.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
    let is_root = rustix::process::geteuid().is_root();
    let mut wanted = vec!["NoNewPrivs:\t1", "Seccomp:\t2"];
    if is_root {
        wanted.extend([
            "Uid:\t65534\t65534\t65534",
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
        ]);
    }
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        if wanted.iter().all(|line| status.contains(line)) {
            break;
        }
        assert!(Instant::now() < end, "{status}");
        std::thread::sleep(Duration::from_millis(5));
    }
    guest.write_all(&reply(REQUEST, None)).unwrap();
    assert_eq!(answer(child), "d");
}
