// SPDX-License-Identifier: Apache-2.0
//! Slots: a real-time controller gives each core to one VM after the other.
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | the daemon's side: starts the processes, publishes plans, restores threads |
//! | [`controller`] | one real-time thread per core that carries out the plan |
//! | [`watchdog`] | the process between them, which restores every thread when one of them fails |
//! | [`shared`], `plan_rows.rs`, `lock_free.rs` | the memory that the three share |
//! | `threads.rs` | a VM's threads and their priorities |
//! | `budget.rs` | the limit on cores that the host uses too |
//! | `forks.rs` | records the threads that VMs create, for restoring them |
//! | `filler.rs` | the thread that enforces caps |
//! | `packets.rs` | a VM's packets in the terms of policy |
//!
//! Three processes share the work, so that a fault in one never takes a core away.

mod budget;
mod child;
pub mod controller;
mod filler;
mod forks;
mod lock_free;
#[cfg(loom)]
#[cfg(test)]
mod loom_models;
mod packets;
mod plan_rows;
pub mod shared;
mod threads;
pub mod watchdog;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use viola_host::Vm;
use viola_meter::acct::Acct;

use self::shared::{MAX_CORES, PoolCore, SharedMemory, now};
use self::watchdog::{CoreArgs, HelperArgs, WatchdogExit, set_cloexec};
use crate::core_lock::lock_core;
use crate::mechanism::{CoreHealth, Health, Mechanism, SchedError};
use crate::plan::{Algorithm, Plan};
use crate::restore::{SavedState, restore_file, restore_vms};

const NAME: &str = "slots";
/// Timeout for controller and watchdog to start, to follow a plan, or to end.
const HELPER_TIMEOUT: Duration = Duration::from_secs(3);
/// A watchdog without a heartbeat for this time is killed; the controller then restores the threads.
const WATCHDOG_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);

/// The command that starts a helper process.
#[derive(Debug, Clone)]
pub struct HelperCommand {
    /// Program, normally the running one.
    pub program: PathBuf,
    /// Arguments before the JSON of [`HelperArgs`].
    pub args: Vec<String>,
}

impl HelperCommand {
    /// The command, to which arguments can be added.
    pub fn command(&self) -> Command {
        let mut c = Command::new(&self.program);
        c.args(&self.args);
        c
    }
}

struct Running {
    watchdog: Child,
    lifeline: OwnedFd,
    shared: SharedMemory,
    cpus: Vec<u32>,
    plan: Plan,
    /// By core: how many of the controller's reports of new threads were read.
    forks_read: Vec<u64>,
}

/// The slot mechanism.
pub struct Slots {
    watchdog: HelperCommand,
    saved: PathBuf,
    state: SavedState,
    running: Option<Running>,
}

impl Slots {
    /// `watchdog` starts the watchdog; `saved` is the file for the attributes that the threads had before.
    pub fn new(watchdog: HelperCommand, saved: PathBuf) -> Self {
        Self {
            watchdog,
            saved,
            state: SavedState::default(),
            running: None,
        }
    }

    /// Starts watchdog and controller, and passes the locks to them.
    fn start(
        &mut self,
        plan: &Plan,
        locks: Vec<OwnedFd>,
        acct: &mut Acct,
    ) -> Result<Running, SchedError> {
        let io = |what: &str| {
            let what = what.to_owned();
            move |source| SchedError::Io { what, source }
        };
        if plan.cores.len() > MAX_CORES {
            return Err(SchedError::unavailable(
                NAME,
                format!(
                    "{} cores are to be managed, and one host has room for {MAX_CORES}",
                    plan.cores.len()
                ),
            ));
        }
        let (shared, shared_fd) =
            SharedMemory::create().map_err(io("creating the shared memory"))?;
        let shared_number = shared_fd.as_raw_fd();
        let mut fds = locks;
        fds.push(shared_fd);
        let mut cores = Vec::new();
        for (core, shared) in plan.cores.iter().zip(&shared.cores) {
            shared.cpu.store(core.cpu, Ordering::Relaxed);
            let f = acct.prepare_core(core.cpu)?;
            cores.push(CoreArgs {
                cpu: core.cpu,
                core_vms: f.core_vms.as_raw_fd(),
                core_ctls: f.core_ctls.as_raw_fd(),
                ring: f.ring.as_raw_fd(),
            });
            fds.extend([f.core_vms, f.core_ctls, f.ring]);
        }
        shared
            .n_cores
            .store(plan.cores.len() as u32, Ordering::Release);
        let (read, lifeline) = rustix::pipe::pipe().map_err(|e| io("making a pipe")(e.into()))?;
        set_cloexec(lifeline.as_raw_fd(), true).map_err(io("making a pipe"))?;
        let cpus: Vec<u32> = plan.cores.iter().map(|c| c.cpu).collect();
        let online = viola_host::topology::online().map_err(|e| SchedError::Restore(e.into()))?;
        let is_shared = |cpu: &u32| {
            let core = plan.cores.iter().find(|c| c.cpu == *cpu);
            core.is_some_and(|c| c.budget_permille.is_some())
        };
        let mut spare_cpus: Vec<u32> = online.iter().filter(|c| !cpus.contains(c)).collect();
        let crowded = spare_cpus.is_empty();
        if crowded {
            spare_cpus = cpus.iter().copied().filter(is_shared).collect();
        }
        let args = HelperArgs {
            shared: shared_number,
            parent: read.as_raw_fd(),
            cpus: acct.cpus(),
            saved: self.saved.clone(),
            spare_cpus,
            crowded,
            cores,
        };
        fds.push(read);
        for fd in &fds {
            set_cloexec(fd.as_raw_fd(), false).map_err(io("handing over a descriptor"))?;
        }
        let json =
            serde_json::to_string(&args).map_err(|e| io("describing the cores")(e.into()))?;
        let spawned = self
            .watchdog
            .command()
            .arg(json)
            .stdin(Stdio::null())
            .spawn();
        drop(fds);
        let watchdog = spawned.map_err(io("starting the watchdog"))?;
        Ok(Running {
            watchdog,
            lifeline,
            shared,
            forks_read: vec![0; cpus.len()],
            cpus,
            plan: Plan::default(),
        })
    }

    /// Waits until every core's controller runs.
    fn await_ready(running: &mut Running) -> Result<(), SchedError> {
        let deadline = Instant::now() + HELPER_TIMEOUT;
        while !running
            .shared
            .cores()
            .iter()
            .all(|c| c.ready.load(Ordering::Acquire) == 1)
        {
            let ended = running.watchdog.try_wait().ok().flatten();
            let why = match ended {
                Some(_) => "the slot controller did not start; its reason is in the line above",
                None if Instant::now() > deadline => {
                    "the slot controller did not start in time; is the host very busy?"
                }
                None => {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                }
            };
            return Err(SchedError::unavailable(NAME, why));
        }
        Ok(())
    }

    fn end(&mut self) -> Result<Option<WatchdogExit>, SchedError> {
        if let Err(e) = self.record_forks() {
            eprintln!("viola: {e}");
        }
        let Some(mut running) = self.running.take() else {
            return Ok(None);
        };
        running.shared.stop.store(1, Ordering::Release);
        drop(running.lifeline);
        let deadline = Instant::now() + HELPER_TIMEOUT;
        let status = loop {
            match running.watchdog.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2))
                }
                _ => {
                    let _ = running.watchdog.kill();
                    break running.watchdog.wait().ok();
                }
            }
        };
        std::thread::sleep(Duration::from_millis(1));
        // The watchdog has restored the threads. Restoring again costs little and covers a watchdog that was killed.
        restore_file(&self.saved)?;
        release_held(&running.plan);
        self.state = SavedState::default();
        Ok(status
            .and_then(|s| s.code())
            .and_then(WatchdogExit::from_code))
    }
}

/// Moves threads back that a killed controller left on another core.
fn release_held(plan: &Plan) {
    for core in &plan.cores {
        for vm in &core.vms {
            let Some(hold_cpu) = vm.hold_cpu else {
                continue;
            };
            let away: viola_host::CpuSet = [hold_cpu].into_iter().collect();
            for t in &vm.threads {
                if viola_host::attrs::affinity(t.tid as u32).ok().flatten() == Some(away.clone()) {
                    threads::set_cpu(t.tid, core.cpu);
                }
            }
        }
    }
}

impl Mechanism for Slots {
    fn name(&self) -> &'static str {
        NAME
    }

    fn apply(
        &mut self,
        plan: &Plan,
        vms: &[Vm],
        acct: Option<&mut Acct>,
    ) -> Result<(), SchedError> {
        let cpus: Vec<u32> = plan.cores.iter().map(|c| c.cpu).collect();
        if self.running.as_ref().is_some_and(|r| r.cpus != cpus) {
            self.end()?;
        }
        if cpus.is_empty() {
            return Ok(());
        }
        // Controller and watchdog hold the locks, so that two never manage one core, not even with a controller that a killed daemon
        // left behind for a moment. Lock before recording: this mechanism must not restore what another one manages.
        let locks = match self.running {
            Some(_) => Vec::new(),
            None => cpus
                .iter()
                .map(|&cpu| lock_core(cpu, NAME))
                .collect::<Result<_, _>>()?,
        };
        if self.state.record_plan(plan, vms)? || self.running.is_none() {
            self.state.write(&self.saved)?;
        }
        if self.running.is_none() {
            let Some(acct) = acct else {
                return Err(SchedError::unavailable(
                    NAME,
                    "it needs the accounting program (BPF with BTF, root)",
                ));
            };
            let mut running = self.start(plan, locks, acct)?;
            self.state.processes = vec![(
                running.watchdog.id(),
                viola_host::proc::stat(running.watchdog.id())
                    .ok()
                    .flatten()
                    .map_or(0, |s| s.start_time),
            )];
            self.state.write(&self.saved)?;
            let ready = Self::await_ready(&mut running);
            self.running = Some(running);
            if let Err(e) = ready {
                self.end()?;
                return Err(e);
            }
        }
        let Some(running) = self.running.as_mut() else {
            return Ok(());
        };
        let pooled = plan.cores.iter().filter(|c| c.algorithm.is_pooled());
        let pool: Vec<PoolCore> = pooled
            .map(|c| PoolCore {
                cpu: c.cpu,
                turbo: c.algorithm == Algorithm::Turbo,
            })
            .collect();
        let mut wanted = Vec::new();
        for core in &plan.cores {
            let Some(shared) = running
                .shared
                .cores()
                .iter()
                .find(|c| c.cpu.load(Ordering::Relaxed) == core.cpu)
            else {
                continue;
            };
            let (seq, _) = shared.publish(core, &pool);
            wanted.push((shared, seq));
        }
        let deadline = Instant::now() + HELPER_TIMEOUT;
        while wanted
            .iter()
            .any(|(c, seq)| c.followed.load(Ordering::Acquire) < *seq)
        {
            if Instant::now() > deadline || !matches!(running.watchdog.try_wait(), Ok(None)) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Restore the VMs that are no longer in the plan.
        let dropped: Vec<_> = self
            .state
            .vms
            .extract_if(.., |s| {
                !plan
                    .cores
                    .iter()
                    .any(|c| c.vms.iter().any(|v| v.pid == s.pid as i32))
            })
            .collect();
        restore_vms(&dropped)?;
        if !dropped.is_empty() {
            self.state.write(&self.saved)?;
        }
        running.plan = plan.clone();
        Ok(())
    }

    fn health(&mut self) -> Health {
        let mut health = Health::default();
        match self.record_forks() {
            Ok(lost) => health.resync = lost,
            Err(e) => eprintln!("viola: {e}"),
        }
        let Some(running) = self.running.as_mut() else {
            return health;
        };
        for core in running.shared.cores() {
            health.resync |= core.resync.swap(0, Ordering::AcqRel) != 0;
            let refused = core.refused.swap(0, Ordering::AcqRel);
            if refused != 0 {
                health.refused = Some(refused as i32);
            }
            health.cores.push(CoreHealth {
                cpu: core.cpu.load(Ordering::Relaxed),
                decisions: core.decisions.load(Ordering::Relaxed),
                switches: core.switches.load(Ordering::Relaxed),
                calls: core.calls.load(Ordering::Relaxed),
                cpu_ns: core.cpu_ns.load(Ordering::Relaxed),
                late_max: core.late_max.load(Ordering::Relaxed),
            });
        }
        let status = running.watchdog.try_wait().ok().flatten();
        let silent = now().saturating_sub(running.shared.watchdog_beat.load(Ordering::Acquire));
        if let Some(status) = status {
            let end = status.code().and_then(WatchdogExit::from_code);
            let sentence = end.map_or(
                "the watchdog was killed; every thread is restored",
                WatchdogExit::sentence,
            );
            health.ended = Some(sentence.to_owned());
        } else if silent > WATCHDOG_HEARTBEAT_TIMEOUT.as_nanos() as u64 {
            let _ = running.watchdog.kill();
            health.ended =
                Some("the watchdog hung and was killed; every thread is restored".to_owned());
        }
        if health.ended.is_some() {
            // A controller whose watchdog was killed restores at once; the daemon restores the rest.
            std::thread::sleep(Duration::from_millis(100));
            if let Err(e) = self.end() {
                eprintln!("viola: {e}");
            }
        }
        health
    }

    fn stop(&mut self) -> Result<(), SchedError> {
        self.end().map(|_| ())
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

#[cfg(test)]
mod tests {
    use viola_policy::slices::{Class, Params};

    use super::*;
    use crate::plan::{CorePlan, ThreadPlan, VmPlan};

    #[test]
    fn a_held_thread_is_returned_but_not_one_that_an_operator_moved() {
        let cpus: Vec<u32> = match viola_host::topology::online() {
            Ok(online) => online.iter().collect(),
            Err(_) => return,
        };
        let [home, away, ..] = cpus[..] else { return };
        let plan = |tid: u32, cpu: u32, hold_cpu: Option<u32>| Plan {
            cores: vec![CorePlan {
                cpu,
                algorithm: Algorithm::Turbo,
                batch_slice: 4_000_000,
                budget_permille: None,
                reserve_permille: 300,
                vms: vec![VmPlan {
                    params: Params {
                        id: 0,
                        class: Class::Ls,
                        weight: 256,
                        cap_permille: None,
                        microslice: 100_000,
                    },
                    index: 0,
                    pid: tid as i32,
                    sees_packets: false,
                    resets_on_fork: false,
                    threads: vec![ThreadPlan {
                        tid: tid as i32,
                        service: false,
                    }],
                    regular_vcpus: (0, 1),
                    hold_cpu,
                }],
            }],
        };
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let tid = child.id();
        let is_on = |cpu: u32| {
            let cpus: viola_host::CpuSet = [cpu].into_iter().collect();
            viola_host::attrs::affinity(tid).ok().flatten() == Some(cpus)
        };
        assert_eq!(threads::set_cpu(tid as i32, away), 0);
        release_held(&plan(tid, home, None));
        assert!(is_on(away));
        release_held(&plan(tid, home, Some(home)));
        assert!(is_on(away));
        release_held(&plan(tid, home, Some(away)));
        assert!(is_on(home));
        let _ = child.kill();
        let _ = child.wait();
    }
}
