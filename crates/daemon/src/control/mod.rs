// SPDX-License-Identifier: Apache-2.0
//! The control loop's state and steps: look at the host, measure, decide, act, tell.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use viola_host::facts::HostFacts;
use viola_host::{CpuSet, Inventory, Tid, Vm, VmId};
use viola_meter::Meter;
use viola_policy::slices::Class;

use crate::host::libvirt::{Asking, Libvirt};
use crate::lanes::Lanes;
use crate::slices::apply::engine::Engine;
use crate::slices::check::{self, Obstacle};
use crate::slices::decide::classes::Classes;
use crate::slices::decide::placement::Placement;
use crate::slices::decide::plan::Draft;
use crate::supervisor::Vread;
use crate::turbo::decide::cores::Pools;
use crate::turbo::decide::vms::Turbos;
use crate::vms::settings::{Controls, Settings};
use crate::vms::totals::Totals;
use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::log::{self, Level};
use viola_config::{Config, MechanismChoice, VmScope};

mod act;
mod look;
mod requests;
mod show;

/// Facts about the host are read again after this time: an operator may have changed a sysctl.
const FACTS_AGE: Duration = Duration::from_secs(30);
/// A VM that the kernel refused is tried again after this time.
const REFUSAL_AGE: Duration = Duration::from_secs(60);
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
    /// Whether the kernel takes the sched_ext scheduler, or why it is not used.
    scheduler: Result<(), String>,
    /// The mechanism that the configuration comes down to, or why there is none.
    choice: Result<MechanismChoice, Obstacle>,
    inventory: Inventory,
    next_look: Instant,
    meter: Meter,
    settings: Settings,
    classes: Classes,
    turbos: Turbos,
    totals: Totals,
    alive: crate::host::exits::Alive,
    /// When the VMs' doings were judged last.
    classified: Instant,
    pools: Pools,
    /// CPUs that were online at the last look.
    online: CpuSet,
    placement: Placement,
    engine: Engine,
    /// Blocks past their DataNode VM; not in a dry run.
    vread: Option<Vread>,
    /// VFs of SR-IOV NICs; not in a dry run.
    lanes: Option<Lanes>,
    /// Libvirt's word, unless the configuration does without.
    libvirt: Option<Libvirt>,
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
        let mut inventory = Inventory::new().map_err(|e| Failure::run(e.one_line()))?;
        inventory
            .restrict_to_own_netns(config.daemon.vms == VmScope::Own)
            .map_err(|e| Failure::run(e.one_line()))?;
        let (meter, accounting) = match Meter::exact() {
            Ok(meter) => (meter, Ok(())),
            Err(e) => (Meter::sampled(), Err(chain(&e))),
        };
        let (settings, warning) = Settings::read(&config.daemon.state_dir);
        let (scheduler, ready) = match check::try_scheduler(&facts) {
            Ok(ready) => (Ok(()), Some(ready)),
            Err(why) => (Err(why), None),
        };
        let mut engine = Engine::new(&config.daemon.run_dir);
        let ready = ready.filter(|_| !dry_run);
        ready.into_iter().for_each(|ready| engine.keep(ready));
        let choice = check::choose(&facts, &config.slices, &accounting, &scheduler);
        let now = Instant::now();
        let facts_online = facts.online();
        let vread = match dry_run {
            true => None,
            false => Some(Vread::start(&config.daemon.run_dir)?),
        };
        if let Some(vread) = &vread {
            vread.configure(&config);
        }
        let lanes = match dry_run {
            true => None,
            false => Some(Lanes::start(&config.daemon.run_dir)?),
        };
        if let Some(lanes) = &lanes {
            lanes.said(settings.lanes());
            lanes.configure(&config);
        }
        let libvirt = match config.daemon.libvirt {
            true => Some(Libvirt::start(Asking::default())?),
            false => None,
        };
        let mut control = Self {
            vread,
            libvirt,
            engine,
            lanes,
            config,
            dry_run,
            started: now,
            facts,
            facts_at: now,
            accounting,
            scheduler,
            choice,
            inventory,
            next_look: now,
            meter,
            settings,
            classes: Classes::default(),
            turbos: Turbos::default(),
            totals: Totals::default(),
            alive: crate::host::exits::Alive::default(),
            classified: now,
            pools: Pools::default(),
            online: facts_online,
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

    /// What came of the start.
    pub fn greet(&mut self) {
        if let Err(why) = &self.accounting {
            log::line(
                Level::Warning,
                format!("waits are sampled, and there are no slots: {why}"),
            );
        }
        self.tell_choice();
    }

    fn tell_choice(&self) {
        let (slices, accounting) = (&self.config.slices, &self.accounting);
        let terms = |choice| check::terms(choice, &self.facts, slices, accounting, &self.scheduler);
        let choice = match &self.choice {
            Ok(choice) => *choice,
            Err(o) => {
                let what = format!("slices are off: {}", o.sentence());
                return log::line(Level::Warning, what);
            }
        };
        let mut line = format!("slices: {}", choice.name());
        if let (Ok(terms), true) = (terms(choice), choice.manages_cores()) {
            line.push_str(&format!(", {terms}"));
        }
        for other in slices.mechanisms.iter().take_while(|m| **m != choice) {
            if let Err(o) = terms(*other) {
                line.push_str(&format!("; no {}: {}", other.name(), o.sentence()));
            }
        }
        log::line(Level::Info, line);
    }

    /// One look, one measurement, and what follows from them.
    pub fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.facts_at) >= FACTS_AGE {
            self.read_facts(now);
        }
        let mut again = !self.dry_run && self.engine.look_after(now);
        again |= self.engine.trouble.is_pending() && !self.engine.trouble.holds_back(now);
        again |= self.fall_back();
        let told = self.libvirt.as_ref().is_some_and(Libvirt::take_news);
        if again || told || now >= self.next_look || self.somebody_died() {
            self.look(now);
            again = true;
        }
        again |= self.classify(now);
        if again {
            self.act(now);
        }
    }

    /// A scheduler in BPF that failed too often gives way to the next mechanism, where the configuration names one.
    /// `true` when it did.
    fn fall_back(&mut self) -> bool {
        let is_free = self.config.slices.mechanisms.len() > 1;
        if !is_free || self.choice != Ok(MechanismChoice::SchedExt) || !self.engine.trouble.is_off()
        {
            return false;
        }
        self.scheduler = Err(format!("it failed: {}", self.engine.trouble.why()));
        self.engine.trouble.forgive();
        self.choose();
        true
    }

    /// Tries a scheduler again that failed before: somebody has changed something.
    fn try_scheduler_again(&mut self) {
        if self.scheduler.is_ok() {
            return;
        }
        self.scheduler = match check::try_scheduler(&self.facts) {
            Ok(ready) => {
                self.engine.keep(ready);
                Ok(())
            }
            Err(why) => Err(why),
        };
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
        let (slices, accounting) = (&self.config.slices, &self.accounting);
        let choice = check::choose(&self.facts, slices, accounting, &self.scheduler);
        if choice != self.choice {
            self.choice = choice;
            self.tell_choice();
        }
    }

    fn manages_cores(&self) -> bool {
        self.choice
            .as_ref()
            .is_ok_and(|choice| choice.manages_cores())
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
