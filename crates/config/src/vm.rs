// SPDX-License-Identifier: Apache-2.0
//! `[[vm]]`: settings of one VM.

use serde::Deserialize;
use toml::Spanned;
use viola_proto::ClassSetting;

use crate::value::{Cap, microslice, weight};
use crate::{VmLane, VmPipe, VmVread};

/// `[[vm]]`: one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmConfig {
    /// Name or identity (`uml:NAME`, `qemu:NAME`).
    pub name: String,
    /// Class.
    pub class: Option<ClassSetting>,
    /// Microslice, ns.
    pub microslice: Option<u64>,
    /// Weight, 1 to 65535.
    pub weight: Option<u32>,
    /// Cap in thousandths of a core; `Some(None)` stands for an explicit `"none"`.
    pub cap: Option<Option<u32>>,
    /// `[vm.vread]`
    pub vread: VmVread,
    /// `[vm.pipe]`
    pub pipe: Option<VmPipe>,
    /// `[vm.lane]`
    pub lane: VmLane,
    /// Line of the key `cap`, or of `name` without it.
    pub(crate) line: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Raw {
    pub(crate) name: Spanned<String>,
    pub(crate) class: Option<ClassSetting>,
    #[serde(default, deserialize_with = "microslice")]
    pub(crate) microslice: Option<u64>,
    #[serde(default, deserialize_with = "weight")]
    pub(crate) weight: Option<u32>,
    pub(crate) cap: Option<Spanned<Cap>>,
    #[serde(default)]
    pub(crate) vread: VmVread,
    pub(crate) pipe: Option<VmPipe>,
    #[serde(default)]
    pub(crate) lane: VmLane,
}
