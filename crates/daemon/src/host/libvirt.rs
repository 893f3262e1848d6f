// SPDX-License-Identifier: Apache-2.0
//! Events of libvirt. While libvirt's daemon runs, a thread reads them from a helper process
//! (`viola internal libvirt`), so that the daemon does not load libvirt's library. The daemon also
//! finds VMs in /proc; libvirt reports at once when one starts, and knows the state of VMs whose
//! monitor socket it uses itself.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_host::libvirt::{Domain, DomainState, Message};
use viola_proto::Libvirt as Shown;

use viola_cli::error::{Failure, Outcome, one_line};
use viola_cli::log::{self, Level};

/// The daemons of libvirt that manage QEMU VMs: the monolithic one, and the modular one.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];
/// First delay before a new attempt; also how often the thread looks for a running daemon.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Longest delay before a new attempt.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);
/// Delay where the library is not installed.
const NO_LIBRARY_RETRY_DELAY: Duration = Duration::from_secs(300);
/// Delay before a connection to a daemon that closed the last one: longer than systemd lets a service stop (90 s, `TimeoutStopSec`).
const CLOSED_RETRY_DELAY: Duration = Duration::from_secs(120);
/// Longest line of the helper process: a list of thousands of domains.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// How the thread starts its helper process, and where the pid files of libvirt's daemons are.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Program and its arguments.
    pub command: Vec<String>,
    /// Folder of libvirt's pid files.
    pub run: PathBuf,
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            // This very program, even if its file was replaced since.
            command: ["/proc/self/exe", "internal", "libvirt"]
                .map(str::to_owned)
                .into(),
            run: "/run".into(),
        }
    }
}

/// What the helper process reported.
#[derive(Debug, Default)]
struct Connection {
    connected: bool,
    why: String,
    /// Running domains, by UUID.
    domains: BTreeMap<String, Domain>,
    events: u64,
}

#[derive(Debug)]
struct Inner {
    connection: Mutex<Connection>,
    /// Whether the host has to be scanned.
    has_changed: AtomicBool,
    ends: AtomicBool,
    child: Mutex<Option<Child>>,
}

/// The thread that follows libvirt. Drop ends it and its helper process.
#[derive(Debug)]
pub struct Libvirt {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn new() -> Self {
        Self {
            connection: Mutex::new(Connection {
                why: "libvirt's daemon does not run".into(),
                ..Connection::default()
            }),
            has_changed: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            child: Mutex::new(None),
        }
    }
}

/// Runs the thread's work on what a helper process writes, for the fuzz target. Returns why it ended, and the domains.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn after(output: &[u8]) -> (Option<String>, BTreeMap<String, Domain>) {
    let inner = Inner::new();
    let (why, _) = inner.follow(output, &|_| {});
    let domains = std::mem::take(&mut lock(&inner.connection).domains);
    (why, domains)
}

impl Libvirt {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the kernel starts no thread.
    pub fn start(launch: Launch) -> Outcome<Self> {
        let inner = Arc::new(Inner::new());
        let of_thread = inner.clone();
        let thread = std::thread::Builder::new()
            .name("libvirt".into())
            .spawn(move || of_thread.run(&launch))
            .map_err(|e| {
                Failure::run(format!(
                    "the thread that reads libvirt's events cannot start: {e}"
                ))
            })?;
        Ok(Self {
            inner,
            thread: Some(thread),
        })
    }

    /// Whether an event since the last call requires a scan of the host.
    pub fn take_changed(&self) -> bool {
        self.inner.has_changed.swap(false, Ordering::AcqRel)
    }

    /// Running domains, by UUID; `None` without a connection.
    pub fn domains(&self) -> Option<BTreeMap<String, Domain>> {
        let connection = lock(&self.inner.connection);
        connection.connected.then(|| connection.domains.clone())
    }

    /// What the control socket shows.
    pub fn shown(&self) -> Shown {
        let connection = lock(&self.inner.connection);
        Shown {
            on: true,
            connected: connection.connected,
            why: connection.why.clone(),
            domains: connection.domains.len() as u64,
            events: connection.events,
        }
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        self.inner.ends.store(true, Ordering::Release);
        self.inner.kill();
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn run(&self, launch: &Launch) {
        let mut delay = MIN_RETRY_DELAY;
        // A daemon of libvirt that closed the connection, and when it did.
        let mut closed: Option<(u32, Instant)> = None;
        while !self.ends() {
            let running = daemon_pid(&launch.run);
            if running.is_none() {
                self.disconnect("libvirt's daemon does not run".into());
                delay = MIN_RETRY_DELAY;
            } else if closed
                .is_some_and(|(pid, at)| running == Some(pid) && at.elapsed() < CLOSED_RETRY_DELAY)
            {
                // It is probably about to end. A connection to its socket would make systemd start another one.
                delay = MIN_RETRY_DELAY;
            } else {
                let begun = Instant::now();
                let (why, no_library) = self.run_process(&launch.command);
                if self.ends() {
                    return;
                }
                let was_connected = lock(&self.connection).connected;
                let is_closed = was_connected && why.is_some();
                closed = running
                    .filter(|_| is_closed)
                    .map(|pid| (pid, Instant::now()));
                self.disconnect(
                    why.unwrap_or_else(|| {
                        "the process that reads libvirt's events has ended".into()
                    }),
                );
                delay = match no_library {
                    true => NO_LIBRARY_RETRY_DELAY,
                    false if begun.elapsed() > MAX_RETRY_DELAY => MIN_RETRY_DELAY,
                    false => (delay * 2).min(MAX_RETRY_DELAY),
                };
            }
            self.sleep(delay);
        }
    }

    fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire)
    }

    fn kill(&self) {
        if let Some(child) = lock(&self.child).as_mut() {
            let _ = child.kill();
        }
    }

    fn sleep(&self, delay: Duration) {
        let end = Instant::now() + delay;
        while !self.ends() && Instant::now() < end {
            std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
        }
    }

    /// Reads events until the process ends. Returns why it ended, if it said so, and whether libvirt's library is missing.
    fn run_process(&self, command: &[String]) -> (Option<String>, bool) {
        let started = Command::new(&command[0])
            .args(&command[1..])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(e) => {
                let why = format!("the process that reads libvirt's events cannot start: {e}");
                return (Some(why), false);
            }
        };
        let out = child.stdout.take();
        *lock(&self.child) = Some(child);
        if self.ends() {
            self.kill();
        }
        let end = match out {
            Some(out) => self.follow(out, &|what| log::line(Level::Info, what)),
            None => (None, false),
        };
        self.kill();
        if let Some(mut child) = lock(&self.child).take() {
            let _ = child.wait();
        }
        end
    }

    /// Handles the lines of the helper process until they end, and passes on what the log gets. Returns as
    /// [`Inner::run_process`].
    fn follow(&self, output: impl Read, log: &dyn Fn(String)) -> (Option<String>, bool) {
        let mut end = (None, false);
        for line in lines(BufReader::new(output)) {
            match serde_json::from_str(&line) {
                Ok(Message::Disconnected { why, no_library }) => {
                    end = (Some(one_line(&why)), no_library);
                }
                Ok(message) => self.handle(message, log),
                // From a newer version of the program, installed while this daemon runs.
                Err(_) => {}
            }
        }
        end
    }

    fn handle(&self, message: Message, log: &dyn Fn(String)) {
        let mut connection = lock(&self.connection);
        match message {
            Message::Connected { domains } => {
                let count = domains.len();
                connection.connected = true;
                connection.why.clear();
                connection.domains = domains.into_iter().map(|d| (d.uuid.clone(), d)).collect();
                let domains = if count == 1 {
                    "domain runs"
                } else {
                    "domains run"
                };
                log(format!("libvirt: connected, {count} {domains}"));
            }
            Message::Event { domain, .. } => {
                connection.events += 1;
                match domain.state {
                    DomainState::Off => drop(connection.domains.remove(&domain.uuid)),
                    _ => drop(connection.domains.insert(domain.uuid.clone(), domain)),
                }
            }
            Message::Disconnected { .. } => return,
        }
        drop(connection);
        self.has_changed.store(true, Ordering::Release);
    }

    fn disconnect(&self, why: String) {
        let mut connection = lock(&self.connection);
        if connection.connected {
            log::line(
                Level::Warning,
                format!("libvirt: {why}; VMs are found in /proc until it is back"),
            );
            self.has_changed.store(true, Ordering::Release);
        }
        connection.connected = false;
        connection.domains.clear();
        connection.why = why;
    }
}

/// The process of libvirt's daemon, if it runs. Connecting to its socket instead would make systemd start it.
fn daemon_pid(run: &Path) -> Option<u32> {
    DAEMONS.iter().find_map(|name| {
        let number = std::fs::read_to_string(run.join(format!("{name}.pid"))).ok()?;
        let pid: u32 = number.trim().parse().ok()?;
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (comm.trim_end() == *name).then_some(pid)
    })
}

/// Lines, until one is longer than [`MAX_LINE_BYTES`].
fn lines(mut from: impl BufRead) -> impl Iterator<Item = String> {
    std::iter::from_fn(move || {
        let mut line = String::new();
        let read = (&mut from).take(MAX_LINE_BYTES).read_line(&mut line).ok()?;
        (read > 0 && line.ends_with('\n')).then_some(line)
    })
}

#[cfg(test)]
mod tests;
