// SPDX-License-Identifier: Apache-2.0
//! Facts about the host that decide which mechanisms it can use. The caller draws the conclusions.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::attrs;
use crate::cgroup::{self, Mounts};
use crate::cpuset::CpuSet;
use crate::error::HostError;
use crate::proc;
use crate::topology::{self, Cpu};

pub use crate::kernel::Kernel;
pub use crate::privilege::Privilege;

/// What this host is and allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Running kernel.
    pub kernel: Kernel,
    /// Online CPUs with their cores, sockets and NUMA nodes.
    pub cpus: Vec<Cpu>,
    /// CPUs that the kernel keeps free of ordinary tasks.
    pub isolated: CpuSet,
    /// `kernel.sched_rt_runtime_us`: microseconds per period that real-time threads may use of a CPU; -1 without limit.
    pub rt_runtime_us: Option<i64>,
    /// `kernel.sched_rt_period_us`: length of that period, microseconds.
    pub rt_period_us: Option<i64>,
    /// Whether control groups divide real-time runtime (`CONFIG_RT_GROUP_SCHED`); `None` when neither a control group nor
    /// the kernel's configuration shows it.
    pub rt_group_sched: Option<bool>,
    /// `kernel.sched_autogroup_enabled`; `None` when not built in. When on, nice values do not count between login
    /// sessions.
    pub autogroup: Option<bool>,
    /// Default slice of the fair class, ns; `None` when the kernel does not report it.
    pub fair_slice_ns: Option<u64>,
    /// The kernel has type information for BPF (`/sys/kernel/btf/vmlinux`).
    pub btf: bool,
    /// Kernel lockdown: `none`, `integrity` or `confidentiality`; `None` when it cannot be read.
    pub lockdown: Option<String>,
    /// The kernel can load schedulers in BPF (`/sys/kernel/sched_ext`).
    pub sched_ext: bool,
    /// Version of the control groups that have the `cpu` controller.
    pub cgroup: Option<cgroup::Version>,
    /// `/dev/kvm` exists.
    pub kvm: bool,
    /// Rights of this program.
    pub privilege: Privilege,
}

impl HostFacts {
    /// Reads all facts.
    ///
    /// # Errors
    /// [`HostError`] when a file that every Linux has is missing or malformed.
    pub fn read() -> Result<Self, HostError> {
        let path = "/proc/sys/kernel/osrelease";
        let release = proc::read_text(path)?.unwrap_or_default();
        let kernel = Kernel::parse(&release)
            .ok_or_else(|| HostError::parse(path, "not a kernel version"))?;
        let mounts = Mounts::read()?;
        Ok(Self {
            cpus: topology::cpus()?,
            isolated: topology::isolated()?,
            rt_runtime_us: sysctl("sched_rt_runtime_us")?,
            rt_period_us: sysctl("sched_rt_period_us")?,
            rt_group_sched: cgroup::rt_group_sched(&mounts),
            autogroup: sysctl("sched_autogroup_enabled")?.map(|on| on != 0),
            fair_slice_ns: attrs::default_slice(),
            btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
            lockdown: proc::read_text("/sys/kernel/security/lockdown")
                .ok()
                .flatten()
                .and_then(|text| bracketed(&text)),
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

/// The word in brackets, as in `none [integrity] confidentiality`.
fn bracketed(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lockdown_mode_is_the_one_in_brackets() {
        assert_eq!(
            bracketed("none [integrity] confidentiality\n").as_deref(),
            Some("integrity")
        );
        assert_eq!(bracketed("none"), None);
    }

    #[test]
    fn facts_of_this_host_survive_json() {
        let facts = HostFacts::read().unwrap();
        assert!(facts.kernel.major >= 4);
        assert!(!facts.online().is_empty());
        assert_eq!(facts.privilege, Privilege::current().unwrap());
        let json = serde_json::to_string(&facts).unwrap();
        assert_eq!(serde_json::from_str::<HostFacts>(&json).unwrap(), facts);
    }
}
