// SPDX-License-Identifier: Apache-2.0
//! A lab's folder below /run: lock, state file, and removal of what a killed lab left.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::error::{Error, Result};
use crate::process::ProcessId;

/// What must be removed when the lab has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The process that holds the lab.
    pub(crate) supervisor: Option<ProcessId>,
    /// Path of the lab's network namespace, valid while its supervisor lives.
    pub(crate) netns: PathBuf,
    /// Guest kernels by guest name.
    pub(crate) guests: Vec<(String, ProcessId)>,
    /// Cgroups of the lab.
    pub(crate) cgroups: Vec<PathBuf>,
}

/// The folder of a running lab. Locks the lab's name until it is dropped.
pub(crate) struct RunDir {
    path: PathBuf,
    state: State,
    // beside the folder: removing the folder keeps the lock
    lock_path: PathBuf,
    _lock: File,
}

impl RunDir {
    /// Locks the lab's name, removes what an earlier lab of this name left, creates the folder.
    pub(crate) fn create(run: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(run).map_err(Error::io("make", run))?;
        let (lock_path, path) = (lock_path(run, name), run.join(name));
        let mut lock = self::lock(&lock_path)?;
        for _ in 0..200 {
            // an ending lab has removed its folder but still holds the lock
            if lock.is_some() || path.exists() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
            lock = self::lock(&lock_path)?;
        }
        let lock = lock.ok_or_else(|| Error::AlreadyRunning { name: name.into() })?;
        sweep_folder(&path);
        fs::create_dir(&path).map_err(Error::io("make", &path))?;
        let mut dir = Self {
            path,
            state: State::default(),
            lock_path,
            _lock: lock,
        };
        dir.update(|state| state.supervisor = ProcessId::of(std::process::id()))?;
        Ok(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Changes the state and writes it atomically.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut State)) -> Result<()> {
        change(&mut self.state);
        let (file, new) = (
            self.path.join("state.json"),
            self.path.join("state.json.new"),
        );
        let text = serde_json::to_string_pretty(&self.state).unwrap_or_default();
        fs::write(&new, text).map_err(Error::io("write", &new))?;
        fs::rename(&new, &file).map_err(Error::io("write", &file))
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }
}

impl RunDir {
    /// Removes the folder; the lock stays until the drop.
    pub(crate) fn remove(&self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        self.remove();
        let _ = fs::remove_file(&self.lock_path);
    }
}

fn lock_path(run: &Path, name: &str) -> PathBuf {
    run.join(format!("{name}.lock"))
}

/// Takes the lock; `None` if another process has it.
fn lock(path: &Path) -> Result<Option<File>> {
    loop {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = file.map_err(Error::io("open", path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            other => other.map_err(|e| Error::io("lock", path)(e.into()))?,
        }
        // the earlier holder may have removed the file between our open and our lock
        use std::os::unix::fs::MetadataExt;
        let ours = file.metadata().map(|m| m.ino()).ok();
        if fs::metadata(path).map(|m| m.ino()).ok() == ours {
            return Ok(Some(file));
        }
    }
}

/// Reads the state of a lab.
pub(crate) fn read(run: &Path, name: &str) -> Option<State> {
    serde_json::from_str(&fs::read_to_string(run.join(name).join("state.json")).ok()?).ok()
}

/// Labs with a folder: name, and whether the lab is running.
pub(crate) fn labs(run: &Path) -> Vec<(String, bool)> {
    let mut labs: Vec<(String, bool)> = fs::read_dir(run)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .map(|name| {
            // by the process, not the lock: taking the lock would disturb a lab that is starting
            let holder = read(run, &name).and_then(|state| state.supervisor);
            let running = holder.is_some_and(ProcessId::alive);
            (name, running)
        })
        .collect();
    labs.sort();
    labs
}

/// Removes what killed labs left. Returns their names.
pub(crate) fn sweep(run: &Path) -> Result<Vec<String>> {
    let mut swept = Vec::new();
    for (name, _) in labs(run).into_iter().filter(|(_, running)| !running) {
        let path = lock_path(run, &name);
        if let Some(_lock) = lock(&path)? {
            sweep_folder(&run.join(&name));
            let _ = fs::remove_file(&path);
            swept.push(name);
        }
    }
    Ok(swept)
}

/// Kills and removes what the folder's state names, then the folder. The caller holds the lock.
fn sweep_folder(path: &Path) {
    let text = fs::read_to_string(path.join("state.json")).unwrap_or_default();
    if let Ok(state) = serde_json::from_str::<State>(&text) {
        clear(&state);
    }
    let _ = fs::remove_dir_all(path);
}

/// Kills the guests and removes the cgroups of a state.
pub(crate) fn clear(state: &State) {
    for (_, guest) in &state.guests {
        guest.kill_session();
    }
    for group in &state.cgroups {
        cgroup::remove(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_locked_while_its_lab_runs() {
        let run = tempfile::tempdir().unwrap();
        let first = RunDir::create(run.path(), "a").unwrap();
        assert!(matches!(
            RunDir::create(run.path(), "a"),
            Err(Error::AlreadyRunning { .. })
        ));
        assert_eq!(labs(run.path()), [("a".to_owned(), true)]);
        drop(first);
        assert_eq!(labs(run.path()), []);
        assert!(RunDir::create(run.path(), "a").is_ok());
    }

    #[test]
    fn sweep_removes_what_a_killed_lab_left() {
        let run = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        let state = State {
            guests: vec![("g".into(), id)],
            ..State::default()
        };
        let folder = run.path().join("a");
        fs::create_dir(&folder).unwrap();
        fs::write(
            folder.join("state.json"),
            serde_json::to_string(&state).unwrap(),
        )
        .unwrap();
        fs::write(folder.join("rubbish"), "").unwrap();
        assert_eq!(labs(run.path()), [("a".to_owned(), false)]);
        assert_eq!(sweep(run.path()).unwrap(), ["a"]);
        child.wait().unwrap();
        assert!(!folder.exists());
    }

    #[test]
    fn a_running_lab_is_not_swept() {
        let run = tempfile::tempdir().unwrap();
        let lab = RunDir::create(run.path(), "a").unwrap();
        assert!(sweep(run.path()).unwrap().is_empty());
        assert!(lab.path().join("state.json").exists());
    }
}
