// SPDX-License-Identifier: Apache-2.0
//! One simulated core that drives any [`Machine`] the way a host kernel and the slot controller do.
//!
//! Of the VMs that want to run, the one with the highest rank runs, equal ranks first come first served (as
//! SCHED_FIFO: a VM whose rank rises goes behind its new equals, one whose rank falls goes before them, a
//! preempted one keeps its place). The machine is asked when [`Decision::until`] or a budget is reached, and on
//! the wake-ups and blocks it wants to hear of. Discrete events, no randomness but that of the seed: equal
//! inputs give equal reports.

use super::{Decision, FOREVER, Machine, Nanos, Params, Rank, Seen, US};

/// What a simulated VM does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behaviour {
    /// Always wants to run.
    Busy,
    /// Never wants to run.
    Idle,
    /// Wakes at each multiple of `period` to run for `on`; a wake-up that falls into work still going on is lost.
    Duty {
        /// Time between wake-ups.
        period: Nanos,
        /// Run time each time.
        on: Nanos,
    },
    /// Sleeps for a random time, runs for a random time, and so on; both uniform in the bounds given.
    Bursts {
        /// Shortest and longest sleep.
        sleep: (Nanos, Nanos),
        /// Shortest and longest run.
        run: (Nanos, Nanos),
    },
    /// Plays against the scheduler: knows its budget, sleeps just before it is used up and wakes again.
    Dodge {
        /// What it leaves of its budget.
        margin: Nanos,
        /// How long it sleeps.
        sleep: Nanos,
    },
}

/// A VM on the simulated core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimVm {
    /// Its controls.
    pub params: Params,
    /// What it does.
    pub behaviour: Behaviour,
}

/// What driving the machine costs, and how exact it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Driver {
    /// Core time that each decision takes; no VM runs meanwhile.
    pub overhead: Nanos,
    /// Timers and budgets fire up to this late (uniform).
    pub late: Nanos,
    /// Whether [`Report::stints`] is filled.
    pub record: bool,
}

/// One VM running without interruption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stint {
    /// [`Params::id`] of the VM.
    pub id: u32,
    /// When it began.
    pub at: Nanos,
    /// How long it ran.
    pub len: Nanos,
}

/// What one VM got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmReport {
    /// [`Params::id`].
    pub id: u32,
    /// Time it ran.
    pub ran: Nanos,
    /// Time it wanted to run, might (was not over its cap), and did not.
    pub waited: Nanos,
    /// Waits from waking to running, in order.
    pub wake_waits: Vec<Nanos>,
    /// Waits from being preempted to running again, in order.
    pub preempt_waits: Vec<Nanos>,
}

impl VmReport {
    /// Longest wait of either kind that ended.
    pub fn worst_wait(&self) -> Nanos {
        self.wake_waits
            .iter()
            .chain(&self.preempt_waits)
            .copied()
            .max()
            .unwrap_or(0)
    }
}

/// What happened on the core.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Simulated time.
    pub time: Nanos,
    /// Time in which no VM ran and no decision was made.
    pub idle: Nanos,
    /// Part of `idle` in which a VM without cap wanted to run. Anything but 0 is a fault of the machine.
    pub wasted: Nanos,
    /// Decisions made.
    pub decisions: u64,
    /// Core time they took.
    pub overhead: Nanos,
    /// Changes of a VM's rank from one decision to the next.
    pub rank_changes: u64,
    /// Per VM, in the order they first came.
    pub vms: Vec<VmReport>,
    /// Who ran when, if [`Driver::record`].
    pub stints: Vec<Stint>,
}

impl Report {
    /// What a VM got, by id.
    pub fn vm(&self, id: u32) -> Option<&VmReport> {
        self.vms.iter().find(|vm| vm.id == id)
    }

    /// Part of the simulated time that a VM ran, 0.0 ..= 1.0.
    pub fn share(&self, id: u32) -> f64 {
        self.vm(id)
            .map_or(0.0, |vm| vm.ran as f64 / self.time.max(1) as f64)
    }
}

/// The machine asked to be called again and again without time passing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "no progress at {at} ns of simulated time: the machine wants to be asked again at once, time after time"
)]
pub struct Stuck {
    /// Simulated time.
    pub at: Nanos,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asleep { until: Nanos },
    Waiting { since: Nanos, woke: bool },
    Running,
}

#[derive(Debug, Clone)]
struct Guest {
    params: Params,
    behaviour: Behaviour,
    state: State,
    /// Work left until it sleeps.
    work: Nanos,
    /// Since the last decision.
    used: Nanos,
    blocked: bool,
    budget: Nanos,
    rank: Rank,
    /// Place among equals: lower is served first.
    place: i64,
    /// Index in the report.
    row: usize,
}

/// A simulated core. See the module's text.
#[derive(Debug)]
pub struct Core<M> {
    machine: M,
    driver: Driver,
    guests: Vec<Guest>,
    seen: Vec<Seen>,
    decision: Decision,
    now: Nanos,
    until: Nanos,
    asked: bool,
    first: i64,
    last: i64,
    seed: u64,
    stalled: u32,
    report: Report,
}

impl<M: Machine> Core<M> {
    /// A core with these VMs at time 0.
    pub fn new(machine: M, vms: &[SimVm], driver: Driver, seed: u64) -> Self {
        let mut core = Self {
            machine,
            driver,
            guests: Vec::new(),
            seen: Vec::new(),
            decision: Decision::default(),
            now: 0,
            until: 0,
            asked: true,
            first: 0,
            last: 0,
            seed,
            stalled: 0,
            report: Report::default(),
        };
        core.configure(vms);
        core
    }

    /// Simulated time.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// What happened so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The machine.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// The machine, to be told what this core's driver does not see. Between two calls of [`Core::run_until`].
    pub fn machine_mut(&mut self) -> &mut M {
        &mut self.machine
    }

    /// Replaces the VMs from now on. Those with a known id and the same behaviour go on with what they do.
    pub fn configure(&mut self, vms: &[SimVm]) {
        // The machine must know what was run under the old order of VMs.
        if !self.guests.is_empty() {
            self.decide();
        }
        let mut old = std::mem::take(&mut self.guests);
        for vm in vms {
            if let Some(k) = old
                .iter()
                .position(|g| g.params.id == vm.params.id && g.behaviour == vm.behaviour)
            {
                let guest = old.swap_remove(k);
                self.guests.push(Guest {
                    params: vm.params,
                    ..guest
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
            let mut guest = Guest {
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
                    guest.state = State::Asleep {
                        until: self.now + self.random(sleep),
                    }
                }
                Behaviour::Busy | Behaviour::Duty { .. } | Behaviour::Dodge { .. } => {
                    guest.state = State::Asleep { until: self.now };
                }
            }
            self.guests.push(guest);
        }
        // Those that want to run at once are seen so by the first decision.
        for i in 0..self.guests.len() {
            self.wake(i);
        }
        let params: Vec<Params> = self.guests.iter().map(|g| g.params).collect();
        self.machine.configure(self.now, &params);
        self.asked = true;
    }

    /// Runs until simulated time `end`.
    ///
    /// # Errors
    /// [`Stuck`] if the machine never lets time go on.
    pub fn run_until(&mut self, end: Nanos) -> Result<&Report, Stuck> {
        while self.now < end {
            if self.asked {
                self.stalled += 1;
                if self.stalled > 100 {
                    return Err(Stuck { at: self.now });
                }
                self.decide();
                continue;
            }
            let running = self.dispatch();
            let mut next = end.min(self.until);
            if let Some(i) = running {
                let g = &self.guests[i];
                next = next.min(self.now.saturating_add(self.until_sleep(g).min(g.budget)));
            }
            for g in &self.guests {
                if let State::Asleep { until } = g.state {
                    next = next.min(until);
                }
            }
            self.advance(next.max(self.now), running);
            self.happen(running);
        }
        self.report.time = self.now;
        Ok(&self.report)
    }

    /// Lets time pass, the VM `running` on the core.
    fn advance(&mut self, to: Nanos, running: Option<usize>) {
        let passed = to - self.now;
        if passed > 0 {
            self.stalled = 0;
        }
        match running {
            Some(i) => {
                let g = &mut self.guests[i];
                g.used += passed;
                g.work = g.work.saturating_sub(passed);
                if g.budget != FOREVER {
                    g.budget = g.budget.saturating_sub(passed);
                }
                self.report.vms[g.row].ran += passed;
                if self.driver.record && passed > 0 {
                    self.record(self.guests[i].params.id, passed);
                }
            }
            None => {
                self.report.idle += passed;
                let held_back = |g: &Guest| {
                    g.state != State::Running && !matches!(g.state, State::Asleep { .. })
                };
                if self
                    .guests
                    .iter()
                    .any(|g| held_back(g) && g.params.cap_permille.is_none())
                {
                    self.report.wasted += passed;
                }
            }
        }
        self.now = to;
    }

    /// Handles all that is due now.
    fn happen(&mut self, running: Option<usize>) {
        if let Some(i) = running {
            let g = &self.guests[i];
            if self.until_sleep(g) == 0 {
                self.sleep(i);
                self.asked |= self.decision.notify_block;
            } else {
                self.asked |= g.budget == 0;
            }
        }
        self.asked |= self.now >= self.until;
        for i in 0..self.guests.len() {
            if self.wake(i) {
                self.asked |= self.decision.notify_wake;
            }
        }
    }

    /// How long the VM would run on before it sleeps.
    fn until_sleep(&self, g: &Guest) -> Nanos {
        match g.behaviour {
            Behaviour::Dodge { margin, .. } if g.budget != FOREVER && g.budget > margin => {
                g.work.min(g.budget - margin)
            }
            _ => g.work,
        }
    }

    fn sleep(&mut self, i: usize) {
        let behaviour = self.guests[i].behaviour;
        let until = match behaviour {
            Behaviour::Busy | Behaviour::Idle => FOREVER,
            Behaviour::Duty { period, .. } => (self.now / period.max(1) + 1) * period.max(1),
            Behaviour::Bursts { sleep, .. } => self.now + self.random(sleep),
            Behaviour::Dodge { sleep, .. } => self.now + sleep.max(1),
        };
        let g = &mut self.guests[i];
        g.state = State::Asleep { until };
        g.blocked = true;
    }

    /// Wakes the VM if its time has come.
    fn wake(&mut self, i: usize) -> bool {
        let State::Asleep { until } = self.guests[i].state else {
            return false;
        };
        if until > self.now {
            return false;
        }
        let work = match self.guests[i].behaviour {
            Behaviour::Idle => return false,
            Behaviour::Busy => FOREVER,
            Behaviour::Duty { on, .. } => on,
            Behaviour::Bursts { run, .. } => self.random(run),
            // Longer than any budget; it sleeps before.
            Behaviour::Dodge { margin, .. } => (margin * 50).max(20_000 * US),
        };
        self.last += 1;
        let g = &mut self.guests[i];
        g.work = work.max(1);
        g.place = self.last;
        g.state = State::Waiting {
            since: until,
            woke: true,
        };
        true
    }

    /// Puts the VM that is to run on the core, as the kernel would.
    fn dispatch(&mut self) -> Option<usize> {
        let mut best: Option<usize> = None;
        for (i, g) in self.guests.iter().enumerate() {
            if matches!(g.state, State::Asleep { .. }) || g.rank == Rank::Capped {
                continue;
            }
            let better = best.is_none_or(|b| {
                let b = &self.guests[b];
                g.rank > b.rank || (g.rank == b.rank && g.place < b.place)
            });
            if better {
                best = Some(i);
            }
        }
        for i in 0..self.guests.len() {
            let g = &mut self.guests[i];
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
                // Time over the cap is no wait.
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
        self.asked = false;
        self.seen.clear();
        for g in &mut self.guests {
            let runnable = !matches!(g.state, State::Asleep { .. });
            self.seen.push(Seen {
                used: g.used,
                runnable,
                blocked: g.blocked,
                ..Seen::default()
            });
            (g.used, g.blocked) = (0, false);
            // A VM that was over its cap until now waits from now.
            if let (State::Waiting { woke, .. }, Rank::Capped) = (g.state, g.rank) {
                g.state = State::Waiting {
                    since: self.now,
                    woke,
                };
            }
        }
        self.machine
            .decide(self.now, &self.seen, &mut self.decision);
        self.report.decisions += 1;
        self.report.overhead += self.driver.overhead;
        self.now += self.driver.overhead;
        self.report.time = self.now;
        let late = self.random((0, self.driver.late));
        self.until = self.decision.until.saturating_add(late).max(self.now);
        for (i, g) in self.guests.iter_mut().enumerate() {
            let rank = self.decision.ranks[i];
            if rank != g.rank {
                self.report.rank_changes += 1;
                if rank > g.rank {
                    self.last += 1;
                    g.place = self.last;
                } else {
                    self.first -= 1;
                    g.place = self.first;
                }
                g.rank = rank;
            }
            g.budget = self.decision.budgets[i].saturating_add(late);
        }
    }

    fn record(&mut self, id: u32, len: Nanos) {
        let at = self.now;
        match self.report.stints.last_mut() {
            Some(s) if s.id == id && s.at + s.len == at => s.len += len,
            _ => self.report.stints.push(Stint { id, at, len }),
        }
    }

    /// Uniform in the bounds (SplitMix64).
    fn random(&mut self, (least, most): (Nanos, Nanos)) -> Nanos {
        if most <= least {
            return least;
        }
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        least + z % (most - least + 1)
    }
}

#[cfg(test)]
mod tests;
