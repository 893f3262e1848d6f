// SPDX-License-Identifier: Apache-2.0
//! One simulated core that drives any [`CoreScheduler`] as a host kernel and the slot controller do.
//!
//! The highest-ranked VM that wants to run has the core; equal ranks are served first come first served, as under
//! SCHED_FIFO: a VM whose rank rises goes behind its new equals, one whose rank falls goes before them, a preempted one
//! keeps its place. The scheduler is asked when [`Decision::until`] or a budget is reached, and at the wake-ups and
//! blocks that it wants to know of. The simulation is one of discrete events, random only by its seed: equal inputs
//! give equal reports.

mod host;
mod report;

pub use host::{Host, Usage, slowest_mean};
pub use report::{Behaviour, Driver, NoProgress, Report, Run, SimVm, VmReport};

use super::{Activity, Class, CoreScheduler, Decision, FOREVER, Io, MS, Nanos, Params, Rank, US};

/// Longest time between two packets of [`Driver::packets`].
const MAX_PACKET_GAP: Nanos = 3 * MS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asleep { until: Nanos },
    Waiting { since: Nanos, woke: bool },
    Running,
}

#[derive(Debug, Clone)]
struct VmState {
    params: Params,
    behaviour: Behaviour,
    state: State,
    /// Work left until it sleeps, ns.
    work: Nanos,
    /// Run time since the last decision, ns.
    used: Nanos,
    blocked: bool,
    budget: Nanos,
    rank: Rank,
    /// Place among VMs of equal rank: the lowest is served first.
    place: i64,
    /// Index in the report.
    row: usize,
}

/// A simulated core. See the module's text.
#[derive(Debug)]
pub struct Core<M> {
    scheduler: M,
    driver: Driver,
    vms: Vec<VmState>,
    activity: Vec<Activity>,
    decision: Decision,
    now: Nanos,
    until: Nanos,
    must_decide: bool,
    front: i64,
    back: i64,
    seed: u64,
    stalled: u32,
    report: Report,
}

impl<M: CoreScheduler> Core<M> {
    /// A core with these VMs at time 0.
    pub fn new(scheduler: M, vms: &[SimVm], driver: Driver, seed: u64) -> Self {
        let mut core = Self {
            scheduler,
            driver,
            vms: Vec::new(),
            activity: Vec::new(),
            decision: Decision::default(),
            now: 0,
            until: 0,
            must_decide: true,
            front: 0,
            back: 0,
            seed,
            stalled: 0,
            report: Report::default(),
        };
        core.configure(vms);
        core
    }

    /// Simulated time, ns.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// The report so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &M {
        &self.scheduler
    }

    /// The scheduler, for input that this core's driver cannot give. Only between two calls of [`Core::run_until`].
    pub fn scheduler_mut(&mut self) -> &mut M {
        &mut self.scheduler
    }

    /// Replaces the VMs from now on. A VM with a known id and the same behaviour continues.
    pub fn configure(&mut self, vms: &[SimVm]) {
        // Charges what was run under the old order of VMs.
        if !self.vms.is_empty() {
            self.decide();
        }
        let mut old = std::mem::take(&mut self.vms);
        for vm in vms {
            if let Some(k) = old
                .iter()
                .position(|g| g.params.id == vm.params.id && g.behaviour == vm.behaviour)
            {
                let state = old.swap_remove(k);
                self.vms.push(VmState {
                    params: vm.params,
                    ..state
                });
                continue;
            }
            let id = vm.params.id;
            let row = self
                .report
                .vms
                .iter()
                .position(|r| r.id == id)
                .unwrap_or_else(|| {
                    self.report.vms.push(VmReport {
                        id,
                        ..VmReport::default()
                    });
                    self.report.vms.len() - 1
                });
            let mut vm = VmState {
                params: vm.params,
                behaviour: vm.behaviour,
                state: State::Asleep { until: FOREVER },
                work: 0,
                used: 0,
                blocked: false,
                budget: FOREVER,
                rank: Rank::Waiting,
                place: 0,
                row,
            };
            match vm.behaviour {
                Behaviour::Idle => {}
                Behaviour::Bursts { sleep, .. } => {
                    vm.state = State::Asleep {
                        until: self.now + self.random(sleep),
                    }
                }
                Behaviour::Busy | Behaviour::Duty { .. } | Behaviour::Evade { .. } => {
                    vm.state = State::Asleep { until: self.now };
                }
            }
            self.vms.push(vm);
        }
        // The first decision must see the VMs that want to run at once.
        for i in 0..self.vms.len() {
            self.wake(i);
        }
        let params: Vec<Params> = self.vms.iter().map(|g| g.params).collect();
        self.scheduler.configure(self.now, &params);
        self.must_decide = true;
    }

    /// Runs until simulated time `end`, ns.
    ///
    /// # Errors
    /// [`NoProgress`] if the scheduler does not let time pass.
    pub fn run_until(&mut self, end: Nanos) -> Result<&Report, NoProgress> {
        while self.now < end {
            if self.must_decide {
                self.stalled += 1;
                if self.stalled > 100 {
                    return Err(NoProgress { at: self.now });
                }
                self.decide();
                continue;
            }
            let running = self.dispatch();
            let mut next = end.min(self.until);
            if let Some(i) = running {
                let g = &self.vms[i];
                next = next.min(self.now.saturating_add(self.until_sleep(g).min(g.budget)));
            }
            for g in &self.vms {
                if let State::Asleep { until } = g.state {
                    next = next.min(until);
                }
            }
            self.advance(next.max(self.now), running);
            self.handle_due_events(running);
        }
        self.report.time = self.now;
        Ok(&self.report)
    }

    /// Lets time pass while VM `running` has the core.
    fn advance(&mut self, to: Nanos, running: Option<usize>) {
        let passed = to - self.now;
        if passed > 0 {
            self.stalled = 0;
        }
        match running {
            Some(i) => {
                let g = &mut self.vms[i];
                g.used += passed;
                g.work = g.work.saturating_sub(passed);
                if g.budget != FOREVER {
                    g.budget = g.budget.saturating_sub(passed);
                }
                self.report.vms[g.row].ran += passed;
                if self.driver.record && passed > 0 {
                    self.record(self.vms[i].params.id, passed);
                }
            }
            None => {
                self.report.idle += passed;
                let held_back = |g: &VmState| {
                    g.state != State::Running && !matches!(g.state, State::Asleep { .. })
                };
                if self
                    .vms
                    .iter()
                    .any(|g| held_back(g) && g.params.cap_permille.is_none())
                {
                    self.report.wasted += passed;
                }
            }
        }
        self.now = to;
    }

    /// Handles all events that are due now.
    fn handle_due_events(&mut self, running: Option<usize>) {
        if let Some(i) = running {
            let g = &self.vms[i];
            if self.until_sleep(g) == 0 {
                self.sleep(i);
                self.must_decide |= self.decision.notify_block;
            } else {
                self.must_decide |= g.budget == 0;
            }
        }
        self.must_decide |= self.now >= self.until;
        for i in 0..self.vms.len() {
            if self.wake(i) {
                self.must_decide |= self.decision.notify_wake;
            }
        }
    }

    /// Time that the VM still runs before it sleeps, ns.
    fn until_sleep(&self, g: &VmState) -> Nanos {
        match g.behaviour {
            Behaviour::Evade { margin, .. } if g.budget != FOREVER && g.budget > margin => {
                g.work.min(g.budget - margin)
            }
            _ => g.work,
        }
    }

    fn sleep(&mut self, i: usize) {
        let behaviour = self.vms[i].behaviour;
        let until = match behaviour {
            Behaviour::Busy | Behaviour::Idle => FOREVER,
            Behaviour::Duty { period, .. } => (self.now / period.max(1) + 1) * period.max(1),
            Behaviour::Bursts { sleep, .. } => self.now + self.random(sleep),
            Behaviour::Evade { sleep, .. } => self.now + sleep.max(1),
        };
        let g = &mut self.vms[i];
        g.state = State::Asleep { until };
        g.blocked = true;
    }

    /// Wakes the VM if it is due; returns whether it woke.
    fn wake(&mut self, i: usize) -> bool {
        let State::Asleep { until } = self.vms[i].state else {
            return false;
        };
        if until > self.now {
            return false;
        }
        let work = match self.vms[i].behaviour {
            Behaviour::Idle => return false,
            Behaviour::Busy => FOREVER,
            Behaviour::Duty { on, .. } => on,
            Behaviour::Bursts { run, .. } => self.random(run),
            // More work than any budget: it sleeps before its end.
            Behaviour::Evade { margin, .. } => (margin * 50).max(20_000 * US),
        };
        self.back += 1;
        let g = &mut self.vms[i];
        g.work = work.max(1);
        g.place = self.back;
        g.state = State::Waiting {
            since: until,
            woke: true,
        };
        true
    }

    /// Gives the core to the VM that is to run, as the kernel would.
    fn dispatch(&mut self) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (i, g) in self.vms.iter().enumerate() {
            if matches!(g.state, State::Asleep { .. }) || g.rank == Rank::Capped {
                continue;
            }
            let better = best.is_none_or(|b| {
                let b = &self.vms[b];
                g.rank > b.rank || (g.rank == b.rank && g.place < b.place)
            });
            if better {
                best = Some(i);
            }
        }
        for i in 0..self.vms.len() {
            let g = &mut self.vms[i];
            let row = &mut self.report.vms[g.row];
            match g.state {
                State::Running if best != Some(i) => {
                    g.state = State::Waiting {
                        since: self.now,
                        woke: false,
                    }
                }
                State::Waiting { since, woke } if best == Some(i) => {
                    let wait = self.now - since;
                    row.waited += wait;
                    if woke {
                        &mut row.wake_waits
                    } else {
                        &mut row.preempt_waits
                    }
                    .push(wait);
                    g.state = State::Running;
                }
                // Time over the cap does not count as waiting.
                State::Waiting { woke, .. } if g.rank == Rank::Capped => {
                    g.state = State::Waiting {
                        since: self.now,
                        woke,
                    };
                }
                _ => {}
            }
        }
        best
    }

    fn decide(&mut self) {
        self.must_decide = false;
        self.activity.clear();
        for i in 0..self.vms.len() {
            let io = match self.driver.packets && self.vms[i].params.class == Class::Ls {
                true => {
                    const ALL: [Io; 5] =
                        [Io::Idle, Io::Answered, Io::Expected, Io::Pending, Io::Flood];
                    ALL[self.random((0, 4)) as usize]
                }
                false => Io::Unknown,
            };
            let g = &mut self.vms[i];
            let runnable = !matches!(g.state, State::Asleep { .. });
            self.activity.push(Activity {
                used: g.used,
                runnable,
                blocked: g.blocked,
                io,
                ..Activity::default()
            });
            (g.used, g.blocked) = (0, false);
            // A VM that was over its cap begins to wait now.
            if let (State::Waiting { woke, .. }, Rank::Capped) = (g.state, g.rank) {
                g.state = State::Waiting {
                    since: self.now,
                    woke,
                };
            }
        }
        self.scheduler
            .decide(self.now, &self.activity, &mut self.decision);
        self.report.decisions += 1;
        self.report.overhead += self.driver.overhead;
        self.now += self.driver.overhead;
        self.report.time = self.now;
        let late = self.random((0, self.driver.late));
        self.until = self.decision.until.saturating_add(late).max(self.now);
        if self.driver.packets {
            let packet = self.now + self.random((10 * US, MAX_PACKET_GAP));
            self.until = self.until.min(packet);
        }
        for (i, g) in self.vms.iter_mut().enumerate() {
            let rank = self.decision.ranks[i];
            if rank != g.rank {
                self.report.rank_changes += 1;
                if rank > g.rank {
                    self.back += 1;
                    g.place = self.back;
                } else {
                    self.front -= 1;
                    g.place = self.front;
                }
                g.rank = rank;
            }
            g.budget = self.decision.budgets[i].saturating_add(late);
        }
    }

    fn record(&mut self, id: u32, len: Nanos) {
        let at = self.now;
        match self.report.runs.last_mut() {
            Some(s) if s.id == id && s.at + s.len == at => s.len += len,
            _ => self.report.runs.push(Run { id, at, len }),
        }
    }

    /// Uniform within the bounds (SplitMix64).
    fn random(&mut self, (min, max): (Nanos, Nanos)) -> Nanos {
        if max <= min {
            return min;
        }
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        min + z % (max - min + 1)
    }
}

#[cfg(test)]
mod tests;
