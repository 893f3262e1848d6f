// SPDX-License-Identifier: Apache-2.0
//! Where a reader's worker runs: on the cores of its VM.
//!
//! Each request of the VM wakes the worker, and each answer the VM. On one core that is a switch; between cores it wakes
//! an idle one, which under virtualisation took 40 to 50 us: reads of 64 KiB came to 41-51 % of the VM's own disk that
//! way, to 108 % on the VM's core. On cores on which slots rank VMs by real-time priority the worker's threads are
//! service threads of its VM: they rank with it, and their time is its time. Where they cannot be (the host's real-time
//! groups forbid it), such cores are left out: a thread of the ordinary class would get a twentieth of one.

use viola_host::attrs::set_affinity;
use viola_host::{CpuSet, Vm, proc};

use viola_config::Slices;

/// Cores for the worker of a VM, process `pid`; none when it is better left where it is.
pub fn cores(vm: &Vm, pid: u32, slices: &Slices) -> CpuSet {
    if vm.service.iter().any(|s| s.thread.pid == pid) {
        return vm.cores.clone();
    }
    let ranked = |cpu: &u32| slices.enabled && slices.cores.contains(*cpu);
    vm.cores.iter().filter(|cpu| !ranked(cpu)).collect()
}

/// Puts all threads of a process on `cores`; `false` when one could not be put there. Threads that are made meanwhile
/// inherit what their maker had, so they are looked for until there are no more.
pub fn put(pid: u32, cores: &CpuSet) -> bool {
    let mut before = 0;
    loop {
        let Ok(tasks) = proc::threads(pid) else {
            return false;
        };
        if tasks
            .iter()
            .any(|(thread, _)| set_affinity(thread.tid, cores).is_err())
        {
            return false;
        }
        if tasks.len() <= before {
            return true;
        }
        before = tasks.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranked_cores_are_for_a_worker_that_ranks_with_its_vm() {
        let text = "[slices]\ncores = \"1-2\"\n";
        let config = viola_config::Config::parse(std::path::Path::new("x"), text);
        let slices = config.unwrap().slices;
        let mut vm = crate::testing::vm("web", 10, &[&[0, 1, 2]]);
        assert_eq!(cores(&vm, 77, &slices), "0".parse().unwrap());
        vm.service.push(viola_host::ServiceThread {
            thread: crate::testing::thread(77, 78),
            kind: viola_host::ServiceKind::Backend,
        });
        assert_eq!(cores(&vm, 77, &slices), "0-2".parse().unwrap());
        assert_eq!(cores(&vm, 70, &slices), "0".parse().unwrap());
    }

    #[test]
    fn a_process_is_put_on_cores_with_all_its_threads() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let all = viola_host::attrs::affinity(child.id()).unwrap().unwrap();
        let last: CpuSet = all.iter().last().into_iter().collect();
        assert!(put(child.id(), &last));
        let now = viola_host::attrs::affinity(child.id()).unwrap().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(now, last);
        assert!(
            put(child.id(), &last),
            "a process that is gone has no threads"
        );
    }
}
