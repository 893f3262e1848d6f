// SPDX-License-Identifier: Apache-2.0
//! Where a reader's worker runs: on the cores of its VM.
//!
//! Each request of the VM wakes the worker, and each reply wakes the VM. On one core that is a
//! context switch. Between cores it wakes an idle core, which took 40 to 50 us under
//! virtualisation. Reads of 64 KiB between cores reached 41 to 51 % of the throughput of the VM's
//! own disk; on the VM's core they reached 108 %.
//!
//! On managed cores the threads of the worker are service threads of its VM: they rank with it, and
//! the VM pays for their time. Where the host's real-time groups forbid that, the worker avoids
//! these cores, since a thread of the fair class gets 1/20 of such a core.

use viola_host::{CpuSet, Vm};

use viola_config::Slices;

/// Cores for the worker (process `pid`) of a VM; none when it stays where it is.
pub fn worker_cores(vm: &Vm, pid: u32, slices: &Slices) -> CpuSet {
    if vm.service.iter().any(|s| s.thread.pid == pid) {
        return vm.cores.clone();
    }
    let is_managed = |cpu: &u32| slices.enabled && slices.cores.contains(*cpu);
    vm.cores.iter().filter(|cpu| !is_managed(cpu)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managed_cores_are_for_workers_that_rank_with_their_vm() {
        let text = "[slices]\ncores = \"1-2\"\n";
        let config = viola_config::Config::parse(std::path::Path::new("x"), text);
        let slices = config.unwrap().slices;
        let mut vm = crate::testing::vm("web", 10, &[&[0, 1, 2]]);
        assert_eq!(worker_cores(&vm, 77, &slices), "0".parse().unwrap());
        vm.service.push(viola_host::ServiceThread {
            thread: crate::testing::thread(77, 78),
            kind: viola_host::ServiceKind::Backend,
        });
        assert_eq!(worker_cores(&vm, 77, &slices), "0-2".parse().unwrap());
        assert_eq!(worker_cores(&vm, 70, &slices), "0".parse().unwrap());
    }
}
