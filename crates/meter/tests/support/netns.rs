// SPDX-License-Identifier: Apache-2.0
//! Threads in network namespaces of their own, which stand for VMs.
#![allow(dead_code, clippy::unwrap_used)]

use std::process::Command;

use viola_host::{Tid, proc};

/// The calling thread.
pub fn tid() -> Tid {
    rustix::thread::gettid().as_raw_nonzero().get() as Tid
}

/// Moves this thread into a network namespace of its own.
pub fn unshare_network() {
    // SAFETY: a plain system call for this thread alone.
    let own = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(own, 0, "needs root");
}

/// Runs `ip` (iproute2) in this thread's namespace.
pub fn ip(words: &str) {
    let done = Command::new("ip").args(words.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {words}: {done:?}");
}

/// Index of an interface of this thread's namespace, and the namespace's inode number.
pub fn interface(name: &str) -> (u32, u32) {
    let all = std::fs::read_to_string("/proc/thread-self/net/dev_mcast").unwrap();
    let line = all.lines().find(|l| l.contains(name)).unwrap();
    let index = line.split_whitespace().next().unwrap().parse().unwrap();
    (index, proc::netns(tid()).unwrap().unwrap() as u32)
}
