// SPDX-License-Identifier: Apache-2.0
//! Lanes: which VM has which virtual function (VF) of an SR-IOV NIC, and why.

pub mod guest;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Source;

/// Whether a VM may have a VF.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaneSetting {
    /// The VM gets a VF while it gains more from it than other VMs.
    #[default]
    Auto,
    /// The VM gets a VF before all others.
    Pin,
    /// The VM never gets a VF.
    Never,
}

impl fmt::Display for LaneSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Pin => "pin",
            Self::Never => "never",
        })
    }
}

/// Body of `PATCH /v1/lanes/{name}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneChange {
    /// The new setting. Absent with `reset`, which returns to the configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneSetting>,
    /// Whether the daemon keeps the setting over a restart.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep: bool,
    /// Whether the daemon first forgets earlier settings of this VM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
}

/// Answer to `GET /v1/lanes`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Lanes {
    /// Whether the daemon gives VFs to VMs.
    pub on: bool,
    /// If not, why.
    pub why: String,
    /// SR-IOV NICs.
    pub pools: Vec<Pool>,
    /// NICs of VMs.
    pub nics: Vec<Nic>,
    /// The last switches, newest first.
    pub switches: Vec<Switch>,
    /// Counters since the daemon started.
    pub counts: Counts,
}

/// The VFs of one SR-IOV NIC.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Interface name of the PF.
    pub pf: String,
    /// Bridge of the NIC's network.
    pub bridge: String,
    /// Number of VFs that the daemon may give to VMs.
    pub usable: u32,
    /// Identity of the VM that has each VF, by VF number; empty for a free VF.
    pub holders: Vec<String>,
    /// Why there are no VFs, or fewer than the NIC has.
    pub why: String,
}

/// One NIC of a VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Nic {
    /// Identity of the VM: `qemu:NAME`, `netns:NAME`.
    pub guest: String,
    /// Name of the VM.
    pub name: String,
    /// The host's interface of the NIC's paravirtual path.
    pub interface: String,
    /// Bridge that this interface is a port of.
    pub bridge: String,
    /// The setting.
    pub lane: LaneSetting,
    /// Where the setting comes from.
    pub source: Option<Source>,
    /// The VM's class of load: `cpu`, `disk`, `net` or `net, heavy`.
    pub kind: String,
    /// Intensity factor IF (Raccoon, equation 2).
    pub intensity: f64,
    /// Share of samples with packets, in percent.
    pub freq: f64,
    /// DI2 (Raccoon, equation 1); absent where the daemon cannot compute it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub di2: Option<f64>,
    /// The VF that the VM has: interface of the PF, and number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<(String, u32)>,
    /// Why the VM has a VF, or none.
    pub why: String,
    /// Packets on the paravirtual path since the daemon started.
    pub packets: u64,
    /// Bytes on the paravirtual path.
    pub bytes: u64,
    /// Packets on the VM's VFs.
    pub vf_packets: u64,
    /// Bytes on the VM's VFs, where the NIC counts them.
    pub vf_bytes: u64,
}

/// An attempt to give a VF to a VM, or to take it back.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// Age of the attempt.
    pub ago_ns: u64,
    /// Interface name of the PF.
    pub pf: String,
    /// Number of the VF.
    pub vf: u32,
    /// Identity of the VM.
    pub guest: String,
    /// `true`: the VM gets the VF. `false`: the VM gives it back.
    pub granted: bool,
    /// The reason, or the error.
    pub why: String,
    /// Whether the attempt succeeded.
    pub done: bool,
    /// Duration of the attempt.
    pub took_ns: u64,
}

/// Counters since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// VFs given to VMs.
    pub granted: u64,
    /// VFs taken back.
    pub revoked: u64,
    /// VFs that a VM's guest did not accept.
    pub failed: u64,
    /// VFs that a VM's guest did not release.
    pub kept: u64,
    /// VFs that VMs had when the daemon started.
    pub adopted: u64,
    /// VFs that the daemon found in the middle of a switch when it started, and took back.
    pub recovered: u64,
    /// VFs that disappeared from a VM without the daemon's doing.
    pub lost: u64,
    /// Total duration of all switches.
    pub switching_ns: u64,
}
