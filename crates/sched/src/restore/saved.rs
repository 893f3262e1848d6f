// SPDX-License-Identifier: Apache-2.0
//! What viola records of VMs before it changes them: the contents of the file.

use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use viola_host::attrs::{SavedThread, SchedAttr};
use viola_host::replace::{Survives, replace};
use viola_host::{CpuSet, HostError, ServiceKind, Thread, Tid, Vm, proc};

use super::own_groups::OwnGroups;
use super::{RestoreError, is_from_ours, is_ours, is_same, restore_vm};
use crate::plan::Plan;

/// One VM as it was before viola changed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVm {
    /// Name, for messages.
    pub id: String,
    /// Main process.
    pub pid: Tid,
    /// Its start time, clock ticks after boot; identifies the process when the number is reused.
    pub start_time: u64,
    /// Attributes for threads that are not listed: those of the main thread.
    pub default: SchedAttr,
    /// Affinity of the main thread.
    pub affinity: CpuSet,
    /// Whether viola pinned its threads, so that affinities must be restored too.
    pub pinned: bool,
    /// Its threads, each as it was.
    pub threads: Vec<SavedThread>,
    /// Other processes whose threads work for the VM, with their start times. They may outlive it.
    #[serde(default)]
    pub helpers: Vec<(Tid, u64)>,
    /// Threads that the VM created while viola scheduled it, with their start times.
    #[serde(default)]
    pub forked: Vec<(Tid, u64)>,
    /// Where processes are found that have left the VM's process tree.
    #[serde(default)]
    pub own: OwnGroups,
}

/// The contents of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// Processes of viola's that a killed daemon may leave behind (the watchdog): pid and start time.
    pub processes: Vec<(Tid, u64)>,
    /// VMs that viola changed.
    pub vms: Vec<SavedVm>,
}

impl SavedState {
    /// Reads the file; an absent file is empty.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn read(path: &Path) -> Result<Self, RestoreError> {
        match fs::read(path) {
            Ok(bytes) => Self::parse(path, &bytes),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(RestoreError::File {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Parses the bytes of the file at `path`.
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self, RestoreError> {
        let damaged = |e: &dyn std::fmt::Display| RestoreError::Damaged {
            path: path.to_owned(),
            // It may quote the file.
            why: e.to_string().replace(char::is_control, "\u{fffd}"),
        };
        // The parser would not look into texts that it skips (RFC 8259, section 8.1: JSON is UTF-8).
        let text = std::str::from_utf8(bytes).map_err(|e| damaged(&e))?;
        serde_json::from_str(text).map_err(|e| damaged(&e))
    }

    /// Replaces the file atomically: a reader sees the old or the new one.
    ///
    /// # Errors
    /// [`RestoreError::File`].
    pub fn write(&self, path: &Path) -> Result<(), RestoreError> {
        let fail = |source| RestoreError::File {
            path: path.to_owned(),
            source,
        };
        let json = serde_json::to_vec(self).map_err(|e| fail(e.into()))?;
        replace(path, &json, Survives::Process).map_err(fail)
    }

    /// Records every VM of a plan; returns whether anything is new. Call it before the first change: only recorded attributes can be
    /// restored.
    pub(crate) fn record_plan(&mut self, plan: &Plan, vms: &[Vm]) -> Result<bool, RestoreError> {
        let before = self.clone();
        for planned in plan.cores.iter().flat_map(|core| &core.vms) {
            if let Some(vm) = vms.iter().find(|vm| vm.pid as i32 == planned.pid) {
                self.record(vm, false)?;
            }
        }
        Ok(*self != before)
    }

    /// Records the present attributes of a VM's threads, except those already recorded. Of threads that the VM created since viola
    /// changed it, records that they exist.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn record(&mut self, vm: &Vm, pinned: bool) -> Result<(), RestoreError> {
        // Another process of this number has ended. One of the same name but another number is restored when the plan has dropped
        // it: its children may still be real-time.
        let is_stale = |s: &mut SavedVm| s.pid == vm.pid && s.start_time != vm.start_time;
        for stale in self.vms.extract_if(.., is_stale).collect::<Vec<_>>() {
            restore_vm(&stale)?;
        }
        let known = self.vms.iter().position(|s| s.pid == vm.pid);
        let at = match known {
            Some(at) => at,
            None => match SavedVm::new(vm, pinned)? {
                Some(saved) => {
                    self.vms.push(saved);
                    self.vms.len() - 1
                }
                None => return Ok(()),
            },
        };
        let entry = &mut self.vms[at];
        entry.pinned |= pinned;
        for service in &vm.service {
            let pid = service.thread.pid;
            let is_other = matches!(service.kind, ServiceKind::Backend | ServiceKind::Vhost);
            if is_other
                && pid != vm.pid
                && let Some(stat) = proc::stat(pid)?
                && !entry.helpers.contains(&(pid, stat.start_time))
            {
                entry.helpers.push((pid, stat.start_time));
            }
        }
        entry.forget_ended()?;
        for thread in vm.threads() {
            entry.record_thread(thread, known.is_some())?;
        }
        if known.is_none() && !pinned {
            let (own, folder) = OwnGroups::of(vm, &entry.helpers)?;
            entry.own = own;
            if let Some(folder) = folder {
                self.keep_apart(at, &folder);
            }
        }
        Ok(())
    }

    /// A control group that two VMs share belongs to neither.
    fn keep_apart(&mut self, new: usize, folder: &Path) {
        let mut shared = false;
        for (_, other) in self.vms.iter_mut().enumerate().filter(|(i, _)| *i != new) {
            if other.own.overlaps(folder) {
                (shared, other.own.cgroup) = (true, None);
            }
        }
        if shared {
            self.vms[new].own.cgroup = None;
        }
    }

    /// Records a thread that the controller gave a priority since the VM created it; returns whether that is new. A thread that has
    /// ended needs no record.
    ///
    /// # Errors
    /// [`HostError`].
    pub(crate) fn record_forked(&mut self, vm: Tid, tid: Tid) -> Result<bool, HostError> {
        let Some(entry) = self.vms.iter_mut().find(|s| s.pid == vm) else {
            return Ok(false);
        };
        let Some(stat) = proc::stat(tid)?.filter(|s| !s.is_dead()) else {
            return Ok(false);
        };
        if stat.start_time < entry.own.since || entry.is_listed(tid, stat.start_time) {
            return Ok(false);
        }
        entry.forked.push((tid, stat.start_time));
        Ok(true)
    }
}

impl SavedVm {
    /// A VM without its threads; `None` when it has ended.
    fn new(vm: &Vm, pinned: bool) -> Result<Option<Self>, RestoreError> {
        let main = Thread {
            pid: vm.pid,
            tid: vm.pid,
            start_time: vm.start_time,
        };
        let Some(saved) = SavedThread::capture(&main)? else {
            return Ok(None);
        };
        let default = if is_ours(&saved.attr) {
            SchedAttr::fair(0)
        } else {
            saved.attr
        };
        Ok(Some(Self {
            id: vm.id.to_string(),
            pid: vm.pid,
            start_time: vm.start_time,
            default,
            affinity: saved.affinity,
            pinned,
            threads: Vec::new(),
            helpers: Vec::new(),
            forked: Vec::new(),
            own: OwnGroups::default(),
        }))
    }

    fn is_listed(&self, tid: Tid, start_time: u64) -> bool {
        let is_saved = |s: &SavedThread| s.tid == tid && s.start_time == start_time;
        self.threads.iter().any(is_saved) || self.forked.contains(&(tid, start_time))
    }

    /// `since_changed`: viola has changed the VM before, so that a new thread inherited a priority of viola's, or by
    /// `SCHED_RESET_ON_FORK` the kernel's default.
    fn record_thread(&mut self, thread: &Thread, since_changed: bool) -> Result<(), RestoreError> {
        let Thread {
            tid, start_time, ..
        } = *thread;
        if self.is_listed(tid, start_time) {
            return Ok(());
        }
        let Some(mut saved) = SavedThread::capture(thread)? else {
            return Ok(());
        };
        self.threads.retain(|s| s.tid != tid);
        let inherited = match since_changed && !self.pinned {
            true => is_from_ours(&saved.attr),
            false => is_ours(&saved.attr),
        };
        if inherited {
            if !self.pinned {
                self.forked.push((tid, start_time));
            }
            return Ok(());
        }
        if since_changed && saved.attr == SchedAttr::fair(0) {
            saved.attr = self.default;
        }
        self.threads.push(saved);
        Ok(())
    }

    fn forget_ended(&mut self) -> Result<(), HostError> {
        let mut living = Vec::with_capacity(self.forked.len());
        for (tid, start_time) in self.forked.drain(..) {
            if is_same(tid, start_time)? {
                living.push((tid, start_time));
            }
        }
        self.forked = living;
        Ok(())
    }
}
