// SPDX-License-Identifier: Apache-2.0
//! Lanes (Raccoon): VFs of SR-IOV NICs move to the guests that gain most from them. They have a thread of their own, since a guest
//! may take seconds to give a VF back; switches are made one after the other.
//!
//! | file | role |
//! |---|---|
//! | `manager` | the loop: check the NICs, sample, decide, move |
//! | `pool` | one NIC and its VFs |
//! | `observe` | which guests may get a VF, and their traffic |
//! | `decide` | asks the policy who gets a VF |
//! | `apply` | grants VFs and takes them back |
//! | `restore` | takes back or adopts the VFs of an earlier daemon |
//! | `status`, `metrics`, `check` | what the control socket, Prometheus and `viola check` show |
//!
//! VFs stay with their guests when the daemon ends; the next daemon finds them by a journal in the run directory.

mod apply;
pub mod check;
mod decide;
mod manager;
pub mod metrics;
mod observe;
mod pool;
pub mod restore;
mod status;

pub use observe::cpu_times;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_host::{Vm, VmId};
use viola_policy::lanes::CpuTime;
use viola_proto::Source;
use viola_proto::lanes::{LaneSetting, Lanes as Shown};

use manager::Manager;
use viola_cli::error::{Failure, Outcome};
use viola_config::Config;

/// File name of the journal in the run directory.
pub const JOURNAL: &str = "lanes.json";
/// `viola stop --all` waits this long for VFs; the rest are taken back later.
const STOP_TIMEOUT: Duration = Duration::from_secs(6);

/// Lane settings of `viola set`, by identity of the guest.
pub type Overrides = BTreeMap<String, (LaneSetting, Source)>;

enum Request {
    Configure(Box<Config>),
    SetVms(Vec<Vm>, BTreeMap<VmId, Vec<CpuTime>>),
    SetOverrides(Overrides),
    Stop(String, mpsc::SyncSender<()>),
    Resume,
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
    /// Starts the thread. It changes nothing before it has the VMs of this host.
    ///
    /// # Errors
    /// When the kernel starts no thread.
    pub fn start(run_dir: &Path) -> Outcome<Self> {
        let (requests, inbox) = mpsc::channel();
        let shown = Arc::new(Mutex::new(Shown::default()));
        let (to, journal) = (shown.clone(), run_dir.join(JOURNAL));
        let thread = std::thread::Builder::new()
            .name("lanes".into())
            .spawn(move || run(Manager::new(&journal), &inbox, &to))
            .map_err(|e| Failure::run(format!("lanes cannot start: {e}")))?;
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

    /// Takes the VMs of this host, and how each vCPU spent its time.
    pub fn set_vms(&self, vms: &[Vm], cpus: BTreeMap<VmId, Vec<CpuTime>>) {
        self.send(Request::SetVms(vms.to_vec(), cpus));
    }

    /// Takes the lane settings of `viola set`.
    pub fn set_overrides(&self, overrides: Overrides) {
        self.send(Request::SetOverrides(overrides));
    }

    /// Takes all VFs back, and waits until that is done; `false` after [`STOP_TIMEOUT`].
    pub fn stop(&self, why: &str) -> bool {
        let (done, is_done) = mpsc::sync_channel(1);
        self.send(Request::Stop(why.to_owned(), done));
        is_done.recv_timeout(STOP_TIMEOUT).is_ok()
    }

    /// Starts again after [`Lanes::stop`].
    pub fn resume(&self) {
        self.send(Request::Resume);
    }

    /// What the control socket shows.
    pub fn shown(&self) -> Shown {
        let shown = self.shown.lock();
        shown.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn send(&self, request: Request) {
        // The thread ends only just before the process does.
        let _ = self.requests.send(request);
    }
}

impl Drop for Lanes {
    /// Ends the thread. VFs stay with their guests.
    fn drop(&mut self) {
        self.send(Request::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(mut manager: Manager, inbox: &mpsc::Receiver<Request>, shown: &Mutex<Shown>) {
    let publish = |manager: &Manager| {
        *shown.lock().unwrap_or_else(PoisonError::into_inner) = manager.status();
    };
    let step = |manager: &mut Manager| {
        manager.step();
        publish(manager);
        manager.interval()
    };
    let take = |manager: &mut Manager, request: Request| {
        match request {
            Request::Configure(config) => manager.configure(&config),
            Request::SetVms(vms, cpus) => manager.set_vms(vms, cpus),
            Request::SetOverrides(overrides) => manager.set_overrides(overrides),
            Request::Resume => manager.resume(),
            Request::Stop(why, done) => {
                manager.stop(&why);
                publish(manager);
                let _ = done.try_send(());
            }
            Request::End => return false,
        }
        true
    };
    serve(&mut manager, inbox, step, take);
}

/// Makes steps and takes requests between them, until `take` returns `false`. A step returns the time from its start to the next step.
/// Before each step all requests are taken that have arrived, also when a step takes longer than that time.
fn serve<K, R>(
    manager: &mut K,
    inbox: &mpsc::Receiver<R>,
    mut step: impl FnMut(&mut K) -> Duration,
    mut take: impl FnMut(&mut K, R) -> bool,
) {
    let mut next = Instant::now();
    loop {
        let begin = Instant::now();
        if begin >= next {
            next = begin + step(manager);
        }
        let mut left = next.saturating_duration_since(Instant::now());
        loop {
            match inbox.recv_timeout(left) {
                Ok(request) => {
                    if !take(manager, request) {
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
    fn requests_are_taken_before_the_next_step_however_long_steps_take() {
        /// Requests, and their number before each step.
        #[derive(Default)]
        struct Manager {
            taken: Vec<u32>,
            at_step: Vec<usize>,
        }
        let (requests, inbox) = mpsc::channel();
        let mut manager = Manager::default();
        let step = |manager: &mut Manager| {
            manager.at_step.push(manager.taken.len());
            // Three requests arrive during the step.
            for n in 0..3 {
                requests.send(n).unwrap();
            }
            Duration::ZERO
        };
        let take = |manager: &mut Manager, n: u32| {
            manager.taken.push(n);
            manager.at_step.len() < 5
        };
        serve(&mut manager, &inbox, step, take);
        assert_eq!(manager.at_step, [0, 3, 6, 9, 12]);
    }
}
