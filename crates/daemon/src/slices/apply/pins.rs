// SPDX-License-Identifier: Apache-2.0
//! Affinities: a vCPU that may run on several cores is pinned to the core it was placed on, and threads of other VMs are kept off
//! cores that real-time threads fill.
//!
//! The original affinity of a thread is saved to a file before the first change. When another program changes an affinity meanwhile
//! (`virsh vcpupin`), that becomes the original one.

use std::path::PathBuf;

use crate::cores::DesiredPins;
use viola_host::attrs::{self, AttrError, Outcome};
use viola_host::{CpuSet, Thread, Tid, Vm, VmId};
use viola_sched::SchedError;
use viola_sched::restore::{RestoreError, SavedState, SavedVm, restore_vm};

/// Pins, and the affinities before them.
#[derive(Debug)]
pub struct Pins {
    file: PathBuf,
    state: SavedState,
    /// Affinities that viola set.
    ours: DesiredPins,
    /// Cores on which the mechanism holds pinned threads at times. A thread that is there was moved by viola, too.
    held: DesiredPins,
}

/// What [`Pins::apply`] changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PinOutcome {
    /// VMs with a thread whose affinity changed.
    pub changed: Vec<VmId>,
    /// VMs that the kernel refused, and why.
    pub refused: Vec<(VmId, String)>,
}

impl Pins {
    /// No pins yet. `file` gets the affinities before the first change.
    pub fn new(file: PathBuf) -> Self {
        Self {
            file,
            state: SavedState::default(),
            ours: DesiredPins::new(),
            held: DesiredPins::new(),
        }
    }

    /// The CPUs that a thread may run on without viola's pins; `None` when it is gone.
    ///
    /// # Errors
    /// When the kernel does not report its affinity.
    pub fn allowed(&mut self, vm: &Vm, thread: &Thread) -> Result<Option<CpuSet>, AttrError> {
        let Some(now) = attrs::affinity(thread.tid)? else {
            return Ok(None);
        };
        Ok(Some(self.without_pin(vm, thread, now)))
    }

    /// The same, where `now` is the affinity that was just read.
    pub fn without_pin(&mut self, vm: &Vm, thread: &Thread, now: CpuSet) -> CpuSet {
        let is_held = self.is_held(thread, &now);
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
            // As viola set it.
            Some(ours) if *ours == now || is_held => {
                known.map_or(&saved.affinity, |k| &k.affinity).clone()
            }
            // Another program has changed it since.
            Some(_) => {
                self.ours.remove(thread);
                match known {
                    Some(k) => k.affinity = now.clone(),
                    None if thread.tid == vm.pid => saved.affinity = now.clone(),
                    None => {}
                }
                now
            }
            // A new thread inherits the pin of the thread that made it.
            None if known.is_none() && self.ours.iter().any(|(t, c)| is_of(vm, t) && *c == now) => {
                saved.affinity.clone()
            }
            None => now,
        }
    }

    /// Sets the cores on which the mechanism holds pinned threads at times.
    pub fn set_hold_cores(&mut self, cores: DesiredPins) {
        self.held.retain(|t, _| self.ours.contains_key(t));
        for (thread, cpus) in cores {
            self.held.entry(thread).or_default().extend(&cpus);
        }
    }

    fn is_held(&self, thread: &Thread, now: &CpuSet) -> bool {
        let cores = self.held.get(thread);
        now.len() == 1 && cores.is_some_and(|cores| now.iter().all(|cpu| cores.contains(cpu)))
    }

    /// Pins the threads of `desired`, and gives all other threads back what they had.
    ///
    /// # Errors
    /// When the original affinities cannot be read or saved, or a VM without pins cannot be
    /// restored.
    pub fn apply(&mut self, desired: &DesiredPins, vms: &[Vm]) -> Result<PinOutcome, SchedError> {
        let mut done = PinOutcome::default();
        if *desired == self.ours {
            return Ok(done);
        }
        self.save_originals(desired, vms)?;
        for vm in vms {
            let mut changed = false;
            for thread in vm.threads() {
                let to = desired.get(thread);
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
        self.drop_unpinned(vms)?;
        Ok(done)
    }

    /// Main processes of VMs with a pinned thread that `desired` moves.
    pub fn moved_by<'a>(
        &'a self,
        desired: &'a DesiredPins,
        vms: &'a [Vm],
    ) -> impl Iterator<Item = Tid> + 'a {
        let moves = |t: &Thread| {
            self.ours
                .get(t)
                .is_some_and(|now| desired.get(t) != Some(now))
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

    /// Saves the affinities of VMs that get a pin, before they change: only what is saved can be restored.
    fn save_originals(&mut self, desired: &DesiredPins, vms: &[Vm]) -> Result<(), RestoreError> {
        let saved_before = self.state.clone();
        for vm in vms
            .iter()
            .filter(|vm| vm.threads().any(|t| desired.contains_key(t)))
        {
            let is_known = |s: &SavedVm| s.pid == vm.pid && s.start_time == vm.start_time;
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
                // A new thread has inherited the pin; its original affinity is that of the VM.
                saved
                    .threads
                    .retain(|t| before.contains(&t.tid) || !ours.contains(&&t.affinity));
                refresh(saved, |tid| self.ours.keys().any(|t| t.tid == tid))?;
            }
        }
        if self.state == saved_before {
            Ok(())
        } else {
            self.state.write(&self.file)
        }
    }

    /// Drops VMs without pins from the file.
    fn drop_unpinned(&mut self, vms: &[Vm]) -> Result<(), RestoreError> {
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
            // It may have threads that were made after the last scan.
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

    /// Gives all threads back what they had, and removes the file.
    ///
    /// # Errors
    /// When an affinity cannot be restored.
    pub fn stop(&mut self) -> Result<(), SchedError> {
        self.ours.clear();
        let mut first_error = None;
        // A VM that cannot be restored now keeps its place in the file, for `viola restore`.
        self.state.vms.retain(|saved| match restore_vm(saved) {
            Ok(_) => false,
            Err(e) => {
                first_error.get_or_insert(e);
                true
            }
        });
        match first_error {
            None => {
                let _ = std::fs::remove_file(&self.file);
                Ok(())
            }
            Some(e) => {
                self.state.write(&self.file)?;
                Err(e.into())
            }
        }
    }
}

/// Saves the affinities of threads that are not pinned again: another program, or vread for a reader's worker, may have changed them.
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

    fn pin(vm: &Vm, cpu: u32) -> DesiredPins {
        vm.threads()
            .map(|t| (*t, [cpu].into_iter().collect()))
            .collect()
    }

    #[test]
    fn unpinned_threads_get_their_affinity_back() {
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
        pins.apply(&DesiredPins::new(), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(sleeper.affinity(), all);
        assert!(!file.exists());
    }

    #[test]
    fn affinities_are_restored_from_the_file_of_a_daemon_that_died() {
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
    fn a_vm_that_cannot_be_restored_keeps_no_other_one_pinned() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("affinity.json");
        let mut pins = Pins::new(file.clone());
        let (other, sleeper) = (Sleeper::new(), Sleeper::new());
        let all = sleeper.affinity();
        let cpu = all.iter().next().unwrap();
        let broken = Vm {
            id: VmId::new(viola_host::Hypervisor::Qemu, "broken"),
            ..other.vm()
        };
        let vms = [broken, sleeper.vm()];
        let mut wanted = pin(&vms[0], cpu);
        wanted.extend(pin(&vms[1], cpu));
        pins.apply(&wanted, &vms).unwrap();
        // The CPU that the first VM had is gone.
        let gone = |vm: &&mut SavedVm| vm.threads.iter().any(|t| t.tid == vms[0].pid);
        let saved = pins.state.vms.iter_mut().find(gone).unwrap();
        saved.threads[0].affinity = "4000".parse().unwrap();
        assert!(pins.stop().is_err());
        assert_eq!(sleeper.affinity(), all);
        assert_eq!(SavedState::read(&file).unwrap().vms.len(), 1);
    }

    #[test]
    fn an_affinity_that_another_program_sets_is_kept() {
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
        pins.apply(&DesiredPins::new(), std::slice::from_ref(&vm))
            .unwrap();
        pins.stop().unwrap();
        assert_eq!(sleeper.affinity(), moved);
    }

    #[test]
    fn a_thread_on_its_hold_core_counts_as_pinned() {
        let dir = tempfile::tempdir().unwrap();
        let mut pins = Pins::new(dir.path().join("affinity.json"));
        let sleeper = Sleeper::new();
        let all: Vec<u32> = sleeper.affinity().iter().collect();
        let [first, second, ..] = all[..] else { return };
        let (vm, before) = (sleeper.vm(), sleeper.affinity());
        let wanted = pin(&vm, first);
        pins.apply(&wanted, std::slice::from_ref(&vm)).unwrap();
        pins.set_hold_cores(pin(&vm, second));
        let away: CpuSet = [second].into_iter().collect();
        let _ = attrs::set_affinity(vm.pid, &away).unwrap();
        let thread = vm.threads().next().unwrap();
        assert_eq!(pins.allowed(&vm, thread).unwrap(), Some(before.clone()));
        pins.stop().unwrap();
        assert_eq!(sleeper.affinity(), before);
    }

    #[test]
    fn a_worker_that_moved_before_it_was_pinned_gets_its_last_affinity_back() {
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
        pins.apply(&DesiredPins::new(), std::slice::from_ref(&vm))
            .unwrap();
        assert_eq!(worker.affinity(), moved);
    }

    #[test]
    fn a_cpu_that_does_not_exist_makes_the_vm_refused() {
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
