// SPDX-License-Identifier: Apache-2.0
//! Workers of readers that hang, as a whole and in a read.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viola_proto::vread::Vread;

use crate::common::guests::signal;
use crate::rig::{BLOCK_FOLDER, CHANGE_TIMEOUT, POOL, Rig};

#[test]
fn a_hanging_reader_does_not_delay_the_daemon() {
    let mut rig = Rig::with_blocks("wk-hang");
    rig.assert_same(1);
    let (_, before) = rig.shown();
    signal(before.pid, Signal::STOP);
    rig.daemon.wait("a new worker", |d| {
        let begin = Instant::now();
        let all: Vread = d.json(&["vread", "ls"]);
        assert!(begin.elapsed() < Duration::from_secs(2));
        all.readers
            .first()
            .is_some_and(|r| r.running && r.pid != before.pid)
    });
    assert!(!crate::lives(before.pid));
    rig.make(4, 50);
    rig.wait_blocks(4);
}

/// strace at a process whose reads it delays, until it is dropped.
struct DelayedReads(Child);

impl DelayedReads {
    fn start(pid: u32, seconds: u32) -> Self {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=preadv"]);
        strace.arg(format!("--inject=preadv:delay_enter={seconds}s"));
        strace.args(["-p", &pid.to_string()]).stdin(Stdio::null());
        let delayed = Self(strace.spawn().unwrap());
        let is_traced = || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            !status.contains("TracerPid:\t0\n")
        };
        let begin = Instant::now();
        while !is_traced() {
            assert!(begin.elapsed() < CHANGE_TIMEOUT, "strace is not attached");
            std::thread::sleep(Duration::from_millis(5));
        }
        delayed
    }
}

impl Drop for DelayedReads {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_worker_that_hangs_in_a_read_of_a_deleted_block_is_ended_after_ten_seconds() {
    let mut rig = Rig::with_blocks("wk-stuck");
    rig.assert_same(1);
    let (_, before) = rig.shown();
    let delayed = DelayedReads::start(before.pid, 60);
    rig.rd(&format!(
        "dd if=/mnt/{POOL}/blk_2_1001 of=/dev/null bs=4096 iflag=direct >/dev/null 2>&1 &"
    ));
    // The read is on its way before the block's lease ends.
    std::thread::sleep(Duration::from_secs(1));
    rig.dn(&format!(
        "rm {BLOCK_FOLDER}/blk_2 {BLOCK_FOLDER}/blk_2_1001.meta"
    ));
    let begin = Instant::now();
    rig.daemon.wait("a new worker", |d| {
        let asked = Instant::now();
        let all: Vread = d.json(&["vread", "stat"]);
        assert!(asked.elapsed() < Duration::from_secs(2));
        let reader = all.readers.first();
        reader.is_some_and(|r| r.running && r.pid != before.pid)
    });
    let took = begin.elapsed();
    assert!(took > Duration::from_secs(9), "{took:?}");
    let why = "it has been reading a withdrawn block for";
    assert!(rig.daemon.log().contains(why), "{}", rig.daemon.log());
    drop(delayed);
    // Nothing is kept for the worker that is gone.
    rig.wait_blocks(2);
    rig.make(4, 50);
    rig.wait_blocks(3);
}
