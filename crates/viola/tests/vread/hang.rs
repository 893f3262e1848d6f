// SPDX-License-Identifier: Apache-2.0
//! Workers of readers that hang, as a whole and in a read.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use viola_proto::vread::Vread;

use crate::common::guests::{signal, within};
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
        strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=preadv,preadv2"]);
        strace.arg(format!("--inject=preadv,preadv2:delay_enter={seconds}s"));
        strace
            .args(["-p", &pid.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        let delayed = Self(strace.spawn().unwrap());
        let is_traced = || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            !status.contains("TracerPid:\t0\n")
        };
        within(CHANGE_TIMEOUT, "strace is attached", is_traced);
        delayed
    }
}

impl Drop for DelayedReads {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether there is a process of this number, be it dead and not waited for.
fn exists(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn a_worker_that_hangs_in_a_read_of_a_deleted_block_is_ended_after_ten_seconds() {
    let mut rig = Rig::with_blocks("wk-stuck");
    rig.assert_same(1);
    let (_, before) = rig.shown();
    let delayed = DelayedReads::start(before.pid, 120);
    rig.rd(&format!(
        "dd if=/mnt/{POOL}/blk_2_1001 of=/dev/null bs=4096 iflag=direct >/dev/null 2>&1 &"
    ));
    // The read is on its way before the block's lease ends.
    within(CHANGE_TIMEOUT, "dd reads", || {
        rig.try_sh("rd", "pidof dd").0 == 0
    });
    std::thread::sleep(Duration::from_secs(1));
    rig.dn(&format!(
        "rm {BLOCK_FOLDER}/blk_2 {BLOCK_FOLDER}/blk_2_1001.meta"
    ));
    let begin = Instant::now();
    let why = "it has been reading a withdrawn block for";
    within(CHANGE_TIMEOUT, "the worker is killed", || {
        rig.daemon.log().contains(why)
    });
    let took = begin.elapsed();
    assert!(took > Duration::from_secs(9), "{took:?}");
    // While strace has its threads, the killed process does not end, as if it waited for a disk. That holds up nothing else.
    rig.make(4, 50);
    rig.wait_blocks(3);
    assert!(exists(before.pid), "the process has ended");
    assert!(!rig.shown().1.running);
    drop(delayed);
    within(CHANGE_TIMEOUT, "a new worker", || {
        let (_, reader) = rig.shown();
        reader.running && reader.pid != before.pid
    });
    assert!(!exists(before.pid));
    rig.make(5, 50);
    rig.wait_blocks(4);
}
