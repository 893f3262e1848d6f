// SPDX-License-Identifier: Apache-2.0
//! The journal: a file with the old value of each setting, written before the change. After a kill, the next agent or
//! `viola-agent restore` restores them.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::knob::{Knob, Step};

/// Content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Contents {
    /// Id of the boot in which the values were changed; settings do not outlive it.
    pub boot: String,
    /// CPUs that were online when the values were set.
    pub online: String,
    /// Changes in the order in which they were made; `old` is from before the first one.
    pub steps: Vec<Step>,
}

/// The file, locked for one agent at a time.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    /// Its content.
    pub contents: Contents,
    _lock: File,
}

impl Journal {
    /// Opens and locks the journal, and reads what an earlier agent has left in it.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] when another agent has it, [`ErrorKind::InvalidData`] when it cannot be parsed.
    pub fn open(path: &Path, boot: &str) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut options = fs::OpenOptions::new();
        let lock = path.with_extension("lock");
        let lock = options
            .create(true)
            .truncate(false)
            .write(true)
            .open(lock)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        let left: Contents = match fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text).map_err(|e| {
                let what = format!("{}: {e}; it holds the old settings", path.display());
                io::Error::new(ErrorKind::InvalidData, what)
            })?,
            Err(e) if e.kind() == ErrorKind::NotFound => Contents::default(),
            Err(e) => return Err(e),
        };
        let contents = match left.boot == boot {
            true => left,
            // those settings ended with that boot
            false => Contents {
                boot: boot.to_owned(),
                ..Contents::default()
            },
        };
        Ok(Self {
            path: path.to_owned(),
            contents,
            _lock: lock,
        })
    }

    /// Adds changes that are about to be made. A setting that was changed before keeps its first old value.
    pub fn add(&mut self, steps: &[Step]) {
        for step in steps {
            let mut all = self.contents.steps.iter_mut();
            let before = all.find(|s| s.knob == step.knob && s.identity == step.identity);
            match before {
                Some(before) => before.new.clone_from(&step.new),
                None => {
                    self.drop(&step.knob);
                    self.contents.steps.push(step.clone());
                }
            }
        }
    }

    /// Removes a setting.
    pub fn drop(&mut self, knob: &Knob) {
        self.contents.steps.retain(|step| step.knob != *knob);
    }

    /// Writes the file, or removes it when nothing has to be restored.
    ///
    /// # Errors
    /// The system's, with the file's name.
    pub fn save(&self) -> io::Result<()> {
        self.write().map_err(|e| {
            let what = format!("{}: {e}", self.path.display());
            io::Error::new(e.kind(), what)
        })
    }

    fn write(&self) -> io::Result<()> {
        if self.contents.steps.is_empty() {
            return match fs::remove_file(&self.path) {
                Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
                _ => Ok(()),
            };
        }
        let new = self.path.with_extension("new");
        let mut file = File::create(&new)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        serde_json::to_writer(&mut file, &self.contents)?;
        file.flush()?;
        file.sync_data()?;
        fs::rename(&new, &self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turbo::knob::Part;

    fn step(old: &str, new: &str) -> Step {
        Step {
            knob: Knob::Workqueues,
            part: Part::Workqueues,
            identity: String::new(),
            old: old.into(),
            new: new.into(),
            chain: false,
        }
    }

    #[test]
    fn the_first_old_value_is_kept_across_changes_and_agents_but_not_across_boots() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/turbo.json");
        let mut journal = Journal::open(&path, "a").unwrap();
        journal.add(&[step("0-1", "0")]);
        journal.add(&[step("0-2", "2")]);
        assert_eq!(journal.contents.steps, [step("0-1", "2")]);
        journal.save().unwrap();
        let second = Journal::open(&path, "a").unwrap_err();
        assert_eq!(second.kind(), ErrorKind::WouldBlock);
        drop(journal);
        let mut journal = Journal::open(&path, "a").unwrap();
        assert_eq!(journal.contents.steps, [step("0-1", "2")]);
        journal.drop(&Knob::Workqueues);
        journal.save().unwrap();
        assert!(!path.exists());
        journal.add(&[step("0-1", "2")]);
        journal.save().unwrap();
        drop(journal);
        assert_eq!(Journal::open(&path, "b").unwrap().contents.steps, []);
        fs::write(&path, "{").unwrap();
        let error = Journal::open(&path, "b").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
}
