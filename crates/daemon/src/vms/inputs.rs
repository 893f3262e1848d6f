// SPDX-License-Identifier: Apache-2.0
//! What every step of the control loop may read: configuration, settings, facts about the host, and its VMs.

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, Inventory, Vm};

use super::settings::{Controls, Settings};
use viola_config::Config;
use viola_proto::ClassSetting;

/// The inputs of a turn of the control loop. Only `control/` writes them.
pub struct Inputs {
    /// The configuration file, as it was read last.
    pub config: Config,
    /// What `viola set` changed.
    pub settings: Settings,
    /// What kernel and hardware can do.
    pub facts: HostFacts,
    /// CPUs that were online at the last scan.
    pub online: CpuSet,
    /// The VMs of this host at the last scan.
    pub inventory: Inventory,
    /// The daemon changes nothing (`--dry-run`).
    pub dry_run: bool,
    /// Who stopped all accelerators (`viola stop --all by root`), until `viola start`.
    pub stopped: Option<String>,
}

impl Inputs {
    /// The VMs, by identity.
    pub fn vms(&self) -> &[Vm] {
        self.inventory.vms()
    }

    /// The class of a VM alone, for each window of the meter.
    pub fn class(&self, vm: &Vm) -> ClassSetting {
        self.settings.class(&self.config, vm)
    }

    /// Class, microslice, weight and cap of a VM.
    pub fn controls(&self, vm: &Vm) -> Controls {
        self.settings.controls(&self.config, vm)
    }
}
