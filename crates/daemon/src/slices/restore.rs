// SPDX-License-Identifier: Apache-2.0
//! What an earlier run left behind: processes that still hold cores, and threads that are not as they were.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use viola_host::{Tid, proc};
use viola_sched::restore::{RestoreCount, RestoreError, SavedState, restore_file, restore_slices};
use viola_sched::slots::watchdog::HelperArgs;

/// Where the slot mechanism keeps the attributes from before.
pub fn slots_file(run_dir: &Path) -> PathBuf {
    run_dir.join("slots.json")
}

/// Where the sched_ext mechanism keeps them.
pub fn sched_ext_file(run_dir: &Path) -> PathBuf {
    run_dir.join("sched_ext.json")
}

/// Where the eevdf mechanism keeps them.
pub fn eevdf_file(run_dir: &Path) -> PathBuf {
    run_dir.join("eevdf.json")
}

/// Where the affinities from before are kept.
pub fn affinity_file(run_dir: &Path) -> PathBuf {
    run_dir.join("affinity.json")
}

/// How long a process may take to put things back by itself.
const PATIENCE: Duration = Duration::from_secs(2);

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Processes ended.
    pub processes: usize,
    /// VMs looked at.
    pub vms: usize,
    /// Changes taken back, one per thread as a rule.
    pub threads: usize,
}

impl Done {
    /// Whether there was anything to do.
    pub fn is_nothing(&self) -> bool {
        self.processes == 0 && self.vms == 0
    }

    fn add(&mut self, r: RestoreCount) {
        self.vms += r.vms;
        self.threads += r.threads;
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.processes > 0 {
            parts.push(format!(
                "ended {} left-behind {}",
                self.processes,
                plural(self.processes, "process", "processes")
            ));
        }
        let vms = format!("{} {}", self.vms, plural(self.vms, "VM", "VMs"));
        match (self.vms, self.threads) {
            (0, _) => {}
            (_, 0) => parts.push(format!("found {vms} as before any change")),
            (_, n) => parts.push(format!(
                "put back {n} {} of {vms}",
                plural(n, "thread", "threads")
            )),
        }
        if parts.is_empty() {
            parts.push("nothing was left behind".into());
        }
        f.write_str(&parts.join(", "))
    }
}

fn plural<'a>(n: usize, one: &'a str, many: &'a str) -> &'a str {
    if n == 1 { one } else { many }
}

/// Puts back everything that the files in `run_dir` tell of. Goes on past an error, and returns the first one.
pub fn put_back(run_dir: &Path) -> (Done, Option<RestoreError>) {
    let mut done = Done::default();
    let mut error = None;
    // As the daemon names it, whose configuration has whole paths only.
    let run_dir = &std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned());
    let slots = slots_file(run_dir);
    match SavedState::read(&slots) {
        Ok(state) => {
            let mut left = state.processes.clone();
            left.extend(controllers(&slots));
            done.processes = end(&left);
        }
        Err(e) => error = Some(e),
    }
    for file in [slots, sched_ext_file(run_dir), affinity_file(run_dir)] {
        match restore_file(&file) {
            Ok(r) => done.add(r),
            Err(e) => error = error.or(Some(e)),
        }
    }
    match eevdf(&eevdf_file(run_dir)) {
        Ok(r) => done.add(r),
        Err(e) => error = error.or(Some(e)),
    }
    (done, error)
}

fn eevdf(file: &Path) -> Result<RestoreCount, RestoreError> {
    let state = SavedState::read(file)?;
    let mut done = RestoreCount::default();
    for vm in &state.vms {
        done.vms += 1;
        done.threads += restore_slices(vm)?;
    }
    let _ = std::fs::remove_file(file);
    Ok(done)
}

/// Watchdogs and controllers that work with this file: one that was stopped while its watchdog was killed is noted
/// nowhere else.
fn controllers(file: &Path) -> Vec<(Tid, u64)> {
    let Ok(pids) = proc::processes() else {
        return Vec::new();
    };
    let is_ours = |pid: Tid| {
        let Ok(Some(args)) = proc::cmdline(pid) else {
            return false;
        };
        let [_, internal, what, json] = &args[..] else {
            return false;
        };
        internal == "internal"
            && matches!(what.as_str(), "slots-controller" | "slots-watchdog")
            && serde_json::from_str::<HelperArgs>(json).is_ok_and(|a| is_same_file(&a.saved, file))
    };
    pids.into_iter()
        .filter(|&pid| is_ours(pid))
        .filter_map(|pid| Some((pid, proc::stat(pid).ok()??.start_time)))
        .collect()
}

/// Whether two names are one file, or would be: it may not be there.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let whole = |p: &Path| Some(p.parent()?.canonicalize().ok()?.join(p.file_name()?));
    a == b || whole(a).is_some_and(|a| Some(a) == whole(b))
}

/// Ends processes that are still the ones meant. The watchdog comes first; its controller then sees that it is
/// gone, puts every thread back and ends by itself, or is ended as well.
fn end(processes: &[(Tid, u64)]) -> usize {
    let mut ended = 0;
    let mut seen = Vec::new();
    for &(pid, start_time) in processes {
        if seen.contains(&pid) {
            continue;
        }
        seen.push(pid);
        let children = proc::children(pid).unwrap_or_default();
        let children: Vec<_> = children
            .into_iter()
            .filter_map(|c| Some((c, proc::stat(c).ok()??.start_time)))
            .collect();
        if kill(pid, start_time) {
            ended += 1;
            let deadline = Instant::now() + PATIENCE;
            while children.iter().any(|&(c, t)| lives(c, t)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            for (child, start_time) in children {
                kill(child, start_time);
                seen.push(child);
            }
        }
    }
    ended
}

fn lives(pid: Tid, start_time: u64) -> bool {
    matches!(proc::stat(pid), Ok(Some(s)) if s.start_time == start_time && !s.is_dead())
}

/// Kills a process and waits until it is gone; `false` when it was gone, or is another one by now.
pub fn kill(pid: Tid, start_time: u64) -> bool {
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    // Opened first: what is looked at afterwards is then what the signal goes to.
    let Ok(fd) = pidfd_open(number, PidfdFlags::empty()) else {
        return false;
    };
    if pid == std::process::id()
        || !lives(pid, start_time)
        || pidfd_send_signal(&fd, Signal::KILL).is_err()
    {
        return false;
    }
    let deadline = Instant::now() + PATIENCE;
    while lives(pid, start_time) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn without_files_nothing_was_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let (done, error) = put_back(dir.path());
        assert!(done.is_nothing() && error.is_none());
        assert_eq!(done.to_string(), "nothing was left behind");
    }

    #[test]
    fn a_noted_process_is_ended_and_another_one_of_its_number_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let start_time = proc::stat(child.id()).unwrap().unwrap().start_time;
        let pid = child.id();
        let note = |start_time| {
            let state = SavedState {
                processes: vec![(pid, start_time)],
                vms: Vec::new(),
            };
            state.write(&slots_file(dir.path())).unwrap();
        };
        note(start_time + 1);
        assert_eq!(put_back(dir.path()).0.processes, 0);
        assert!(child.try_wait().unwrap().is_none());
        note(start_time);
        let (done, error) = put_back(dir.path());
        assert!(error.is_none());
        assert_eq!(done.processes, 1);
        assert_eq!(done.to_string(), "ended 1 left-behind process");
        assert!(!child.wait().unwrap().success());
        assert!(put_back(dir.path()).0.is_nothing());
    }

    #[test]
    fn a_folder_may_have_several_names() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        assert!(is_same_file(
            &link.join("slots.json"),
            &slots_file(dir.path())
        ));
        assert!(!is_same_file(
            &link.join("other.json"),
            &slots_file(dir.path())
        ));
        assert!(!is_same_file(
            Path::new("/nonexistent/slots.json"),
            &slots_file(dir.path())
        ));
    }

    #[test]
    fn a_damaged_file_does_not_keep_the_others_from_being_put_back() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(slots_file(dir.path()), "{").unwrap();
        SavedState::default()
            .write(&eevdf_file(dir.path()))
            .unwrap();
        let (_, error) = put_back(dir.path());
        assert!(error.unwrap().to_string().contains("slots.json"));
        assert!(!eevdf_file(dir.path()).exists());
    }
}
