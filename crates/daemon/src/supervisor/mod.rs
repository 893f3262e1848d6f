// SPDX-License-Identifier: Apache-2.0
//! vread in the daemon: which worker processes there are, and what each of them is handed.
//!
//! The daemon itself parses nothing that a guest has sent. It opens images, channels and shared files, and gives them
//! to workers without privilege, which go on when it ends; a new daemon finds them by their sockets. All this is on a
//! thread of its own: a worker that hangs holds up nothing else.
//!
//! | module | does |
//! |---|---|
//! | `supervisor` | which workers there are to be |
//! | `agents`, `readers` | one DataNode VM, one reading VM |
//! | `peers` | the worker for other hosts |
//! | `resolve` | names of other hosts |
//! | `pairs` | who is introduced to whom |
//! | `disks` | the files behind a VM's disks |
//! | `line` | a reader's byte stream |
//! | `pipes` | where a VM's files are sent from |
//! | `pulse` | whether a VM runs at all |
//! | `place` | the cores of a reader's worker |
//! | `worker` | one process |
//! | `folder` | what lies in the run directory |

pub mod agent;
pub mod reconcile;

use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_host::Vm;
use viola_proto::vread::Vread as Shown;

use reconcile::Supervisor;
pub use reconcile::named;
use viola_cli::error::{Failure, Outcome};
use viola_config::Config;

/// Time between two looks; QEMU's events are noticed so soon.
const STEP: Duration = Duration::from_millis(50);
/// The same while there is nothing to look after.
const REST: Duration = Duration::from_secs(2);
/// How long everything may take to be withdrawn.
const STOP_TIME: Duration = Duration::from_secs(6);

enum Request {
    Configure(Box<Config>),
    See(Vec<Vm>),
    Stop(String, mpsc::SyncSender<()>),
    GoOn,
    End,
}

/// The thread that looks after the workers.
#[derive(Debug)]
pub struct Vread {
    requests: mpsc::Sender<Request>,
    shown: Arc<Mutex<Shown>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Vread {
    /// Starts the thread, which looks for workers of an earlier daemon first.
    pub fn start(run_dir: &Path) -> Outcome<Self> {
        let (requests, inbox) = mpsc::channel();
        let shown = Arc::new(Mutex::new(Shown::default()));
        let (to, run_dir) = (shown.clone(), run_dir.to_owned());
        let thread = std::thread::Builder::new()
            .name("vread".into())
            .spawn(move || work(Supervisor::new(&run_dir), &inbox, &to))
            .map_err(|e| Failure::run(format!("vread cannot start: {e}")))?;
        Ok(Self {
            requests,
            shown,
            thread: Some(thread),
        })
    }

    /// Takes another configuration.
    pub fn configure(&self, config: &Config) {
        self.send(Request::Configure(Box::new(config.clone())));
    }

    /// Tells what VMs there are now.
    pub fn see(&self, vms: &[Vm]) {
        self.send(Request::See(vms.to_vec()));
    }

    /// The processes that serve readers now, each with its VM as the configuration names it.
    pub fn workers(&self) -> Vec<(String, u32)> {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let running = shown.readers.iter().filter(|r| r.running && r.pid > 0);
        running.map(|r| (r.name.clone(), r.pid)).collect()
    }

    /// Withdraws everything, and waits until that is done; `false` when it takes too long.
    pub fn stop(&self, why: &str) -> bool {
        let (done, is_done) = mpsc::sync_channel(1);
        self.send(Request::Stop(why.to_owned(), done));
        is_done.recv_timeout(STOP_TIME).is_ok()
    }

    /// Goes on.
    pub fn go_on(&self) {
        self.send(Request::GoOn);
    }

    /// What there is to be shown.
    pub fn shown(&self) -> Shown {
        self.shown
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn send(&self, request: Request) {
        // The thread is gone only when the process is about to be.
        let _ = self.requests.send(request);
    }
}

impl Drop for Vread {
    /// The workers stay.
    fn drop(&mut self) {
        self.send(Request::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(mut supervisor: Supervisor, inbox: &mpsc::Receiver<Request>, shown: &Mutex<Shown>) {
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next {
            supervisor.step(now);
            publish(&supervisor, shown);
            next = Instant::now() + if supervisor.rests() { REST } else { STEP };
        }
        match inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Request::Configure(config)) => {
                supervisor.configure(*config);
                next = next.min(Instant::now() + STEP);
            }
            Ok(Request::See(vms)) => supervisor.see(vms),
            Ok(Request::GoOn) => {
                supervisor.go_on();
                next = next.min(Instant::now() + STEP);
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
    *shown.lock().unwrap_or_else(PoisonError::into_inner) = supervisor.show();
}
