// SPDX-License-Identifier: Apache-2.0
//! Lanes in the daemon: VFs go to the guests that gain most from them. On a thread of its own, as a guest may take its
//! time to give one back; switches are made one after the other.
//!
//! | module | does |
//! |---|---|
//! | `keeper` | the loop: pools, samples, decisions, and what comes of them |
//! | `pools` | one NIC with its VFs |
//! | `guests` | who may have a VF, and what its NIC counts |
//! | `restore` | takes back what an earlier daemon left, without one |
//!
//! VFs stay with their guests when the daemon ends; the next one finds them by a journal in the run directory.

mod apply;
pub mod check;
mod manager;
pub mod metrics;
mod observe;
mod pool;
pub mod restore;
mod status;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_host::{Vm, VmId};
use viola_policy::lanes::CpuTime;
use viola_proto::Source;
use viola_proto::lanes::{LaneSetting, Lanes as Shown};

use manager::Keeper;
use viola_cli::error::{Failure, Outcome};
use viola_config::Config;

/// Name of the journal in the run directory.
pub const JOURNAL: &str = "lanes.json";
/// How long all VFs may take to be taken back at `viola stop --all`; further ones are taken later.
const STOP_TIME: Duration = Duration::from_secs(6);

/// What was said about guests by `viola set`, by their identities.
pub type Said = BTreeMap<String, (LaneSetting, Source)>;

enum Request {
    Configure(Box<Config>),
    See(Vec<Vm>, BTreeMap<VmId, Vec<CpuTime>>),
    Said(Said),
    Stop(String, mpsc::SyncSender<()>),
    GoOn,
    End,
}

/// The thread that moves VFs.
#[derive(Debug)]
pub struct Lanes {
    requests: mpsc::Sender<Request>,
    shown: Arc<Mutex<Shown>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Lanes {
    /// Starts the thread. Nothing is touched before it knows what VMs there are.
    pub fn start(run_dir: &Path) -> Outcome<Self> {
        let (requests, inbox) = mpsc::channel();
        let shown = Arc::new(Mutex::new(Shown::default()));
        let (to, journal) = (shown.clone(), run_dir.join(JOURNAL));
        let thread = std::thread::Builder::new()
            .name("lanes".into())
            .spawn(move || work(Keeper::new(&journal), &inbox, &to))
            .map_err(|e| Failure::run(format!("lanes cannot start: {e}")))?;
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

    /// Tells what VMs there are now, and how they spent their time on each vCPU.
    pub fn see(&self, vms: &[Vm], cpus: BTreeMap<VmId, Vec<CpuTime>>) {
        self.send(Request::See(vms.to_vec(), cpus));
    }

    /// Tells what was said by `viola set`.
    pub fn said(&self, said: Said) {
        self.send(Request::Said(said));
    }

    /// Takes all VFs back, and waits until that is done; `false` when it takes too long.
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
        let shown = self.shown.lock();
        shown.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn send(&self, request: Request) {
        // The thread is gone only when the process is about to be.
        let _ = self.requests.send(request);
    }
}

impl Drop for Lanes {
    /// The VFs stay with their guests.
    fn drop(&mut self) {
        self.send(Request::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(mut keeper: Keeper, inbox: &mpsc::Receiver<Request>, shown: &Mutex<Shown>) {
    let publish = |keeper: &Keeper| {
        *shown.lock().unwrap_or_else(PoisonError::into_inner) = keeper.show();
    };
    let step = |keeper: &mut Keeper| {
        keeper.step();
        publish(keeper);
        keeper.interval()
    };
    let take = |keeper: &mut Keeper, request: Request| {
        match request {
            Request::Configure(config) => keeper.configure(&config),
            Request::See(vms, cpus) => keeper.see(vms, cpus),
            Request::Said(said) => keeper.said(said),
            Request::GoOn => keeper.go_on(),
            Request::Stop(why, done) => {
                keeper.stop(&why);
                publish(keeper);
                let _ = done.try_send(());
            }
            Request::End => return false,
        }
        true
    };
    serve(&mut keeper, inbox, step, take);
}

/// Makes steps, each of which answers how long it is from its beginning to the next one's, and takes what comes in between,
/// until `take` answers `false`. Before each step all is taken that has come: steps may take longer than it is between two
/// of them, and longer than until the next requests come.
fn serve<K, R>(
    keeper: &mut K,
    inbox: &mpsc::Receiver<R>,
    mut step: impl FnMut(&mut K) -> Duration,
    mut take: impl FnMut(&mut K, R) -> bool,
) {
    let mut next = Instant::now();
    loop {
        let begin = Instant::now();
        if begin >= next {
            next = begin + step(keeper);
        }
        let mut left = next.saturating_duration_since(Instant::now());
        loop {
            match inbox.recv_timeout(left) {
                Ok(request) => {
                    if !take(keeper, request) {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
            left = Duration::ZERO;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_holds_for_the_next_step_however_long_steps_take() {
        /// Steps, and what came before each of them.
        #[derive(Default)]
        struct Keeper {
            taken: Vec<u32>,
            at_step: Vec<usize>,
        }
        let (requests, inbox) = mpsc::channel();
        let mut keeper = Keeper::default();
        let step = |keeper: &mut Keeper| {
            keeper.at_step.push(keeper.taken.len());
            // while it lasts three more come
            for n in 0..3 {
                requests.send(n).unwrap();
            }
            Duration::ZERO
        };
        let take = |keeper: &mut Keeper, n: u32| {
            keeper.taken.push(n);
            keeper.at_step.len() < 5
        };
        serve(&mut keeper, &inbox, step, take);
        assert_eq!(keeper.at_step, [0, 3, 6, 9, 12]);
    }
}
