// SPDX-License-Identifier: Apache-2.0
//! Leaving every thread as it was found.
//!
//! Before the first change the attributes of each thread are written to a small file under /run. Whoever
//! notices that the controller is gone (watchdog, controller's own main thread, daemon, `viola restore`, the
//! next start) reads it and puts them back. Threads that a VM made meanwhile get what the VM's main thread had.
//! Restoring is idempotent, and touches only threads that still carry a priority of ours.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_host::attrs::{self, AttrError, Policy, SavedThread, SchedAttr};
use viola_host::{CpuSet, HostError, ServiceKind, Thread, Tid, Vm, proc};

use crate::slots::PRIORITIES;

/// Why something could not be saved or restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The file of saved attributes.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file of saved attributes is damaged.
    #[error("{path} is not a file of saved attributes ({why}); remove it, and give the VMs' threads their class back by chrt", path = path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A thread's attributes.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// Reading procfs.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// One VM as it was before viola changed anything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVm {
    /// Name for messages.
    pub id: String,
    /// Main process.
    pub pid: Tid,
    /// Its start time, so that a reused number is noticed.
    pub start_time: u64,
    /// What threads get that are not listed: the main thread's attributes.
    pub default: SchedAttr,
    /// Affinity of the main thread.
    pub affinity: CpuSet,
    /// Whether viola pinned its threads, so that affinities have to be put back too.
    pub pinned: bool,
    /// Threads, each as it was.
    pub threads: Vec<SavedThread>,
    /// Other processes whose threads work for the VM, with their start times. They may outlive it.
    #[serde(default)]
    pub helpers: Vec<(Tid, u64)>,
}

/// Contents of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// Processes of ours that may have been left behind (watchdog): pid and start time.
    pub processes: Vec<(Tid, u64)>,
    /// VMs that were changed.
    pub vms: Vec<SavedVm>,
}

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoreCount {
    /// VMs looked at.
    pub vms: usize,
    /// Threads put back.
    pub threads: usize,
}

impl SavedState {
    /// Reads the file; an absent one is empty.
    pub fn read(path: &Path) -> Result<Self, RestoreError> {
        match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| RestoreError::Damaged {
                path: path.to_owned(),
                why: e.to_string(),
            }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(RestoreError::File {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Writes the file as a whole: a reader sees the old or the new one, never a part.
    pub fn write(&self, path: &Path) -> Result<(), RestoreError> {
        let fail = |source| RestoreError::File {
            path: path.to_owned(),
            source,
        };
        let temporary = path.with_extension("new");
        let json = serde_json::to_vec(self).map_err(|e| fail(e.into()))?;
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(fail)?;
        file.write_all(&json).map_err(fail)?;
        fs::rename(&temporary, path).map_err(fail)
    }

    /// Notes the present attributes of a VM's threads, but for those it knows already and those that carry a
    /// priority of ours (made since).
    pub fn record(&mut self, vm: &Vm, pinned: bool) -> Result<(), RestoreError> {
        self.vms.retain(|s| {
            s.id != vm.id.as_str() || (s.pid == vm.pid && s.start_time == vm.start_time)
        });
        let at = match self.vms.iter().position(|s| s.pid == vm.pid) {
            Some(at) => at,
            None => {
                let main = Thread {
                    pid: vm.pid,
                    tid: vm.pid,
                    start_time: vm.start_time,
                };
                let Some(saved) = SavedThread::capture(&main)? else {
                    return Ok(());
                };
                let default = if is_ours(&saved.attr) {
                    SchedAttr::fair(0)
                } else {
                    saved.attr
                };
                self.vms.push(SavedVm {
                    id: vm.id.to_string(),
                    pid: vm.pid,
                    start_time: vm.start_time,
                    default,
                    affinity: saved.affinity,
                    pinned,
                    threads: Vec::new(),
                    helpers: Vec::new(),
                });
                self.vms.len() - 1
            }
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
        for thread in vm.threads() {
            if entry
                .threads
                .iter()
                .any(|s| s.tid == thread.tid && s.start_time == thread.start_time)
            {
                continue;
            }
            if let Some(saved) = SavedThread::capture(thread)?
                && !is_ours(&saved.attr)
            {
                entry.threads.retain(|s| s.tid != thread.tid);
                entry.threads.push(saved);
            }
        }
        Ok(())
    }
}

fn is_ours(attr: &SchedAttr) -> bool {
    // Nobody else gives a VM's threads to a sched_ext scheduler one by one; one that takes all leaves their policy.
    attr.policy == Policy::Ext
        || attr.policy == Policy::Fifo && PRIORITIES.contains(&(attr.rt_priority as i32))
}

/// Puts back every VM of the file, and removes the file when nothing failed.
pub fn restore_file(path: &Path) -> Result<RestoreCount, RestoreError> {
    let done = restore_all(path)?;
    let _ = fs::remove_file(path);
    Ok(done)
}

/// Puts back every VM of the file and keeps the file, for doing it once more.
pub fn restore_and_keep_file(path: &Path) -> Result<(), RestoreError> {
    restore_all(path).map(|_| ())
}

fn restore_all(path: &Path) -> Result<RestoreCount, RestoreError> {
    let state = SavedState::read(path)?;
    let mut done = RestoreCount::default();
    let mut failed = None;
    for vm in &state.vms {
        done.vms += 1;
        match restore_vm(vm) {
            Ok(n) => done.threads += n,
            Err(e) => failed = Some(e),
        }
    }
    failed.map_or(Ok(done), Err)
}

/// Puts back one VM. Looks again until nothing is left to do, since a guest may fork meanwhile: what a restored
/// thread makes is restored by inheritance.
pub fn restore_vm(saved: &SavedVm) -> Result<usize, RestoreError> {
    let mut done = 0;
    for _ in 0..10 {
        let mut left = 0;
        for tid in saved.living()? {
            let Some(attr) = attrs::get(tid)? else {
                continue;
            };
            let known = saved.threads.iter().find(|s| s.tid == tid);
            if is_ours(&attr) {
                let _ = attrs::set(tid, saved.attr_of(tid)?)?;
                left += 1;
            }
            if saved.pinned {
                let to = known.map_or(&saved.affinity, |s| &s.affinity);
                if attrs::affinity(tid)?.is_some_and(|now| now != *to) {
                    let _ = attrs::set_affinity(tid, to)?;
                    left += 1;
                }
            }
        }
        done += left;
        if left == 0 {
            break;
        }
    }
    Ok(done)
}

/// Puts back some threads of a VM.
pub(crate) fn restore_threads(saved: &SavedVm, tids: &BTreeSet<Tid>) -> Result<(), RestoreError> {
    if tids.is_empty() {
        return Ok(());
    }
    for tid in saved.living()?.intersection(tids) {
        if attrs::get(*tid)?.is_some_and(|attr| is_ours(&attr)) {
            let _ = attrs::set(*tid, saved.attr_of(*tid)?)?;
        }
    }
    Ok(())
}

/// Puts back the slice of the fair class, for threads whose class nobody changed.
pub fn restore_slices(saved: &SavedVm) -> Result<usize, RestoreError> {
    let mut done = 0;
    for tid in saved.living()? {
        let Some(mut attr) = attrs::get(tid)? else {
            continue;
        };
        let to = saved
            .threads
            .iter()
            .find(|s| s.tid == tid)
            .map_or(&saved.default, |s| &s.attr);
        if attr.policy == to.policy && attr.runtime != to.runtime {
            attr.runtime = to.runtime;
            let _ = attrs::set(tid, &attr)?;
            done += 1;
        }
    }
    Ok(done)
}

impl SavedVm {
    /// What a thread had. A reused number among the VM's own threads is a thread made since.
    fn attr_of(&self, tid: Tid) -> Result<&SchedAttr, HostError> {
        let known = self.threads.iter().find(|s| s.tid == tid);
        let same = match known {
            Some(s) => proc::stat(tid)?.is_some_and(|p| p.start_time == s.start_time),
            None => false,
        };
        Ok(known.filter(|_| same).map_or(&self.default, |s| &s.attr))
    }

    /// The threads that there are now: of the VM, of its descendants, of the processes that work for it.
    fn living(&self) -> Result<BTreeSet<Tid>, HostError> {
        let lives = |pid: Tid, start_time: u64| {
            Ok::<_, HostError>(proc::stat(pid)?.is_some_and(|s| s.start_time == start_time))
        };
        let mut all = match lives(self.pid, self.start_time)? {
            true => threads_of(self.pid)?,
            false => BTreeSet::new(),
        };
        for (pid, start_time) in &self.helpers {
            if lives(*pid, *start_time)? {
                all.extend(proc::thread_ids(*pid)?);
            }
        }
        Ok(all)
    }
}

/// All threads of a process and of its descendants (UML: the guest's processes).
fn threads_of(pid: Tid) -> Result<BTreeSet<Tid>, HostError> {
    let mut all = BTreeSet::new();
    let mut processes = vec![pid];
    let mut next = 0;
    while next < processes.len() {
        let process = processes[next];
        next += 1;
        all.extend(proc::thread_ids(process)?);
        for child in proc::children(process)? {
            if !processes.contains(&child) {
                processes.push(child);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_file_is_empty_and_a_damaged_one_is_said_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slots.json");
        assert_eq!(SavedState::read(&path).unwrap(), SavedState::default());
        fs::write(&path, b"{\"vms\":").unwrap();
        let said = SavedState::read(&path).unwrap_err().to_string();
        assert!(
            said.contains("slots.json") && said.contains("chrt"),
            "{said}"
        );
    }

    #[test]
    fn what_is_written_is_read_again_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("slots.json");
        let state = SavedState {
            processes: vec![(7, 8)],
            vms: Vec::new(),
        };
        state.write(&path).unwrap();
        assert_eq!(SavedState::read(&path).unwrap(), state);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// A process that sleeps.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn new() -> Self {
            let child = std::process::Command::new("sleep").arg("60").spawn();
            Self(child.unwrap())
        }

        fn thread(&self) -> Thread {
            let (pid, tid) = (self.0.id(), self.0.id());
            let start_time = proc::stat(pid).unwrap().unwrap().start_time;
            Thread {
                pid,
                tid,
                start_time,
            }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_worked_for_a_vm_has_its_own_back_also_after_the_vm_has_ended() {
        let (vm, backend) = (Sleeper::new(), Sleeper::new());
        let (main, worker) = (vm.thread(), backend.thread());
        let kind = ServiceKind::Backend;
        let thread = worker;
        let noted: Vm = serde_json::from_value(serde_json::json!({
            "id": "uml:x", "name": "x", "hypervisor": "uml",
            "pid": main.pid, "start_time": main.start_time,
            "vcpus": [{"index": 0, "threads": [main], "kernel_thread": null, "cores": CpuSet::new()}],
            "service": [viola_host::ServiceThread { thread, kind }],
            "disks": [], "nics": [], "cgroup": null, "cores": CpuSet::new(), "status": null
        }))
        .unwrap();
        let mut state = SavedState::default();
        state.record(&noted, false).unwrap();
        assert_eq!(state.vms[0].helpers, [(worker.pid, worker.start_time)]);
        // real-time classes take root
        if attrs::set(worker.tid, &SchedAttr::fifo(18)).is_err() {
            return;
        }
        drop(vm);
        assert_eq!(restore_vm(&state.vms[0]).unwrap(), 1);
        let now = attrs::get(worker.tid).unwrap().unwrap();
        assert_eq!(now.policy, SchedAttr::fair(0).policy);
    }

    #[test]
    fn only_our_own_priorities_are_taken_for_ours() {
        assert!(is_ours(&SchedAttr::fifo(18)));
        assert!(!is_ours(&SchedAttr::fifo(50)));
        assert!(!is_ours(&SchedAttr::fair(0)));
    }
}
