// SPDX-License-Identifier: Apache-2.0
//! What libvirt tells, on a thread of its own: a process of its own is asked (`viola internal libvirt`), as long as
//! libvirt's daemon runs. VMs are found in /proc in any case; libvirt says at once that there is something to be found,
//! and what state a VM is in whose monitor it keeps to itself.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use viola_host::libvirt::{Domain, DomainState, Message};
use viola_proto::Libvirt as Shown;

use viola_cli::error::{Failure, Outcome};
use viola_cli::log::{self, Level};

/// Daemons of libvirt's that know of QEMU's VMs: one for all, or one for these.
const DAEMONS: [&str; 2] = ["libvirtd", "virtqemud"];
/// Whether one of them runs is looked at so often, and after a connection has ended it is tried again so soon.
const WAIT: Duration = Duration::from_secs(1);
/// It is never waited longer than this until the next try...
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// ...but where there is no library.
const NO_LIBRARY_WAIT: Duration = Duration::from_secs(300);
/// Longest line that is taken: a list of thousands of domains.
const LONGEST_LINE: u64 = 1 << 20;

/// How the process is started, and where libvirt's daemons leave their numbers.
#[derive(Debug, Clone)]
pub struct Asking {
    /// Program and its arguments.
    pub command: Vec<String>,
    /// Folder of libvirt's pid files.
    pub run: PathBuf,
}

impl Default for Asking {
    fn default() -> Self {
        Self {
            // This program itself, also when its file was replaced since.
            command: ["/proc/self/exe", "internal", "libvirt"]
                .map(str::to_owned)
                .into(),
            run: "/run".into(),
        }
    }
}

#[derive(Debug, Default)]
struct Told {
    connected: bool,
    why: String,
    /// Domains that run, by UUID.
    domains: BTreeMap<String, Domain>,
    events: u64,
}

#[derive(Debug)]
struct Inner {
    told: Mutex<Told>,
    /// Whether there is something to be looked at.
    news: AtomicBool,
    ends: AtomicBool,
    child: Mutex<Option<Child>>,
}

/// The thread.
#[derive(Debug)]
pub struct Libvirt {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Libvirt {
    /// Starts the thread.
    pub fn start(asking: Asking) -> Outcome<Self> {
        let inner = Arc::new(Inner {
            told: Mutex::new(Told {
                why: "libvirt's daemon does not run".into(),
                ..Told::default()
            }),
            news: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            child: Mutex::new(None),
        });
        let of_thread = inner.clone();
        let thread = std::thread::Builder::new()
            .name("libvirt".into())
            .spawn(move || of_thread.work(&asking))
            .map_err(|e| Failure::run(format!("the thread that asks libvirt cannot start: {e}")))?;
        Ok(Self {
            inner,
            thread: Some(thread),
        })
    }

    /// Whether something has happened since the last call that a look at the host would show.
    pub fn take_news(&self) -> bool {
        self.inner.news.swap(false, Ordering::AcqRel)
    }

    /// The domains that run, by UUID; `None` while there is no connection.
    pub fn domains(&self) -> Option<BTreeMap<String, Domain>> {
        let told = lock(&self.inner.told);
        told.connected.then(|| told.domains.clone())
    }

    /// What there is to be shown.
    pub fn shown(&self) -> Shown {
        let told = lock(&self.inner.told);
        Shown {
            on: true,
            connected: told.connected,
            why: told.why.clone(),
            domains: told.domains.len() as u64,
            events: told.events,
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
    fn work(&self, asking: &Asking) {
        let mut wait = WAIT;
        // a daemon of libvirt's that has hung up, and when
        let mut left: Option<(u32, Instant)> = None;
        while !self.ends() {
            let running = runs(&asking.run);
            if running.is_none() {
                self.gone("libvirt's daemon does not run".into());
                wait = WAIT;
            } else if left
                .is_some_and(|(pid, at)| running == Some(pid) && at.elapsed() < LONGEST_WAIT)
            {
                // It ends, most likely, and who asks its socket meanwhile has systemd start another one.
                wait = WAIT;
            } else {
                let begun = Instant::now();
                let (why, no_library) = self.ask(&asking.command);
                if self.ends() {
                    return;
                }
                let was_connected = lock(&self.told).connected;
                let hung_up = was_connected && why.is_some();
                left = running.filter(|_| hung_up).map(|pid| (pid, Instant::now()));
                self.gone(why.unwrap_or_else(|| "the process that asks libvirt has ended".into()));
                wait = match no_library {
                    true => NO_LIBRARY_WAIT,
                    false if begun.elapsed() > LONGEST_WAIT => WAIT,
                    false => (wait * 2).min(LONGEST_WAIT),
                };
            }
            self.pause(wait);
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

    fn pause(&self, wait: Duration) {
        let end = Instant::now() + wait;
        while !self.ends() && Instant::now() < end {
            std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
        }
    }

    /// Listens until the process ends. Why it did, if it has said so, and whether that will not change.
    fn ask(&self, command: &[String]) -> (Option<String>, bool) {
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
                let why = format!("the process that asks libvirt cannot start: {e}");
                return (Some(why), false);
            }
        };
        let out = child.stdout.take();
        *lock(&self.child) = Some(child);
        if self.ends() {
            self.kill();
        }
        let mut end = (None, false);
        for line in out.into_iter().flat_map(|out| lines(BufReader::new(out))) {
            match serde_json::from_str(&line) {
                Ok(Message::Disconnected { why, no_library }) => end = (Some(why), no_library),
                Ok(word) => self.hear(word),
                // Of no version that this one knows: a new program was installed beside a daemon that runs on.
                Err(_) => {}
            }
        }
        self.kill();
        if let Some(mut child) = lock(&self.child).take() {
            let _ = child.wait();
        }
        end
    }

    fn hear(&self, word: Message) {
        let mut told = lock(&self.told);
        match word {
            Message::Connected { domains } => {
                let count = domains.len();
                told.connected = true;
                told.why.clear();
                told.domains = domains.into_iter().map(|d| (d.uuid.clone(), d)).collect();
                let domains = if count == 1 {
                    "domain runs"
                } else {
                    "domains run"
                };
                log::line(
                    Level::Info,
                    format!("libvirt: connected, {count} {domains}"),
                );
            }
            Message::Event { domain, .. } => {
                told.events += 1;
                match domain.state {
                    DomainState::Off => drop(told.domains.remove(&domain.uuid)),
                    _ => drop(told.domains.insert(domain.uuid.clone(), domain)),
                }
            }
            Message::Disconnected { .. } => return,
        }
        drop(told);
        self.news.store(true, Ordering::Release);
    }

    fn gone(&self, why: String) {
        let mut told = lock(&self.told);
        if told.connected {
            log::line(
                Level::Warning,
                format!("libvirt: {why}; VMs are found in /proc until it is back"),
            );
            self.news.store(true, Ordering::Release);
        }
        told.connected = false;
        told.domains.clear();
        told.why = why;
    }
}

/// The daemon of libvirt's that runs, if one does. Connecting to its socket would start it where systemd listens, which is
/// not for viola to do.
fn runs(run: &Path) -> Option<u32> {
    DAEMONS.iter().find_map(|name| {
        let number = std::fs::read_to_string(run.join(format!("{name}.pid"))).ok()?;
        let pid: u32 = number.trim().parse().ok()?;
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (comm.trim_end() == *name).then_some(pid)
    })
}

/// Lines up to one that is too long.
fn lines(mut from: impl BufRead) -> impl Iterator<Item = String> {
    std::iter::from_fn(move || {
        let mut line = String::new();
        let read = (&mut from).take(LONGEST_LINE).read_line(&mut line).ok()?;
        (read > 0 && line.ends_with('\n')).then_some(line)
    })
}

#[cfg(test)]
mod tests;
