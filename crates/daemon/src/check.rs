// SPDX-License-Identifier: Apache-2.0
//! The table of `viola check`: each folder says in its `check.rs` what this host can do, and what to change where it cannot.

use viola_host::Vm;
use viola_host::facts::HostFacts;
use viola_proto::{Libvirt, Row, lanes::Lanes, vread::Vread};

pub use crate::slices::observe::mechanisms::{Support, try_scheduler};
use crate::{host, lanes, slices, turbo, vread, workers};
use viola_config::Config;

/// What a running daemon knows beyond what the host shows.
#[derive(Debug, Clone, Copy)]
pub struct Daemon<'a> {
    /// Its connection to libvirt.
    pub libvirt: &'a Libvirt,
    /// Pools of VFs, and who has them.
    pub lanes: &'a Lanes,
    /// DataNode VMs, readers and other hosts.
    pub vread: &'a Vread,
}

/// All rows, in the order in which the table shows them. `support` says whether the kernel takes viola's BPF programs.
pub fn rows(
    config: &Config,
    facts: &HostFacts,
    support: &Support,
    vms: &[Vm],
    daemon: Option<Daemon<'_>>,
) -> Vec<Row> {
    let mechanism = support.choose(facts, &config.slices);
    let mut rows = vec![host::check::kernel(facts), host::check::vms(vms)];
    rows.extend(slices::check::rows(config, facts, support));
    rows.push(host::check::libvirt(daemon.map(|d| d.libvirt), config));
    rows.push(host::check::read_socket(config));
    rows.push(turbo::check::row(config, facts, mechanism, vms));
    rows.push(lanes::check::row(daemon.map(|d| d.lanes), config));
    if config.has_workers() {
        rows.push(workers::check::row());
    }
    let shown = daemon.map(|d| d.vread);
    rows.push(vread::check::row(shown, &config.vread));
    rows.extend(vread::check::other_hosts(shown, &config.vread));
    rows
}
