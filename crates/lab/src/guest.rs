// SPDX-License-Identifier: Apache-2.0
//! A running guest.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::channel::Channel;
use crate::error::{Error, Result};
use crate::process::ProcessId;
use crate::registration::Registration;
use crate::relay::{self, Relay};
use crate::shell::Shell;
use crate::spec::GuestSpec;
use crate::start::{AgentLine, Started};
use crate::wire::{Command, Output, Stat, Workload};

/// Time limit for a reply that needs no work; a guest may share its core with many others.
const GUEST_REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a guest to power off.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of [`Guest::exec`].
const EXEC_TIMEOUT: Duration = Duration::from_secs(60);

/// A guest of a running lab. Several threads may call it at once.
pub struct Guest {
    spec: GuestSpec,
    id: ProcessId,
    child: Mutex<Child>,
    channel: Channel,
    shell: Shell,
    agent: PathBuf,
    _relay: Option<Relay>,
    console: PathBuf,
    cgroup: Option<PathBuf>,
    boot_timeout: Duration,
    _registration: Registration,
}

impl Guest {
    pub(crate) fn new(spec: GuestSpec, mut started: Started) -> Result<Self> {
        let failed = |e: std::io::Error| Error::guest(&spec.name, e.to_string());
        let Some(id) = ProcessId::of(started.child.id()) else {
            let _ = started.child.wait();
            return Err(failed(std::io::Error::other("its kernel ended at once")));
        };
        let registration = Registration::new(id, &spec.name)?;
        let (agent, relay, channel) = match started.agent {
            AgentLine::Serial(line, folder) => {
                crate::rearm::start(started.child.id()).map_err(failed)?;
                let relay = Relay::new(line, &folder).map_err(failed)?;
                let up = relay.up().map_err(failed)?;
                let channel = Channel::new(started.channel, up);
                (folder.join(relay::SOCKET), Some(relay), channel)
            }
            AgentLine::Socket(socket) => (socket, None, Channel::new(started.channel, || ())),
        };
        let channel = channel.map_err(failed)?;
        let shell = Shell::new(started.shell).map_err(failed)?;
        let child = Mutex::new(started.child);
        Ok(Self {
            spec,
            id,
            child,
            channel,
            shell,
            agent,
            _relay: relay,
            console: started.console,
            cgroup: started.cgroup,
            boot_timeout: started.boot_timeout,
            _registration: registration,
        })
    }

    /// Its name in the lab.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its description.
    pub fn spec(&self) -> &GuestSpec {
        &self.spec
    }

    /// Process id of the guest's kernel, or of QEMU, which stays the same over reboots. The main thread of a UML guest's
    /// kernel is its first vCPU.
    pub fn pid(&self) -> u32 {
        self.id.pid
    }

    pub(crate) fn id(&self) -> ProcessId {
        self.id
    }

    /// Address of its first NIC.
    pub fn address(&self) -> Option<Ipv4Addr> {
        self.spec.taps.first().map(|tap| tap.address)
    }

    /// File with the output of its kernel.
    pub fn console(&self) -> &Path {
        &self.console
    }

    /// Unix socket at the host end of its agent's line (`/dev/ttyS2` in a UML guest, the port `org.viola.agent.0` of QEMU), for one
    /// client at a time. It appears shortly after the guest has booted.
    pub fn agent_socket(&self) -> &Path {
        &self.agent
    }

    /// Its cpu cgroup: that of a KVM guest (cgroup v2), or of a guest with a weight.
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_deref()
    }

    pub(crate) fn shell(&self) -> &Shell {
        &self.shell
    }

    /// Whether its kernel is running.
    pub fn alive(&self) -> bool {
        matches!(self.child().try_wait(), Ok(None))
    }

    /// Checks that its init answers.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn ping(&self) -> Result<()> {
        self.ask::<Value>(Command::Ping, GUEST_REPLY_TIMEOUT)
            .map(drop)
    }

    /// Runs a program in the guest for at most a minute.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn exec<S: AsRef<str>>(&self, argv: &[S]) -> Result<Output> {
        self.exec_for(argv, "", EXEC_TIMEOUT)
    }

    /// Runs a program in the guest with `stdin` as its standard input. The guest kills it after
    /// `limit`.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn exec_for<S: AsRef<str>>(
        &self,
        argv: &[S],
        stdin: &str,
        limit: Duration,
    ) -> Result<Output> {
        let argv = argv.iter().map(|word| word.as_ref().to_owned()).collect();
        let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let command = Command::Exec {
            argv,
            timeout_ms,
            stdin: stdin.into(),
        };
        self.ask(command, limit.saturating_add(GUEST_REPLY_TIMEOUT))
    }

    /// Starts a workload. Returns when it works, or serves requests.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn start(&self, name: &str, workload: Workload) -> Result<()> {
        self.ask::<Value>(
            Command::Start {
                name: name.into(),
                workload,
            },
            GUEST_REPLY_TIMEOUT,
        )
        .map(drop)
    }

    /// Stops a workload. Returns its last state.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn stop(&self, name: &str) -> Result<Stat> {
        self.ask(Command::Stop { name: name.into() }, GUEST_REPLY_TIMEOUT)
    }

    /// State of a workload.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn stat(&self, name: &str) -> Result<Stat> {
        self.ask(Command::Stat { name: name.into() }, GUEST_REPLY_TIMEOUT)
    }

    /// Names of its running workloads.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn workloads(&self) -> Result<Vec<String>> {
        self.ask(Command::List, GUEST_REPLY_TIMEOUT)
    }

    /// Powers the guest off. Kills it after ten seconds.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn shutdown(&self) -> Result<()> {
        if self.alive() {
            let asked = self.channel.ask(Command::Shutdown, SHUTDOWN_TIMEOUT);
            let clean = asked.is_ok() && self.wait_end(SHUTDOWN_TIMEOUT);
            self.kill();
            if !clean {
                return Err(Error::guest(
                    self.name(),
                    "it did not power off in time and was killed",
                ));
            }
        }
        self.kill();
        Ok(())
    }

    /// Restarts its kernel and the workloads of its description. Returns when they are up.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest refuses or does not answer in time.
    pub fn reboot(&self) -> Result<()> {
        let before = self.channel.boots();
        self.ask::<Value>(Command::Reboot, GUEST_REPLY_TIMEOUT)?;
        self.wait_boot(before)?;
        self.start_workloads()
    }

    /// Kills its kernel and waits until all its processes are gone.
    pub fn kill(&self) {
        let mut child = self.child();
        if matches!(child.try_wait(), Ok(None)) {
            let _ = child.kill();
        }
        let _ = child.wait();
        self.id.kill_session();
    }

    pub(crate) fn wait_boot(&self, before: u64) -> Result<()> {
        if self.channel.wait_up(before, self.boot_timeout) {
            return Ok(());
        }
        // its channel closes shortly before its process ends
        let what = if self.wait_end(Duration::from_secs(1)) {
            "its kernel ended while booting".to_owned()
        } else {
            format!("it did not boot within {} s", self.boot_timeout.as_secs())
        };
        let log = std::fs::read(&self.console).unwrap_or_default();
        let words = last_words(&String::from_utf8_lossy(&log));
        Err(Error::guest(
            self.name(),
            format!("{what}; its console says: {words}"),
        ))
    }

    pub(crate) fn start_workloads(&self) -> Result<()> {
        self.spec
            .workloads
            .iter()
            .try_for_each(|(name, workload)| self.start(name, workload.clone()))
    }

    /// Passes a client's command to the guest.
    pub(crate) fn forward(&self, command: Command) -> Result<Value> {
        let limit = match &command {
            Command::Exec { timeout_ms, .. } => {
                GUEST_REPLY_TIMEOUT.saturating_add(Duration::from_millis(*timeout_ms))
            }
            _ => GUEST_REPLY_TIMEOUT,
        };
        self.ask(command, limit)
    }

    fn ask<T: DeserializeOwned>(&self, command: Command, limit: Duration) -> Result<T> {
        let answer = self
            .channel
            .ask(command, limit)
            .map_err(|e| Error::guest(self.name(), e))?;
        serde_json::from_value(answer)
            .map_err(|e| Error::guest(self.name(), format!("its answer is not valid: {e}")))
    }

    fn wait_end(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while self.alive() {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The line with the reason of a kernel panic, else the last lines of a console.
fn last_words(log: &str) -> String {
    if let Some(panic) = log.lines().find(|line| line.contains("Kernel panic")) {
        return panic.trim().into();
    }
    let mut last: Vec<&str> = log
        .lines()
        .rev()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .take(3)
        .collect();
    last.reverse();
    last.join(" / ")
}

#[cfg(test)]
mod tests {
    use super::last_words;

    #[test]
    fn the_reason_of_a_panic_is_preferred_to_the_last_lines() {
        assert_eq!(
            last_words("a\nKernel panic - not syncing: x\n[<6>] ? panic\n"),
            "Kernel panic - not syncing: x"
        );
        assert_eq!(last_words("a\nb\n\nc\nd \n"), "b / c / d");
        assert_eq!(last_words(""), "");
    }
}
