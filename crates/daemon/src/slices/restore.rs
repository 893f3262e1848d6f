// SPDX-License-Identifier: Apache-2.0
//! Restores what an earlier run left: it ends slot controllers and watchdogs, and gives threads back their priority, slice and
//! affinity from the files in the run directory.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::host::process::{is_alive, kill};
use viola_host::{Tid, proc};
use viola_sched::restore::{RestoreCount, RestoreError, SavedState, restore_file, restore_slices};
use viola_sched::slots::watchdog::HelperArgs;

/// File with the attributes that threads had before slots.
pub fn slots_file(run_dir: &Path) -> PathBuf {
    run_dir.join("slots.json")
}

/// The same before sched_ext.
pub fn sched_ext_file(run_dir: &Path) -> PathBuf {
    run_dir.join("sched_ext.json")
}

/// The same before eevdf.
pub fn eevdf_file(run_dir: &Path) -> PathBuf {
    run_dir.join("eevdf.json")
}

/// File with the affinities that threads had before they were pinned.
pub fn affinity_file(run_dir: &Path) -> PathBuf {
    run_dir.join("affinity.json")
}

/// A controller whose watchdog is gone restores all threads by itself, for which it has this time.
const CONTROLLER_EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// What was restored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Restoration {
    /// Processes ended.
    pub processes: usize,
    /// VMs in the files.
    pub vms: usize,
    /// Threads that got something back.
    pub threads: usize,
}

impl Restoration {
    /// Whether there was anything to do.
    pub fn is_nothing(&self) -> bool {
        self.processes == 0 && self.vms == 0
    }

    fn add(&mut self, r: RestoreCount) {
        self.vms += r.vms;
        self.threads += r.threads;
    }
}

impl fmt::Display for Restoration {
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

/// Restores what the files in `run_dir` say. After an error it goes on, and returns the first error at the end.
pub fn restore_all(run_dir: &Path) -> (Restoration, Option<RestoreError>) {
    let mut done = Restoration::default();
    let mut error = None;
    // The daemon knows it by its absolute path.
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
    let done = RestoreCount {
        vms: state.vms.len(),
        threads: restore_slices(&state.vms)?,
    };
    let _ = std::fs::remove_file(file);
    Ok(done)
}

/// Watchdogs and controllers that use this file. A stopped controller whose watchdog was killed is in no file.
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

/// Whether two paths name the same file, which need not exist.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let whole = |p: &Path| Some(p.parent()?.canonicalize().ok()?.join(p.file_name()?));
    a == b || whole(a).is_some_and(|a| Some(a) == whole(b))
}

/// Kills these processes. A watchdog is killed first: its controller sees that, restores all threads and exits; otherwise it is
/// killed, too.
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
            let deadline = Instant::now() + CONTROLLER_EXIT_TIMEOUT;
            while children.iter().any(|&(c, t)| is_alive(c, t)) && Instant::now() < deadline {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn without_files_there_is_nothing_to_restore() {
        let dir = tempfile::tempdir().unwrap();
        let (done, error) = restore_all(dir.path());
        assert!(done.is_nothing() && error.is_none());
        assert_eq!(done.to_string(), "nothing was left behind");
    }

    #[test]
    fn a_process_of_the_file_is_ended_unless_its_number_belongs_to_another_one() {
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
        assert_eq!(restore_all(dir.path()).0.processes, 0);
        assert!(child.try_wait().unwrap().is_none());
        note(start_time);
        let (done, error) = restore_all(dir.path());
        assert!(error.is_none());
        assert_eq!(done.processes, 1);
        assert_eq!(done.to_string(), "ended 1 left-behind process");
        assert!(!child.wait().unwrap().success());
        assert!(restore_all(dir.path()).0.is_nothing());
    }

    #[test]
    fn two_paths_of_one_folder_name_the_same_file() {
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
    fn a_damaged_file_does_not_prevent_the_others_from_being_restored() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(slots_file(dir.path()), "{").unwrap();
        SavedState::default()
            .write(&eevdf_file(dir.path()))
            .unwrap();
        let (_, error) = restore_all(dir.path());
        assert!(error.unwrap().to_string().contains("slots.json"));
        assert!(!eevdf_file(dir.path()).exists());
    }
}
