// SPDX-License-Identifier: Apache-2.0
//! One daemon per run directory: a locked file that names its process.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Name of the file in `run_dir`.
const NAME: &str = "viola.lock";

/// Why the lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has it.
    #[error("another viola{} runs with {}; stop it first, or give this one another run_dir", pid_text(*pid), run_dir.display())]
    Held {
        /// The process, when the file names it.
        pid: Option<u32>,
        /// The run directory.
        run_dir: PathBuf,
    },
    /// The file cannot be created or locked.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

fn pid_text(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |p| format!(" (process {p})"))
}

/// The lock, held until it is dropped or the process ends. Children do not inherit it.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock of a run directory, and writes the number of this process into the file.
    ///
    /// # Errors
    /// When another process has it, or the file cannot be written.
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

    /// The process that holds the lock of a run directory, if one does; `Some(None)` when the file does not name it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_daemon_gets_the_process_of_the_first() {
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
    fn a_missing_folder_is_named() {
        let said = Lock::take(Path::new("/nonexistent/viola"))
            .unwrap_err()
            .to_string();
        assert!(
            said.starts_with("/nonexistent/viola/viola.lock: "),
            "{said}"
        );
    }
}
