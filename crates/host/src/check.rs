// SPDX-License-Identifier: Apache-2.0
//! Facts about the host that decide which mechanisms it can have. Only facts: what follows from them, and
//! how it is told, is up to the caller.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cgroup::{self, Mounts};
use crate::error::HostError;
use crate::proc;
use crate::topology::{self, Cpu};
use crate::{CpuSet, attrs};

/// Version of the running kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number, 0 when there is none.
    pub patch: u32,
    /// All of `uname -r`.
    pub release: String,
}

impl Kernel {
    /// Reads a release such as `6.18.44-generic` or `7.2-rc3`.
    #[must_use]
    pub fn parse(release: &str) -> Option<Self> {
        let release = release.trim();
        let mut numbers = release.split('.').map(|part| {
            let digits = part.bytes().take_while(u8::is_ascii_digit).count();
            part[..digits].parse::<u32>().ok()
        });
        Some(Self {
            major: numbers.next()??,
            minor: numbers.next()??,
            patch: numbers.next().flatten().unwrap_or(0),
            release: release.to_owned(),
        })
    }

    /// Whether it is this version or a later one.
    #[must_use]
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        (self.major, self.minor) >= (major, minor)
    }

    /// Whether the fair class gets up to 5 % of a core that real-time threads fill (Linux 6.12).
    #[must_use]
    pub fn has_fair_server(&self) -> bool {
        self.is_at_least(6, 12)
    }

    /// Whether `sched_setattr` takes a slice for a thread of the fair class (Linux 6.12).
    #[must_use]
    pub fn has_fair_slice(&self) -> bool {
        self.is_at_least(6, 12)
    }
}

/// Rights of this program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Privilege {
    /// Effective user is root.
    pub root: bool,
    /// `CAP_SYS_NICE`: real-time classes and other users' threads.
    pub sys_nice: bool,
    /// `CAP_BPF` and `CAP_PERFMON`, or `CAP_SYS_ADMIN`: tracing programs.
    pub bpf: bool,
    /// `CAP_SYS_ADMIN`.
    pub sys_admin: bool,
    /// `CAP_SYS_PTRACE`: looking into processes of other users.
    pub sys_ptrace: bool,
}

impl Privilege {
    /// Those of the calling process.
    ///
    /// # Errors
    /// [`HostError`] for `/proc/self/status`.
    pub fn current() -> Result<Self, HostError> {
        let path = "/proc/self/status";
        let status = proc::read_text(path)?.unwrap_or_default();
        Self::parse(&status).ok_or_else(|| HostError::parse(path, "it has no line CapEff or Uid"))
    }

    fn parse(status: &str) -> Option<Self> {
        // Numbers of linux/capability.h.
        const SYS_PTRACE: u32 = 19;
        const SYS_ADMIN: u32 = 21;
        const SYS_NICE: u32 = 23;
        const PERFMON: u32 = 38;
        const BPF: u32 = 39;
        let effective = u64::from_str_radix(proc::status_field(status, "CapEff")?, 16).ok()?;
        let has = |bit: u32| effective >> bit & 1 == 1;
        let mut uids = proc::status_field(status, "Uid")?.split_ascii_whitespace();
        Some(Self {
            root: uids.nth(1)? == "0",
            sys_nice: has(SYS_NICE),
            bpf: has(SYS_ADMIN) || (has(BPF) && has(PERFMON)),
            sys_admin: has(SYS_ADMIN),
            sys_ptrace: has(SYS_PTRACE),
        })
    }
}

/// What this host is and allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Running kernel.
    pub kernel: Kernel,
    /// Online CPUs with cores, sockets and nodes.
    pub cpus: Vec<Cpu>,
    /// CPUs kept free of ordinary tasks.
    pub isolated: CpuSet,
    /// `kernel.sched_rt_runtime_us`: microseconds per period that real-time threads may use of a CPU, -1
    /// without limit.
    pub rt_runtime_us: Option<i64>,
    /// `kernel.sched_rt_period_us`.
    pub rt_period_us: Option<i64>,
    /// Whether control groups divide real-time run time (`CONFIG_RT_GROUP_SCHED`); `None` when neither a
    /// control group nor a file of the kernel's configuration tells.
    pub rt_group_sched: Option<bool>,
    /// `kernel.sched_autogroup_enabled`; `None` when not built in. When on, nice values do not count
    /// between login sessions.
    pub autogroup: Option<bool>,
    /// Nanoseconds a thread of the fair class gets by default; `None` where the kernel does not tell.
    pub fair_slice_ns: Option<u64>,
    /// Type information of the kernel for BPF (`/sys/kernel/btf/vmlinux`).
    pub btf: bool,
    /// Kernel lockdown: `none`, `integrity` or `confidentiality`; `None` when it cannot be read.
    pub lockdown: Option<String>,
    /// The kernel can load schedulers in BPF (`/sys/kernel/sched_ext`).
    pub sched_ext: bool,
    /// Version of the control groups that have the `cpu` controller.
    pub cgroup: Option<cgroup::Version>,
    /// `/dev/kvm` is there.
    pub kvm: bool,
    /// Rights of this program.
    pub privilege: Privilege,
}

impl HostFacts {
    /// Reads them all.
    ///
    /// # Errors
    /// [`HostError`] when a file that every Linux has is missing or strange.
    pub fn read() -> Result<Self, HostError> {
        let path = "/proc/sys/kernel/osrelease";
        let release = proc::read_text(path)?.unwrap_or_default();
        let kernel = Kernel::parse(&release)
            .ok_or_else(|| HostError::parse(path, "it is no kernel version"))?;
        let mounts = Mounts::read()?;
        Ok(Self {
            cpus: topology::cpus()?,
            isolated: topology::isolated()?,
            rt_runtime_us: sysctl("sched_rt_runtime_us")?,
            rt_period_us: sysctl("sched_rt_period_us")?,
            rt_group_sched: rt_group_sched(&mounts),
            autogroup: sysctl("sched_autogroup_enabled")?.map(|on| on != 0),
            fair_slice_ns: attrs::default_slice(),
            btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
            lockdown: proc::read_text("/sys/kernel/security/lockdown")
                .ok()
                .flatten()
                .and_then(|text| chosen(&text)),
            sched_ext: Path::new("/sys/kernel/sched_ext").exists(),
            cgroup: mounts.cpu_version()?,
            kvm: Path::new("/dev/kvm").exists(),
            privilege: Privilege::current()?,
            kernel,
        })
    }

    /// Numbers of the online CPUs.
    #[must_use]
    pub fn online(&self) -> CpuSet {
        self.cpus.iter().map(|c| c.cpu).collect()
    }
}

fn sysctl(name: &str) -> Result<Option<i64>, HostError> {
    Ok(proc::read_text(format!("/proc/sys/kernel/{name}"))?
        .and_then(|text| text.trim().parse().ok()))
}

/// The word in brackets of `none [integrity] confidentiality`.
fn chosen(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

/// From a version 1 hierarchy, else from the kernel's configuration and command line.
pub(crate) fn rt_group_sched(mounts: &Mounts) -> Option<bool> {
    if let Some(answer) = mounts.has_rt_groups() {
        return Some(answer);
    }
    let release = proc::read_text("/proc/sys/kernel/osrelease")
        .ok()
        .flatten()?;
    let release = release.trim();
    let files = [
        format!("/boot/config-{release}"),
        format!("/lib/modules/{release}/config"),
    ];
    let config = files
        .iter()
        .find_map(|f| proc::read_text(f).ok().flatten())?;
    let command_line = proc::read_text("/proc/cmdline")
        .ok()
        .flatten()
        .unwrap_or_default();
    Some(rt_groups_of(&config, &command_line))
}

/// Built in, and not switched off at start (Linux 6.15 and later can).
fn rt_groups_of(config: &str, command_line: &str) -> bool {
    let has = |option: &str| config.lines().any(|line| line == option);
    let asked = command_line
        .split_ascii_whitespace()
        .rev()
        .find_map(|word| word.strip_prefix("rt_group_sched="));
    has("CONFIG_RT_GROUP_SCHED=y")
        && match asked {
            Some(word) => matches!(word, "1" | "y" | "Y" | "on"),
            None => !has("CONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y"),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_of_distributions_are_understood() {
        let version = |text: &str| Kernel::parse(text).map(|k| (k.major, k.minor, k.patch));
        assert_eq!(version("6.18.44-fc-v669\n"), Some((6, 18, 44)));
        assert_eq!(version("7.2-rc3"), Some((7, 2, 0)));
        assert_eq!(version("5.14.0-503.11.1.el9_5.x86_64"), Some((5, 14, 0)));
        assert_eq!(version("6.12+deb13-amd64"), Some((6, 12, 0)));
        assert_eq!(version("linux"), None);
        assert_eq!(version("6"), None);
        assert_eq!(version("99999999999.1"), None);
        let kernel = Kernel::parse("6.12.1").unwrap();
        assert!(
            kernel.is_at_least(6, 12) && kernel.is_at_least(5, 99) && !kernel.is_at_least(7, 0)
        );
    }

    #[test]
    fn capabilities_are_read_from_the_effective_set() {
        let status = |caps: &str| {
            format!("Uid:\t1000\t0\t0\t0\nCapPrm:\tffffffffffffffff\nCapEff:\t{caps}\n")
        };
        let all = Privilege::parse(&status("000001ffffffffff")).unwrap();
        assert!(all.root && all.sys_nice && all.bpf && all.sys_admin && all.sys_ptrace);
        let nice = Privilege::parse(&status("0000000000800000")).unwrap();
        assert!(nice.sys_nice && !nice.bpf && !nice.sys_admin);
        let bpf_without_perfmon = Privilege::parse(&status("0000008000000000")).unwrap();
        assert!(!bpf_without_perfmon.bpf);
        assert!(Privilege::parse(&status("000000c000000000")).unwrap().bpf);
        assert_eq!(Privilege::parse("Uid:\t0\n"), None);
    }

    #[test]
    fn the_lockdown_mode_is_the_one_in_brackets() {
        assert_eq!(
            chosen("none [integrity] confidentiality\n").as_deref(),
            Some("integrity")
        );
        assert_eq!(chosen("none"), None);
    }

    #[test]
    fn real_time_groups_can_be_built_in_and_yet_off() {
        let built = "CONFIG_RT_GROUP_SCHED=y\n";
        let off = "CONFIG_RT_GROUP_SCHED=y\nCONFIG_RT_GROUP_SCHED_DEFAULT_DISABLED=y\n";
        assert!(rt_groups_of(built, "quiet"));
        assert!(!rt_groups_of(built, "rt_group_sched=0"));
        assert!(!rt_groups_of(off, "quiet"));
        assert!(rt_groups_of(off, "rt_group_sched=0 rt_group_sched=1"));
        assert!(!rt_groups_of("# CONFIG_RT_GROUP_SCHED is not set\n", ""));
    }

    #[test]
    fn this_host_has_facts() {
        let facts = HostFacts::read().unwrap();
        assert!(facts.kernel.major >= 4);
        assert!(!facts.online().is_empty());
        assert_eq!(facts.privilege, Privilege::current().unwrap());
        let json = serde_json::to_string(&facts).unwrap();
        assert_eq!(serde_json::from_str::<HostFacts>(&json).unwrap(), facts);
    }
}
