// SPDX-License-Identifier: Apache-2.0
//! The daemon's configuration: a TOML file. Unknown keys are refused; each error names file, line and key.
//!
//! | module | table of the file |
//! |---|---|
//! | here | `[daemon]`, `[slices]`, `[[vm]]` |
//! | `turbo` | `[turbo]` |
//! | `vread`, `vread::peers` | `[vread]`, `[vm.vread]`, `[[vread.peer]]` |
//! | `pipe` | `[vm.pipe]` |
//! | `lanes` | `[lanes]`, `[vm.lane]` |
//! | `reference` | the description of every key, from which the book's page is generated |

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use toml::Spanned;
use viola_cli::toml_text::{explain, line_of};
use viola_host::CpuSet;
use viola_proto::ClassSetting;

use viola_cli::error::Failure;
use viola_cli::quantities::{self, BadQuantity};

pub mod lanes;
pub mod pipe;
pub mod turbo;
pub mod vread;

pub use lanes::{Lanes, VmLane};
pub use pipe::VmPipe;
pub use turbo::Turbo;
pub use vread::{Transport, VmVread, Vread};

/// Default path of the configuration.
pub const DEFAULT_PATH: &str = "/etc/viola/viola.toml";
/// Default path of the control socket.
pub const DEFAULT_SOCKET: &str = "/run/viola/viola.sock";
/// Default folder of the daemon's run-time state.
pub const DEFAULT_RUN_DIR: &str = "/run/viola";

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// A key or its value is wrong.
    #[error("{}:{line}: {what}", path.display())]
    At {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// The key, and what is wrong with it.
        what: String,
    },
}

impl From<ConfigError> for Failure {
    fn from(e: ConfigError) -> Self {
        Self::usage(e)
    }
}

/// The whole configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The file that it was read from.
    pub path: PathBuf,
    /// `[daemon]`
    pub daemon: Daemon,
    /// `[slices]`
    pub slices: Slices,
    /// `[turbo]`
    pub turbo: Turbo,
    /// `[vread]`
    pub vread: Vread,
    /// `[lanes]`
    pub lanes: Lanes,
    /// `[[vm]]`, in the order of the file.
    pub vms: Vec<VmConfig>,
}

/// `[daemon]`: paths, interval and scope of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Daemon {
    /// Path of the control socket.
    #[serde(deserialize_with = "absolute")]
    pub socket: PathBuf,
    /// Group whose members may use the control socket.
    pub group: String,
    /// Interval of the control loop, ns.
    #[serde(deserialize_with = "interval")]
    pub interval: u64,
    /// Folder of settings that `viola set --keep` keeps.
    #[serde(deserialize_with = "absolute")]
    pub state_dir: PathBuf,
    /// Folder of the run-time state.
    #[serde(deserialize_with = "absolute")]
    pub run_dir: PathBuf,
    /// VMs that the daemon manages.
    pub vms: VmScope,
    /// Whether the daemon follows libvirt's events.
    pub libvirt: bool,
}

/// VMs that the daemon manages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmScope {
    /// All VMs of this host.
    #[default]
    All,
    /// VMs whose process is in the daemon's network namespace.
    Own,
}

impl Default for Daemon {
    fn default() -> Self {
        Self {
            socket: DEFAULT_SOCKET.into(),
            group: "viola".into(),
            interval: 100_000_000,
            state_dir: "/var/lib/viola".into(),
            run_dir: DEFAULT_RUN_DIR.into(),
            vms: VmScope::All,
            libvirt: true,
        }
    }
}

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slices {
    /// Whether the daemon schedules VMs.
    pub enabled: bool,
    /// Mechanisms; the first one that the host supports is used.
    pub mechanisms: Vec<MechanismChoice>,
    /// Cores set aside for VMs.
    pub cores: CpuSet,
    /// Algorithm of the slot mechanism.
    pub mode: Mode,
    /// Slice of a batch VM, ns; `None` for the mode's default.
    pub batch_slice: Option<u64>,
    /// Whether the classifier chooses the class of VMs that have none configured.
    pub auto: bool,
    /// Whether slots are used on a host that `viola check` finds unfit for them.
    pub force: bool,
    /// Line of the key `cores`, 0 when it is absent.
    cores_line: usize,
}

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
    line: usize,
}

impl Config {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(path, &text)
    }

    /// Parses the text of a file; `path` is for messages.
    ///
    /// # Errors
    /// [`ConfigError::At`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let at = |span: Range<usize>, what: String| ConfigError::At {
            path: path.to_owned(),
            line: line_of(text, span.start),
            what,
        };
        let raw: Raw = toml::from_str(text).map_err(|e| {
            let span = e.span().unwrap_or(0..0);
            at(span.clone(), explain(e.message(), text, span.start))
        })?;
        let mut vms: Vec<VmConfig> = Vec::new();
        for vm in raw.vm {
            let name = vm.name.get_ref().trim();
            if name.is_empty() {
                return Err(at(
                    vm.name.span(),
                    "name: empty; write the name or identity of a VM".into(),
                ));
            }
            if let Some(first) = vms.iter().find(|v| v.name == name) {
                let what = format!(
                    "name: a second [[vm]] for {}; the first one is in line {}",
                    quantities::quoted(name),
                    first.line
                );
                return Err(at(vm.name.span(), what));
            }
            let line = line_of(
                text,
                vm.cap.as_ref().map_or(vm.name.span(), Spanned::span).start,
            );
            vms.push(VmConfig {
                name: name.to_owned(),
                class: vm.class,
                microslice: vm.microslice,
                weight: vm.weight,
                cap: vm.cap.map(|c| c.into_inner().0),
                vread: vm.vread,
                pipe: vm.pipe,
                lane: vm.lane,
                line,
            });
        }
        let s = raw.slices;
        let cores_line = s
            .cores
            .as_ref()
            .map_or(0, |c| line_of(text, c.span().start));
        Ok(Self {
            path: path.to_owned(),
            daemon: raw.daemon,
            slices: Slices {
                enabled: s.enabled,
                mechanisms: s.mechanism,
                cores: s.cores.map(|c| c.into_inner().0).unwrap_or_default(),
                mode: s.mode,
                batch_slice: s.batch_slice,
                auto: s.auto,
                force: s.force,
                cores_line,
            },
            turbo: {
                let cores = raw.turbo.cores.as_ref();
                let line = cores.map_or(0, |c| line_of(text, c.span().start));
                raw.turbo.validate(line)
            },
            vread: raw
                .vread
                .validate()
                .map_err(|(span, what)| at(span, what))?,
            lanes: raw
                .lanes
                .validate()
                .map_err(|(span, what)| at(span, what))?,
            vms,
        })
    }

    /// Checks the configuration against the host: cores have to be online, caps must not exceed them.
    ///
    /// # Errors
    /// [`ConfigError::At`].
    pub fn check_host(&self, online: &CpuSet) -> Result<(), ConfigError> {
        let at = |line, what| ConfigError::At {
            path: self.path.clone(),
            line,
            what,
        };
        if let Some(cpu) = self.slices.cores.iter().find(|&c| !online.contains(c)) {
            let what = format!("cores: CPU {cpu} is not online; this host has {online}");
            return Err(at(self.slices.cores_line, what));
        }
        if let Some(what) = self.turbo.conflict(online, &self.slices.cores) {
            return Err(at(self.turbo.line, what));
        }
        let (cores, whose) = match self.slices.cores.len() {
            0 => (online.len(), "this host"),
            n => (n, "[slices]"),
        };
        for vm in &self.vms {
            if let Some(Some(cap)) = vm.cap {
                quantities::cap_fits(cap, cores, whose).map_err(|e| at(vm.line, e.to_string()))?;
            }
        }
        Ok(())
    }

    /// Whether any VM needs a worker (vread, vpipe).
    pub fn has_workers(&self) -> bool {
        !self.vread.is_off() || self.vms.iter().any(|vm| vm.pipe.is_some())
    }

    /// The entry of a VM: the one with its identity, else the one with its name.
    pub fn vm(&self, id: &str, name: &str) -> Option<&VmConfig> {
        self.vms
            .iter()
            .find(|v| v.name == id)
            .or_else(|| self.vms.iter().find(|v| v.name == name))
    }
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    #[serde(default)]
    daemon: Daemon,
    #[serde(default)]
    slices: RawSlices,
    #[serde(default)]
    turbo: turbo::Raw,
    #[serde(default)]
    vread: vread::Raw,
    #[serde(default)]
    lanes: lanes::Raw,
    #[serde(default)]
    vm: Vec<RawVm>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawSlices {
    enabled: bool,
    #[serde(deserialize_with = "mechanisms")]
    mechanism: Vec<MechanismChoice>,
    cores: Option<Spanned<Cores>>,
    mode: Mode,
    #[serde(deserialize_with = "batch_slice")]
    batch_slice: Option<u64>,
    auto: bool,
    force: bool,
}

impl Default for RawSlices {
    fn default() -> Self {
        Self {
            enabled: true,
            mechanism: AUTO.to_vec(),
            cores: None,
            mode: Mode::default(),
            batch_slice: None,
            auto: false,
            force: false,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawVm {
    name: Spanned<String>,
    class: Option<ClassSetting>,
    #[serde(default, deserialize_with = "microslice")]
    microslice: Option<u64>,
    #[serde(default, deserialize_with = "weight")]
    weight: Option<u32>,
    cap: Option<Spanned<Cap>>,
    #[serde(default)]
    vread: VmVread,
    pipe: Option<VmPipe>,
    #[serde(default)]
    lane: VmLane,
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

struct Cores(CpuSet);

impl<'de> Deserialize<'de> for Cores {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(StringVisitor(
            "a CPU list in quotes, for example \"4-7\"",
            |t: &str| {
                t.parse()
                    .map(Self)
                    .map_err(|e: viola_host::cpuset::ParseCpuSetError| e.to_string())
            },
        ))
    }
}

struct Cap(Option<u32>);

impl<'de> Deserialize<'de> for Cap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(StringVisitor(
            "a cap in quotes, for example \"50%\"",
            |t: &str| quantities::cap(t).map(Self).map_err(|e| e.to_string()),
        ))
    }
}

fn absolute<'de, D: Deserializer<'de>>(d: D) -> Result<PathBuf, D::Error> {
    d.deserialize_any(StringVisitor("a path in quotes", |t: &str| {
        let path = PathBuf::from(t);
        if path.is_absolute() {
            Ok(path)
        } else {
            Err(format!("{} is not an absolute path", quantities::quoted(t)))
        }
    }))
}

fn interval<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    duration(d, &quantities::INTERVAL)
}

fn batch_slice<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    duration(d, &quantities::BATCH_SLICE).map(Some)
}

fn microslice<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u64>, D::Error> {
    duration(d, &quantities::MICROSLICE).map(Some)
}

fn duration<'de, D: Deserializer<'de>>(
    d: D,
    allowed: &RangeInclusive<u64>,
) -> Result<u64, D::Error> {
    d.deserialize_any(StringVisitor(
        "a duration with its unit in quotes, for example \"300us\"",
        |t: &str| quantities::duration_in(t, allowed).map_err(|e| e.to_string()),
    ))
}

fn weight<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let value = i64::deserialize(d)?;
    quantities::weight(value)
        .map(Some)
        .map_err(|e: BadQuantity| de::Error::custom(e))
}

/// Deserializes a TOML string with a parser; the text is what serde says it expects.
struct StringVisitor<F>(&'static str, F);

impl<T, F: FnOnce(&str) -> Result<T, String>> Visitor<'_> for StringVisitor<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.1)(text).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
