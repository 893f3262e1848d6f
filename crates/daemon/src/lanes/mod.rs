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
//! | `advice` | which VMs would gain from a VF, where no pool is named |
//! | `status`, `metrics`, `check` | what the control socket, Prometheus and `viola check` show |
//!
//! VFs stay with their guests when the daemon ends; the next daemon finds them by a journal in the run directory.

pub mod advice;
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
use std::time::Duration;

use viola_host::{Vm, VmId};
use viola_policy::lanes::CpuTime;
use viola_proto::Source;
use viola_proto::lanes::{LaneSetting, Lanes as Shown};

use crate::background::Background;
use manager::Manager;
use viola_cli::error::Outcome;
use viola_config::Config;

/// File name of the journal in the run directory.
pub const JOURNAL: &str = "lanes.json";
/// `viola stop --all` waits this long for VFs; the rest are taken back later.
const STOP_TIMEOUT: Duration = Duration::from_secs(6);

/// Lane settings of `viola set`, by identity of the guest.
pub type Overrides = BTreeMap<String, (LaneSetting, Source)>;

/// The thread that moves VFs. VFs stay with their guests when it ends.
pub struct Lanes(Background<Manager>);

impl Lanes {
    /// Starts the thread. It changes nothing before it has the VMs of this host.
    ///
    /// # Errors
    /// When the kernel starts no thread.
    pub fn start(run_dir: &Path) -> Outcome<Self> {
        let journal = run_dir.join(JOURNAL);
        Background::start("lanes", move || Manager::new(&journal)).map(Self)
    }

    /// Takes a configuration.
    pub fn configure(&self, config: &Config) {
        let config = config.clone();
        self.0.send(move |manager| manager.configure(&config));
    }

    /// Takes the VMs of this host, and how each vCPU spent its time.
    pub fn set_vms(&self, vms: Vec<Vm>, cpus: BTreeMap<VmId, Vec<CpuTime>>) {
        self.0.send(move |manager| manager.set_vms(vms, cpus));
    }

    /// Takes the lane settings of `viola set`.
    pub fn set_overrides(&self, overrides: Overrides) {
        self.0.send(move |manager| manager.set_overrides(overrides));
    }

    /// Takes all VFs back, and waits until that is done; `false` after 6 s.
    pub fn stop(&self, why: &str) -> bool {
        let why = why.to_owned();
        (self.0).send_and_wait(move |manager| manager.stop(&why), STOP_TIMEOUT)
    }

    /// Starts again after [`Lanes::stop`].
    pub fn resume(&self) {
        self.0.send(Manager::resume);
    }

    /// What the control socket shows.
    pub fn shown(&self) -> Shown {
        self.0.status().clone()
    }
}
