// SPDX-License-Identifier: Apache-2.0
//! Who has which virtual function (VF) of an SR-IOV NIC, and why.

pub mod guest;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Source;

/// Whether a guest may have a VF.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LaneSetting {
    /// While it gains more from one than others.
    #[default]
    Auto,
    /// Before all others.
    Pin,
    /// Not at all.
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

/// What `PATCH /v1/lanes/{name}` changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaneChange {
    /// What holds from now on; absent with `reset`: what the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<LaneSetting>,
    /// Whether it holds after a restart of the daemon too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep: bool,
    /// Whether what was set before is forgotten first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
}

/// Everything about lanes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Lanes {
    /// Whether VFs change hands.
    pub on: bool,
    /// Why not, if they do not.
    pub why: String,
    /// NICs with VFs.
    pub pools: Vec<Pool>,
    /// NICs of guests.
    pub nics: Vec<Nic>,
    /// The last switches, the newest first.
    pub switches: Vec<Switch>,
    /// Counts since the start of the daemon.
    pub counts: Counts,
}

/// The VFs of a NIC.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Interface of the PF.
    pub pf: String,
    /// The bridge of its network.
    pub bridge: String,
    /// VFs that may be granted.
    pub usable: u32,
    /// Who has them: identities of guests, by number of the VF; empty for none.
    pub holders: Vec<String>,
    /// Why there are none, or fewer.
    pub why: String,
}

/// One NIC of a guest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Nic {
    /// Identity of the guest: `qemu:NAME`, `netns:NAME`.
    pub guest: String,
    /// Its name.
    pub name: String,
    /// The host's interface of its paravirtual path.
    pub interface: String,
    /// The bridge that this is a port of.
    pub bridge: String,
    /// What was asked for.
    pub lane: LaneSetting,
    /// Who asked.
    pub source: Option<Source>,
    /// What the guest does: `cpu`, `disk`, `net` or `net, heavy`.
    pub kind: String,
    /// IF (eq 2 of the paper).
    pub intensity: f64,
    /// Samples with packets in them, percent.
    pub freq: f64,
    /// DI2 (eq 1); absent where it cannot be found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub di2: Option<f64>,
    /// VF that it has, as PF and number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vf: Option<(String, u32)>,
    /// Why it has one, or none.
    pub why: String,
    /// Packets on its paravirtual path so far.
    pub packets: u64,
    /// Bytes on it.
    pub bytes: u64,
    /// Packets on its VFs so far.
    pub vf_packets: u64,
    /// Bytes on them, where the NIC tells.
    pub vf_bytes: u64,
}

/// A VF that changed hands, or did not.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Switch {
    /// How long ago.
    pub ago_ns: u64,
    /// Interface of the PF.
    pub pf: String,
    /// Number of the VF.
    pub vf: u32,
    /// Identity of the guest.
    pub guest: String,
    /// Whether the guest got it (`true`) or gave it back.
    pub granted: bool,
    /// Why, or what went wrong.
    pub why: String,
    /// Whether it was done.
    pub done: bool,
    /// How long it took.
    pub took_ns: u64,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// VFs given.
    pub granted: u64,
    /// VFs taken.
    pub revoked: u64,
    /// VFs that a guest did not take.
    pub failed: u64,
    /// VFs that a guest did not give back.
    pub kept: u64,
    /// VFs that were found with a guest at the start.
    pub adopted: u64,
    /// VFs that were found half given or half taken, and taken.
    pub recovered: u64,
    /// VFs that went from a guest by themselves.
    pub lost: u64,
    /// Time that all switches took.
    pub switching_ns: u64,
}
