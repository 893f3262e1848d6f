// SPDX-License-Identifier: Apache-2.0
//! Notices at each tick when a VM ends, by one system call for all of them.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::event::{Timespec, epoll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use viola_host::Vm;

use super::process::is_alive;

/// Watches the processes of VMs for their end.
#[derive(Debug, Default)]
pub struct ExitWatch {
    /// By number and start time.
    watched: BTreeMap<(u32, u64), OwnedFd>,
    /// An epoll instance with all of `watched`.
    epoll: Option<OwnedFd>,
    /// Processes that cannot be watched, and are read from /proc at each tick.
    polled: Vec<(u32, u64)>,
}

impl ExitWatch {
    /// Watches exactly these VMs from now on.
    pub fn watch(&mut self, vms: &[Vm]) {
        let key = |vm: &Vm| (vm.pid, vm.start_time);
        self.watched
            .retain(|k, _| vms.iter().any(|vm| key(vm) == *k));
        self.polled.clear();
        if self.epoll.is_none() {
            self.epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok();
        }
        for key in vms.iter().map(key) {
            if self.watched.contains_key(&key) {
                continue;
            }
            let process = Pid::from_raw(key.0 as i32);
            let opened = process.and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
            let watched = opened.zip(self.epoll.as_ref()).and_then(|(fd, epoll_fd)| {
                let data = epoll::EventData::new_u64(key.0.into());
                epoll::add(epoll_fd, &fd, data, epoll::EventFlags::IN).ok()?;
                Some(fd)
            });
            // The number may belong to another process by now.
            match watched.filter(|_| is_alive(key.0, key.1)) {
                Some(fd) => drop(self.watched.insert(key, fd)),
                None => self.polled.push(key),
            }
        }
    }

    /// Whether one of them has ended.
    pub fn has_any(&self) -> bool {
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut event = [MaybeUninit::uninit(); 1];
        let has_ended = |epoll_fd: &OwnedFd| {
            let seen = epoll::wait(epoll_fd, &mut event[..], Some(&at_once));
            match seen {
                Ok((ended, _)) => !ended.is_empty(),
                Err(_) => !self.watched.keys().all(|key| is_alive(key.0, key.1)),
            }
        };
        self.epoll.as_ref().is_some_and(has_ended)
            || !self.polled.iter().all(|key| is_alive(key.0, key.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use viola_host::proc;

    fn started() -> (Child, Vm) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let mut vm = crate::testing::vm("a", child.id(), &[&[0]]);
        vm.start_time = proc::stat(child.id()).unwrap().unwrap().start_time;
        (child, vm)
    }

    #[test]
    fn an_end_is_seen_before_the_parent_has_reaped_the_process() {
        let ((mut a, vm_a), (mut b, vm_b)) = (started(), started());
        let vms = [vm_a, vm_b];
        let mut exits = ExitWatch::default();
        assert!(!exits.has_any());
        exits.watch(&vms);
        assert_eq!((exits.watched.len(), exits.polled.len()), (2, 0));
        assert!(!exits.has_any());
        b.kill().unwrap();
        let begun = std::time::Instant::now();
        while !exits.has_any() {
            assert!(begun.elapsed().as_secs() < 10);
        }
        assert!(exits.has_any(), "until the next scan");
        exits.watch(&vms[..1]);
        assert!(!exits.has_any());
        a.kill().unwrap();
        a.wait().unwrap();
        b.wait().unwrap();
        assert!(exits.has_any());
    }

    #[test]
    fn a_process_with_the_number_of_a_vm_that_ended_is_another_one() {
        let (mut child, mut vm) = started();
        vm.start_time += 1;
        let mut exits = ExitWatch::default();
        exits.watch(std::slice::from_ref(&vm));
        assert!(exits.watched.is_empty());
        assert!(exits.has_any());
        exits.watch(&[]);
        assert!(!exits.has_any());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// For example when the daemon is out of descriptors.
    #[test]
    fn a_process_that_cannot_be_watched_is_polled() {
        let (mut child, vm) = started();
        let mut exits = ExitWatch::default();
        exits.polled.push((vm.pid, vm.start_time));
        assert!(!exits.has_any());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(exits.has_any());
    }
}
