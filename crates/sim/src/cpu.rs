// SPDX-License-Identifier: Apache-2.0
//! Cores, and vCPUs with what their guests have to do on them.

mod jobs;

use std::collections::VecDeque;

use viola_policy::slices::{FOREVER, Nanos, Params};
use viola_policy::turbo::{Elsewhere, portion};

pub use jobs::{Done, Level};

use crate::queue::Timers;
use crate::sched::{Scheduler, Views};
use jobs::Jobs;

/// What a vCPU computes besides, at the lowest level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Hog {
    /// Nothing.
    #[default]
    None,
    /// All the time.
    Busy,
    /// So many percent by lookbusy ([`crate::work::Lookbusy`]), which is a workload.
    Lookbusy(u32),
    /// `on` of run time in each `period`; what could not be run in one period is gone.
    Duty {
        /// Length of a period, ns.
        period: Nanos,
        /// Run time in it, ns.
        on: Nanos,
    },
}

impl Hog {
    /// So many percent of each `period`: nothing, a part, or all the time.
    pub fn percent(percent: u64, period: Nanos) -> Self {
        match percent {
            0 => Hog::None,
            100.. => Hog::Busy,
            _ => Hog::Duty {
                period,
                on: period / 100 * percent,
            },
        }
    }
}

/// What happened to a vCPU so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// It ran, cold caches included.
    pub ran: Nanos,
    /// Part of that in which it only waited for its caches.
    pub cold: Nanos,
    /// It wanted to run and did not.
    pub waited: Nanos,
    /// It ran its own computing (not cold).
    pub computed: Nanos,
    /// Longest wait that ended.
    pub longest: Nanos,
    /// How often it got the core.
    pub switches: u64,
    /// Wake-ups.
    pub wakes: u64,
}

#[derive(Debug)]
struct Vcpu {
    core: usize,
    slot: usize,
    vm: usize,
    turbo: bool,
    jobs: Jobs,
    hog_left: Nanos,
    /// Time it needs for its caches whenever another one ran before it.
    refill: Nanos,
    cold: Nanos,
    runnable: bool,
    waits_since: Nanos,
    usage: Usage,
    /// Counter of `usage.ran` at the last exchange between the pools.
    told: Nanos,
    hog: Hog,
}

impl Vcpu {
    fn has_work(&self) -> bool {
        self.hog_left > 0 || !self.jobs.is_empty()
    }

    /// Time to the end of what it does now.
    fn next_end(&self) -> Nanos {
        let left = self.jobs.next_end().unwrap_or(self.hog_left);
        left.saturating_add(self.cold)
    }
}

struct Core {
    scheduler: Box<dyn Scheduler + Send>,
    pool: Pool,
    vcpus: Vec<usize>,
    params: Vec<Params>,
    views: Views,
    current: Option<usize>,
    /// Who ran last, for the caches.
    last: Option<usize>,
    since: Nanos,
    until: Nanos,
    /// Time of the core that goes to the scheduler or a switch before anybody runs.
    busy: Nanos,
    idle: Nanos,
    stolen: Nanos,
    wasted: Nanos,
}

/// Which pool a core is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// Cores that know nothing of each other.
    Alone,
    /// Regular core beside turbo cores.
    Regular,
    /// Turbo core.
    Turbo,
}

/// All cores and vCPUs of one simulation.
#[derive(Default)]
pub struct Cpus {
    cores: Vec<Core>,
    vcpus: Vec<Vcpu>,
    /// By VM: all it ever ran on turbo cores, and all it was ever due on regular ones.
    on_turbo: Vec<Nanos>,
    due: Vec<Nanos>,
    /// Cost of a switch from one vCPU to another, ns.
    pub switch_cost: Nanos,
    /// Cores whose timers went off at this moment.
    timed: Vec<usize>,
    /// Ended work, in order; to be taken by the caller.
    pub done: VecDeque<Done>,
    /// When each core has something to do.
    pub timers: Timers,
}

impl Cpus {
    /// Adds a core.
    pub fn add_core(&mut self, scheduler: Box<dyn Scheduler + Send>, pool: Pool) -> usize {
        self.cores.push(Core {
            scheduler,
            pool,
            vcpus: Vec::new(),
            params: Vec::new(),
            views: Views::default(),
            current: None,
            last: None,
            since: 0,
            until: 0,
            busy: 0,
            idle: 0,
            stolen: 0,
            wasted: 0,
        });
        self.timers.add();
        self.cores.len() - 1
    }

    /// Adds a vCPU of VM number `vm` to a core.
    pub fn add_vcpu(&mut self, vm: usize, core: usize, params: Params, refill: Nanos) -> usize {
        let id = self.vcpus.len();
        let one = &mut self.cores[core];
        let slot = one.vcpus.len();
        one.vcpus.push(id);
        one.params.push(params);
        one.views.add();
        self.on_turbo.resize(self.on_turbo.len().max(vm + 1), 0);
        self.due.resize(self.on_turbo.len(), 0);
        self.vcpus.push(Vcpu {
            core,
            slot,
            vm,
            turbo: one.pool == Pool::Turbo,
            jobs: Jobs::default(),
            hog: Hog::None,
            hog_left: 0,
            refill,
            cold: 0,
            runnable: false,
            waits_since: 0,
            usage: Usage::default(),
            told: 0,
        });
        id
    }

    /// Number of cores.
    pub fn cores(&self) -> usize {
        self.cores.len()
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// Which core a vCPU is on.
    pub fn core_of(&self, vcpu: usize) -> usize {
        self.vcpus[vcpu].core
    }

    /// Tells the schedulers who is there. Once, when all vCPUs are added.
    pub fn begin(&mut self, now: Nanos) {
        for k in 0..self.cores.len() {
            let core = &mut self.cores[k];
            core.since = now;
            core.scheduler.configure(now, &core.params);
        }
    }

    /// What a vCPU computes besides, from now on.
    pub fn set_hog(&mut self, now: Nanos, vcpu: usize, hog: Hog) {
        let core = self.vcpus[vcpu].core;
        self.advance(now, core);
        let v = &mut self.vcpus[vcpu];
        v.hog = hog;
        v.hog_left = match hog {
            Hog::None | Hog::Lookbusy(_) => 0,
            Hog::Busy => FOREVER,
            Hog::Duty { on, .. } => on,
        };
        self.changed(now, vcpu);
    }

    /// A period of a [`Hog::Duty`] begins.
    pub fn new_period(&mut self, now: Nanos, vcpu: usize) {
        let hog = self.vcpus[vcpu].hog;
        self.set_hog(now, vcpu, hog);
    }

    /// Gives a vCPU work of `cost` ns (at least 1).
    pub fn submit(&mut self, now: Nanos, vcpu: usize, level: Level, cost: Nanos, done: Done) {
        let core = self.vcpus[vcpu].core;
        self.advance(now, core);
        let v = &mut self.vcpus[vcpu];
        v.jobs.push(level, cost, done);
        let (slot, waits) = (v.slot, v.runnable);
        let one = &mut self.cores[core];
        let waits = waits && one.current != Some(slot);
        let first = level == Level::Irq && !one.views.all()[slot].io;
        if first {
            one.views.change(slot).io = true;
        }
        if first && waits && one.scheduler.hears_io() {
            self.pick(now, core);
        } else {
            self.changed(now, vcpu);
        }
    }

    /// Whether a vCPU has its core at this moment.
    pub fn runs(&self, vcpu: usize) -> bool {
        let v = &self.vcpus[vcpu];
        self.cores[v.core].current == Some(v.slot)
    }

    /// A core's timer went off.
    pub fn timer(&mut self, now: Nanos, core: usize) {
        self.advance(now, core);
        self.finish_jobs(core);
        self.timed.push(core);
    }

    /// Decides what goes on on cores whose timers went off. To be called when those that [`Cpus::done`] names have
    /// submitted what comes next, as a VM does not sleep between two pieces of work.
    pub fn conclude(&mut self, now: Nanos) {
        while let Some(core) = self.timed.pop() {
            let one = &self.cores[core];
            let blocked = (one.current).is_some_and(|s| !self.vcpus[one.vcpus[s]].has_work());
            if blocked || now >= one.until {
                self.pick(now, core);
            } else {
                self.arm(now, core);
            }
        }
    }

    /// Lets the machines of the pools know what their VMs ran elsewhere.
    pub fn exchange(&mut self, now: Nanos) {
        let vms = self.on_turbo.len();
        let (mut ran, mut turbo, mut regular) = (vec![0; vms], vec![0; vms], vec![0u32; vms]);
        for core in 0..self.cores.len() {
            self.advance(now, core);
        }
        for v in self
            .vcpus
            .iter()
            .filter(|v| self.cores[v.core].pool != Pool::Alone)
        {
            let delta = v.usage.ran - v.told;
            ran[v.vm] += delta;
            if v.turbo {
                turbo[v.vm] += delta;
            } else {
                regular[v.vm] += 1;
            }
        }
        let mut dues = vec![(0, false); vms];
        for core in self.cores.iter().filter(|c| c.pool == Pool::Regular) {
            for (slot, &id) in core.vcpus.iter().enumerate() {
                let (due, waits) = core.scheduler.due(slot);
                let of = &mut dues[self.vcpus[id].vm];
                *of = (of.0 + due, of.1 | waits);
            }
        }
        for core in &mut self.cores {
            if core.pool == Pool::Alone {
                continue;
            }
            let told: Vec<Elsewhere> = core
                .vcpus
                .iter()
                .map(|&id| {
                    let v = &self.vcpus[id];
                    let (before, after) = (self.on_turbo[v.vm], self.on_turbo[v.vm] + turbo[v.vm]);
                    let all = regular[v.vm];
                    Elsewhere {
                        turbo: portion(after, 1, all) - portion(before, 1, all),
                        total: ran[v.vm] - (v.usage.ran - v.told),
                        due: dues[v.vm].0.saturating_sub(self.due[v.vm]),
                        waits: dues[v.vm].1,
                    }
                })
                .collect();
            core.scheduler.elsewhere(&told);
        }
        for (due, (all, _)) in self.due.iter_mut().zip(dues) {
            *due = all;
        }
        for v in &mut self.vcpus {
            v.told = v.usage.ran;
        }
        for (sum, turbo) in self.on_turbo.iter_mut().zip(turbo) {
            *sum += turbo;
        }
        // As the controller's accounting does at each decision, no decision is forced by this.
        for core in 0..self.cores.len() {
            self.arm(now, core);
        }
    }

    /// Brings all counters up to `now`.
    pub fn settle(&mut self, now: Nanos) {
        for core in 0..self.cores.len() {
            self.advance(now, core);
            self.arm(now, core);
        }
        for v in &mut self.vcpus {
            if v.runnable && self.cores[v.core].current != Some(v.slot) {
                v.usage.waited += now - v.waits_since;
                v.waits_since = now;
            }
        }
    }

    /// What a vCPU got.
    pub fn usage(&self, vcpu: usize) -> Usage {
        self.vcpus[vcpu].usage
    }

    /// Of a core: idle time, time that switches and the scheduler took, and idle time in which a vCPU without a cap
    /// wanted to run (which must be 0), ns.
    pub fn core_times(&self, core: usize) -> (Nanos, Nanos, Nanos) {
        let c = &self.cores[core];
        (c.idle, c.stolen, c.wasted)
    }

    /// Something about a vCPU's work changed (and its core is advanced to `now`).
    fn changed(&mut self, now: Nanos, vcpu: usize) {
        let v = &mut self.vcpus[vcpu];
        let (core, slot, wants) = (v.core, v.slot, v.has_work());
        if wants && !v.runnable {
            v.runnable = true;
            v.waits_since = now;
            v.usage.wakes += 1;
            self.cores[core].views.change(slot).runnable = true;
            self.pick(now, core);
        } else if self.cores[core].current == Some(slot) {
            if wants {
                self.arm(now, core);
            } else {
                self.pick(now, core);
            }
        } else if !wants && v.runnable {
            // Its computing was called off while it waited.
            v.runnable = false;
            v.usage.waited += now - v.waits_since;
            let view = self.cores[core].views.change(slot);
            (view.runnable, view.blocked) = (false, true);
        }
    }

    /// Charges the time since the last event of this core.
    fn advance(&mut self, now: Nanos, core: usize) {
        let one = &mut self.cores[core];
        let mut passed = now - one.since;
        one.since = now;
        let busy = one.busy.min(passed);
        one.busy -= busy;
        one.stolen += busy;
        passed -= busy;
        let Some(slot) = one.current else {
            one.idle += passed;
            let unfree = |(k, &id): (usize, &usize)| {
                self.vcpus[id].runnable && one.params[k].cap_permille.is_none()
            };
            if one.vcpus.iter().enumerate().any(unfree) {
                one.wasted += passed;
            }
            return;
        };
        one.views.change(slot).used += passed;
        let v = &mut self.vcpus[one.vcpus[slot]];
        v.usage.ran += passed;
        let cold = v.cold.min(passed);
        v.cold -= cold;
        v.usage.cold += cold;
        passed -= cold;
        if !v.jobs.is_empty() {
            v.jobs.run(passed);
        } else {
            v.usage.computed += passed;
            if v.hog_left != FOREVER {
                v.hog_left = v.hog_left.saturating_sub(passed);
            }
        }
    }

    fn finish_jobs(&mut self, core: usize) {
        let one = &self.cores[core];
        let Some(slot) = one.current else { return };
        if one.busy > 0 {
            return;
        }
        let v = &mut self.vcpus[one.vcpus[slot]];
        if v.cold > 0 {
            return;
        }
        self.done.extend(v.jobs.pop_ended());
        if !v.jobs.has_irq() && self.cores[core].views.all()[slot].io {
            self.cores[core].views.change(slot).io = false;
        }
    }

    /// Asks the scheduler who runs.
    fn pick(&mut self, now: Nanos, core: usize) {
        let one = &mut self.cores[core];
        if let Some(slot) = one.current {
            let v = &mut self.vcpus[one.vcpus[slot]];
            if !v.has_work() && v.runnable {
                v.runnable = false;
                let view = one.views.change(slot);
                (view.runnable, view.blocked) = (false, true);
            }
        }
        one.views.sort();
        let pick = one.scheduler.pick(now, &one.views);
        one.views.picked();
        one.busy += one.scheduler.overhead();
        if pick.who != one.current {
            if let Some(old) = one.current {
                let v = &mut self.vcpus[one.vcpus[old]];
                v.waits_since = now;
            }
            if let Some(new) = pick.who {
                let v = &mut self.vcpus[one.vcpus[new]];
                let waited = now - v.waits_since;
                v.usage.waited += waited;
                v.usage.longest = v.usage.longest.max(waited);
                v.usage.switches += 1;
                if one.last != Some(new) {
                    one.busy += self.switch_cost;
                    v.cold = v.refill;
                }
                one.last = Some(new);
            }
            one.current = pick.who;
        }
        // It begins to run when the core is its own.
        let runs_from = now.saturating_add(one.busy);
        one.until = pick.until.min(runs_from.saturating_add(pick.budget));
        self.arm(now, core);
    }

    /// Sets the timer of a core.
    fn arm(&mut self, now: Nanos, core: usize) {
        let one = &self.cores[core];
        let mut at = one.until;
        if let Some(slot) = one.current {
            let end = self.vcpus[one.vcpus[slot]].next_end();
            at = at.min(now.saturating_add(one.busy).saturating_add(end));
        }
        self.timers.set(core, at.max(now));
    }
}
