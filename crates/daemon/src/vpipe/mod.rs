// SPDX-License-Identifier: Apache-2.0
//! vpipe (vPipe): the host sends a file of a VM to a socket, and the data bypasses the VM. The
//! agent's worker of the VM ([`crate::supervisor`]) does the work; this folder prepares what needs
//! the daemon's privileges.
//!
//! | file | role |
//! |---|---|
//! | `observe` | the kernel files that show whether the VM runs |
//! | `apply` | the network namespace and steering programs from which the worker sends |
//! | `advice` | which VMs without it send files |
//! | `metrics` | what Prometheus shows |
//!
//! The configuration decides which VMs send. The network ends with its worker, so there is nothing
//! to restore.

pub mod advice;
mod apply;
pub mod metrics;
mod observe;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use viola_host::{Nic, Vm, VmId};
use viola_policy::slices::DEFAULT_WEIGHT;
use viola_vread::control::PipeSetup;

use crate::workers::process::{Worker, WorkerError};
use apply::SendNetwork;
use observe::RunState;
use viola_cli::log::{self, Level};
use viola_config::VmPipe;

/// Interval at which the limits of a VM's NIC are read.
const LIMIT_INTERVAL: Duration = Duration::from_secs(10);

/// vpipe of one VM.
#[derive(Debug, Default)]
pub struct Pipes {
    /// The `[vm.pipe]` that the worker was started with; `None` for a worker of an earlier daemon.
    started_with: Option<Option<VmPipe>>,
    /// Why the VM's files cannot be sent.
    error: Option<String>,
    /// The VM's NICs when that was found.
    nics: Vec<Nic>,
    /// Lives as long as the worker: when the worker is killed, the kernel resets its connections,
    /// and these resets still have to pass the steering programs.
    network: Option<SendNetwork>,
    /// What the worker watches to see whether the VM runs.
    run_state: Option<RunState>,
    /// When the limits of the VM's NIC were last read.
    limit_read: Option<Instant>,
    /// Process and weight for which the worker's nice value was set.
    niced: Option<(u32, Option<u32>)>,
}

impl Pipes {
    /// Makes the network from which a new worker sends. If that fails, the worker still serves
    /// blocks.
    pub fn prepare(&mut self, vm: &Vm, config: Option<&VmPipe>) {
        self.error = None;
        self.nics.clone_from(&vm.nics);
        self.network = match config.map(|config| SendNetwork::make(vm, config)) {
            Some(Err(why)) => {
                log::about(Level::Error, &vm.id, &why);
                self.error = Some(why);
                None
            }
            Some(Ok(network)) => Some(network),
            None => None,
        };
        self.started_with = Some(config.cloned());
    }

    /// Setup and descriptors of the network for a new worker.
    pub fn setup(&self) -> (Option<PipeSetup>, Vec<BorrowedFd<'_>>) {
        let network = self.network.as_ref();
        let setup = network.map(|network| network.setup.clone());
        (setup, network.map(SendNetwork::fds).unwrap_or_default())
    }

    /// Notes that a new worker runs, which does not watch the VM yet.
    pub fn worker_started(&mut self) {
        self.run_state = None;
    }

    /// Whether the worker was started with this configuration, and another network would not come of it now. Of a worker of an
    /// earlier daemon only `is_sending` is known.
    pub fn is_started_with(&self, vm: &Vm, config: Option<&VmPipe>, is_sending: bool) -> bool {
        match &self.started_with {
            // The NIC that was missing may be there now.
            Some(_) if self.error.is_some() && self.nics != vm.nics => false,
            Some(started_with) => started_with.as_ref() == config,
            None => is_sending == config.is_some(),
        }
    }

    /// Whether the VM's NIC has got or lost a limit since the network was made. Reads the limit at most every ten seconds.
    pub fn has_other_limit(&mut self, now: Instant) -> bool {
        let Some(network) = &self.network else {
            return false;
        };
        if (self.limit_read).is_some_and(|at| now.saturating_duration_since(at) < LIMIT_INTERVAL) {
            return false;
        }
        self.limit_read = Some(now);
        network.has_other_limit()
    }

    /// Whether the worker may write to the VM's images.
    pub fn may_write(&self) -> bool {
        let config = self.started_with.as_ref().and_then(Option::as_ref);
        config.is_some_and(|config| config.writes)
    }

    /// Whether the worker watches whether the VM runs.
    pub fn watches_run_state(&self) -> bool {
        self.run_state.is_some()
    }

    /// Hands the worker the files that show whether the VM runs, if they changed.
    ///
    /// # Errors
    /// When the worker does not take them.
    pub fn watch_run_state(
        &mut self,
        vm: &Vm,
        worker: Option<&Worker>,
        is_sending: bool,
    ) -> Result<(), WorkerError> {
        if !is_sending && self.network.is_none() {
            return Ok(());
        }
        let run_state = RunState::of(vm);
        if self.run_state.as_ref() == Some(&run_state) {
            return Ok(());
        }
        if let Some(worker) = worker {
            let files = run_state.open();
            worker.order(&files.order(), &files.fds())?;
            self.run_state = Some(run_state);
        }
        Ok(())
    }

    /// Gives the worker the nice value of the VM's weight, since it works in the VM's place.
    pub fn set_weight(&mut self, vm: &VmId, worker: &Worker, weight: Option<u32>) {
        let niced = Some((worker.pid, weight));
        if self.niced == niced {
            return;
        }
        let nice = viola_policy::pipes::nice(weight.unwrap_or(DEFAULT_WEIGHT));
        if let Err(e) = apply::set_nice(worker.pid, nice) {
            let what = format!("vpipe: its worker does not get its weight: {e}");
            log::about(Level::Warning, vm, what);
        }
        self.niced = niced;
    }

    /// Why the VM's files cannot be sent, if vpipe could not be prepared.
    pub fn error(&self) -> Option<&String> {
        self.error.as_ref()
    }
}
