// SPDX-License-Identifier: Apache-2.0
//! Cores, vCPUs, and the work of their guests.

mod exchange;
mod jobs;

use std::collections::VecDeque;

use viola_policy::slices::{FOREVER, Nanos, Params};

pub use jobs::{Completion, Level};

use crate::net::Packet;
use crate::queue::Timers;
use crate::sched::{Scheduler, Views};
use jobs::Jobs;

/// Computing load of a vCPU, below all other work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuLoad {
    /// No load.
    #[default]
    None,
    /// Computes all the time.
    Busy,
    /// Computes this many percent of a core, by the workload [`crate::work::Lookbusy`].
    Lookbusy(u32),
    /// Computes for `on` in each `period`. Run time that it does not get within a period is lost.
    Duty {
        /// Length of a period, ns.
        period: Nanos,
        /// Run time per period, ns.
        on: Nanos,
    },
}

impl CpuLoad {
    /// A load of `percent` percent of a core, in each `period` (ns); 100 and more is
    /// [`CpuLoad::Busy`].
    pub fn percent(percent: u64, period: Nanos) -> Self {
        match percent {
            0 => CpuLoad::None,
            100.. => CpuLoad::Busy,
            _ => CpuLoad::Duty {
                period,
                on: period / 100 * percent,
            },
        }
    }
}

/// Counters of a vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Time it ran, including time with cold caches, ns.
    pub ran: Nanos,
    /// Part of `ran` in which it waited for cold caches, ns.
    pub cold: Nanos,
    /// Time it wanted to run and did not, ns.
    pub waited: Nanos,
    /// Time it ran its computing load, without cold caches, ns.
    pub computed: Nanos,
    /// Longest wait that has ended, ns.
    pub longest: Nanos,
    /// Number of times it got the core.
    pub switches: u64,
    /// Number of wake-ups.
    pub wakes: u64,
}

#[derive(Debug)]
struct Vcpu {
    core: usize,
    slot: usize,
    vm: usize,
    turbo: bool,
    jobs: Jobs,
    load_left: Nanos,
    /// Time to refill its caches after another vCPU ran on the core, ns.
    refill: Nanos,
    cold: Nanos,
    runnable: bool,
    waits_since: Nanos,
    usage: Usage,
    /// `usage.ran` at the last exchange between the pools.
    ran_at_exchange: Nanos,
    load: CpuLoad,
}

impl Vcpu {
    fn has_work(&self) -> bool {
        self.load_left > 0 || !self.jobs.is_empty()
    }

    /// Time to the end of its present work, ns.
    fn next_end(&mut self) -> Nanos {
        let left = self.jobs.next_end(self.load_left);
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
    /// vCPU that ran last, whose data is in the caches.
    last: Option<usize>,
    since: Nanos,
    until: Nanos,
    /// Time that the scheduler or a switch takes before the current vCPU runs, ns.
    busy: Nanos,
    idle: Nanos,
    stolen: Nanos,
    wasted: Nanos,
}

/// The pool of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// Core outside of the pools.
    Single,
    /// Core of the regular pool.
    Regular,
    /// Core of the turbo pool.
    Turbo,
}

/// All cores and vCPUs of one simulation.
#[derive(Default)]
pub struct Cpus {
    cores: Vec<Core>,
    vcpus: Vec<Vcpu>,
    /// By VM: all it ever ran on turbo cores, and all it was ever due on regular cores, ns.
    on_turbo: Vec<Nanos>,
    due: Vec<Nanos>,
    /// Cost of a switch from one vCPU to another, ns.
    pub switch_cost: Nanos,
    /// Cores whose timers expired at this moment.
    timed: Vec<usize>,
    /// Completed work in order, for the caller to remove.
    pub done: VecDeque<Completion>,
    /// Timers of the cores.
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
            load: CpuLoad::None,
            load_left: 0,
            refill,
            cold: 0,
            runnable: false,
            waits_since: 0,
            usage: Usage::default(),
            ran_at_exchange: 0,
        });
        id
    }

    /// Splits a vCPU in two that share its time: one runs interrupts and softirqs, the other one all else.
    pub fn split(&mut self, vcpu: usize) {
        self.vcpus[vcpu].jobs = Jobs::apart(self.switch_cost);
    }

    /// Number of cores.
    pub fn cores(&self) -> usize {
        self.cores.len()
    }

    /// Number of vCPUs.
    pub fn vcpus(&self) -> usize {
        self.vcpus.len()
    }

    /// The core of a vCPU.
    pub fn core_of(&self, vcpu: usize) -> usize {
        self.vcpus[vcpu].core
    }

    /// Passes the vCPUs to the schedulers. Call it once, after all vCPUs are added.
    pub fn begin(&mut self, now: Nanos) {
        for k in 0..self.cores.len() {
            let core = &mut self.cores[k];
            core.since = now;
            core.scheduler.configure(now, &core.params);
        }
    }

    /// Sets the computing load of a vCPU from now on.
    pub fn set_load(&mut self, now: Nanos, vcpu: usize, load: CpuLoad) {
        let core = self.vcpus[vcpu].core;
        self.advance(now, core);
        let v = &mut self.vcpus[vcpu];
        v.load = load;
        v.load_left = match load {
            CpuLoad::None | CpuLoad::Lookbusy(_) => 0,
            CpuLoad::Busy => FOREVER,
            CpuLoad::Duty { on, .. } => on,
        };
        self.changed(now, vcpu);
    }

    /// Begins a period of a [`CpuLoad::Duty`].
    pub fn new_period(&mut self, now: Nanos, vcpu: usize) {
        let load = self.vcpus[vcpu].load;
        self.set_load(now, vcpu, load);
    }

    /// Gives a vCPU work of `cost` ns (at least 1).
    pub fn submit(&mut self, now: Nanos, vcpu: usize, level: Level, cost: Nanos, done: Completion) {
        let core = self.vcpus[vcpu].core;
        self.advance(now, core);
        let v = &mut self.vcpus[vcpu];
        v.jobs.push(level, cost, done);
        let (slot, waits) = (v.slot, v.runnable);
        let one = &mut self.cores[core];
        let first = level == Level::Irq && !one.views.all()[slot].io;
        if first {
            one.views.change(slot).io = true;
        }
        let asks = match one.current == Some(slot) {
            true => one.scheduler.wants_wake_ups(),
            false => waits && one.scheduler.wants_io_events(),
        };
        if first && asks {
            self.pick(now, core);
        } else {
            self.changed(now, vcpu);
        }
    }

    /// Records packets for the VM of the vCPU that handles its packets.
    pub fn note_requests(&mut self, now: Nanos, vcpu: usize, packets: &[Packet]) {
        let v = &self.vcpus[vcpu];
        let view = self.cores[v.core].views.change(v.slot);
        for packet in packets {
            view.packets.count_request(now, packet.connection_on_host());
        }
    }

    /// Records a packet that the VM of this vCPU sends.
    pub fn note_reply(&mut self, now: Nanos, vcpu: usize, packet: Packet) {
        let v = &self.vcpus[vcpu];
        let core = v.core;
        let packets = &mut self.cores[core].views.change(v.slot).packets;
        packets.count_reply(now, packet.connection_on_host(), true);
        if packets.open == 0 && self.cores[core].scheduler.wants_io_events() {
            self.advance(now, core);
            self.pick(now, core);
        }
    }

    /// Whether a vCPU has its core now.
    pub fn runs(&self, vcpu: usize) -> bool {
        let v = &self.vcpus[vcpu];
        self.cores[v.core].current == Some(v.slot)
    }

    /// Handles the expired timer of a core.
    pub fn timer(&mut self, now: Nanos, core: usize) {
        self.advance(now, core);
        self.finish_jobs(core);
        self.timed.push(core);
    }

    /// Lets cores whose timers expired decide. Call it after the owners of [`Cpus::done`] have
    /// submitted their next work, because a VM does not sleep between two pieces of work.
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

    /// Counters of a vCPU.
    pub fn usage(&self, vcpu: usize) -> Usage {
        self.vcpus[vcpu].usage
    }

    /// Of a core, ns: idle time, time of scheduler and switches, and idle time in which a vCPU without a cap wanted to
    /// run (which must be 0).
    pub fn core_times(&self, core: usize) -> (Nanos, Nanos, Nanos) {
        let c = &self.cores[core];
        (c.idle, c.stolen, c.wasted)
    }

    /// Reacts to a change of a vCPU's work. Its core must be advanced to `now`.
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
            // Its load was removed while it waited.
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
        let computed = v.jobs.run(passed, v.load_left > 0);
        if computed > 0 {
            v.usage.computed += computed;
            if v.load_left != FOREVER {
                v.load_left = v.load_left.saturating_sub(computed);
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

    /// Asks the scheduler which vCPU runs.
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
        one.views.clear();
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
                v.jobs.look();
                if one.last != Some(new) {
                    one.busy += self.switch_cost;
                    v.cold = v.refill;
                }
                one.last = Some(new);
            }
            one.current = pick.who;
        }
        // The vCPU begins to run after the scheduler and the switch.
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
