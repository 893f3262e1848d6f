// SPDX-License-Identifier: Apache-2.0
//! Runs another sched_ext scheduler, which schedules all threads of the host.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use viola_sched::scx;

use super::Outcome;

/// Timeout for a start, in guest time. The kernel's verifier processes hundreds of thousands of instructions, each of
/// which costs many emulated instructions of 8 ns.
const LOAD_TIMEOUT: Duration = Duration::from_secs(400);

/// An active scheduler. Drop ends it.
pub struct Other {
    child: Child,
    log: std::path::PathBuf,
}

impl Other {
    /// Starts the program and waits until its scheduler is active. Fails if the program ends, or if
    /// the scheduler is not active in time.
    pub fn start(program: &Path) -> Outcome<Self> {
        let log = super::file("other");
        let log_text = std::fs::File::create(&log)?;
        let child = Command::new(program)
            .stdin(Stdio::null())
            .stdout(log_text.try_clone()?)
            .stderr(log_text)
            .spawn()?;
        let mut other = Self { child, log };
        let end = Instant::now() + LOAD_TIMEOUT;
        while std::fs::read_to_string("/sys/kernel/sched_ext/state")?.trim() != "enabled" {
            if Instant::now() > end || other.child.try_wait()?.is_some() {
                return Err(format!("the scheduler did not start: {}", other.log_text()).into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(other)
    }

    /// Holds the scheduler until the file is removed. Fails if the scheduler ends before.
    pub fn hold_until_removed(mut self, file: &Path) -> Outcome {
        while file.exists() {
            if self.child.try_wait()?.is_some() || scx::active_scheduler().is_none() {
                return Err(format!("the scheduler ended: {}", self.log_text()).into());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn log_text(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("; ")
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        let end = Instant::now() + Duration::from_secs(10);
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() > end {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
