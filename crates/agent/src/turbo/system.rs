// SPDX-License-Identifier: Apache-2.0
//! Access to the guest: files below `/proc` and `/sys`, affinities, and irqbalance's socket.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::cpus::Cpus;
use super::irqbalance;

/// A guest, by absolute paths. Tests have one that is made of files.
pub trait System: Send {
    /// Reads a small file.
    ///
    /// # Errors
    /// The kernel's error.
    fn read(&self, path: &str) -> io::Result<String>;

    /// Writes to an existing file.
    ///
    /// # Errors
    /// The kernel's error.
    fn write(&self, path: &str, text: &str) -> io::Result<()>;

    /// Names in a directory; none when it does not exist.
    fn list_dir(&self, path: &str) -> Vec<String>;

    /// The path without symbolic links.
    fn real_path(&self, path: &str) -> Option<String>;

    /// Whether a file's mode has a write bit.
    fn is_writable(&self, path: &str) -> bool;

    /// Creates a directory.
    ///
    /// # Errors
    /// The kernel's error.
    fn create_dir(&self, path: &str) -> io::Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The kernel's error.
    fn remove_dir(&self, path: &str) -> io::Result<()>;

    /// Sets a thread's affinity.
    ///
    /// # Errors
    /// The kernel's error.
    fn set_affinity(&self, tid: i32, cpus: &Cpus) -> io::Result<()>;

    /// Sends a message to irqbalance and returns its answer.
    ///
    /// # Errors
    /// When it does not listen or answer.
    fn irqbalance(&self, pid: i32, words: &str) -> io::Result<String>;
}

/// This guest, or a copy of its files below another root.
#[derive(Debug, Clone)]
pub struct RealSystem {
    root: PathBuf,
}

impl RealSystem {
    /// Uses `root` in place of `/`.
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

impl System for RealSystem {
    fn read(&self, path: &str) -> io::Result<String> {
        fs::read_to_string(self.at(path))
    }

    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).truncate(true).open(self.at(path))?;
        file.write_all(text.as_bytes())
    }

    fn list_dir(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    fn real_path(&self, path: &str) -> Option<String> {
        let root = self.root.canonicalize().ok()?;
        let real = self.at(path).canonicalize().ok()?;
        let below = real.strip_prefix(root).ok()?;
        Some(format!("/{}", below.to_str()?))
    }

    fn is_writable(&self, path: &str) -> bool {
        fs::metadata(self.at(path)).is_ok_and(|meta| meta.permissions().mode() & 0o222 != 0)
    }

    fn create_dir(&self, path: &str) -> io::Result<()> {
        fs::create_dir(self.at(path))
    }

    fn remove_dir(&self, path: &str) -> io::Result<()> {
        fs::remove_dir(self.at(path))
    }

    fn set_affinity(&self, tid: i32, cpus: &Cpus) -> io::Result<()> {
        let mut set = CpuSet::new();
        for cpu in cpus.iter().map(|cpu| cpu as usize) {
            if cpu >= CpuSet::MAX_CPU {
                return Err(ErrorKind::Unsupported.into());
            }
            set.set(cpu);
        }
        let tid = Pid::from_raw(tid).ok_or(ErrorKind::InvalidInput)?;
        Ok(sched_setaffinity(Some(tid), &set)?)
    }

    fn irqbalance(&self, pid: i32, words: &str) -> io::Result<String> {
        irqbalance::ask(&self.at("/run/irqbalance"), pid, words)
    }
}
