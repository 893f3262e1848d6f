// SPDX-License-Identifier: Apache-2.0
//! The kernel files that show whether a VM runs or is stopped or frozen. The worker watches them, and cannot open them itself.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use viola_host::cgroup::Mounts;
use viola_host::{Thread, Vm};
use viola_vread::control::{MAX_FDS, Order};

/// The threads and the control group of a VM, whose kernel files show whether it runs.
#[derive(Debug, PartialEq, Eq)]
pub struct RunState {
    threads: Vec<Thread>,
    group: Option<PathBuf>,
}

impl RunState {
    /// The first thread of each vCPU, at most as many as fit into one order: a signal stops all threads of a process. The first thread
    /// of a UML guest is its kernel.
    pub fn of(vm: &Vm) -> Self {
        let first = vm.vcpus.iter().filter_map(|vcpu| vcpu.threads.first());
        let threads: Vec<Thread> = first.take(MAX_FDS - 1).copied().collect();
        // A host without a unified hierarchy freezes no group.
        let group = threads.first().and_then(|thread| {
            let mounts = Mounts::read().ok()?;
            mounts.unified(thread.tid).ok()?
        });
        Self { threads, group }
    }

    /// Opens the files. A thread or group that is gone is left out.
    pub fn open(&self) -> RunStateFiles {
        let stat = |thread: &Thread| {
            let Thread { pid, tid, .. } = thread;
            File::open(format!("/proc/{pid}/task/{tid}/stat")).ok()
        };
        // The root group has no such file, and cannot be frozen.
        let events = |group: &PathBuf| File::open(group.join("cgroup.events")).ok();
        RunStateFiles {
            threads: self.threads.iter().filter_map(stat).collect(),
            group: self.group.as_ref().and_then(events),
        }
    }
}

/// The open files.
#[derive(Debug)]
pub struct RunStateFiles {
    threads: Vec<File>,
    group: Option<File>,
}

impl RunStateFiles {
    /// The order to the worker.
    pub fn order(&self) -> Order {
        Order::Pulse {
            threads: self.threads.len(),
            group: self.group.is_some(),
        }
    }

    /// The descriptors that go with [`RunStateFiles::order`].
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.threads
            .iter()
            .chain(&self.group)
            .map(AsFd::as_fd)
            .collect()
    }
}
