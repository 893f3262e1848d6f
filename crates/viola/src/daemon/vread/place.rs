// SPDX-License-Identifier: Apache-2.0
//! Where a reader's worker runs: on the cores of its VM.
//!
//! Each request of the VM wakes the worker, and each answer the VM. On one core that is a switch; between cores it wakes
//! an idle one, which under virtualisation took 40 to 50 us: reads of 64 KiB came to 41-51 % of the VM's own disk that
//! way, to 108 % on the VM's core. Cores on which slots rank VMs by real-time priority are left out: a thread of the
//! ordinary class would get a twentieth of such a core.

use viola_host::attrs::set_affinity;
use viola_host::{CpuSet, Vm, proc};

use crate::config::Slices;

/// Cores for the worker of a VM; none when it is better left where it is.
pub fn cores(vm: &Vm, slices: &Slices) -> CpuSet {
    let ranked = |cpu: &u32| slices.enabled && slices.cores.contains(*cpu);
    vm.cores.iter().filter(|cpu| !ranked(cpu)).collect()
}

/// Puts all threads of a process on `cores`; `false` when one could not be put there. Threads that are made meanwhile
/// inherit what their maker had, so they are looked for until there are no more.
pub fn put(pid: u32, cores: &CpuSet) -> bool {
    let mut before = 0;
    loop {
        let Ok(tasks) = proc::tasks(pid) else {
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
