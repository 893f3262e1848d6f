// SPDX-License-Identifier: Apache-2.0
//! Finds the processes that a VM made and that have left its process tree: a double-forked child, a child of a VM that has ended.
//!
//! They may have inherited a real-time priority. To find them again, viola notes with each VM the control group and the session
//! that only processes of the VM are in. A process enters a session only by being forked in it, and a control group only by being
//! forked in it or by the write of who owns the group. So what is found there later descends from the VM.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_host::cgroup::{Mounts, members};
use viola_host::confirm::{Confirmation, is_machines_scope};
use viola_host::{HostError, Tid, Vm, proc};

use super::processes_of;

/// The control group and the session that only processes of the VM were in when viola recorded it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnGroups {
    /// When viola recorded the VM, in clock ticks after boot. A thread that began earlier has inherited nothing of viola's.
    pub since: u64,
    /// Folder of the control group.
    pub cgroup: Option<PathBuf>,
    /// Number of the session. Its leader is the VM's process, or had ended.
    pub session: Option<Tid>,
}

impl OwnGroups {
    /// The groups of a VM, and the folder of its control group, which may be another one's too. `helpers` are processes that work for
    /// it.
    pub(super) fn of(
        vm: &Vm,
        helpers: &[(Tid, u64)],
    ) -> Result<(Self, Option<PathBuf>), HostError> {
        let mut own = Self {
            since: now(),
            ..Self::default()
        };
        let Some(stat) = proc::stat(vm.pid)?.filter(|s| s.start_time == vm.start_time) else {
            return Ok((own, None));
        };
        let mut group_folder = None;
        let mut family: BTreeSet<Tid> = processes_of(vm.pid)?.into_iter().collect();
        family.extend(helpers.iter().map(|(pid, _)| *pid));
        if stat.session == vm.pid {
            own.session = Some(vm.pid);
        }
        let session = own.session;
        let is_family = |pid: Tid| {
            let is_known = |s: proc::Stat| s.is_dead() || session == Some(s.session);
            Ok::<_, HostError>(family.contains(&pid) || proc::stat(pid)?.is_none_or(is_known))
        };
        if let Some(group) = vm.cgroup.as_ref().filter(|group| group.path != "/")
            && let Some(folder) = Mounts::read()?.folder(vm.pid, &group.path)?
        {
            let by_libvirt = [Confirmation::Libvirt, Confirmation::Machined].map(Some);
            let mut is_own = by_libvirt.contains(&vm.confirmed) && is_machines_scope(&group.path);
            if !is_own {
                is_own = true;
                for pid in members(&folder) {
                    is_own &= is_family(pid)?;
                }
            }
            own.cgroup = is_own.then(|| folder.clone());
            group_folder = Some(folder);
        }
        // A daemon's session, whose leader has ended: nobody else can enter it. Reading all processes is dear, and needless for a VM
        // that has a control group of its own.
        let needs_session = own.session.is_none() && own.cgroup.is_none();
        if needs_session && stat.session != 0 && !lives(stat.session)? {
            let sessions = Sessions::read()?;
            let all = sessions.members(stat.session);
            let is_own = all.iter().all(|pid| family.contains(pid));
            own.session = is_own.then_some(stat.session);
        }
        Ok((own, group_folder))
    }

    /// Whether a control group is that of the VM, or one within the other.
    pub(super) fn overlaps(&self, folder: &Path) -> bool {
        let own = self.cgroup.as_ref();
        own.is_some_and(|own| own.starts_with(folder) || folder.starts_with(own))
    }

    /// The threads in the groups of the VM with main process `(pid, start_time)` that began since viola recorded it.
    pub(super) fn threads(
        &self,
        main: (Tid, u64),
        sessions: &Sessions,
    ) -> Result<BTreeSet<Tid>, HostError> {
        let mut processes: BTreeSet<Tid> = BTreeSet::new();
        if let Some(folder) = &self.cgroup {
            processes.extend(members(folder));
        }
        if let Some(session) = self.session {
            // While a session has members, the kernel gives its number to no other process.
            let leader = proc::stat(session)?.filter(|s| !s.is_dead());
            if leader.is_none_or(|s| (session, s.start_time) == main) {
                processes.extend(sessions.members(session));
            }
        }
        let mut threads = BTreeSet::new();
        for pid in processes {
            for tid in proc::thread_ids(pid)? {
                if proc::stat(tid)?.is_some_and(|s| s.start_time >= self.since) {
                    threads.insert(tid);
                }
            }
        }
        Ok(threads)
    }
}

fn lives(pid: Tid) -> Result<bool, HostError> {
    Ok(proc::stat(pid)?.is_some_and(|s| !s.is_dead()))
}

/// Clock ticks since boot, as the kernel counts the start of a process.
fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    t.tv_sec as u64 * ticks + t.tv_nsec as u64 / (1_000_000_000 / ticks)
}

/// The processes of each session.
#[derive(Default)]
pub(super) struct Sessions(BTreeMap<Tid, Vec<Tid>>);

impl Sessions {
    /// Reads all processes of the host.
    pub(super) fn read() -> Result<Self, HostError> {
        let mut sessions = Self::default();
        for pid in proc::processes()? {
            if let Some(stat) = proc::stat(pid)?.filter(|s| !s.is_dead()) {
                sessions.0.entry(stat.session).or_default().push(pid);
            }
        }
        Ok(sessions)
    }

    fn members(&self, session: Tid) -> &[Tid] {
        self.0.get(&session).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_made_now_begins_at_the_present_tick() {
        let before = now();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let start_time = proc::stat(child.id()).unwrap().unwrap().start_time;
        child.wait().unwrap();
        assert!((before..=now()).contains(&start_time), "{start_time}");
    }

    #[test]
    fn groups_overlap_when_one_is_within_the_other() {
        let overlap = |own: Option<&str>, folder: &str| {
            let own = OwnGroups {
                cgroup: own.map(PathBuf::from),
                ..OwnGroups::default()
            };
            own.overlaps(Path::new(folder))
        };
        assert!(overlap(Some("/c/vm"), "/c/vm"));
        assert!(overlap(Some("/c/vm"), "/c/vm/a"));
        assert!(overlap(Some("/c/vm/a"), "/c/vm"));
        assert!(!overlap(Some("/c/vm1"), "/c/vm"));
        assert!(!overlap(None, "/c/vm"));
    }
}
