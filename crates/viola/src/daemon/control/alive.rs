// SPDX-License-Identifier: Apache-2.0
//! Whether all VMs still live, asked at each turn: one system call for all of them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use viola_host::{Vm, proc};

/// The processes of the VMs, by number and start time.
#[derive(Debug, Default)]
pub struct Alive(BTreeMap<(u32, u64), OwnedFd>);

impl Alive {
    /// Watches exactly these from now on.
    pub fn follow(&mut self, vms: &[Vm]) {
        let key = |vm: &Vm| (vm.pid, vm.start_time);
        self.0.retain(|k, _| vms.iter().any(|vm| key(vm) == *k));
        for vm in vms {
            if self.0.contains_key(&key(vm)) {
                continue;
            }
            let process = Pid::from_raw(vm.pid as i32);
            // Without one, it is looked at each time.
            let opened = process.and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
            // The number may be another process's by now.
            if let Some(fd) = opened.filter(|_| lives(vm)) {
                self.0.insert(key(vm), fd);
            }
        }
    }

    /// Whether one of them has ended.
    pub fn somebody_died(&self, vms: &[Vm]) -> bool {
        let mut fds: Vec<PollFd<'_>> = self
            .0
            .values()
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect();
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match poll(&mut fds, Some(&at_once)) {
            Ok(0) => {
                let watched = |vm: &&Vm| self.0.contains_key(&(vm.pid, vm.start_time));
                vms.iter().filter(|vm| !watched(vm)).any(|vm| !lives(vm))
            }
            Ok(_) => true,
            Err(_) => vms.iter().any(|vm| !lives(vm)),
        }
    }
}

fn lives(vm: &Vm) -> bool {
    matches!(proc::stat(vm.pid), Ok(Some(s)) if s.start_time == vm.start_time && !s.is_dead())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    fn started() -> (Child, Vm) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut vm = crate::testing::vm("a", child.id(), &[&[0]]);
        vm.start_time = proc::stat(child.id()).unwrap().unwrap().start_time;
        (child, vm)
    }

    #[test]
    fn an_end_is_seen_before_anybody_waited_for_it() {
        let ((mut a, vm_a), (mut b, vm_b)) = (started(), started());
        let vms = [vm_a, vm_b];
        let mut alive = Alive::default();
        // also of those that are not watched yet
        assert!(!alive.somebody_died(&vms));
        alive.follow(&vms);
        assert_eq!(alive.0.len(), 2);
        assert!(!alive.somebody_died(&vms));
        b.kill().unwrap();
        let begun = std::time::Instant::now();
        while !alive.somebody_died(&vms) {
            assert!(begun.elapsed().as_secs() < 10);
        }
        alive.follow(&vms[..1]);
        assert!(!alive.somebody_died(&vms[..1]));
        a.kill().unwrap();
        a.wait().unwrap();
        b.wait().unwrap();
    }

    #[test]
    fn a_number_that_is_another_process_is_not_the_vm() {
        let (mut child, mut vm) = started();
        vm.start_time += 1;
        let mut alive = Alive::default();
        alive.follow(std::slice::from_ref(&vm));
        assert!(alive.0.is_empty());
        assert!(alive.somebody_died(std::slice::from_ref(&vm)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
