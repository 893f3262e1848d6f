// SPDX-License-Identifier: Apache-2.0
//! Processes of this program that read what a guest or an emulator answers, without privilege.
//!
//! `viola worker NAME` enters a worker's sandbox before it reads anything. Other programs that use this library have no such
//! command and read the answers themselves.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

static ARE_USED: AtomicBool = AtomicBool::new(false);

/// From now on processes read answers. Only a program with the command `worker` may call this.
pub fn use_processes() {
    ARE_USED.store(true, Ordering::Relaxed);
}

/// Whether processes read answers.
#[must_use]
pub fn are_used() -> bool {
    ARE_USED.load(Ordering::Relaxed)
}

/// A process that is killed on drop.
#[derive(Debug)]
pub struct AnswerProcess(Child);

impl AnswerProcess {
    /// Starts `viola worker WORDS`. `from` is what it reads, its standard input; `to` its standard output.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(words: &[&str], from: OwnedFd, to: OwnedFd) -> io::Result<Self> {
        Command::new("/proc/self/exe")
            .arg("worker")
            .args(words)
            .current_dir("/")
            .env_clear()
            .stdin(Stdio::from(from))
            .stdout(Stdio::from(to))
            .spawn()
            .map(Self)
    }
}

impl Drop for AnswerProcess {
    fn drop(&mut self) {
        // It has ended by itself as a rule.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
