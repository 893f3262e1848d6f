// SPDX-License-Identifier: Apache-2.0
//! Affinity: vCPUs that may run on several cores are pinned to the one they were placed on, and other VMs' threads
//! are kept off the cores that real-time slots fill.
//!
//! What a thread could run on before is written down before the first change, as the mechanisms do with its class.
//! Somebody else who changes an affinity meanwhile (`virsh vcpupin`) wins: that is then what the thread could
//! run on before.

use std::collections::BTreeMap;
use std::path::PathBuf;

use viola_host::attrs::{self, AttrError, Outcome};
use viola_host::{CpuSet, Thread, Tid, Vm, VmId};
use viola_sched::SchedError;
use viola_sched::restore::{RestoreError, SavedState, SavedVm, restore_vm};

/// The CPUs that threads are to run on.
pub type Wanted = BTreeMap<Thread, CpuSet>;

/// Pins and what was there before.
#[derive(Debug)]
pub struct Pins {
    file: PathBuf,
    state: SavedState,
    /// What we set.
    ours: Wanted,
    /// The cores to which the mechanism sends a pinned thread for a moment, or ever did: that is our doing too.
    parks: Wanted,
}

/// What applying the pins has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// VMs with threads that run elsewhere from now on.
    pub changed: Vec<VmId>,
    /// VMs that the kernel refused, with the reason.
    pub refused: Vec<(VmId, String)>,
}

impl Pins {
    /// `file` is where the affinities from before are kept.
    pub fn new(file: PathBuf) -> Self {
        Self {
            file,
            state: SavedState::default(),
            ours: Wanted::new(),
            parks: Wanted::new(),
        }
    }

    /// The CPUs that a thread may run on as far as others than viola are concerned; `None` when it is gone.
    pub fn allowed(&mut self, vm: &Vm, thread: &Thread) -> Result<Option<CpuSet>, AttrError> {
        let Some(now) = attrs::affinity(thread.tid)? else {
            return Ok(None);
        };
        Ok(Some(self.before(vm, thread, now)))
    }

    /// The same, from an affinity that was just read.
    pub fn before(&mut self, vm: &Vm, thread: &Thread, now: CpuSet) -> CpuSet {
        let parked = self.is_parked(thread, &now);
        let saved = self
            .state
            .vms
            .iter_mut()
            .find(|s| s.pid == vm.pid && s.start_time == vm.start_time);
        let Some(saved) = saved else { return now };
        let known = saved
            .threads
            .iter_mut()
            .find(|s| s.tid == thread.tid && s.start_time == thread.start_time);
        match self.ours.get(thread) {
            // As we left it.
            Some(ours) if *ours == now || parked => {
                known.map_or(&saved.affinity, |k| &k.affinity).clone()
            }
            // Changed by somebody else since.
            Some(_) => {
                self.ours.remove(thread);
                match known {
                    Some(k) => k.affinity = now.clone(),
                    None if thread.tid == vm.pid => saved.affinity = now.clone(),
                    None => {}
                }
                now
            }
            // Made since, by a thread that we had pinned.
            None if known.is_none() && self.ours.iter().any(|(t, c)| is_of(vm, t) && *c == now) => {
                saved.affinity.clone()
            }
            None => now,
        }
    }

    /// Says where pinned threads may be found beside where they were pinned.
    pub fn park(&mut self, parks: Wanted) {
        self.parks.retain(|t, _| self.ours.contains_key(t));
        for (thread, cpus) in parks {
            self.parks.entry(thread).or_default().extend(&cpus);
        }
    }

    fn is_parked(&self, thread: &Thread, now: &CpuSet) -> bool {
        let parks = self.parks.get(thread);
        now.len() == 1 && parks.is_some_and(|parks| now.iter().all(|cpu| parks.contains(cpu)))
    }

    /// Pins as `wanted` says, and gives all other threads back what they had.
    pub fn apply(&mut self, wanted: &Wanted, vms: &[Vm]) -> Result<Pinned, SchedError> {
        let mut done = Pinned::default();
        if *wanted == self.ours {
            return Ok(done);
        }
        self.note(wanted, vms)?;
        for vm in vms {
            let mut changed = false;
            for thread in vm.threads() {
                let to = wanted.get(thread);
                if to == self.ours.get(thread) {
                    continue;
                }
                let cpus = match to {
                    Some(cpus) => cpus.clone(),
                    None => self.original(vm, thread),
                };
                match attrs::set_affinity(thread.tid, &cpus) {
                    Ok(Outcome::Done) => {
                        changed = true;
                        match to {
                            Some(cpus) => self.ours.insert(*thread, cpus.clone()),
                            None => self.ours.remove(thread),
                        };
                    }
                    Ok(Outcome::Gone) => {
                        self.ours.remove(thread);
                    }
                    Err(e) => {
                        self.ours.remove(thread);
                        let why = e.to_string();
                        if !done.refused.iter().any(|(id, _)| *id == vm.id) {
                            done.refused.push((vm.id.clone(), why));
                        }
                    }
                }
            }
            if changed {
                done.changed.push(vm.id.clone());
            }
        }
        self.ours
            .retain(|t, _| vms.iter().any(|vm| vm.threads().any(|o| o == t)));
        self.forget(vms)?;
        Ok(done)
    }

    /// Main processes of the VMs that have a thread which `wanted` moves away from where it was pinned.
    pub fn moved_by<'a>(
        &'a self,
        wanted: &'a Wanted,
        vms: &'a [Vm],
    ) -> impl Iterator<Item = Tid> + 'a {
        let moves = |t: &Thread| {
            self.ours
                .get(t)
                .is_some_and(|now| wanted.get(t) != Some(now))
        };
        vms.iter()
            .filter(move |vm| vm.threads().any(moves))
            .map(|vm| vm.pid)
    }

    fn original(&self, vm: &Vm, thread: &Thread) -> CpuSet {
        let saved = self.state.vms.iter().find(|s| s.pid == vm.pid);
        saved.map_or_else(
            || vm.cores.clone(),
            |s| {
                s.threads
                    .iter()
                    .find(|k| k.tid == thread.tid)
                    .map_or(&s.affinity, |k| &k.affinity)
                    .clone()
            },
        )
    }

    /// What is not written down cannot be put back.
    fn note(&mut self, wanted: &Wanted, vms: &[Vm]) -> Result<(), RestoreError> {
        let written = self.state.clone();
        for vm in vms
            .iter()
            .filter(|vm| vm.threads().any(|t| wanted.contains_key(t)))
        {
            let is_known = |s: &viola_sched::restore::SavedVm| {
                s.pid == vm.pid && s.start_time == vm.start_time
            };
            let before: Option<Vec<Tid>> = self
                .state
                .vms
                .iter()
                .find(|s| is_known(s))
                .map(|s| s.threads.iter().map(|t| t.tid).collect());
            self.state.record(vm, true)?;
            let ours: Vec<&CpuSet> = self
                .ours
                .iter()
                .filter(|(t, _)| is_of(vm, t))
                .map(|(_, c)| c)
                .collect();
            if let (Some(before), Some(saved)) =
                (before, self.state.vms.iter_mut().find(|s| is_known(s)))
            {
                // A thread made since has inherited our pin; what it could run on before is what the others could.
                saved
                    .threads
                    .retain(|t| before.contains(&t.tid) || !ours.contains(&&t.affinity));
                refresh(saved, |tid| self.ours.keys().any(|t| t.tid == tid))?;
            }
        }
        if self.state == written {
            Ok(())
        } else {
            self.state.write(&self.file)
        }
    }

    /// Drops VMs of which nothing is pinned any more.
    fn forget(&mut self, vms: &[Vm]) -> Result<(), RestoreError> {
        let ours = &self.ours;
        for saved in &mut self.state.vms {
            refresh(saved, |tid| ours.keys().any(|t| t.tid == tid))?;
        }
        let has_pin = |pid: Tid| {
            vms.iter()
                .find(|vm| vm.pid == pid)
                .is_some_and(|vm| vm.threads().any(|t| ours.contains_key(t)))
        };
        let dropped: Vec<_> = self.state.vms.extract_if(.., |s| !has_pin(s.pid)).collect();
        for saved in &dropped {
            // Threads that nobody knew of at the last look.
            restore_vm(saved)?;
        }
        match (dropped.is_empty(), self.state.vms.is_empty()) {
            (true, _) => Ok(()),
            (false, true) => {
                let _ = std::fs::remove_file(&self.file);
                Ok(())
            }
            (false, false) => self.state.write(&self.file),
        }
    }

    /// Gives every thread back what it had.
    pub fn stop(&mut self) -> Result<(), SchedError> {
        self.ours.clear();
        for saved in &self.state.vms {
            restore_vm(saved)?;
        }
        self.state.vms.clear();
        let _ = std::fs::remove_file(&self.file);
        Ok(())
    }
}

/// What threads that are not pinned may run on now is what they are to have: others may have changed it, such as the
/// supervisor of vread for a reader's worker.
fn refresh(saved: &mut SavedVm, is_pinned: impl Fn(Tid) -> bool) -> Result<(), AttrError> {
    for thread in saved.threads.iter_mut().filter(|t| !is_pinned(t.tid)) {
        if let Some(now) = attrs::affinity(thread.tid)? {
            thread.affinity = now;
        }
    }
    Ok(())
}

fn is_of(vm: &Vm, thread: &Thread) -> bool {
    vm.threads().any(|t| t == thread)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// A process that sleeps, as a VM of one thread.
    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            Self(
                Command::new("sleep")
                    .arg("60")
                    .stdin(Stdio::null())
                    .spawn()
                    .unwrap(),
            )
        }

        fn vm(&self) -> Vm {
            let pid = self.0.id();
            let mut vm = crate::testing::vm("sleeper", pid, &[&[0]]);
            vm.start_time = viola_host::proc::stat(pid).unwrap().unwrap().start_time;
            vm.vcpus[0].threads[0].start_time = vm.start_time;
            vm.vcpus[0].cores = self.affinity();
            vm.cores = self.affinity();
            vm
        }

        fn affinity(&self) -> CpuSet {
            attrs::affinity(self.0.id()).unwrap().unwrap()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn pin(vm: &Vm, cpu: u32) -> Wanted {
        vm.threads()
            .map(|t| (*t, [cpu].into_iter().collect()))
            .collect()
    }

    #[test]
    fn a_pinned_vm_can_run_where_it_could_before_when_the_pin_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("affinity.json");
        let mut pins = Pins::new(file.clone());
        let sleeper = Sleeper::new();
        let (vm, all) = (sleeper.vm(), sleeper.affinity());
        let cpu = all.iter().next().unwrap();
        let done = pins
            .apply(&pin(&vm, cpu), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(
            (done.changed, done.refused),
            (vec![vm.id.clone()], Vec::new())
        );
        assert_eq!(sleeper.affinity(), [cpu].into_iter().collect());
        let thread = vm.threads().next().unwrap();
        assert_eq!(pins.allowed(&vm, thread).unwrap(), Some(all.clone()));
        assert!(file.exists());
        pins.apply(&Wanted::new(), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(sleeper.affinity(), all);
        assert!(!file.exists());
    }

    #[test]
    fn what_was_pinned_by_a_daemon_that_died_is_put_back_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("affinity.json");
        let sleeper = Sleeper::new();
        let (vm, all) = (sleeper.vm(), sleeper.affinity());
        let cpu = all.iter().next().unwrap();
        Pins::new(file.clone())
            .apply(&pin(&vm, cpu), &[vm])
            .unwrap();
        viola_sched::restore::restore_file(&file).unwrap();
        assert_eq!(sleeper.affinity(), all);
    }

    #[test]
    fn somebody_else_who_moves_the_vm_meanwhile_wins() {
        let dir = tempfile::tempdir().unwrap();
        let mut pins = Pins::new(dir.path().join("affinity.json"));
        let sleeper = Sleeper::new();
        let all: Vec<u32> = sleeper.affinity().iter().collect();
        let [first, second, ..] = all[..] else { return };
        let vm = sleeper.vm();
        pins.apply(&pin(&vm, first), std::slice::from_ref(&vm))
            .unwrap();
        let moved: CpuSet = [second].into_iter().collect();
        let _ = attrs::set_affinity(vm.pid, &moved).unwrap();
        let thread = vm.threads().next().unwrap();
        assert_eq!(pins.allowed(&vm, thread).unwrap(), Some(moved.clone()));
        pins.apply(&Wanted::new(), std::slice::from_ref(&vm))
            .unwrap();
        pins.stop().unwrap();
        assert_eq!(sleeper.affinity(), moved);
    }

    #[test]
    fn a_thread_that_the_mechanism_has_sent_away_for_a_moment_was_not_moved_by_somebody_else() {
        let dir = tempfile::tempdir().unwrap();
        let mut pins = Pins::new(dir.path().join("affinity.json"));
        let sleeper = Sleeper::new();
        let all: Vec<u32> = sleeper.affinity().iter().collect();
        let [first, second, ..] = all[..] else { return };
        let (vm, before) = (sleeper.vm(), sleeper.affinity());
        let wanted = pin(&vm, first);
        pins.apply(&wanted, std::slice::from_ref(&vm)).unwrap();
        pins.park(pin(&vm, second));
        let away: CpuSet = [second].into_iter().collect();
        let _ = attrs::set_affinity(vm.pid, &away).unwrap();
        let thread = vm.threads().next().unwrap();
        assert_eq!(pins.allowed(&vm, thread).unwrap(), Some(before.clone()));
        pins.stop().unwrap();
        assert_eq!(sleeper.affinity(), before);
    }

    #[test]
    fn a_worker_that_was_moved_before_it_was_pinned_comes_back_to_where_it_was_moved() {
        let dir = tempfile::tempdir().unwrap();
        let mut pins = Pins::new(dir.path().join("affinity.json"));
        let (sleeper, worker) = (Sleeper::new(), Sleeper::new());
        let all: Vec<u32> = sleeper.affinity().iter().collect();
        let [first, second, ..] = all[..] else { return };
        let mut vm = sleeper.vm();
        let of_worker = *worker.vm().threads().next().unwrap();
        vm.service.push(viola_host::ServiceThread {
            thread: of_worker,
            kind: viola_host::ServiceKind::Backend,
        });
        let mut wanted = pin(&vm, first);
        wanted.remove(&of_worker);
        pins.apply(&wanted, std::slice::from_ref(&vm)).unwrap();
        let moved: CpuSet = [second].into_iter().collect();
        let _ = attrs::set_affinity(of_worker.tid, &moved).unwrap();
        assert_eq!(pins.allowed(&vm, &of_worker).unwrap(), Some(moved.clone()));
        pins.apply(&pin(&vm, first), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(worker.affinity(), [first].into_iter().collect());
        assert_eq!(pins.allowed(&vm, &of_worker).unwrap(), Some(moved.clone()));
        pins.apply(&Wanted::new(), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(worker.affinity(), moved);
    }

    #[test]
    fn a_cpu_that_is_not_there_is_refused_and_said_of_the_vm() {
        let dir = tempfile::tempdir().unwrap();
        let mut pins = Pins::new(dir.path().join("affinity.json"));
        let sleeper = Sleeper::new();
        let (vm, all) = (sleeper.vm(), sleeper.affinity());
        let done = pins
            .apply(&pin(&vm, 8000), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(done.refused.len(), 1);
        assert_eq!(done.refused[0].0, vm.id);
        assert_eq!(sleeper.affinity(), all);
    }
}
