// SPDX-License-Identifier: Apache-2.0
//! By what a VM's worker sees that the VM stands still: files of the kernel's, which it could not open itself.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use viola_host::cgroup::Mounts;
use viola_host::{Thread, Vm};
use viola_vread::control::{MAX_FDS, Order};

/// What is looked at.
#[derive(Debug, PartialEq, Eq)]
pub struct Sign {
    threads: Vec<Thread>,
    group: Option<PathBuf>,
}

impl Sign {
    /// One thread for each vCPU, but no more than go with one order: a signal stops all threads of a process. Of UML it is the guest's
    /// kernel.
    pub fn of(vm: &Vm) -> Self {
        let first = vm.vcpus.iter().filter_map(|vcpu| vcpu.threads.first());
        let threads: Vec<Thread> = first.take(MAX_FDS - 1).copied().collect();
        // a host without such groups freezes none
        let group = threads.first().and_then(|thread| {
            let mounts = Mounts::read().ok()?;
            mounts.unified(thread.tid).ok()?
        });
        Self { threads, group }
    }

    /// Opens it. A thread or group that is gone is left out.
    pub fn open(&self) -> Files {
        let stat = |thread: &Thread| {
            let Thread { pid, tid, .. } = thread;
            File::open(format!("/proc/{pid}/task/{tid}/stat")).ok()
        };
        // the root has no such file, and cannot be frozen
        let events = |group: &PathBuf| File::open(group.join("cgroup.events")).ok();
        Files {
            threads: self.threads.iter().filter_map(stat).collect(),
            group: self.group.as_ref().and_then(events),
        }
    }
}

/// The same, open.
#[derive(Debug)]
pub struct Files {
    threads: Vec<File>,
    group: Option<File>,
}

impl Files {
    /// What the worker is told.
    pub fn order(&self) -> Order {
        Order::Pulse {
            threads: self.threads.len(),
            group: self.group.is_some(),
        }
    }

    /// What goes with it.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.threads
            .iter()
            .chain(&self.group)
            .map(AsFd::as_fd)
            .collect()
    }
}
