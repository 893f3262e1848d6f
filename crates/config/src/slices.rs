// SPDX-License-Identifier: Apache-2.0
//! `[slices]`: when vCPUs run.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};
use viola_host::CpuSet;

use viola_cli::quantities::BATCH_SLICE;

use crate::value::{cores, some_duration};

/// A mechanism of slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MechanismChoice {
    /// The sched_ext scheduler (bpf/scx.bpf.c).
    #[serde(rename = "sched_ext")]
    SchedExt,
    /// Slots given by real-time priority.
    Slots,
    /// Per-thread slices of EEVDF (sched_setattr(2)).
    Eevdf,
}

/// Mechanisms of `auto`, in the order in which they are tried. sched_ext is last, because threads of the fair class take
/// precedence over it.
const AUTO: [MechanismChoice; 3] = [
    MechanismChoice::Slots,
    MechanismChoice::Eevdf,
    MechanismChoice::SchedExt,
];

impl MechanismChoice {
    /// Whether the mechanism needs cores of its own, to which it pins the VMs' threads.
    pub fn manages_cores(self) -> bool {
        matches!(self, Self::SchedExt | Self::Slots)
    }

    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::SchedExt => "sched_ext",
            Self::Slots => "slots",
            Self::Eevdf => "eevdf",
        }
    }
}

/// Algorithm of the slot mechanism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Microslices between and inside the slices of batch VMs.
    #[default]
    Interleaved,
    /// vSlicer's Algorithm 1 (paper 000, section 2.3).
    Paper,
    /// Xen's credit scheduler, the papers' baseline.
    Credit,
}

/// `[slices]`: when vCPUs run.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Slices {
    /// Whether the daemon schedules VMs.
    pub enabled: bool,
    /// Mechanisms; the first one that the host supports is used.
    #[serde(rename = "mechanism", deserialize_with = "mechanisms")]
    pub mechanisms: Vec<MechanismChoice>,
    /// Cores set aside for VMs.
    #[serde(deserialize_with = "cores")]
    pub cores: CpuSet,
    /// Algorithm of the slot mechanism.
    pub mode: Mode,
    /// Slice of a batch VM, 100 us to 100 ms, in ns; `None` for the mode's default.
    #[serde(
        deserialize_with = "some_duration::<_, { *BATCH_SLICE.start() }, { *BATCH_SLICE.end() }>"
    )]
    pub batch_slice: Option<u64>,
    /// Former name of `auto` at the top: true is on, false says nothing.
    pub auto: bool,
    /// Whether slots are used on a host that `viola check` finds unfit for them.
    pub force: bool,
}

impl Slices {
    /// Slice of a batch VM, ns.
    pub fn batch_slice(&self) -> u64 {
        self.batch_slice.unwrap_or(match self.mode {
            Mode::Interleaved => viola_sched::BATCH_SLICE,
            Mode::Paper | Mode::Credit => viola_sched::PAPER_SLICE,
        })
    }

    /// The algorithm of `mode`.
    pub fn algorithm(&self) -> viola_sched::Algorithm {
        match self.mode {
            Mode::Interleaved => viola_sched::Algorithm::Interleaved,
            Mode::Paper => viola_sched::Algorithm::Paper,
            Mode::Credit => viola_sched::Algorithm::Credit { boost: true },
        }
    }
}

impl Default for Slices {
    fn default() -> Self {
        Self {
            enabled: true,
            mechanisms: AUTO.to_vec(),
            cores: CpuSet::default(),
            mode: Mode::default(),
            batch_slice: None,
            auto: false,
            force: false,
        }
    }
}

/// Parses a name, `auto`, or a list of names.
fn mechanisms<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<MechanismChoice>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Names {
        One(String),
        Several(Vec<String>),
    }
    let wrong = || {
        <D::Error as de::Error>::custom(
            "mechanism is auto, sched_ext, slots or eevdf, or a list of the last three such as [\"sched_ext\", \"eevdf\"]",
        )
    };
    let names = match Names::deserialize(d).map_err(|_| wrong())? {
        Names::One(name) if name == "auto" => return Ok(AUTO.to_vec()),
        Names::One(name) => vec![name],
        Names::Several(names) => names,
    };
    let mut all = Vec::new();
    for name in names {
        let found = AUTO.into_iter().find(|m| m.name() == name);
        let found = found.ok_or_else(wrong)?;
        if !all.contains(&found) {
            all.push(found);
        }
    }
    match all.is_empty() {
        true => Err(wrong()),
        false => Ok(all),
    }
}
