// SPDX-License-Identifier: Apache-2.0
//! The daemon of a side: `viola run` with a configuration, ended with SIGTERM.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use viola_proto::{Stage, Status};

use super::super::folder::Folder;
use super::super::spawn;
use super::{Guests, Side};
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome};
use viola_cli::interrupt;

/// Timeout for the daemon to schedule the guests, and to restore everything.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(15);
/// Timeout for a transient state of the daemon; after that its reason is reported.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(3);

/// A running `viola run`.
pub(super) struct Daemon {
    pub(super) child: Child,
    pub(super) client: Client,
    folder: Folder,
}

impl Daemon {
    pub(super) fn start(side: Side, guests: &Guests, names: &[&str]) -> Outcome<Self> {
        let path = PathBuf::from(format!("/run/viola-bench.{}", std::process::id()));
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", path.display()));
        let _ = fs::remove_dir_all(&path);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(failed)?;
        let folder = Folder(path.clone());
        let config = path.join("viola.toml");
        fs::write(&config, guests.config(side, &path)).map_err(failed)?;
        let child = spawn::daemon(&config, &path.join("log"), None).map_err(failed)?;
        let client = Client::new(&path.join("viola.sock"));
        let mut daemon = Self {
            child,
            client,
            folder,
        };
        daemon.wait(side, guests, names)?;
        Ok(daemon)
    }

    /// Waits until all guests are on the cores, and the latency-sensitive ones on cores that the daemon schedules. Of
    /// several cores it schedules only those that need it.
    fn wait(&mut self, side: Side, guests: &Guests, names: &[&str]) -> Outcome {
        let started = Instant::now();
        let mut last = String::from("the daemon does not answer");
        while started.elapsed() < DAEMON_TIMEOUT {
            interrupt::check()?;
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(Failure::run(format!(
                    "viola run ended with {status}: {}",
                    self.log_tail()
                )));
            }
            if let Ok(status) = self.client.get::<Status>("/status") {
                let listed = status
                    .cores
                    .iter()
                    .filter(|c| guests.cores.contains(&(c.cpu as usize)));
                let (managed, others): (Vec<_>, Vec<_>) = listed.partition(|c| c.managed);
                let has = |cores: &[&viola_proto::Core], name: &str| {
                    let mut vms = cores.iter().flat_map(|c| &c.vms);
                    vms.any(|vm| vm == name)
                };
                let is_placed = |name: &&str| has(&managed, name) || has(&others, name);
                let is_served = !managed.is_empty() && guests.ls.iter().all(|n| has(&managed, n));
                let is_ready = match side {
                    // It changes nothing yet.
                    Side::Auto => status.stage == Stage::Idle,
                    _ => status.stage == Stage::Running && is_served,
                };
                if is_ready && names.iter().all(is_placed) {
                    return Ok(());
                }
                last = match others.first() {
                    Some(core) if status.stage == Stage::Running => core.why.clone(),
                    _ => status.why.clone(),
                };
                if let Some(left) = status.unmanaged.first() {
                    last = format!("{}: {}", left.vm, left.why);
                }
                if status.stage == Stage::Off && started.elapsed() > SETTLE_TIMEOUT {
                    break;
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(Failure::run(format!(
            "viola does not schedule the guests: {last}"
        )))
    }

    pub(super) fn controller_ns(&self) -> Outcome<u64> {
        let status: Status = self.client.get("/status").map_err(Failure::run)?;
        if status.failures > 0 {
            return Err(Failure::run(format!(
                "the slot controller failed during a measurement: {}",
                self.log_tail()
            )));
        }
        Ok(status.cores.iter().map(|c| c.controller_ns).sum())
    }

    pub(super) fn stop(&mut self) -> Outcome {
        let started = Instant::now();
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        while started.elapsed() < DAEMON_TIMEOUT {
            match self.child.try_wait().map_err(Failure::run)? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    return Err(Failure::run(format!(
                        "viola run ended with {status}: {}",
                        self.log_tail()
                    )));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        Err(Failure::run(format!(
            "viola run does not end: {}",
            self.log_tail()
        )))
    }

    /// Last lines of the daemon's log, for errors.
    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.folder.0.join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(3)..].join(" / ")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) && self.stop().is_err() {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}
