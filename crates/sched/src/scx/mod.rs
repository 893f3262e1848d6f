// SPDX-License-Identifier: Apache-2.0
//! sched_ext: the default algorithm and turbo cores in the kernel, as a scheduler in BPF (bpf/scx.bpf.c).
//!
//! Threads of managed VMs are given SCHED_EXT, all others stay in the kernel's own classes, which go before. No
//! real-time priority, no controller process: the kernel asks the scheduler whenever a core has to choose. When it
//! fails, or the process that loaded it ends in whatever way, the kernel takes its threads back into the fair class.

mod layout;
mod load;
#[cfg(test)]
mod replay;
mod rows;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use viola_host::Vm;
use viola_host::attrs::{self, Policy, RESET_ON_FORK, SchedAttr};
use viola_meter::acct::Acct;

use self::layout::CoreRows;
use self::load::Loaded;
use self::rows::{Ids, rows};
use crate::mechanism::{CoreHealth, Health, Mechanism, SchedError, Usage};
use crate::plan::Plan;
use crate::restore::{SavedState, restore_file, restore_threads, restore_vm};
use crate::slots::lock_core;

use layout::VmStats;
pub use layout::{CoreStats, Knobs};
pub use load::ScxError;

const NAME: &str = "sched_ext";

/// A scheduler that the kernel has verified and that is not at work. Dropping it leaves nothing.
pub struct VerifiedScheduler(Loaded);

impl VerifiedScheduler {
    /// How many instructions the verifier looked at, by program: what loading costs.
    pub fn verified(&self) -> Vec<(String, u32)> {
        self.0.verified()
    }
}

/// Has the kernel verify the scheduler, which tells whether it takes it. Nothing is scheduled by it.
pub fn load() -> Result<VerifiedScheduler, ScxError> {
    Loaded::load(Knobs::default()).map(VerifiedScheduler)
}

/// Name of the sched_ext scheduler that is at work on this host, whosever it is.
pub fn active_scheduler() -> Option<String> {
    load::active_scheduler()
}

impl From<ScxError> for SchedError {
    fn from(e: ScxError) -> Self {
        let mut why = e.to_string();
        if let Some(source) = std::error::Error::source(&e) {
            why = format!("{why}: {source}");
        }
        Self::Unavailable {
            mechanism: NAME,
            why,
        }
    }
}

/// One core and who has which row there.
struct Core {
    cpu: u32,
    seq: u64,
    rows: CoreRows,
}

struct Running {
    loaded: Loaded,
    cores: Vec<Core>,
    ids: Ids,
    /// Threads: which VM's, and whether they go before its vCPUs.
    threads: BTreeMap<i32, (u32, bool)>,
    _locks: Vec<OwnedFd>,
}

/// The sched_ext mechanism.
pub struct Scx {
    saved: PathBuf,
    knobs: Knobs,
    /// Loaded before, with the usual knobs.
    ready: Option<Loaded>,
    state: SavedState,
    running: Option<Running>,
}

impl Scx {
    /// `saved` is where the attributes from before are kept; `ready` saves having the kernel verify the scheduler again.
    pub fn new(saved: PathBuf, ready: Option<VerifiedScheduler>) -> Self {
        let mut scx = Self::with_knobs(saved, Knobs::default());
        scx.ready = ready.map(|r| r.0);
        scx
    }

    /// With other knobs than the usual ones.
    pub fn with_knobs(saved: PathBuf, knobs: Knobs) -> Self {
        Self {
            saved,
            knobs,
            ready: None,
            state: SavedState::default(),
            running: None,
        }
    }

    /// Has the kernel verify the scheduler now, which its start then needs not.
    ///
    /// # Errors
    /// Why there is none.
    pub fn prepare(&mut self) -> Result<(), ScxError> {
        self.ready = Some(Loaded::load(self.knobs)?);
        Ok(())
    }

    /// What each VM, by its main process, got on each core so far.
    fn stats(&self) -> Vec<(u32, i32, VmStats)> {
        let Some(running) = &self.running else {
            return Vec::new();
        };
        let mut all = Vec::new();
        for core in &running.cores {
            for (row, vm) in core.rows.vms.iter().enumerate().filter(|(_, v)| v.id != 0) {
                let pid = running.ids.of.iter().find(|(_, id)| **id == vm.id);
                let stats = running.loaded.vm_stats(core.cpu, row as u32);
                if let Some((pid, _)) = pid.filter(|_| stats.id == vm.id) {
                    all.push((core.cpu, *pid, stats));
                }
            }
        }
        all
    }

    /// What scheduling cost on each core so far.
    pub fn core_stats(&self) -> Vec<(u32, CoreStats)> {
        let running = self.running.iter();
        running
            .flat_map(|r| r.cores.iter().map(|c| (c.cpu, r.loaded.core_stats(c.cpu))))
            .collect()
    }

    fn start(&mut self, plan: &Plan, locks: Vec<OwnedFd>) -> Result<Running, SchedError> {
        let mut loaded = match self.ready.take() {
            Some(loaded) => loaded,
            None => Loaded::load(self.knobs)?,
        };
        let mut ids = Ids::default();
        let mut cores = Vec::new();
        for core in &plan.cores {
            let rows = rows(core, None, &mut ids)?;
            if core.cpu >= loaded.cpus {
                return Err(unavailable(format!("there is no CPU {}", core.cpu)));
            }
            loaded.publish(core.cpu, 1, &rows)?;
            cores.push(Core {
                cpu: core.cpu,
                seq: 1,
                rows,
            });
        }
        loaded.attach()?;
        Ok(Running {
            loaded,
            cores,
            ids,
            threads: BTreeMap::new(),
            _locks: locks,
        })
    }

    fn end(&mut self) -> Result<(), SchedError> {
        let Some(running) = self.running.take() else {
            return Ok(());
        };
        // Thread by thread, so that each is back before the scheduler goes; once more for those made meanwhile.
        let first = restore_file(&self.saved);
        let kept = first.is_ok().then(|| self.state.clone());
        drop(running);
        for vm in kept.iter().flat_map(|s| &s.vms) {
            restore_vm(vm)?;
        }
        self.state = SavedState::default();
        first?;
        Ok(())
    }
}

fn unavailable(why: String) -> SchedError {
    SchedError::Unavailable {
        mechanism: NAME,
        why,
    }
}

/// Gives a thread SCHED_EXT, with the nice value it has.
fn take(tid: i32) -> Result<(), SchedError> {
    let tid = tid as u32;
    let Some(attr) = attrs::get(tid)? else {
        return Ok(());
    };
    if attr.policy != Policy::Ext {
        let ext = SchedAttr {
            policy: Policy::Ext,
            flags: attr.flags & RESET_ON_FORK,
            ..SchedAttr::fair(attr.nice)
        };
        let _ = attrs::set(tid, &ext)?;
    }
    Ok(())
}

/// The kernel's scx_exit_kind in a sentence, with its own words.
fn sentence(kind: u32, words: &str) -> String {
    let what = match kind {
        1026 => "the kernel ended the scheduler, since a thread had waited for 5 s",
        67 => "SysRq S ended the scheduler",
        64..=66 => "somebody ended the scheduler",
        _ => "the kernel ended the scheduler after an error",
    };
    let words = match words {
        "" => String::new(),
        words => format!(" ({words})"),
    };
    format!("{what}{words}; the VMs' threads are in the fair class")
}

impl Mechanism for Scx {
    fn name(&self) -> &'static str {
        NAME
    }

    fn apply(
        &mut self,
        plan: &Plan,
        vms: &[Vm],
        _acct: Option<&mut Acct>,
    ) -> Result<(), SchedError> {
        let cpus: Vec<u32> = plan.cores.iter().map(|c| c.cpu).collect();
        let is_same = |r: &Running| r.cores.iter().map(|c| c.cpu).eq(cpus.iter().copied());
        if self.running.as_ref().is_some_and(|r| !is_same(r)) {
            self.end()?;
        }
        if cpus.is_empty() {
            return Ok(());
        }
        if self.running.is_none() {
            // Not while slots have one of the cores.
            let locks = cpus.iter().map(|&cpu| lock_core(cpu, NAME));
            let locks = locks.collect::<Result<Vec<_>, _>>()?;
            self.running = Some(self.start(plan, locks)?);
        }
        let done = self.follow(plan, vms);
        if done.is_err() {
            self.end()?;
        }
        done
    }

    fn health(&mut self) -> Health {
        let Some(running) = &self.running else {
            return Health::default();
        };
        let mut health = Health::default();
        for core in &running.cores {
            let s = running.loaded.core_stats(core.cpu);
            health.cores.push(CoreHealth {
                cpu: core.cpu,
                decisions: s.decisions,
                switches: s.switches,
                calls: s.kicks,
                cpu_ns: s.decide_ns,
                late_max: s.late_max,
            });
        }
        if let Some(ended) = running.loaded.ended() {
            match ended.by_hotplug() {
                true => health.resync = true,
                false => health.ended = Some(sentence(ended.kind, &ended.words)),
            }
            if let Err(e) = self.end() {
                eprintln!("viola: {e}");
            }
        }
        health
    }

    fn usage(&self) -> Vec<Usage> {
        let of = |(cpu, pid, s): (u32, i32, VmStats)| Usage {
            pid,
            cpu,
            run: s.run,
            turns: s.turns,
            waits: s.waits,
            wait_sum: s.wait_sum,
            wait_max: s.wait_max,
            boosts: s.boosts,
        };
        self.stats().into_iter().map(of).collect()
    }

    fn stop(&mut self) -> Result<(), SchedError> {
        self.end()
    }
}

impl Scx {
    /// Brings rows and threads in line with the plan.
    fn follow(&mut self, plan: &Plan, vms: &[Vm]) -> Result<(), SchedError> {
        // What is not written down cannot be put back, so this comes before any change.
        let before = self.state.clone();
        for v in plan.cores.iter().flat_map(|c| &c.vms) {
            if let Some(vm) = vms.iter().find(|vm| vm.pid as i32 == v.pid) {
                self.state.record(vm, false)?;
            }
        }
        if self.state != before {
            self.state.write(&self.saved)?;
        }
        let Some(running) = self.running.as_mut() else {
            return Ok(());
        };
        let stays = |pid: i32| {
            plan.cores
                .iter()
                .any(|c| c.vms.iter().any(|v| v.pid == pid))
        };
        running.ids.of.retain(|pid, _| stays(*pid));
        let mut wanted = BTreeMap::new();
        let mut changed = Vec::new();
        for (core, new) in running.cores.iter_mut().zip(&plan.cores) {
            let rows = rows(new, Some(&core.rows), &mut running.ids)?;
            if rows != core.rows {
                changed.push((core, rows));
            }
            for vm in &new.vms {
                let Some(id) = running.ids.of.get(&vm.pid) else {
                    continue;
                };
                let threads = vm.threads.iter().map(|t| (t.tid, (*id, t.service)));
                wanted.extend(threads);
            }
        }
        // First those leave that have no row any more, last those come that are to have one.
        let gone: BTreeSet<u32> = running
            .threads
            .keys()
            .filter(|tid| !wanted.contains_key(*tid))
            .map(|tid| *tid as u32)
            .collect();
        for tid in &gone {
            running.loaded.enrol(*tid as i32, 0, false)?;
        }
        for vm in &self.state.vms {
            if stays(vm.pid as i32) {
                restore_threads(vm, &gone)?;
            } else {
                restore_vm(vm)?;
            }
        }
        if self.state.vms.iter().any(|vm| !stays(vm.pid as i32)) {
            self.state.vms.retain(|vm| stays(vm.pid as i32));
            self.state.write(&self.saved)?;
        }
        for (core, rows) in changed {
            core.seq += 1;
            running.loaded.publish(core.cpu, core.seq, &rows)?;
            core.rows = rows;
        }
        for (tid, (id, service)) in &wanted {
            if running.threads.get(tid) != Some(&(*id, *service)) {
                running.loaded.enrol(*tid, *id, *service)?;
            }
            take(*tid)?;
        }
        running.threads = wanted;
        Ok(())
    }
}

impl Drop for Scx {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            eprintln!("viola: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_it_ended_is_one_sentence_with_the_kernels_own_words() {
        assert_eq!(
            sentence(1026, "runnable task stall: g1[7] failed to run for 5.0s"),
            "the kernel ended the scheduler, since a thread had waited for 5 s \
             (runnable task stall: g1[7] failed to run for 5.0s); the VMs' threads are in the fair class"
        );
        assert_eq!(
            sentence(67, ""),
            "SysRq S ended the scheduler; the VMs' threads are in the fair class"
        );
    }

    #[test]
    fn a_kernel_without_it_is_said_so() {
        if !std::path::Path::new("/sys/kernel/sched_ext").exists() {
            let said = load().err().unwrap().to_string();
            assert!(said.contains("CONFIG_SCHED_CLASS_EXT"), "{said}");
            assert_eq!(active_scheduler(), None);
        }
    }
}
