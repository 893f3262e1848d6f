// SPDX-License-Identifier: Apache-2.0
//! Stock Linux: EEVDF on one core (kernel/sched/fair.c since 6.6, as of 6.18), with vCPUs as tasks.
//!
//! A task is eligible while its virtual run time is not ahead of the mean; the eligible task with the earliest virtual
//! deadline runs. Until the deadline with which it was picked it stays, as long as it is eligible (RUN_TO_PARITY). The
//! kernel notices the end of a slice at a tick or a wake-up; a task that wakes preempts if it is the one to run. A task
//! that sleeps keeps the time it is owed, at most a slice and a tick; one that was ahead is neither owed nor owes once
//! the others have reached it (DELAY_DEQUEUE, DELAY_ZERO). Group scheduling, migration and the fair server are not
//! modelled.

use viola_policy::slices::{FOREVER, MS, Nanos, Params, US};

use super::{Pick, Scheduler, Views};

/// base_slice_ns of two cores, ns: 0.7 ms·(1 + log2 2).
pub const BASE_SLICE: Nanos = 1_400 * US;
/// Tick interval at HZ 250, ns.
pub const TICK: Nanos = 4 * MS;

/// Settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// base_slice_ns, ns; by default [`BASE_SLICE`].
    pub slice: Nanos,
    /// Tick interval, ns; by default [`TICK`].
    pub tick: Nanos,
    /// Whether a packet for a VM wakes a thread of it, as with UML guests: their kernel is one thread, their processes
    /// are others.
    pub packets_wake: bool,
    /// Interval, ns, at which the timer of a guest's own kernel wakes such a thread, for each VM that wants to run and
    /// whose last one has run; 0: never.
    pub guest_tick: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slice: BASE_SLICE,
            tick: TICK,
            packets_wake: false,
            guest_tick: 0,
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Task {
    /// Kernel weight: 1024 is nice 0.
    weight: f64,
    vruntime: f64,
    deadline: f64,
    /// Of a sleeping task: how far its vruntime was behind the mean, at least 0.
    lag: f64,
    queued: bool,
    /// Whether it, or another thread of its VM, has woken since the last decision.
    woke: bool,
    /// Whether a packet already waited for it.
    io: bool,
    /// When its guest's timer expires next, and whether the thread that it woke last still waits.
    guest_tick: Nanos,
    ticked: bool,
}

/// EEVDF on one core.
#[derive(Debug)]
pub struct Eevdf {
    config: Config,
    tasks: Vec<Task>,
    current: Option<usize>,
    /// Virtual run time until which the current task is protected from preemption.
    protected: f64,
    next_tick: Nanos,
}

impl Eevdf {
    /// A core without vCPUs.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            tasks: Vec::new(),
            current: None,
            protected: 0.0,
            next_tick: 0,
        }
    }

    /// Mean virtual run time by weight of the tasks that want to run.
    fn mean(&self) -> f64 {
        let (mut sum, mut weight) = (0.0, 0.0);
        for task in self.tasks.iter().filter(|t| t.queued) {
            sum += task.vruntime * task.weight;
            weight += task.weight;
        }
        if weight > 0.0 { sum / weight } else { 0.0 }
    }

    fn place(&mut self, i: usize) {
        let mean = self.mean();
        let total: f64 = self.queued().map(|k| self.tasks[k].weight).sum();
        let slice = self.config.slice as f64;
        let task = &mut self.tasks[i];
        let vslice = slice * 1024.0 / task.weight;
        task.vruntime = match total > 0.0 {
            // The task shifts the mean by joining; scaling keeps its lag (place_entity).
            true if task.lag > 0.0 => mean - task.lag * (total + task.weight) / total,
            true => task.vruntime.max(mean),
            false => mean,
        };
        task.deadline = task.vruntime + vslice;
        (task.queued, task.woke) = (true, true);
    }

    fn queued(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.tasks.len()).filter(|&i| self.tasks[i].queued)
    }

    fn best(&self) -> Option<usize> {
        let mean = self.mean();
        let eligible = |&i: &usize| self.tasks[i].vruntime <= mean + 1e-3;
        let protected = |&i: &usize| self.tasks[i].vruntime < self.protected;
        if let Some(i) = self.current.filter(eligible).filter(protected) {
            return Some(i);
        }
        let deadline = |&a: &usize, &b: &usize| {
            self.tasks[a]
                .deadline
                .total_cmp(&self.tasks[b].deadline)
                .then(a.cmp(&b))
        };
        self.queued()
            .filter(eligible)
            .min_by(deadline)
            .or_else(|| self.queued().min_by(deadline))
    }

    /// Lets the timers of the guests wake threads.
    fn guest_ticks(&mut self, now: Nanos) {
        let interval = self.config.guest_tick;
        for (i, task) in self.tasks.iter_mut().enumerate() {
            let runs = self.current == Some(i);
            task.ticked &= !runs;
            if interval > 0 && now >= task.guest_tick {
                task.guest_tick += ((now - task.guest_tick) / interval + 1) * interval;
                if task.queued && !task.ticked {
                    (task.ticked, task.woke) = (!runs, true);
                }
            }
        }
    }

    fn charge(&mut self, i: usize, used: Nanos) {
        let slice = self.config.slice as f64;
        let task = &mut self.tasks[i];
        let scale = 1024.0 / task.weight;
        task.vruntime += used as f64 * scale;
        if task.vruntime >= task.deadline {
            task.deadline = task.vruntime + slice * scale;
        }
    }
}

impl Scheduler for Eevdf {
    fn configure(&mut self, _now: Nanos, vcpus: &[Params]) {
        let task = Task {
            weight: 1024.0,
            vruntime: 0.0,
            deadline: self.config.slice as f64,
            lag: 0.0,
            queued: false,
            woke: false,
            io: false,
            guest_tick: 0,
            ticked: false,
        };
        self.tasks.resize(vcpus.len(), task);
        for ((i, task), vcpu) in self.tasks.iter_mut().enumerate().zip(vcpus) {
            task.weight = 4.0 * f64::from(vcpu.weight.max(1));
            // The timers began at any time, and so in no relation to the host's ticks.
            task.guest_tick = (618 * (i as u64 + 1) % 1000) * self.config.guest_tick / 1000;
        }
    }

    fn pick(&mut self, now: Nanos, views: &Views) -> Pick {
        let views = views.all();
        let tick = self.config.tick.max(1);
        for (i, view) in views.iter().enumerate() {
            if view.used > 0 {
                self.charge(i, view.used);
            }
        }
        for (i, view) in views.iter().enumerate() {
            if self.tasks[i].queued && (!view.runnable || view.blocked) {
                let mean = self.mean();
                let task = &mut self.tasks[i];
                let max_lag = (self.config.slice + tick) as f64 * 1024.0 / task.weight;
                task.lag = (mean - task.vruntime).clamp(0.0, max_lag);
                task.queued = false;
                if self.current == Some(i) {
                    self.current = None;
                }
            }
            if view.runnable && !self.tasks[i].queued {
                self.place(i);
            }
            let task = &mut self.tasks[i];
            task.woke |= self.config.packets_wake && view.io && !task.io;
            task.io = view.io;
        }
        let queued = self.queued().count();
        self.guest_ticks(now);
        let at_tick = now >= self.next_tick;
        if at_tick {
            self.next_tick = (now / tick + 1) * tick;
        }
        let woke = self.tasks.iter().any(|task| task.woke);
        let best = self.best();
        let switch = match self.current {
            None => true,
            Some(i) if self.tasks[i].vruntime >= self.protected => at_tick || woke,
            Some(_) => best.is_some_and(|i| self.tasks[i].woke),
        };
        if switch && self.current != best {
            self.current = best;
            self.protected = best.map_or(0.0, |i| self.tasks[i].deadline);
        }
        for task in &mut self.tasks {
            task.woke = false;
        }
        let ticks = |task: &&Task| self.config.guest_tick > 0 && task.queued && !task.ticked;
        let ticks = self.tasks.iter().filter(ticks).map(|task| task.guest_tick);
        let until = ticks.fold(self.next_tick, Nanos::min);
        Pick {
            who: self.current,
            until: if queued < 2 { FOREVER } else { until },
            budget: FOREVER,
        }
    }

    fn wants_io_events(&self) -> bool {
        self.config.packets_wake
    }

    fn wants_wake_ups(&self) -> bool {
        self.config.packets_wake
    }
}
