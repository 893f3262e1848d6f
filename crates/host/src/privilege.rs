// SPDX-License-Identifier: Apache-2.0
//! The rights of this program.

use serde::{Deserialize, Serialize};

use crate::error::HostError;
use crate::proc;

/// Rights of this program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Privilege {
    /// The effective user is root.
    pub root: bool,
    /// `CAP_SYS_NICE`: real-time classes and threads of other users.
    pub sys_nice: bool,
    /// `CAP_BPF` and `CAP_PERFMON`, or `CAP_SYS_ADMIN`: tracing programs.
    pub bpf: bool,
    /// `CAP_SYS_ADMIN`.
    pub sys_admin: bool,
    /// `CAP_SYS_PTRACE`: reading processes of other users.
    pub sys_ptrace: bool,
}

impl Privilege {
    /// The rights of the calling process.
    ///
    /// # Errors
    /// [`HostError`] for `/proc/self/status`.
    pub fn current() -> Result<Self, HostError> {
        let path = "/proc/self/status";
        let status = proc::read_text(path)?.unwrap_or_default();
        Self::parse(&status).ok_or_else(|| HostError::parse(path, "no line CapEff or Uid"))
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
