// SPDX-License-Identifier: Apache-2.0
//! Report about one VM, and the settings that a client can change.

use serde::{Deserialize, Serialize};

/// How viola schedules a VM.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Latency-sensitive: short slices, more often, at the same share.
    Ls,
    /// All other VMs: full slices.
    Batch,
    /// A turbo vCPU for its I/O, and full slices for its other vCPUs.
    Turbo,
}

/// The operator's setting.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClassSetting {
    /// Always latency-sensitive.
    Ls,
    /// Never latency-sensitive.
    Batch,
    /// As the meter classifies it.
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
    /// The default: no setting exists.
    Default,
}

/// One VM: what its weight promises it, what it received, and what would help it.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// Identity, for example `uml:g1`.
    pub id: String,
    /// Name in the hypervisor's command line.
    pub name: String,
    /// `uml` or `qemu`.
    pub hypervisor: String,
    /// Process ID of the VM's main process.
    pub pid: u32,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// Current class.
    pub class: Class,
    /// The setting.
    pub class_setting: ClassSetting,
    /// Where the class setting comes from.
    pub class_source: Source,
    /// Why the VM has its class, in one sentence. Absent without a daemon.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Length of a slice while the VM is latency-sensitive, 50,000..=30,000,000.
    pub microslice_ns: u64,
    /// Proportional share, 1..=65535.
    pub weight: u32,
    /// Where the value comes from.
    pub weight_source: Source,
    /// CPU limit in thousandths of one core; absent without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap_permille: Option<u32>,
    /// Where the value comes from.
    pub cap_source: Source,
    /// CPUs that the vCPUs may run on.
    pub cores: Vec<u32>,
    /// Share that the weight guarantees while all VMs are busy, as a fraction of `cores`.
    pub share: f64,
    /// CPU time of the vCPUs in the last second, as a fraction of `cores`.
    pub used: f64,
    /// Part of the measured time (`measured_ns` of [`VmList`]) that the VM waited for a core: a vCPU was runnable, and another
    /// thread ran. 0..=1, the mean of its vCPUs. The guest sees it as steal time. Absent before the first measurement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<f64>,
    /// Part of the time in which the VM wanted to run that it waited for a core: waiting / (running + waiting), over the same
    /// time and all its vCPUs. 0..=1. (Called `wait` before.)
    #[serde(alias = "wait")]
    pub wait_share: f64,
    /// How long packets for the VM waited over the last 10 s: from the arrival at its NIC until one of its vCPUs ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet_delay: Option<Delay>,
    /// Why `packet_delay` is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packet_delay_absent: Option<String>,
    /// How long the VM waited for a core over the last 10 s when an interrupt woke it: a packet, a timer, a completed request.
    /// Absent without BPF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake_delay: Option<Delay>,
    /// Times of the VM's answers over the last 10 s, as they pass its NIC: from the first byte of a TCP request until the first byte of
    /// the answer. Measured only while a class is set for some time (`viola try`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_time: Option<Delay>,
    /// Times of new TCP connections over the last 10 s: from the SYN until the VM's SYN-ACK. Measured like `answer_time`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect_time: Option<Delay>,
    /// How long a vCPU still waits for a core at a random moment of the last 10 s. Absent without BPF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual_wait: Option<ResidualWait>,
    /// Wake-ups of the vCPUs; 0 where the accounting (schedstat) does not count them.
    pub wakes_per_s: f64,
    /// Network bytes, both directions.
    pub net_bytes_per_s: f64,
    /// Network packets, both directions.
    pub net_packets_per_s: f64,
    /// Disk bytes, both directions.
    pub disk_bytes_per_s: f64,
    /// One entry per vCPU, by number.
    pub by_vcpu: Vec<CpuTime>,
    /// Sum over vhost, I/O and emulator threads.
    pub service: CpuTime,
    /// Mechanism that schedules the VM: `slots`, `sched_ext`, `eevdf` or `stock`.
    pub scheduled_by: String,
    /// Counters of the sched_ext scheduler since it took over the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<SchedulerCounts>,
    /// Why viola does not apply a setting of the VM, and other remarks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// Accelerators that would help the VM and that it does not have: `slices`, `turbo`, `lanes`, `vread`, `vpipe`. Only a running
    /// daemon measures for long enough to tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub help: Vec<String>,
    /// The same in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

/// How long events for a VM waited until one of its vCPUs ran. An event that came while a vCPU ran waited 0 ns.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delay {
    /// Events.
    pub count: u64,
    /// Half of the events waited no longer, to within a quarter octave. Absent without events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_ns: Option<u64>,
    /// 99 of 100 events waited no longer, to within a quarter octave. Absent without events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_ns: Option<u64>,
    /// Histogram: lower and upper bound in ns, count. Empty buckets are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<(u64, u64, u64)>,
}

/// How long a vCPU of a VM still waits for a core at a random moment; 0 at a moment when it does not wait.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidualWait {
    /// Mean of all moments.
    pub mean_ns: u64,
    /// At half of all moments it is no longer.
    pub p50_ns: u64,
    /// At 99 of 100 moments it is no longer.
    pub p99_ns: u64,
}

/// Counters of the sched_ext scheduler for one VM, over all its cores.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerCounts {
    /// How often the scheduler put one of the VM's threads on a core.
    pub turns: u64,
    /// Time that the threads ran.
    pub run_ns: u64,
    /// Completed waits for a core.
    pub waits: u64,
    /// Sum of these waits.
    pub wait_ns: u64,
    /// The longest wait.
    pub wait_max_ns: u64,
    /// How often a waking thread of the VM preempted another VM.
    pub boosts: u64,
}

/// CPU time of a vCPU or of service threads over the measured time (`measured_ns` of [`VmList`]).
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// Running.
    pub run_ns: u64,
    /// Runnable, but not running.
    pub wait_ns: u64,
    /// Blocked.
    pub blocked_ns: u64,
    /// Wake-ups.
    pub wakes: u64,
    /// Context switches to the thread.
    pub switches: u64,
    /// Preemptions.
    pub preempted: u64,
    /// Histogram of waits over the last 10 s: lower and upper bound in ns, count. Empty buckets are left out. Absent without BPF.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<(u64, u64, u64)>,
}

/// Answer to `GET /v1/vms`.
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmList {
    /// Sorted by name.
    pub vms: Vec<VmReport>,
    /// Time over which `used`, `waiting`, `wait_share` and the rates were measured.
    pub measured_ns: u64,
    /// Probes that failed, one sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Body of `PATCH /v1/vms/{name}`. An absent field leaves the setting unchanged.
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
    /// Percent of one core, `1%` to `100%` per vCPU, or `none` for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<String>,
    /// Whether the change survives a restart of the daemon.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keep: bool,
    /// Removes all earlier `viola set` settings of this VM before the others are applied: the configuration applies
    /// again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub reset: bool,
    /// The class holds for this number of seconds, 0..=3600; then the former setting holds again. 0 ends a class that was set with
    /// `for_s`. Goes with a class, and with nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_s: Option<u32>,
}

fn is_false(b: &bool) -> bool {
    !b
}
