// SPDX-License-Identifier: Apache-2.0
//! One daemon per host: a locked file that says who holds it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Name of the file in `run_dir`.
const NAME: &str = "viola.lock";

/// Why the lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else has it.
    #[error("another viola{} runs with {}; stop it first, or give this one another run_dir", pid_text(*pid), run_dir.display())]
    Held {
        /// Who, when the file says so.
        pid: Option<u32>,
        /// Whose lock.
        run_dir: PathBuf,
    },
    /// The file cannot be made or locked.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

fn pid_text(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |p| format!(" (process {p})"))
}

/// The lock; held until dropped or until the process ends in whatever way. Children do not inherit it.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock of a run directory, and writes this process's number into it.
    pub fn take(run_dir: &Path) -> Result<Self, LockError> {
        let path = run_dir.join(NAME);
        let fail = |source| LockError::Io {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(fail)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(LockError::Held {
                    pid: read_pid(&mut file),
                    run_dir: run_dir.to_owned(),
                });
            }
            Err(e) => return Err(fail(e.into())),
        }
        file.set_len(0).map_err(fail)?;
        writeln!(file, "{}", std::process::id()).map_err(fail)?;
        Ok(Self { file })
    }

    /// Who holds the lock of a run directory, if anybody does: its number where it is known.
    pub fn holder(run_dir: &Path) -> Option<Option<u32>> {
        let mut file = OpenOptions::new()
            .read(true)
            .open(run_dir.join(NAME))
            .ok()?;
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(rustix::io::Errno::WOULDBLOCK) => Some(read_pid(&mut file)),
            _ => None,
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file stays: removing it would let two daemons hold locks on two files of one name.
        let _ = self.file.set_len(0);
    }
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

/// Makes a directory of ours, unless it is there.
pub fn make_dir(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(mode)
        .create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_one_is_told_who_is_first() {
        let dir = tempfile::tempdir().unwrap();
        let first = Lock::take(dir.path()).unwrap();
        let said = Lock::take(dir.path()).unwrap_err().to_string();
        assert!(
            said.contains(&format!("process {}", std::process::id())),
            "{said}"
        );
        assert_eq!(Lock::holder(dir.path()), Some(Some(std::process::id())));
        drop(first);
        assert_eq!(Lock::holder(dir.path()), None);
        Lock::take(dir.path()).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_there_is_named() {
        let said = Lock::take(Path::new("/nonexistent/viola"))
            .unwrap_err()
            .to_string();
        assert!(
            said.starts_with("/nonexistent/viola/viola.lock: "),
            "{said}"
        );
    }
}
