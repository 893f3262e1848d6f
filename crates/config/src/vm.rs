// SPDX-License-Identifier: Apache-2.0
//! `[[vm]]`: settings of one VM.

use serde::Deserialize;
use viola_cli::quantities::MICROSLICE;
use viola_proto::ClassSetting;

use crate::value::{cap, name, some_duration, weight};
use crate::{VmLane, VmPipe, VmVread};

/// `[[vm]]`: one VM.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// Name or identity (`uml:NAME`, `qemu:NAME`).
    #[serde(deserialize_with = "name")]
    pub name: String,
    /// Class.
    pub class: Option<ClassSetting>,
    /// Microslice, 50 us to 30 ms, in ns.
    #[serde(
        default,
        deserialize_with = "some_duration::<_, { *MICROSLICE.start() }, { *MICROSLICE.end() }>"
    )]
    pub microslice: Option<u64>,
    /// Weight, 1 to 65535.
    #[serde(default, deserialize_with = "weight")]
    pub weight: Option<u32>,
    /// Cap in thousandths of a core; `Some(None)` stands for an explicit `"none"`.
    #[serde(default, deserialize_with = "cap")]
    pub cap: Option<Option<u32>>,
    /// `[vm.vread]`
    #[serde(default)]
    pub vread: VmVread,
    /// `[vm.pipe]`
    pub pipe: Option<VmPipe>,
    /// `[vm.lane]`
    #[serde(default)]
    pub lane: VmLane,
}
