// SPDX-License-Identifier: Apache-2.0
//! What is said about one VM, and what can be changed.

use serde::{Deserialize, Serialize};

/// How a VM is scheduled.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Latency-sensitive: short slices, more often, the same share.
    Ls,
    /// Everything else: whole slices.
    Batch,
    /// With a turbo vCPU for its I/O, and whole slices for the others.
    Turbo,
}

/// What the operator asked for.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClassSetting {
    /// Always latency-sensitive.
    Ls,
    /// Never latency-sensitive.
    Batch,
    /// As the meter finds it.
    Auto,
    /// With a turbo vCPU.
    Turbo,
}

/// Where a setting comes from.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// `viola set`, until the daemon ends.
    Set,
    /// `viola set --keep`.
    Kept,
    /// The configuration file.
    Config,
    /// The VM's control group.
    Cgroup,
    /// Nobody said anything.
    Default,
}

/// One VM: what it is promised, what it got, and what would help it.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// Identity, for example `uml:g1`.
    pub id: String,
    /// Name as the hypervisor was given it.
    pub name: String,
    /// `uml` or `qemu`.
    pub hypervisor: String,
    /// Main process.
    pub pid: u32,
    /// Virtual CPUs.
    pub vcpus: usize,
    /// What it is scheduled as now.
    pub class: Class,
    /// What was asked for.
    pub class_setting: ClassSetting,
    /// Who asked for it.
    pub class_source: Source,
    /// Length of its slice while it is latency-sensitive, 50,000..=30,000,000.
    pub microslice_ns: u64,
    /// Proportional share, 1..=65535.
    pub weight: u32,
    /// Who set it.
    pub weight_source: Source,
    /// Most it may use, in thousandths of one core; absent without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap_permille: Option<u32>,
    /// Who set it.
    pub cap_source: Source,
    /// CPUs that its vCPUs may run on.
    pub cores: Vec<u32>,
    /// What its weight entitles it to when everybody is busy, as a fraction of `cores`.
    pub share: f64,
    /// What its vCPUs ran in the last second, as a fraction of `cores`.
    pub used: f64,
    /// Part of the time it wanted to run that it waited, 0..=1, in the last second.
    pub wait: f64,
    /// Wait that half of its waits did not exceed, over the last 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_p50_ns: Option<u64>,
    /// Wait that 99 of 100 waits did not exceed, over the last 10 s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_p99_ns: Option<u64>,
    /// Wake-ups of its vCPUs; 0 where they are not known (accounting by schedstat).
    pub wakes_per_s: f64,
    /// Bytes received and sent.
    pub net_bytes_per_s: f64,
    /// Packets received and sent.
    pub net_packets_per_s: f64,
    /// Bytes read and written.
    pub disk_bytes_per_s: f64,
    /// Each vCPU by itself, by number.
    pub by_vcpu: Vec<CpuTime>,
    /// Vhost, I/O and emulator threads together.
    pub service: CpuTime,
    /// What schedules it: `slots`, `sched_ext`, `eevdf` or `stock`.
    pub scheduled_by: String,
    /// What the sched_ext scheduler has counted of it since it took the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<SchedulerCounts>,
    /// Why it is not scheduled by viola although it was asked for, or other remarks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// Accelerators that would help it and that it does not have: `slices`, `vread`. Only a daemon has looked for
    /// long enough to tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub help: Vec<String>,
    /// The same in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// What a scheduler gave a VM, over all its cores.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerCounts {
    /// Times that one of its threads was put on a core.
    pub turns: u64,
    /// Time they ran.
    pub run_ns: u64,
    /// Waits for a core that ended.
    pub waits: u64,
    /// Their sum.
    pub wait_ns: u64,
    /// The longest.
    pub wait_max_ns: u64,
    /// Times that it took a core from another VM when it woke.
    pub boosts: u64,
}

/// Time of a vCPU, or of service threads, over the time measured (`measured_ns` of [`VmList`]).
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// On a CPU.
    pub run_ns: u64,
    /// Runnable while something else ran.
    pub wait_ns: u64,
    /// Neither.
    pub blocked_ns: u64,
    /// Wake-ups.
    pub wakes: u64,
    /// Times it was put on a CPU.
    pub switches: u64,
    /// Times it lost the CPU while it wanted to go on.
    pub preempted: u64,
    /// Waits of the last 10 s by length: lower bound and upper bound in ns, count. Empty buckets are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<(u64, u64, u64)>,
}

/// Answer to `GET /v1/vms`.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmList {
    /// In the order of their names.
    pub vms: Vec<VmReport>,
    /// Time over which `used`, `wait` and the rates were taken.
    pub measured_ns: u64,
    /// What could not be found out, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Body of `PATCH /v1/vms/{name}`; what is absent stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Change {
    /// `ls`, `batch`, `turbo` or `auto`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<ClassSetting>,
    /// A duration with its unit, `50us` to `30ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microslice: Option<String>,
    /// 1..=65535.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<i64>,
    /// Percent of one core, `1%` to `100%` per vCPU, or `none` to lift it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<String>,
    /// Whether the change survives a restart of the daemon.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keep: bool,
    /// Forgets what `viola set` said about this VM before, kept or not; the configuration holds again. Goes
    /// before the rest.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reset: bool,
}

fn is_false(b: &bool) -> bool {
    !b
}
