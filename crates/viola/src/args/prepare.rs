// SPDX-License-Identifier: Apache-2.0
//! Options of the commands that prepare VMs.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// What a VM can be prepared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrepareWhat {
    /// Reading of HDFS blocks by the host.
    Vread,
    /// Sending and receiving by the host.
    Vpipe,
    /// A turbo vCPU.
    Turbo,
    /// A VF of an SR-IOV NIC.
    Lane,
}

/// Options of `prepare`.
#[derive(Debug, Args)]
pub struct Prepare {
    /// Name of a VM of libvirt.
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The accelerator.
    #[arg(value_name = "WHAT")]
    pub what: PrepareWhat,
    /// Only show the changes.
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON: vm, dry_run, uses, parts (part, purpose, state, why, xml) and next.
    #[arg(long)]
    pub json: bool,
    /// Configuration file with the grants of vread.
    #[arg(short, long, value_name = "FILE", default_value = viola_config::DEFAULT_PATH)]
    pub config: PathBuf,
}

/// Options of `unprepare`.
#[derive(Debug, Args)]
pub struct Unprepare {
    /// Name of a VM of libvirt.
    #[arg(value_name = "VM")]
    pub vm: String,
    /// The accelerator; all by default.
    #[arg(value_name = "WHAT")]
    pub what: Option<PrepareWhat>,
    /// Only show the changes.
    #[arg(long)]
    pub dry_run: bool,
    /// Print JSON, as `viola prepare` does.
    #[arg(long)]
    pub json: bool,
}
