// SPDX-License-Identifier: Apache-2.0
//! Supervises the workers of vread and vpipe on a thread of its own, so a worker that hangs delays nothing else.
//!
//! | file | does |
//! |---|---|
//! | `reconcile` | which workers run, and what each of them knows |
//! | `agent` | one VM with an agent, whose worker serves vread and vpipe |
//! | `status` | what the control socket shows |
//!
//! The daemon parses nothing that a guest sends. It opens images, channels and shared files, and hands the descriptors to workers
//! without privileges. Workers go on when the daemon ends; the next daemon finds them by their sockets.

mod agent;
mod reconcile;
mod status;

use std::path::Path;
use std::time::Duration;

use viola_host::Vm;
use viola_proto::vread::Vread as Shown;

use crate::background::Background;
use reconcile::Supervisor;
use viola_cli::error::Outcome;
use viola_config::Config;

/// `viola stop --all` waits this long until all blocks are withdrawn.
const STOP_TIMEOUT: Duration = Duration::from_secs(6);

/// The thread that supervises the workers. Workers go on when it ends.
pub struct Workers(Background<Supervisor>);

impl Workers {
    /// Starts the thread, which first looks for workers of an earlier daemon.
    ///
    /// # Errors
    /// When the kernel starts no thread.
    pub fn start(run_dir: &Path) -> Outcome<Self> {
        let run_dir = run_dir.to_owned();
        Background::start("vread", move || Supervisor::new(&run_dir)).map(Self)
    }

    /// Takes a configuration.
    pub fn configure(&self, config: &Config) {
        let config = config.clone();
        self.0.send(move |supervisor| supervisor.configure(config));
    }

    /// Takes the VMs of this host.
    pub fn set_vms(&self, vms: Vec<Vm>) {
        self.0.send(move |supervisor| supervisor.set_vms(vms));
    }

    /// Processes of readers' workers, each with its VM as the configuration names it.
    pub fn readers(&self) -> Vec<(String, u32)> {
        let shown = self.0.status();
        let running = shown.readers.iter().filter(|r| r.running && r.pid > 0);
        running.map(|r| (r.name.clone(), r.pid)).collect()
    }

    /// Withdraws all blocks, and waits until that is done; `false` after 6 s.
    pub fn stop(&self, why: &str) -> bool {
        let why = why.to_owned();
        (self.0).send_and_wait(move |supervisor| supervisor.stop(&why), STOP_TIMEOUT)
    }

    /// Starts again after [`Workers::stop`].
    pub fn resume(&self) {
        self.0.send(Supervisor::resume);
    }

    /// What the control socket shows.
    pub fn shown(&self) -> Shown {
        self.0.status().clone()
    }
}
