// SPDX-License-Identifier: Apache-2.0
//! Carries a draft out: pins, then the mechanism, in an order in which no real-time thread is ever let loose on a core
//! that is not set aside; and looks after the mechanism.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use viola_host::{Thread, Vm, VmId};
use viola_meter::acct::Acct;
use viola_sched::eevdf::Eevdf;
use viola_sched::scx::{Scx, VerifiedScheduler};
use viola_sched::slots::{HelperCommand, Slots};
use viola_sched::{CoreHealth, Mechanism, Plan, SchedError, Usage, VmPlan};

use crate::retry::{Trouble, Verdict};
use crate::slices::apply::pins::{Pins, Wanted};
use crate::slices::decide::plan::Draft;
use crate::slices::restore;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_cli::quantities::{cap_text, exact};
use viola_config::MechanismChoice;

/// Time over which the controllers' use of a CPU is taken.
const MEAN: Duration = Duration::from_secs(1);

/// The mechanism in use and what it was told.
pub struct Engine {
    run_dir: PathBuf,
    choice: Option<MechanismChoice>,
    mechanism: Option<Box<dyn Mechanism>>,
    /// The sched_ext scheduler, verified and not at work yet.
    ready: Option<VerifiedScheduler>,
    applied: Plan,
    /// What a dry run would have applied.
    pretended: Plan,
    again: bool,
    cores: Vec<CoreHealth>,
    /// What the controllers had used a second or so ago, and what part of a CPU that makes.
    used_at: Option<Instant>,
    used: BTreeMap<u32, (u64, f64)>,
    /// Affinities.
    pub pins: Pins,
    /// Failures.
    pub trouble: Trouble,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Driven {
    /// VMs that the kernel refused, with the reason; they have to be left out of the next draft.
    pub refused: Vec<(VmId, String)>,
}

impl Engine {
    /// Nothing is changed before [`Engine::drive`].
    pub fn new(run_dir: &Path) -> Self {
        Self {
            run_dir: run_dir.to_owned(),
            choice: None,
            mechanism: None,
            ready: None,
            applied: Plan::default(),
            pretended: Plan::default(),
            again: false,
            cores: Vec::new(),
            used_at: None,
            used: BTreeMap::new(),
            pins: Pins::new(restore::affinity_file(run_dir)),
            trouble: Trouble::default(),
        }
    }

    /// Takes a sched_ext scheduler that the kernel has verified, for its next start.
    pub fn keep(&mut self, ready: VerifiedScheduler) {
        self.ready = Some(ready);
    }

    /// Sets which mechanism is to be used from now on; the one in use ends when it is another.
    pub fn choose(&mut self, choice: Option<MechanismChoice>) {
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

    /// What each VM got, as the mechanism counts it.
    pub fn got(&self) -> Vec<Usage> {
        self.mechanism
            .as_deref()
            .map_or(Vec::new(), Mechanism::usage)
    }

    /// Name of the mechanism that is at work.
    pub fn at_work(&self) -> Option<&'static str> {
        self.mechanism
            .as_deref()
            .filter(|_| !self.applied.cores.is_empty())
            .map(Mechanism::name)
    }

    /// The plan that holds now.
    pub fn applied(&self) -> &Plan {
        &self.applied
    }

    /// What the mechanism said last of each core.
    pub fn cores(&self) -> &[CoreHealth] {
        &self.cores
    }

    /// Asks the mechanism how it is. `true` when the plan has to be drawn up again.
    pub fn look_after(&mut self, now: Instant) -> bool {
        let Some(mechanism) = self.mechanism.as_deref_mut() else {
            return false;
        };
        let health = mechanism.health();
        if let Some(why) = health.ended {
            self.failed(now, why);
            return true;
        }
        self.cores = health.cores;
        self.count_used(now);
        if let Some(errno) = health.refused {
            let why = std::io::Error::from_raw_os_error(errno);
            log::line(
                Level::Warning,
                format!("the kernel refused a real-time priority: {why}"),
            );
        }
        self.again |= health.resync || health.refused.is_some();
        self.again
    }

    fn count_used(&mut self, now: Instant) {
        let span = self.used_at.map(|at| now.saturating_duration_since(at));
        if span.is_some_and(|s| s < MEAN) {
            return;
        }
        self.used_at = Some(now);
        for core in &self.cores {
            let entry = self.used.entry(core.cpu).or_insert((core.cpu_ns, 0.0));
            // A controller that was started anew counts from zero.
            let used = core.cpu_ns.saturating_sub(entry.0);
            let share = span.map_or(0.0, |s| used as f64 / s.as_nanos().max(1) as f64);
            *entry = (core.cpu_ns, share);
        }
    }

    /// Part of a CPU that a core's controller took over the last second or so.
    pub fn controller_share(&self, cpu: u32) -> f64 {
        self.used.get(&cpu).map_or(0.0, |(_, share)| *share)
    }

    fn failed(&mut self, now: Instant, why: String) {
        let name = self
            .mechanism
            .as_deref()
            .map_or("mechanism", Mechanism::name);
        if let Err(e) = self.stop() {
            log::line(Level::Error, chain(&e));
        }
        let then = match self.trouble.fail(now, why.clone()) {
            Verdict::Retry(delay) => format!("it is tried again in {} s", delay.as_secs()),
            Verdict::GiveUp => {
                "that was the third time in a minute, so it stays off; viola start tries it again"
                    .to_owned()
            }
        };
        log::line(Level::Error, format!("{name}: {why}; {then}"));
    }

    /// Brings a draft about, unless it is already.
    pub fn drive(
        &mut self,
        now: Instant,
        draft: &Draft,
        vms: &[Vm],
        acct: Option<&mut Acct>,
    ) -> Driven {
        let mut driven = Driven::default();
        let Some(choice) = self.choice else {
            return driven;
        };
        if self.trouble.holds_back(now) {
            return driven;
        }
        match self.try_drive(choice, draft, vms, acct) {
            Ok(refused) => {
                self.trouble.overcome();
                driven.refused = refused;
            }
            Err(e) => self.failed(now, chain(&e)),
        }
        driven
    }

    fn try_drive(
        &mut self,
        choice: MechanismChoice,
        draft: &Draft,
        vms: &[Vm],
        mut acct: Option<&mut Acct>,
    ) -> Result<Vec<(VmId, String)>, SchedError> {
        // A thread that is real-time now becomes an ordinary one before it goes elsewhere.
        let moving: Vec<i32> = self
            .pins
            .moved_by(&draft.pins, vms)
            .map(|pid| pid as i32)
            .collect();
        let between = without(&self.applied, &moving);
        if between != self.applied
            && let Some(mechanism) = self.mechanism.as_deref_mut()
        {
            mechanism.apply(&between, vms, acct.as_deref_mut())?;
            self.applied = between;
        }
        self.pins.park(parks(&draft.plan, vms));
        let pinned = self.pins.apply(&draft.pins, vms)?;
        for id in &pinned.changed {
            log::about(Level::Notice, id, pinned_text(&draft.pins, vms, id));
        }
        if !pinned.refused.is_empty() {
            return Ok(pinned.refused);
        }
        if draft.plan == self.applied && !self.again {
            return Ok(Vec::new());
        }
        if self.mechanism.is_none() {
            if draft.plan.cores.is_empty() {
                return Ok(Vec::new());
            }
            let ready = self.ready.take();
            self.mechanism = Some(make(choice, &self.run_dir, ready));
        }
        if let Some(mechanism) = self.mechanism.as_deref_mut() {
            mechanism.apply(&draft.plan, vms, acct)?;
            tell(mechanism.name(), &self.applied, draft, vms);
        }
        self.again = false;
        self.applied = draft.plan.clone();
        Ok(Vec::new())
    }

    /// Tells what would be done, for a dry run; nothing is.
    pub fn pretend(&mut self, choice: Option<MechanismChoice>, draft: &Draft, vms: &[Vm]) {
        let name = choice.map_or("slots", MechanismChoice::name);
        for (vm, what) in told(name, &self.pretended, draft, vms) {
            let what = format!("dry run, would be: {what}");
            match vm {
                None => log::line(Level::Notice, what),
                Some(vm) => log::about(Level::Notice, vm, what),
            }
        }
        self.pretended = draft.plan.clone();
    }

    /// Puts everything back.
    pub fn stop(&mut self) -> Result<(), SchedError> {
        let stopped = self.mechanism.take().map_or(Ok(()), |mut m| m.stop());
        self.applied = Plan::default();
        self.again = false;
        self.cores.clear();
        self.used.clear();
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

/// Where turbo vCPUs wait at times.
fn parks(plan: &Plan, vms: &[Vm]) -> Wanted {
    let mut parks = Wanted::new();
    for plan in plan.cores.iter().flat_map(|core| &core.vms) {
        let (Some(cpu), Some(vm)) = (
            plan.hold_cpu,
            vms.iter().find(|vm| vm.pid as i32 == plan.pid),
        ) else {
            continue;
        };
        let planned = |t: &&Thread| plan.threads.iter().any(|p| p.tid == t.tid as i32);
        for thread in vm.threads().filter(planned) {
            parks.insert(*thread, [cpu].into_iter().collect());
        }
    }
    parks
}

fn make(
    choice: MechanismChoice,
    run_dir: &Path,
    ready: Option<VerifiedScheduler>,
) -> Box<dyn Mechanism> {
    match choice {
        MechanismChoice::Eevdf => Box::new(Eevdf::new(restore::eevdf_file(run_dir))),
        MechanismChoice::SchedExt => Box::new(Scx::new(restore::sched_ext_file(run_dir), ready)),
        MechanismChoice::Slots => {
            // This program itself, also when its file was replaced since.
            let program = "/proc/self/exe".into();
            let args = vec!["internal".into(), "slots-watchdog".into()];
            Box::new(Slots::new(
                HelperCommand { program, args },
                restore::slots_file(run_dir),
            ))
        }
    }
}

/// A plan without some VMs, and without cores that are empty then.
fn without(plan: &Plan, pids: &[i32]) -> Plan {
    let mut plan = plan.clone();
    for core in &mut plan.cores {
        core.vms.retain(|v| !pids.contains(&v.pid));
    }
    plan.cores.retain(|c| !c.vms.is_empty());
    plan
}

fn pinned_text(pins: &Wanted, vms: &[Vm], id: &VmId) -> String {
    let vm = vms.iter().find(|vm| vm.id == *id);
    let mut cpus: Vec<String> = vm
        .into_iter()
        .flat_map(Vm::threads)
        .filter_map(|t| pins.get(t))
        .map(ToString::to_string)
        .collect();
    cpus.sort();
    cpus.dedup();
    if cpus.is_empty() {
        "its threads may run where they could before".into()
    } else {
        format!(
            "threads that could run on several cores are kept on {}",
            cpus.join(" and ")
        )
    }
}

/// One line per core and per VM that is scheduled in another way from now on.
fn tell(mechanism: &str, old: &Plan, draft: &Draft, vms: &[Vm]) {
    for line in told(mechanism, old, draft, vms) {
        match line {
            (None, what) => log::line(Level::Notice, what),
            (Some(vm), what) => log::about(Level::Notice, vm, what),
        }
    }
}

fn told(mechanism: &str, old: &Plan, draft: &Draft, vms: &[Vm]) -> Vec<(Option<VmId>, String)> {
    let mut lines = Vec::new();
    let managed = |plan: &Plan, cpu: u32| plan.cores.iter().any(|c| c.cpu == cpu);
    for note in &draft.cores {
        match (managed(old, note.cpu), note.managed) {
            (false, true) => lines.push((
                None,
                format!("core {}: {mechanism} on, since {}", note.cpu, note.why),
            )),
            (true, false) => lines.push((
                None,
                format!(
                    "core {}: back to stock scheduling, since {}",
                    note.cpu, note.why
                ),
            )),
            _ => {}
        }
    }
    let (before, after) = (by_vm(old), by_vm(&draft.plan));
    for vm in vms {
        let key = |map: &BTreeMap<i32, Vec<String>>| {
            map.get(&(vm.pid as i32)).cloned().unwrap_or_default()
        };
        let (was, is) = (key(&before), key(&after));
        if was != is {
            let what = match is.is_empty() {
                true => "stock scheduling".to_owned(),
                false => format!("{mechanism}: {}", is.join("; ")),
            };
            lines.push((Some(vm.id.clone()), what));
        }
    }
    lines
}

/// What each VM (by process) has on its cores, in words.
fn by_vm(plan: &Plan) -> BTreeMap<i32, Vec<String>> {
    let mut words: BTreeMap<i32, Vec<String>> = BTreeMap::new();
    for core in &plan.cores {
        for v in &core.vms {
            words.entry(v.pid).or_default().push(format!(
                "core {}, {}",
                core.cpu,
                controls_text(v)
            ));
        }
    }
    words
}

fn controls_text(v: &VmPlan) -> String {
    let class = match v.params.class {
        viola_policy::slices::Class::Ls => {
            format!("class ls, microslice {}", exact(v.params.microslice))
        }
        viola_policy::slices::Class::Batch => "class batch".into(),
    };
    let cap = v
        .params
        .cap_permille
        .map(|c| format!(", cap {}", cap_text(Some(c))))
        .unwrap_or_default();
    format!("{class}, weight {}{cap}", v.params.weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slices::decide::plan::CoreNote;
    use crate::testing::vm;
    use viola_policy::slices::{Class, Params};
    use viola_sched::{Algorithm, CorePlan};

    fn plan(vms: &[(i32, Class, u32)]) -> Plan {
        let vms = vms
            .iter()
            .map(|&(pid, class, weight)| VmPlan {
                hold_cpu: None,
                params: Params {
                    id: pid as u32,
                    class,
                    weight,
                    cap_permille: None,
                    microslice: 300_000,
                },
                index: 0,
                pid,
                sees_packets: false,
                regular_vcpus: (0, 0),
                threads: Vec::new(),
            })
            .collect();
        Plan {
            cores: vec![CorePlan {
                cpu: 1,
                algorithm: Algorithm::Interleaved,
                batch_slice: 1,
                budget_permille: None,
                reserve_permille: 0,
                vms,
            }],
        }
    }

    fn draft(plan: Plan, why: &str) -> Draft {
        let managed = !plan.cores.is_empty();
        let note = CoreNote {
            cpu: 1,
            managed,
            why: why.into(),
            vms: Vec::new(),
        };
        Draft {
            plan,
            cores: vec![note],
            ..Draft::default()
        }
    }

    #[test]
    fn each_change_is_told_once_with_its_reason() {
        let vms = [vm("a", 10, &[&[1]]), vm("b", 20, &[&[1]])];
        let on = draft(
            plan(&[(10, Class::Ls, 256), (20, Class::Batch, 512)]),
            "a is latency-sensitive",
        );
        let text = |old: &Plan, draft: &Draft| -> Vec<String> {
            told("slots", old, draft, &vms)
                .into_iter()
                .map(|(vm, t)| format!("{}{t}", vm.map(|v| format!("{v}: ")).unwrap_or_default()))
                .collect()
        };
        assert_eq!(
            text(&Plan::default(), &on),
            [
                "core 1: slots on, since a is latency-sensitive",
                "uml:a: slots: core 1, class ls, microslice 300us, weight 256",
                "uml:b: slots: core 1, class batch, weight 512",
            ]
        );
        assert!(text(&on.plan, &on).is_empty());
        assert_eq!(
            text(
                &on.plan,
                &draft(
                    Plan::default(),
                    "no VM there is latency-sensitive or has a cap"
                )
            ),
            [
                "core 1: back to stock scheduling, since no VM there is latency-sensitive or has a cap",
                "uml:a: stock scheduling",
                "uml:b: stock scheduling",
            ]
        );
    }

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
