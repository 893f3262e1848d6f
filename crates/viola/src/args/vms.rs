// SPDX-License-Identifier: Apache-2.0
//! Options of the commands that explain, try and change what VMs have.

use std::path::PathBuf;

use clap::Args;
use viola_proto::ClassSetting;
use viola_proto::lanes::LaneSetting;

use super::Socket;

/// Options of `advise`.
#[derive(Debug, Args)]
pub struct Advise {
    /// Recording of `viola record`, instead of the present moment. No daemon is asked.
    #[arg(long, value_name = "FILE")]
    pub from: Option<PathBuf>,
    /// Print JSON: a list of objects with vm, help, part and why.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `why`.
#[derive(Debug, Args)]
pub struct Why {
    /// Name or identity of a VM; all VMs by default.
    #[arg(value_name = "VM")]
    pub vm: Option<String>,
    /// Print JSON: a list of objects with vm, what, state and why.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `log`.
#[derive(Debug, Args)]
pub struct Log {
    /// Name or identity of a VM; all VMs and the host by default.
    #[arg(value_name = "VM")]
    pub vm: Option<String>,
    /// Show lines of kind info, too.
    #[arg(long)]
    pub all: bool,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `try`.
#[derive(Debug, Args)]
pub struct Try {
    /// Names or identities of the VMs that get the class; by default those that class ls would help (HELP of viola vms).
    #[arg(value_name = "VM")]
    pub vms: Vec<String>,
    /// The class: ls or turbo.
    #[arg(long, value_parser = tried_class, default_value = "ls")]
    pub class: ClassSetting,
    /// Try what class auto has chosen by now: all VMs that have a class by its choice.
    #[arg(long, conflicts_with_all = ["vms", "class"])]
    pub auto: bool,
    /// Length of the trial, 192s or more; more than 80m counts as 80m. A longer trial shows smaller differences.
    #[arg(long = "for", value_name = "TIME", default_value = "10m")]
    pub length: String,
    /// Write a page with a picture of all ratios and their intervals (HTML).
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print JSON: medians without and with the class, ratio and interval, by VM.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

/// Options of `set`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("change").args(["class", "microslice", "weight", "cap", "lane", "reset"]).required(true).multiple(true)))]
pub struct Set {
    /// Name of the VM, or its identity (uml:NAME, qemu:NAME) when several VMs have that name.
    pub vm: String,
    /// ls: short slices, more often; batch: whole slices; turbo: one vCPU, which serves I/O, on a turbo core, and whole
    /// slices for the others; auto: the classifier chooses.
    #[arg(long, value_parser = class)]
    pub class: Option<ClassSetting>,
    /// Slice of an ls VM, 50us to 30ms. A shorter one gives shorter waits and costs more switches.
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub microslice: Option<String>,
    /// Weight of the VM among the VMs of its core, 1 to 65535; 256 by default.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub weight: Option<String>,
    /// Upper bound of what the VM uses, in percent of one core: 1% to 100% per vCPU; none removes it.
    #[arg(long, value_name = "PERCENT", allow_hyphen_values = true)]
    pub cap: Option<String>,
    /// VF of the VM: auto, while it gains more than the others; pin, before all others; never.
    #[arg(long, value_parser = lane)]
    pub lane: Option<LaneSetting>,
    /// Set the class for this time only, 1s to 1h. Afterwards the former setting holds again.
    #[arg(long = "for", value_name = "TIME", requires = "class", conflicts_with_all = ["microslice", "weight", "cap", "lane", "keep", "reset"])]
    pub length: Option<String>,
    /// Keep the change across restarts of the daemon.
    #[arg(long)]
    pub keep: bool,
    /// Undo earlier changes, kept ones too, before the other options are applied.
    #[arg(long)]
    pub reset: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub socket: Socket,
}

fn tried_class(text: &str) -> Result<ClassSetting, String> {
    match class(text) {
        Ok(class @ (ClassSetting::Ls | ClassSetting::Turbo)) => Ok(class),
        _ => Err("ls or turbo is allowed".into()),
    }
}

fn class(text: &str) -> Result<ClassSetting, String> {
    match text {
        "ls" => Ok(ClassSetting::Ls),
        "batch" => Ok(ClassSetting::Batch),
        "auto" => Ok(ClassSetting::Auto),
        "turbo" => Ok(ClassSetting::Turbo),
        _ => Err("ls, batch, turbo or auto is allowed".into()),
    }
}

fn lane(text: &str) -> Result<LaneSetting, String> {
    match text {
        "auto" => Ok(LaneSetting::Auto),
        "pin" => Ok(LaneSetting::Pin),
        "never" => Ok(LaneSetting::Never),
        _ => Err("auto, pin or never is allowed".into()),
    }
}
