// SPDX-License-Identifier: Apache-2.0
//! Supervises the workers of vread and vpipe on a thread of its own, so a worker that hangs delays nothing else.
//!
//! | file | does |
//! |---|---|
//! | `reconcile` | which workers run, and what each of them knows |
//! | `agent` | one VM with an agent, whose worker serves vread and vpipe |
//!
//! The daemon parses nothing that a guest sends. It opens images, channels and shared files, and hands the descriptors to workers
//! without privileges. Workers go on when the daemon ends; the next daemon finds them by their sockets.

mod agent;
mod reconcile;

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_host::Vm;
use viola_proto::vread::Vread as Shown;

use reconcile::Supervisor;
use viola_cli::error::{Failure, Outcome};
use viola_config::Config;

/// Time between two steps, within which the daemon notices QEMU's events.
const STEP_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two steps without workers.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);
/// All blocks are withdrawn within this time.
const STOP_TIMEOUT: Duration = Duration::from_secs(6);

enum Request {
    Configure(Box<Config>),
    SetVms(Vec<Vm>),
    Stop(String, mpsc::SyncSender<()>),
    Resume,
    End,
}

/// The thread that supervises the workers.
#[derive(Debug)]
pub struct Workers {
    requests: mpsc::Sender<Request>,
    shown: Arc<Mutex<Shown>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Workers {
    /// Starts the thread, which first looks for workers of an earlier daemon.
    ///
    /// # Errors
    /// When the kernel starts no thread.
    pub fn start(run_dir: &Path) -> Outcome<Self> {
        let (requests, inbox) = mpsc::channel();
        let shown = Arc::new(Mutex::new(Shown::default()));
        let (to, run_dir) = (shown.clone(), run_dir.to_owned());
        let thread = std::thread::Builder::new()
            .name("vread".into())
            .spawn(move || run(Supervisor::new(&run_dir), &inbox, &to))
            .map_err(|e| Failure::run(format!("vread cannot start: {e}")))?;
        Ok(Self {
            requests,
            shown,
            thread: Some(thread),
        })
    }

    /// Takes a configuration.
    pub fn configure(&self, config: &Config) {
        self.send(Request::Configure(Box::new(config.clone())));
    }

    /// Takes the VMs of this host.
    pub fn set_vms(&self, vms: &[Vm]) {
        self.send(Request::SetVms(vms.to_vec()));
    }

    /// Processes of readers' workers, each with its VM as the configuration names it.
    pub fn readers(&self) -> Vec<(String, u32)> {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let running = shown.readers.iter().filter(|r| r.running && r.pid > 0);
        running.map(|r| (r.name.clone(), r.pid)).collect()
    }

    /// Withdraws all blocks, and waits until that is done; `false` after [`STOP_TIMEOUT`].
    pub fn stop(&self, why: &str) -> bool {
        let (done, is_done) = mpsc::sync_channel(1);
        self.send(Request::Stop(why.to_owned(), done));
        is_done.recv_timeout(STOP_TIMEOUT).is_ok()
    }

    /// Starts again after [`Workers::stop`].
    pub fn resume(&self) {
        self.send(Request::Resume);
    }

    /// What the control socket shows.
    pub fn shown(&self) -> Shown {
        self.shown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn send(&self, request: Request) {
        // The thread ends only just before the process does.
        let _ = self.requests.send(request);
    }
}

impl Drop for Workers {
    /// Ends the thread. The workers go on.
    fn drop(&mut self) {
        self.send(Request::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(mut supervisor: Supervisor, inbox: &mpsc::Receiver<Request>, shown: &Mutex<Shown>) {
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next {
            supervisor.step(now);
            publish(&supervisor, shown);
            next = Instant::now()
                + match supervisor.is_idle() {
                    true => IDLE_INTERVAL,
                    false => STEP_INTERVAL,
                };
        }
        match inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Request::Configure(config)) => {
                supervisor.configure(*config);
                next = next.min(Instant::now() + STEP_INTERVAL);
            }
            Ok(Request::SetVms(vms)) => supervisor.set_vms(vms),
            Ok(Request::Resume) => {
                supervisor.resume();
                next = next.min(Instant::now() + STEP_INTERVAL);
            }
            Ok(Request::Stop(why, done)) => {
                supervisor.stop(&why);
                publish(&supervisor, shown);
                let _ = done.try_send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Request::End) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn publish(supervisor: &Supervisor, shown: &Mutex<Shown>) {
    *shown.lock().unwrap_or_else(PoisonError::into_inner) = supervisor.status();
}
