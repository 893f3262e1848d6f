// SPDX-License-Identifier: Apache-2.0
//! Whether all VMs still live, asked at each turn: one system call for all of them.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::event::{Timespec, epoll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use viola_host::{Vm, proc};

/// The processes of the VMs, by number and start time.
#[derive(Debug, Default)]
pub struct Alive {
    watched: BTreeMap<(u32, u64), OwnedFd>,
    /// All of `watched`: asking costs the same however many they are.
    ends: Option<OwnedFd>,
    /// Those that cannot be watched, and are looked at each time.
    others: Vec<(u32, u64)>,
}

impl Alive {
    /// Watches exactly these from now on.
    pub fn follow(&mut self, vms: &[Vm]) {
        let key = |vm: &Vm| (vm.pid, vm.start_time);
        self.watched
            .retain(|k, _| vms.iter().any(|vm| key(vm) == *k));
        self.others.clear();
        if self.ends.is_none() {
            self.ends = epoll::create(epoll::CreateFlags::CLOEXEC).ok();
        }
        for key in vms.iter().map(key) {
            if self.watched.contains_key(&key) {
                continue;
            }
            let process = Pid::from_raw(key.0 as i32);
            let opened = process.and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
            let watched = opened.zip(self.ends.as_ref()).and_then(|(fd, ends)| {
                let data = epoll::EventData::new_u64(key.0.into());
                epoll::add(ends, &fd, data, epoll::EventFlags::IN).ok()?;
                Some(fd)
            });
            // The number may be another process's by now.
            match watched.filter(|_| lives(key)) {
                Some(fd) => drop(self.watched.insert(key, fd)),
                None => self.others.push(key),
            }
        }
    }

    /// Whether one of them has ended.
    pub fn somebody_died(&self) -> bool {
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut event = [MaybeUninit::uninit(); 1];
        let is_over = |ends: &OwnedFd| {
            let seen = epoll::wait(ends, &mut event[..], Some(&at_once));
            match seen {
                Ok((ended, _)) => !ended.is_empty(),
                Err(_) => !self.watched.keys().all(|key| lives(*key)),
            }
        };
        self.ends.as_ref().is_some_and(is_over) || !self.others.iter().all(|key| lives(*key))
    }
}

fn lives((pid, start_time): (u32, u64)) -> bool {
    matches!(proc::stat(pid), Ok(Some(s)) if s.start_time == start_time && !s.is_dead())
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
        assert!(!alive.somebody_died());
        alive.follow(&vms);
        assert_eq!((alive.watched.len(), alive.others.len()), (2, 0));
        assert!(!alive.somebody_died());
        b.kill().unwrap();
        let begun = std::time::Instant::now();
        while !alive.somebody_died() {
            assert!(begun.elapsed().as_secs() < 10);
        }
        assert!(alive.somebody_died(), "until somebody looks");
        alive.follow(&vms[..1]);
        assert!(!alive.somebody_died());
        a.kill().unwrap();
        a.wait().unwrap();
        b.wait().unwrap();
        assert!(alive.somebody_died());
    }

    #[test]
    fn a_number_that_is_another_process_is_not_the_vm() {
        let (mut child, mut vm) = started();
        vm.start_time += 1;
        let mut alive = Alive::default();
        alive.follow(std::slice::from_ref(&vm));
        assert!(alive.watched.is_empty());
        assert!(alive.somebody_died());
        alive.follow(&[]);
        assert!(!alive.somebody_died());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Where no more descriptors are to be had, for example.
    #[test]
    fn one_that_cannot_be_watched_is_looked_at() {
        let (mut child, vm) = started();
        let mut alive = Alive::default();
        alive.others.push((vm.pid, vm.start_time));
        assert!(!alive.somebody_died());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(alive.somebody_died());
    }
}
