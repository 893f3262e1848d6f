// SPDX-License-Identifier: Apache-2.0
//! The control loop's state and steps: look at the host, measure, decide, act, tell.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use viola_host::check::HostFacts;
use viola_host::{CpuSet, Inventory, Tid, Vm, VmId, proc};
use viola_meter::Meter;
use viola_policy::slices::Class;
use viola_policy::slices::classify::{self, Advice};
use viola_proto::{Change, Done, VmReport};

use super::classes::{Classes, Observation};
use super::engine::Engine;
use super::http::{Peer, Refusal};
use super::placement::{Placed, Placement};
use super::plan::{self, Candidate, Draft, Frame};
use super::settings::{Controls, Settings};
use crate::ability::{self, Obstacle};
use crate::config::{Config, MechanismChoice};
use crate::error::{Failure, Outcome, chain};
use crate::log::{self, Level};
use crate::measure;
use crate::names;
use crate::quantities::{cap_text, exact};

mod show;

/// Facts about the host are read again after this time: an operator may have changed a sysctl.
const FACTS_AGE: Duration = Duration::from_secs(30);
/// A VM that the kernel refused is tried again after this time.
const REFUSAL_AGE: Duration = Duration::from_secs(60);
/// A look at the whole host may take this part of the time, 1/50...
const LOOK_SHARE: u32 = 50;
/// ...but there is one so often.
const LOOK_AGE: Duration = Duration::from_secs(1);
/// Views are published at least so often.
const PUBLISH: Duration = Duration::from_millis(500);

/// Everything that the loop knows.
pub struct Control {
    config: Config,
    dry_run: bool,
    started: Instant,
    facts: HostFacts,
    facts_at: Instant,
    /// Whether the accounting program runs, or why not.
    accounting: Result<(), String>,
    /// The mechanism that the configuration comes down to, or why there is none.
    choice: Result<MechanismChoice, Obstacle>,
    inventory: Inventory,
    next_look: Instant,
    meter: Meter,
    settings: Settings,
    classes: Classes,
    placement: Placement,
    engine: Engine,
    /// CPUs that the threads of each VM may run on, as far as others than viola are concerned.
    allowed: BTreeMap<VmId, BTreeMap<Tid, CpuSet>>,
    /// VMs that cannot be managed, as of the last look.
    blocked: BTreeMap<VmId, String>,
    /// VMs that the kernel refused, and until when that is believed.
    refused: BTreeMap<VmId, (Instant, String)>,
    draft: Draft,
    /// Who stopped everything, if somebody did.
    stopped: Option<String>,
    /// What was said once and is not said again.
    said: BTreeSet<String>,
    /// Warnings of the last look.
    warnings: Vec<String>,
    /// VMs of the last plan that do not get what they ask for.
    left_out: Vec<(VmId, String)>,
    published: Option<Instant>,
}

impl Control {
    /// Looks at nothing yet, but loads the accounting program.
    pub fn new(config: Config, facts: HostFacts, dry_run: bool) -> Outcome<Self> {
        let inventory = Inventory::new().map_err(|e| Failure::run(e.one_line()))?;
        let (meter, accounting) = match Meter::exact() {
            Ok(meter) => (meter, Ok(())),
            Err(e) => (Meter::sampled(), Err(chain(&e))),
        };
        let (settings, warning) = Settings::read(&config.daemon.state_dir);
        let choice = ability::choose(&facts, &config.slices, &accounting);
        let now = Instant::now();
        let mut control = Self {
            engine: Engine::new(&config.daemon.run_dir),
            config,
            dry_run,
            started: now,
            facts,
            facts_at: now,
            accounting,
            choice,
            inventory,
            next_look: now,
            meter,
            settings,
            classes: Classes::default(),
            placement: Placement::default(),
            allowed: BTreeMap::new(),
            blocked: BTreeMap::new(),
            refused: BTreeMap::new(),
            draft: Draft::default(),
            stopped: None,
            said: BTreeSet::new(),
            warnings: Vec::new(),
            left_out: Vec::new(),
            published: None,
        };
        if let Some(warning) = warning {
            control.say(Level::Warning, warning);
        }
        Ok(control)
    }

    /// Time between two looks.
    pub fn interval(&self) -> Duration {
        Duration::from_nanos(self.config.daemon.interval)
    }

    /// The first lines in the journal.
    pub fn greet(&mut self) {
        let dry = if self.dry_run { ", changing nothing (--dry-run)" } else { "" };
        let config = self.config.path.display();
        log::line(Level::Info, format!("viola {} runs by {config}{dry}", env!("CARGO_PKG_VERSION")));
        if let Err(why) = &self.accounting {
            log::line(Level::Warning, format!("waits are sampled, and there are no slots: {why}"));
        }
        self.tell_choice();
    }

    fn tell_choice(&self) {
        match &self.choice {
            Ok(MechanismChoice::Eevdf) => {
                let why = ability::slots(&self.facts, &self.config.slices, &self.accounting).err();
                let why = why.map(|o| format!("; no slots: {}", o.sentence())).unwrap_or_default();
                log::line(Level::Info, format!("slices: eevdf{why}"));
            }
            Ok(_) => {
                let terms = ability::slots(&self.facts, &self.config.slices, &self.accounting).unwrap_or_default();
                log::line(Level::Info, format!("slices: slots, {terms}"));
            }
            Err(o) => log::line(Level::Warning, format!("slices are off: {}", o.sentence())),
        }
    }

    /// One look, one measurement, and what follows from them.
    pub fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.facts_at) >= FACTS_AGE {
            self.read_facts(now);
        }
        let mut again = !self.dry_run && self.engine.look_after(now);
        again |= self.engine.trouble.is_pending() && !self.engine.trouble.holds_back(now);
        if again || now >= self.next_look || self.somebody_died() {
            self.look(now);
            again = true;
        }
        again |= self.classify();
        if again {
            self.act(now);
        }
    }

    /// Takes a snapshot, and looks at what the VMs do; `true` when one is of another class from now on.
    fn classify(&mut self) -> bool {
        let snapshot = self.meter.snapshot();
        // Where nothing can be tried, class auto stays what it is.
        let idle = self.dry_run || self.engine.trouble.is_off() || self.engine.trouble.is_pending();
        let advice = if idle { vec![None; self.inventory.vms().len()] } else { self.advice() };
        let mut changed = false;
        for (vm, advice) in self.inventory.vms().iter().zip(advice) {
            let Some(sample) = snapshot.vms.iter().find(|s| s.id == vm.id) else { continue };
            let waits = self.meter.vm_waits(&vm.id);
            let observation = Observation {
                vm,
                setting: self.settings.controls(&self.config, vm).class.value,
                sample,
                at: snapshot.at,
                span: snapshot.span,
                p99: waits.quantile(0.99),
                waits: waits.count(),
                advice,
            };
            if let Some(what) = self.classes.observe(&observation) {
                log::about(Level::Notice, &vm.id, what);
                changed = true;
            }
        }
        changed
    }

    /// What class ls would bring each VM, in their order; only slots bring it about.
    fn advice(&self) -> Vec<Option<Advice>> {
        let vms = self.inventory.vms();
        if self.choice != Ok(MechanismChoice::Slots) || self.stopped.is_some() {
            return vec![None; vms.len()];
        }
        let controls: Vec<Controls> = vms.iter().map(|vm| self.settings.controls(&self.config, vm)).collect();
        let claims: Vec<_> = vms
            .iter()
            .zip(&controls)
            .map(|(vm, c)| (&vm.cores, vm.vcpus.len(), c.weight.value, c.cap.value))
            .collect();
        let shares = measure::shares(&claims);
        let homes: Vec<Option<u32>> = vms.iter().map(|vm| self.placement.home(&vm.id)).collect();
        let advise = |i: usize| {
            let home = homes[i]?;
            let others: Vec<usize> = (0..vms.len()).filter(|&j| j != i && homes[j] == Some(home)).collect();
            let ls = others.iter().filter(|&&j| self.class(&vms[j], &controls[j]) == Class::Ls);
            // Of one core, for one vCPU.
            let share = shares[i] * vms[i].cores.len() as f64 / vms[i].vcpus.len().max(1) as f64;
            Some(classify::advise(
                self.meter.vm_waits(&vms[i].id).quantile(0.99),
                others.len() as u32,
                self.config.slices.batch_slice(),
                share.min(1.0),
                controls[i].microslice.value,
                ls.map(|&j| controls[j].microslice.value),
            ))
        };
        (0..vms.len()).map(advise).collect()
    }

    fn read_facts(&mut self, now: Instant) {
        self.facts_at = now;
        match HostFacts::read() {
            Ok(facts) => self.facts = facts,
            Err(e) => self.say(Level::Warning, e.one_line()),
        }
        self.choose();
    }

    /// Comes back to what the configuration and the host allow.
    fn choose(&mut self) {
        let choice = ability::choose(&self.facts, &self.config.slices, &self.accounting);
        if choice != self.choice {
            self.choice = choice;
            self.tell_choice();
        }
    }

    fn somebody_died(&self) -> bool {
        self.inventory.vms().iter().any(|vm| {
            !matches!(proc::stat(vm.pid), Ok(Some(s)) if s.start_time == vm.start_time && !s.is_dead())
        })
    }

    /// Looks at the whole host.
    fn look(&mut self, now: Instant) {
        let cpu_before = thread_cpu_time();
        let before: Vec<VmId> = self.inventory.vms().iter().map(|vm| vm.id.clone()).collect();
        let looked = self.inventory.refresh().map(|_| ());
        let cost = thread_cpu_time().saturating_sub(cpu_before);
        self.next_look = now + (cost * LOOK_SHARE).clamp(self.interval(), LOOK_AGE);
        let mut warnings: Vec<String> = looked.err().map(|e| e.one_line()).into_iter().collect();
        warnings.extend(self.inventory.warnings().iter().cloned());
        for vm in self.inventory.vms().iter().filter(|vm| !before.contains(&vm.id)) {
            let cores = ability::cores_text(&vm.cores);
            let vcpus = match vm.vcpus.len() {
                1 => "1 vCPU".to_owned(),
                n => format!("{n} vCPUs"),
            };
            log::about(Level::Info, &vm.id, format!("found: {vcpus}, cores {cores}"));
        }
        for id in before.iter().filter(|id| self.inventory.get(id).is_none()) {
            log::about(Level::Info, id, "gone");
            self.classes.forget(id);
        }
        let unaccounted = match self.meter.follow(self.inventory.vms()) {
            Ok(left_out) => left_out,
            Err(e) => {
                warnings.push(chain(&e));
                Vec::new()
            }
        };
        self.refused.retain(|_, (until, _)| now < *until);
        self.find_obstacles(&unaccounted, &mut warnings);
        self.find_affinities();
        for w in warnings.iter().filter(|w| !self.warnings.contains(w)) {
            log::line(Level::Warning, w);
        }
        self.warnings = warnings;
    }

    fn find_obstacles(&mut self, unaccounted: &[VmId], warnings: &mut Vec<String>) {
        self.blocked.clear();
        let slots = self.choice == Ok(MechanismChoice::Slots);
        for vm in self.inventory.vms().iter().filter(|_| slots) {
            let tids = vm.vcpus.iter().filter_map(|v| v.threads.first()).map(|t| t.tid);
            let why = if let Some((_, why)) = self.refused.get(&vm.id) {
                Some(why.clone())
            } else if vm.vcpus.is_empty() {
                Some("its vCPU threads cannot be told from its others".to_owned())
            } else if unaccounted.contains(&vm.id) {
                Some("the accounting program has no room for another VM".to_owned())
            } else if self.facts.rt_group_sched == Some(false) {
                None
            } else {
                let mut found = None;
                for tid in std::iter::once(vm.pid).chain(tids) {
                    match self.inventory.mounts().rt_group_blocks(tid) {
                        Ok(block) => found = found.or(block.map(|b| b.to_string())),
                        Err(e) => warnings.push(e.one_line()),
                    }
                }
                found
            };
            if let Some(why) = why {
                self.blocked.insert(vm.id.clone(), why);
            }
        }
    }

    fn find_affinities(&mut self) {
        self.allowed.clear();
        if self.choice != Ok(MechanismChoice::Slots) {
            return;
        }
        for vm in self.inventory.vms() {
            let mut allowed = BTreeMap::new();
            for v in &vm.vcpus {
                if let Some(thread) = v.threads.first() {
                    allowed.insert(thread.tid, self.engine.pins.before(vm, thread, v.cores.clone()));
                }
            }
            for s in &vm.service {
                // One that is gone, or not ours to ask about, is planned by what its VM may do.
                if let Ok(Some(cpus)) = self.engine.pins.allowed(vm, &s.thread) {
                    allowed.insert(s.thread.tid, cpus);
                }
            }
            self.allowed.insert(vm.id.clone(), allowed);
        }
    }

    /// Draws up a plan and carries it out.
    fn act(&mut self, now: Instant) {
        let choice = self.choice.clone().ok().filter(|_| self.stopped.is_none());
        if !self.dry_run {
            self.engine.choose(choice);
        }
        // A refusal makes another plan; each VM can be refused once.
        for _ in 0..=self.inventory.vms().len() {
            let (draft, placed) = self.draw(now, choice);
            self.draft = draft;
            self.tell_moved(&placed);
            self.placement.take(now, placed);
            self.watch_packets();
            if self.dry_run {
                self.engine.pretend(choice, &self.draft, self.inventory.vms());
                break;
            }
            let driven = self.engine.drive(now, &self.draft, self.inventory.vms(), self.meter.acct());
            if driven.refused.is_empty() {
                break;
            }
            for (id, why) in driven.refused {
                self.blocked.insert(id.clone(), why.clone());
                self.refused.insert(id, (now + REFUSAL_AGE, why));
            }
        }
        for (id, why) in self.draft.left_out.iter().filter(|l| !self.left_out.contains(l)) {
            log::about(Level::Warning, id, format!("stock scheduling: {why}"));
        }
        self.left_out.clone_from(&self.draft.left_out);
    }

    fn draw(&self, now: Instant, choice: Option<MechanismChoice>) -> (Draft, Placed) {
        let slices = &self.config.slices;
        let frame = Frame { cores: &slices.cores, algorithm: slices.algorithm(), batch_slice: slices.batch_slice() };
        let candidates: Vec<Candidate<'_>> = self.inventory.vms().iter().map(|vm| self.candidate(vm)).collect();
        match choice {
            None => (Draft::default(), Placed::default()),
            Some(MechanismChoice::Eevdf) => (plan::eevdf(frame, &candidates), Placed::default()),
            Some(_) => {
                let mut placed = Placed::default();
                let draft = plan::slots(frame, &candidates, |asks| {
                    let (answers, p) =
                        self.placement.answer(now, &self.facts, &slices.cores, &candidates, asks, &self.meter);
                    placed = p;
                    answers
                });
                (draft, placed)
            }
        }
    }

    /// Why vCPUs that are pinned go to another core.
    fn tell_moved(&self, placed: &Placed) {
        for (id, vcpu, why) in &placed.moved {
            let threads = self.inventory.get(id).and_then(|vm| vm.vcpus.get(*vcpu)).map(|v| &v.threads);
            let pin = threads.and_then(|t| t.first()).and_then(|t| self.draft.pins.get(t));
            if let Some(cpus) = pin {
                log::about(Level::Notice, id, format!("vCPU {vcpu} goes to core {cpus}: {why}"));
            }
        }
    }

    /// Lets the accounting program announce the packets of latency-sensitive VMs to their controllers.
    fn watch_packets(&mut self) {
        if self.dry_run {
            return;
        }
        match self.meter.watch_packets(&self.draft.interrupts) {
            Ok(served) => self.draft.sees_packets_of(&served, self.inventory.vms()),
            // They are then given the core on suspicion.
            Err(e) => self.say(Level::Warning, format!("packets are not seen: {}", chain(&e))),
        }
    }

    fn candidate<'a>(&self, vm: &'a Vm) -> Candidate<'a> {
        let c = self.settings.controls(&self.config, vm);
        Candidate {
            vm,
            index: self.meter.index(&vm.id).unwrap_or(u32::MAX),
            class: self.classes.class(&vm.id, c.class.value),
            microslice: c.microslice.value,
            weight: c.weight.value,
            cap_permille: c.cap.value,
            capped_by_viola: c.capped_by_viola(),
            vcpu_quota: c.vcpu_quota,
            allowed: self.allowed.get(&vm.id).cloned().unwrap_or_default(),
            blocked: self.blocked.get(&vm.id).cloned(),
        }
    }

    /// Changes what holds for a VM, at once.
    pub fn set(&mut self, name: &str, change: &Change, peer: Peer) -> Result<VmReport, Refusal> {
        let refuse = |status: u16, error: String| (status, viola_proto::Error { error, nearest: Vec::new() });
        let now = Instant::now();
        let found = |vms: &[Vm]| names::find(vms.iter().map(|vm| (vm.name.as_str(), vm.id.as_str())), name);
        // It may have been started a moment ago.
        if found(self.inventory.vms()).is_err() {
            self.look(now);
        }
        let at = found(self.inventory.vms()).map_err(|e| e.answer(name))?;
        let vm = self.inventory.vms()[at].clone();
        if self.dry_run && change.keep {
            return Err(refuse(400, "a dry run keeps nothing; leave --keep out".into()));
        }
        let before = self.settings.controls(&self.config, &vm);
        self.settings.change(&vm, change).map_err(|e| refuse(400, e))?;
        let by = format!("viola set by {peer}{}", if change.keep { ", kept" } else { "" });
        self.tell_controls(&vm, &before, &by);
        self.read_facts(now);
        self.act(now);
        self.reports()
            .into_iter()
            .find(|r| r.id == vm.id.as_str())
            .ok_or_else(|| refuse(404, format!("{} is gone", vm.name)))
    }

    /// One line per control that is another one now.
    fn tell_controls(&self, vm: &Vm, old: &Controls, by: &str) {
        let new = self.settings.controls(&self.config, vm);
        let tell = |what: &str, was: String, is: String| {
            if was != is {
                log::about(Level::Notice, &vm.id, format!("{what} {is} (was {was}): {by}"));
            }
        };
        let class = |c: &Controls| show::class_text(c.class.value).to_owned();
        tell("class", class(old), class(&new));
        tell("microslice", exact(old.microslice.value), exact(new.microslice.value));
        tell("weight", old.weight.value.to_string(), new.weight.value.to_string());
        tell("cap", cap_text(old.cap.value), cap_text(new.cap.value));
    }

    /// Stops everything until further notice, or goes on.
    pub fn pause(&mut self, stop: bool, peer: Peer) -> Result<Done, Refusal> {
        let now = Instant::now();
        self.stopped = stop.then(|| format!("viola stop --all by {peer}"));
        let done = if stop {
            log::line(Level::Notice, format!("stopped: viola stop --all by {peer}"));
            let failed = self.engine.stop().err();
            if let Some(e) = failed {
                let error = format!("not everything could be put back: {}; try viola restore", chain(&e));
                log::line(Level::Error, &error);
                return Err((500, viola_proto::Error { error, nearest: Vec::new() }));
            }
            "all VMs have stock scheduling; viola start goes on".to_owned()
        } else {
            log::line(Level::Notice, format!("started: viola start by {peer}"));
            self.engine.trouble.forgive();
            self.refused.clear();
            self.read_facts(now);
            self.look(now);
            String::new()
        };
        self.act(now);
        let done = if stop { done } else { self.status(now).why };
        Ok(Done { done })
    }

    /// Reads the configuration again; a wrong one is told and left.
    pub fn reload(&mut self) {
        let path = self.config.path.clone();
        let read = Config::read(&path).and_then(|c| c.check_host(&self.facts.online()).map(|()| c));
        let mut config = match read {
            Ok(config) => config,
            Err(e) => {
                log::line(Level::Error, format!("SIGHUP: {e}; the old configuration holds"));
                return;
            }
        };
        let (old, new) = (&self.config.daemon, &config.daemon);
        let fixed = |d: &crate::config::Daemon| (d.socket.clone(), d.group.clone(), d.run_dir.clone(), d.state_dir.clone());
        if fixed(old) != fixed(new) {
            log::line(Level::Warning, "SIGHUP: socket, group, run_dir and state_dir hold from the next start on");
        }
        config.daemon = crate::config::Daemon { interval: new.interval, ..old.clone() };
        let before: Vec<(Vm, Controls)> =
            self.inventory.vms().iter().map(|vm| (vm.clone(), self.settings.controls(&self.config, vm))).collect();
        log::line(Level::Notice, format!("SIGHUP: {} holds", path.display()));
        self.config = config;
        for (vm, old) in &before {
            self.tell_controls(vm, old, "configuration");
        }
        super::step_aside(&self.config, &self.facts);
        let now = Instant::now();
        self.engine.trouble.forgive();
        self.refused.clear();
        self.read_facts(now);
        self.look(now);
        self.act(now);
    }

    /// Says something once.
    fn say(&mut self, level: Level, what: String) {
        if self.said.insert(what.clone()) {
            log::line(level, what);
        }
    }

    fn class(&self, vm: &Vm, controls: &Controls) -> Class {
        self.classes.class(&vm.id, controls.class.value)
    }
}

/// CPU time of the loop so far; a loaded host does not make a look dearer.
fn thread_cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.unsigned_abs() as u32)
}
