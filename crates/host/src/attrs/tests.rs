// SPDX-License-Identifier: Apache-2.0
//! Attributes of real threads.

use std::process::{Child, Command};

use super::*;
use crate::thread::Thread;

/// A sleeping process; killed at the end.
struct Sleeper(Child);

impl Sleeper {
    fn new() -> Self {
        Self(Command::new("sleep").arg("60").spawn().unwrap())
    }

    fn thread(&self) -> Thread {
        let tid = self.0.id();
        let start_time = proc::stat(tid).unwrap().unwrap().start_time;
        Thread {
            pid: tid,
            tid,
            start_time,
        }
    }

    fn end(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A thread that has just ended.
fn ended() -> Thread {
    let mut sleeper = Sleeper::new();
    let thread = sleeper.thread();
    sleeper.end();
    thread
}

#[test]
fn a_nice_value_and_a_policy_are_set_and_read_back() {
    let sleeper = Sleeper::new();
    let tid = sleeper.thread().tid;
    let attr = SchedAttr {
        policy: Policy::Batch,
        ..SchedAttr::fair(17)
    };
    assert_eq!(set(tid, &attr).unwrap(), Outcome::Done);
    assert_eq!(get(tid).unwrap(), Some(attr));
    assert_eq!(proc::stat(tid).unwrap().unwrap().nice, 17);
}

#[test]
fn restore_brings_attributes_affinity_and_the_default_slice_back() {
    let sleeper = Sleeper::new();
    let thread = sleeper.thread();
    let saved = SavedThread::capture(&thread).unwrap().unwrap();
    let first: CpuSet = saved.affinity.iter().take(1).collect();
    assert_eq!(set_affinity(thread.tid, &first).unwrap(), Outcome::Done);
    let changed = SchedAttr {
        nice: 18,
        runtime: 300_000,
        ..saved.attr
    };
    assert_eq!(set(thread.tid, &changed).unwrap(), Outcome::Done);
    let seen = get(thread.tid).unwrap().unwrap();
    assert_eq!(seen.nice, 18);
    if default_slice().is_some() {
        assert_eq!(seen.runtime, 300_000);
    }
    assert_eq!(affinity(thread.tid).unwrap(), Some(first));

    let kept = serde_json::to_string(&saved).unwrap();
    let saved: SavedThread = serde_json::from_str(&kept).unwrap();
    if Privilege::current().unwrap().sys_nice {
        assert_eq!(saved.restore().unwrap(), Outcome::Done);
        assert_eq!(SavedThread::capture(&thread).unwrap(), Some(saved));
    } else {
        let error = saved.restore().unwrap_err();
        assert!(error.to_string().contains("CAP_SYS_NICE"), "{error}");
    }
}

#[test]
fn an_ended_thread_is_no_error() {
    let thread = ended();
    let tid = thread.tid;
    assert_eq!(get(tid).unwrap(), None);
    assert_eq!(affinity(tid).unwrap(), None);
    assert_eq!(set(tid, &SchedAttr::fair(0)).unwrap(), Outcome::Gone);
    assert_eq!(
        set_affinity(tid, &CpuSet::from_iter([0])).unwrap(),
        Outcome::Gone
    );
    assert_eq!(SavedThread::capture(&thread).unwrap(), None);
}

#[test]
fn restore_ignores_another_thread_of_the_same_number() {
    let sleeper = Sleeper::new();
    let thread = sleeper.thread();
    let mut saved = SavedThread::capture(&thread).unwrap().unwrap();
    saved.start_time -= 1;
    let before = saved.attr;
    saved.attr.nice = 19;
    assert_eq!(saved.restore().unwrap(), Outcome::Gone);
    assert_eq!(get(thread.tid).unwrap(), Some(before));
    let stale = Thread {
        start_time: thread.start_time - 1,
        ..thread
    };
    assert_eq!(SavedThread::capture(&stale).unwrap(), None);
}

#[test]
fn an_invalid_argument_is_named_in_the_error() {
    let sleeper = Sleeper::new();
    let tid = sleeper.thread().tid;
    let error = set(tid, &SchedAttr::fifo(200)).unwrap_err();
    assert!(matches!(error, AttrError::Invalid { .. }), "{error}");
    assert!(error.to_string().contains("priority 200"), "{error}");
    let error = set_affinity(tid, &CpuSet::new()).unwrap_err();
    assert!(matches!(error, AttrError::Invalid { .. }), "{error}");
}

/// Needs a version 1 cpu hierarchy with real-time groups, root, and throttling that is on.
#[test]
fn a_refusal_for_lack_of_real_time_runtime_names_the_group() {
    let group = format!("viola-test-{}", std::process::id());
    let folder = std::path::Path::new("/sys/fs/cgroup/cpu").join(&group);
    let mounts = Mounts::read().unwrap();
    if mounts.has_rt_groups() != Some(true) || std::fs::create_dir(&folder).is_err() {
        eprintln!("not tried: this host has no version 1 cpu groups with real-time run time");
        return;
    }
    let mut sleeper = Sleeper::new();
    let tid = sleeper.thread().tid;
    std::fs::write(folder.join("cgroup.procs"), tid.to_string()).unwrap();
    std::fs::write(folder.join("cpu.shares"), "512").unwrap();
    let refused = set(tid, &SchedAttr::fifo(1));
    let block = mounts.rt_group_blocks(tid).unwrap();
    let cgroup = mounts.of_vm(tid, &[tid]).unwrap().unwrap();
    let own = mounts.rt_group_blocks(std::process::id()).unwrap();
    sleeper.end();
    std::fs::remove_dir(&folder).unwrap();

    assert_eq!(
        (cgroup.path, cgroup.weight),
        (format!("/{group}"), Some(128))
    );
    let throttling = std::fs::read_to_string("/proc/sys/kernel/sched_rt_runtime_us").unwrap();
    if throttling.trim() == "-1" {
        assert_eq!(block, None);
        assert_eq!(refused.unwrap(), Outcome::Done);
    } else {
        assert_eq!(block.unwrap().group, format!("/{group}"));
        assert!(refused.unwrap_err().to_string().contains(&group));
    }
    assert_eq!(
        own.map(|b| b.group).filter(|g| g == "/"),
        None,
        "the root group never blocks"
    );
}
