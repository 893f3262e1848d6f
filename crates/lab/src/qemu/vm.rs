// SPDX-License-Identifier: Apache-2.0
//! A running QEMU VM.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};

use super::image::Image;
use super::qmp::Qmp;
use super::spec::{VmSpec, file_of};
use crate::channel::Channel;
use crate::error::{Error, Result};
use crate::process::ProcessId;
use crate::registration::Registration;
use crate::wire::{Command, Output, Workload};

/// Time limit for QEMU's sockets to appear.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Time limit for a guest's reply that needs no work.
const GUEST_REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// A QEMU process and its guest. It is killed on drop, and when the thread that started it ends.
pub struct QemuVm {
    name: String,
    folder: PathBuf,
    child: Mutex<Child>,
    pid: u32,
    _registration: Option<Registration>,
    channel: Channel,
    boot_timeout: Duration,
    qmp: Mutex<Qmp>,
}

impl std::fmt::Debug for QemuVm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QemuVm")
            .field("name", &self.name)
            .field("pid", &self.pid)
            .finish_non_exhaustive()
    }
}

impl QemuVm {
    /// Starts a VM. Waits until the guest has booted, unless it is [`VmSpec::incoming`]. Its
    /// sockets and `NAME.log`, the console, are in `folder`, which several VMs may share.
    ///
    /// # Errors
    /// [`Error::Guest`] with QEMU's messages.
    pub fn start(spec: &VmSpec, image: &Image, folder: &Path) -> Result<Self> {
        let at = |what: &str| PathBuf::from(file_of(folder, &spec.name, what));
        let failed = |what: String| Error::guest(&spec.name, what);
        let io_error = |what: std::io::Error| Error::guest(&spec.name, what.to_string());
        for stale in ["lab", "agent", "qmp", "lab.qmp", "viola.qmp", "log"] {
            let _ = std::fs::remove_file(at(stale));
        }
        let listener = UnixListener::bind(at("lab")).map_err(Error::io("listen", at("lab")))?;
        let words = File::create(at("qemu.log")).map_err(Error::io("make", at("qemu.log")))?;
        let program = image.program();
        let mut command = Process::new(&program);
        command
            .args(spec.words(image, folder))
            .stdin(Stdio::null())
            .stdout(words.try_clone().map_err(io_error)?)
            .stderr(words);
        let mut cores = CpuSet::new();
        spec.cores.iter().for_each(|core| cores.set(*core));
        let pinned = !spec.cores.is_empty();
        // SAFETY: only system calls are made between fork and exec.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                if pinned {
                    sched_setaffinity(None, &cores)?;
                }
                Ok(())
            });
        }
        let mut child = command.spawn().map_err(|e| {
            let program = program.display();
            failed(format!("{program}: {e}; scripts/qemu-image.sh fetches it"))
        })?;
        // Nothing is registered for a process that has ended already; `begin` says why it did.
        let registration = ProcessId::of(child.id()).map(|id| Registration::new(id, &spec.name));
        let begun = begin(&mut child, &listener, &at("lab.qmp"));
        let (stream, qmp) = match begun {
            Ok(begun) => begun,
            Err(what) => {
                let _ = child.kill();
                let _ = child.wait();
                let log = std::fs::read_to_string(at("qemu.log")).unwrap_or_default();
                return Err(failed(format!("{what}; QEMU says: {}", log.trim())));
            }
        };
        let channel = Channel::new(stream, || ()).map_err(io_error)?;
        let vm = Self {
            _registration: registration.transpose()?,
            name: spec.name.clone(),
            folder: folder.to_owned(),
            pid: child.id(),
            child: Mutex::new(child),
            channel,
            qmp: Mutex::new(qmp),
            boot_timeout: spec.boot_timeout,
        };
        if !spec.incoming {
            vm.wait_boot(0)?;
        }
        Ok(vm)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Host end of the port for viola-agent, for one client at a time.
    pub fn agent_socket(&self) -> PathBuf {
        file_of(&self.folder, &self.name, "agent").into()
    }

    /// The output of its kernel.
    pub fn console(&self) -> String {
        let path = file_of(&self.folder, &self.name, "log");
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    }

    /// Whether QEMU is running.
    pub fn alive(&self) -> bool {
        matches!(self.child().try_wait(), Ok(None))
    }

    /// How often its init has come up.
    pub fn boots(&self) -> u64 {
        self.channel.boots()
    }

    /// Waits until its init has come up more than `before` times.
    ///
    /// # Errors
    /// [`Error::Guest`] with the end of its console.
    pub fn wait_boot(&self, before: u64) -> Result<()> {
        if self.channel.wait_up(before, self.boot_timeout) {
            return Ok(());
        }
        let console = self.console();
        let last: Vec<&str> = console.lines().rev().take(3).collect();
        let what = format!(
            "it did not boot; the last lines of its console: {}",
            last.join(" / ")
        );
        Err(self.error(what))
    }

    /// Checks that its init answers.
    ///
    /// # Errors
    /// [`Error::Guest`].
    pub fn ping(&self, limit: Duration) -> Result<()> {
        let asked = self.channel.ask(Command::Ping, limit);
        asked.map(drop).map_err(|e| self.error(e))
    }

    /// Runs a shell script in the guest, which kills it after `limit`.
    ///
    /// # Errors
    /// [`Error::Guest`] if the guest does not answer.
    pub fn exec(&self, script: &str, limit: Duration) -> Result<Output> {
        let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
        let command = Command::Exec {
            argv,
            timeout_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            stdin: String::new(),
        };
        let asked = self
            .channel
            .ask(command, limit.saturating_add(GUEST_REPLY_TIMEOUT));
        let answer = asked.map_err(|e| self.error(e))?;
        serde_json::from_value(answer)
            .map_err(|e| self.error(format!("its answer is not valid: {e}")))
    }

    /// Runs a script that must succeed within two minutes. Returns its standard output.
    ///
    /// # Errors
    /// [`Error::Guest`] with the script's output.
    pub fn sh(&self, script: &str) -> Result<String> {
        let output = self.exec(script, Duration::from_secs(120))?;
        if output.status == 0 {
            return Ok(output.stdout);
        }
        Err(self.error(format!(
            "`{script}` ended with {}: {}{}",
            output.status, output.stdout, output.stderr
        )))
    }

    /// Starts a workload, such as [`Workload::agent`].
    ///
    /// # Errors
    /// [`Error::Guest`].
    pub fn start_workload(&self, name: &str, workload: Workload) -> Result<()> {
        let name = name.to_owned();
        let asked = self
            .channel
            .ask(Command::Start { name, workload }, GUEST_REPLY_TIMEOUT);
        asked.map(drop).map_err(|e| self.error(e))
    }

    /// Runs a QMP command and returns the answer.
    ///
    /// # Errors
    /// [`Error::Guest`] with QEMU's error.
    pub fn qmp(&self, command: &str, arguments: Option<Value>) -> Result<Value> {
        let mut qmp = self.lock_qmp();
        let done = qmp.execute(command, arguments);
        done.map_err(|e| self.error(e))
    }

    /// Runs a command of the human monitor, for what QMP has no command.
    ///
    /// # Errors
    /// [`Error::Guest`].
    pub fn hmp(&self, line: &str) -> Result<String> {
        let answer = self.qmp("human-monitor-command", Some(json!({"command-line": line})))?;
        Ok(answer.as_str().unwrap_or_default().trim().to_owned())
    }

    /// Waits for an event of QEMU whose data fulfils `wanted`, or returns one that arrived since
    /// [`QemuVm::clear_events`].
    ///
    /// # Errors
    /// [`Error::Guest`] if it does not arrive in time.
    pub fn wait_event(
        &self,
        event: &str,
        wanted: impl Fn(&Value) -> bool,
        limit: Duration,
    ) -> Result<Value> {
        let mut qmp = self.lock_qmp();
        let came = qmp.wait(event, &wanted, limit).map_err(|e| self.error(e))?;
        came.ok_or_else(|| self.error(format!("no event {event} within {limit:?}")))
    }

    /// Drops earlier events.
    pub fn clear_events(&self) {
        self.lock_qmp().clear();
    }

    /// Ends QEMU at once.
    pub fn kill(&self) {
        let mut child = self.child();
        let _ = child.kill();
        let _ = child.wait();
    }

    fn error(&self, what: impl Into<String>) -> Error {
        Error::guest(&self.name, what)
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_qmp(&self) -> MutexGuard<'_, Qmp> {
        self.qmp.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for QemuVm {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Waits until QEMU has connected the guest's port, and connects to its monitor.
fn begin(
    child: &mut Child,
    listener: &UnixListener,
    monitor: &Path,
) -> std::result::Result<(UnixStream, Qmp), String> {
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let end = Instant::now() + START_TIMEOUT;
    let mut stream = None;
    loop {
        if stream.is_none()
            && let Ok((taken, _)) = listener.accept()
        {
            taken.set_nonblocking(false).map_err(|e| e.to_string())?;
            stream = Some(taken);
        }
        if monitor.exists()
            && let Some(stream) = stream.take()
        {
            return Ok((stream, Qmp::connect(monitor)?));
        }
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("it ended with {status}"));
        }
        if Instant::now() >= end {
            return Err("it did not start in time".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
