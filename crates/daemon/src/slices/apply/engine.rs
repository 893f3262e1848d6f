// SPDX-License-Identifier: Apache-2.0
//! Starts, feeds and stops the mechanism. Pins are set before the mechanism gets the plan, and a thread that moves loses its
//! real-time priority first: a real-time thread never runs on a core that is not set aside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use viola_host::{Thread, Vm, VmId};
use viola_meter::acct::Acct;
use viola_sched::eevdf::Eevdf;
use viola_sched::scx::{Scx, VerifiedScheduler};
use viola_sched::slots::{HelperCommand, Slots};
use viola_sched::{CoreHealth, Mechanism, Plan, SchedError, Usage};

use super::changes;
use super::pins::Pins;
use crate::cores::DesiredPins;
use crate::retry::{NextTry, Retry};
use crate::slices::decide::plan::Draft;
use crate::slices::restore;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::MechanismChoice;

/// Time over which the CPU time of controllers is averaged.
const CPU_SHARE_WINDOW: Duration = Duration::from_secs(1);

/// The mechanism in use, and the plan that it carries out.
pub struct Engine {
    run_dir: PathBuf,
    choice: Option<MechanismChoice>,
    mechanism: Option<Box<dyn Mechanism>>,
    /// A sched_ext scheduler that the kernel has verified, for the next start.
    ready: Option<VerifiedScheduler>,
    applied: Plan,
    /// The last plan of a dry run.
    dry_run_plan: Plan,
    /// Whether the mechanism has to get the plan again, though the plan did not change.
    must_reapply: bool,
    core_health: Vec<CoreHealth>,
    /// When the CPU time of controllers was read last.
    cpu_read: Option<Instant>,
    /// CPU time of each core's controller at that moment, ns, and its share of a core before it.
    cpu_used: BTreeMap<u32, (u64, f64)>,
    /// Affinities that viola set.
    pub pins: Pins,
    /// Failures of the mechanism.
    pub retry: Retry,
    /// Whether the next plan is put in force without log lines.
    pub is_quiet: bool,
}

impl Engine {
    /// An engine without a mechanism. [`Engine::apply`] starts one, and writes to `run_dir` the
    /// files from which its changes can be restored.
    pub fn new(run_dir: &Path) -> Self {
        Self {
            run_dir: run_dir.to_owned(),
            choice: None,
            mechanism: None,
            ready: None,
            applied: Plan::default(),
            dry_run_plan: Plan::default(),
            is_quiet: false,
            must_reapply: false,
            core_health: Vec::new(),
            cpu_read: None,
            cpu_used: BTreeMap::new(),
            pins: Pins::new(restore::affinity_file(run_dir)),
            retry: Retry::default(),
        }
    }

    /// Keeps a sched_ext scheduler that the kernel has verified, for its next start.
    pub fn set_scheduler(&mut self, ready: VerifiedScheduler) {
        self.ready = Some(ready);
    }

    /// Sets the mechanism of the next plan. Another one that runs is stopped.
    pub fn select(&mut self, choice: Option<MechanismChoice>) {
        if choice != self.choice {
            if let Err(e) = self.stop() {
                log::line(Level::Error, chain(&e));
            }
            self.choice = choice;
        }
        if choice.is_some_and(|c| c != MechanismChoice::SchedExt) {
            self.ready = None;
        }
    }

    /// What each VM got on each core, as the mechanism counts it.
    pub fn usage(&self) -> Vec<Usage> {
        self.mechanism
            .as_deref()
            .map_or(Vec::new(), Mechanism::usage)
    }

    /// Name of the mechanism, if it schedules a core.
    pub fn active_mechanism(&self) -> Option<&'static str> {
        self.mechanism
            .as_deref()
            .filter(|_| !self.applied.cores.is_empty())
            .map(Mechanism::name)
    }

    /// The plan in force.
    pub fn applied(&self) -> &Plan {
        &self.applied
    }

    /// Health of each core, as the mechanism reported it last.
    pub fn core_health(&self) -> &[CoreHealth] {
        &self.core_health
    }

    /// Asks the mechanism how it is; `true` when the cores have to be planned again.
    pub fn check_health(&mut self, now: Instant) -> bool {
        let Some(mechanism) = self.mechanism.as_deref_mut() else {
            return false;
        };
        let health = mechanism.health();
        if let Some(why) = health.ended {
            self.failed(now, why);
            return true;
        }
        self.core_health = health.cores;
        self.update_cpu_shares(now);
        if let Some(errno) = health.refused {
            let why = std::io::Error::from_raw_os_error(errno);
            log::line(
                Level::Warning,
                format!("the kernel refused a real-time priority: {why}"),
            );
        }
        self.must_reapply |= health.resync || health.refused.is_some();
        self.must_reapply
    }

    fn update_cpu_shares(&mut self, now: Instant) {
        let span = self.cpu_read.map(|at| now.saturating_duration_since(at));
        if span.is_some_and(|s| s < CPU_SHARE_WINDOW) {
            return;
        }
        self.cpu_read = Some(now);
        for core in &self.core_health {
            let entry = self.cpu_used.entry(core.cpu).or_insert((core.cpu_ns, 0.0));
            // A controller that started again counts from zero.
            let used = core.cpu_ns.saturating_sub(entry.0);
            let share = span.map_or(0.0, |s| used as f64 / s.as_nanos().max(1) as f64);
            *entry = (core.cpu_ns, share);
        }
    }

    /// Share of a core that a core's controller used in the last second, 0..=1.
    pub fn controller_share(&self, cpu: u32) -> f64 {
        self.cpu_used.get(&cpu).map_or(0.0, |(_, share)| *share)
    }

    fn failed(&mut self, now: Instant, why: String) {
        let name = self
            .mechanism
            .as_deref()
            .map_or("mechanism", Mechanism::name);
        if let Err(e) = self.stop() {
            log::line(Level::Error, chain(&e));
        }
        let then = match self.retry.failed(now, why.clone()) {
            NextTry::After(delay) => format!("it is tried again in {} s", delay.as_secs()),
            NextTry::Never => {
                "that was the third time in a minute, so it stays off; viola start tries it again"
                    .to_owned()
            }
        };
        log::line(Level::Error, format!("{name}: {why}; {then}"));
    }

    /// Puts a plan in force, unless it is. Returns the VMs that the kernel refused, and why: the next plan has to leave them out.
    pub fn apply(
        &mut self,
        now: Instant,
        draft: &Draft,
        vms: &[Vm],
        acct: Option<&mut Acct>,
    ) -> Vec<(VmId, String)> {
        let Some(choice) = self.choice else {
            return Vec::new();
        };
        if self.retry.must_wait(now) {
            return Vec::new();
        }
        match self.try_apply(choice, draft, vms, acct) {
            Ok(refused) => {
                self.retry.succeeded();
                refused
            }
            Err(e) => {
                self.failed(now, chain(&e));
                Vec::new()
            }
        }
    }

    fn try_apply(
        &mut self,
        choice: MechanismChoice,
        draft: &Draft,
        vms: &[Vm],
        mut acct: Option<&mut Acct>,
    ) -> Result<Vec<(VmId, String)>, SchedError> {
        // A thread that is real-time now becomes a fair one before it moves.
        let moving: Vec<i32> = self
            .pins
            .moved_by(&draft.pins, vms)
            .map(|pid| pid as i32)
            .collect();
        let without_moving = without(&self.applied, &moving);
        if without_moving != self.applied
            && let Some(mechanism) = self.mechanism.as_deref_mut()
        {
            mechanism.apply(&without_moving, vms, acct.as_deref_mut())?;
            self.applied = without_moving;
        }
        self.pins.set_hold_cores(hold_cores(&draft.plan, vms));
        let pinned = self.pins.apply(&draft.pins, vms)?;
        for id in pinned.changed.iter().filter(|_| !self.is_quiet) {
            let what = changes::pinned_text(&draft.pins, vms, id);
            log::about(Level::Notice, id, what);
        }
        if !pinned.refused.is_empty() {
            return Ok(pinned.refused);
        }
        if draft.plan == self.applied && !self.must_reapply {
            return Ok(Vec::new());
        }
        if self.mechanism.is_none() {
            if draft.plan.cores.is_empty() {
                return Ok(Vec::new());
            }
            let ready = self.ready.take();
            self.mechanism = Some(start(choice, &self.run_dir, ready));
        }
        if let Some(mechanism) = self.mechanism.as_deref_mut() {
            mechanism.apply(&draft.plan, vms, acct)?;
            if !self.is_quiet {
                changes::log(mechanism.name(), &self.applied, draft, vms);
            }
        }
        self.must_reapply = false;
        self.applied = draft.plan.clone();
        Ok(Vec::new())
    }

    /// Logs what the plan of a dry run would change.
    pub fn log_dry_run(&mut self, choice: Option<MechanismChoice>, draft: &Draft, vms: &[Vm]) {
        let name = choice.map_or("slots", MechanismChoice::name);
        changes::log_as_dry_run(name, &self.dry_run_plan, draft, vms);
        self.dry_run_plan = draft.plan.clone();
    }

    /// Stops the mechanism and gives all threads back what they had.
    ///
    /// # Errors
    /// When a thread or file cannot be restored.
    pub fn stop(&mut self) -> Result<(), SchedError> {
        let stopped = self.mechanism.take().map_or(Ok(()), |mut m| m.stop());
        self.applied = Plan::default();
        self.must_reapply = false;
        self.core_health.clear();
        self.cpu_used.clear();
        stopped.and(self.pins.stop())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Err(e) = self.stop() {
            log::line(Level::Error, chain(&e));
        }
    }
}

/// The regular cores on which turbo vCPUs are held while the regular vCPUs of their VM are due the rest of its share.
fn hold_cores(plan: &Plan, vms: &[Vm]) -> DesiredPins {
    let mut cores = DesiredPins::new();
    for plan in plan.cores.iter().flat_map(|core| &core.vms) {
        let (Some(cpu), Some(vm)) = (
            plan.hold_cpu,
            vms.iter().find(|vm| vm.pid as i32 == plan.pid),
        ) else {
            continue;
        };
        let planned = |t: &&Thread| plan.threads.iter().any(|p| p.tid == t.tid as i32);
        for thread in vm.threads().filter(planned) {
            cores.insert(*thread, [cpu].into_iter().collect());
        }
    }
    cores
}

fn start(
    choice: MechanismChoice,
    run_dir: &Path,
    ready: Option<VerifiedScheduler>,
) -> Box<dyn Mechanism> {
    match choice {
        MechanismChoice::Eevdf => Box::new(Eevdf::new(restore::eevdf_file(run_dir))),
        MechanismChoice::SchedExt => Box::new(Scx::new(restore::sched_ext_file(run_dir), ready)),
        MechanismChoice::Slots => {
            // This very program, even if its file was replaced since.
            let program = "/proc/self/exe".into();
            let args = vec!["internal".into(), "slots-watchdog".into()];
            Box::new(Slots::new(
                HelperCommand { program, args },
                restore::slots_file(run_dir),
            ))
        }
    }
}

/// A plan without some VMs, and without cores that have no VM then.
fn without(plan: &Plan, pids: &[i32]) -> Plan {
    let mut plan = plan.clone();
    for core in &mut plan.cores {
        core.vms.retain(|v| !pids.contains(&v.pid));
    }
    plan.cores.retain(|c| !c.vms.is_empty());
    plan
}

#[cfg(test)]
mod tests {
    use super::super::changes::tests::plan;
    use super::*;
    use viola_policy::slices::Class;

    #[test]
    fn a_plan_without_its_last_vm_has_no_core() {
        assert_eq!(
            without(&plan(&[(10, Class::Ls, 1)]), &[10]),
            Plan::default()
        );
        assert_eq!(
            without(&plan(&[(10, Class::Ls, 1), (20, Class::Ls, 1)]), &[10]),
            plan(&[(20, Class::Ls, 1)])
        );
    }
}
