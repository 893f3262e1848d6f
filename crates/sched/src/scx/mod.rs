// SPDX-License-Identifier: Apache-2.0
//! sched_ext: the default algorithm and turbo cores in the kernel, as a scheduler in BPF (bpf/scx.bpf.c).
//!
//! Threads of managed VMs get SCHED_EXT; all others stay in the kernel's own classes, which take precedence. There is no
//! real-time priority and no controller process: the kernel asks the scheduler whenever a core must choose. When the scheduler
//! fails, or the process that loaded it ends, the kernel returns its threads to the fair class.

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

use self::layout::{CoreRows, NAME};
use self::load::Loaded;
use self::rows::{VmIds, rows};
use crate::core_lock::lock_core;
use crate::mechanism::{CoreHealth, Health, Mechanism, SchedError, Usage};
use crate::plan::Plan;
use crate::restore::{SavedState, restore_file, restore_threads, restore_vm};

use layout::VmStats;
pub use layout::{CoreStats, Knobs};
pub use load::ScxError;

/// A scheduler that the kernel has verified but not attached.
pub struct VerifiedScheduler(Loaded);

impl VerifiedScheduler {
    /// The number of instructions that the verifier examined, by program: the cost of loading.
    pub fn verified(&self) -> Vec<(String, u32)> {
        self.0.verified()
    }
}

/// Has the kernel verify the scheduler, which shows whether it accepts it. Attaches nothing.
///
/// # Errors
/// [`ScxError`].
pub fn load() -> Result<VerifiedScheduler, ScxError> {
    Loaded::load(Knobs::default()).map(VerifiedScheduler)
}

/// Name of this host's active sched_ext scheduler, viola's or another.
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

/// One core and its rows.
struct Core {
    cpu: u32,
    seq: u64,
    rows: CoreRows,
}

struct Running {
    loaded: Loaded,
    cores: Vec<Core>,
    ids: VmIds,
    /// Threads: the id of the VM, and whether it is a service thread.
    threads: BTreeMap<i32, (u32, bool)>,
    _locks: Vec<OwnedFd>,
}

/// The sched_ext mechanism.
pub struct Scx {
    saved: PathBuf,
    knobs: Knobs,
    /// Loaded in advance, with the default knobs.
    ready: Option<Loaded>,
    state: SavedState,
    running: Option<Running>,
}

impl Scx {
    /// `saved` is the file for the attributes that the threads had before; `ready` saves verifying the scheduler again.
    pub fn new(saved: PathBuf, ready: Option<VerifiedScheduler>) -> Self {
        let mut scx = Self::with_knobs(saved, Knobs::default());
        scx.ready = ready.map(|r| r.0);
        scx
    }

    /// With other knobs than the default ones.
    pub fn with_knobs(saved: PathBuf, knobs: Knobs) -> Self {
        Self {
            saved,
            knobs,
            ready: None,
            state: SavedState::default(),
            running: None,
        }
    }

    /// Has the kernel verify the scheduler now, so that its start need not.
    ///
    /// # Errors
    /// [`ScxError`].
    pub fn prepare(&mut self) -> Result<(), ScxError> {
        self.ready = Some(Loaded::load(self.knobs)?);
        Ok(())
    }

    /// What each VM, by its main process, has used of each core so far.
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

    /// What scheduling has cost on each core so far.
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
        let mut ids = VmIds::default();
        let mut cores = Vec::new();
        for core in &plan.cores {
            let rows = rows(core, None, &mut ids)?;
            if core.cpu >= loaded.cpus {
                return Err(SchedError::unavailable(
                    NAME,
                    format!("there is no CPU {}", core.cpu),
                ));
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
        // Restore the threads before the scheduler goes, and once more those created meanwhile.
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

/// Gives a thread SCHED_EXT; keeps its nice value.
fn move_to_ext(tid: i32) -> Result<(), SchedError> {
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

/// One sentence for the kernel's scx_exit_kind, with the kernel's message.
fn sentence(kind: u32, message: &str) -> String {
    let what = match kind {
        1026 => "the kernel ended the scheduler, since a thread had waited for 5 s",
        67 => "SysRq S ended the scheduler",
        64..=66 => "the scheduler was disabled from outside",
        _ => "the kernel ended the scheduler after an error",
    };
    let message = match message {
        "" => String::new(),
        message => format!(" ({message})"),
    };
    format!("{what}{message}; the VMs' threads are in the fair class")
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
            // The locks keep out slots that manage one of the cores.
            let locks = cpus.iter().map(|&cpu| lock_core(cpu, NAME));
            let locks = locks.collect::<Result<Vec<_>, _>>()?;
            self.running = Some(self.start(plan, locks)?);
        }
        let done = self.apply_plan(plan, vms);
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
                false => health.ended = Some(sentence(ended.kind, &ended.message)),
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
    fn apply_plan(&mut self, plan: &Plan, vms: &[Vm]) -> Result<(), SchedError> {
        if self.state.record_plan(plan, vms)? {
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
        // First remove threads that have no row any more; last add those that get one.
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
            move_to_ext(*tid)?;
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
    fn the_exit_is_one_sentence_with_the_kernels_message() {
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
    fn a_kernel_without_sched_ext_is_reported() {
        if !std::path::Path::new("/sys/kernel/sched_ext").exists() {
            let error = load().err().unwrap().to_string();
            assert!(error.contains("CONFIG_SCHED_CLASS_EXT"), "{error}");
            assert_eq!(active_scheduler(), None);
        }
    }
}
