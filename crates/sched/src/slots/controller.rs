// SPDX-License-Identifier: Apache-2.0
//! The slot controller: one real-time thread per managed core that does what the policy decides.
//!
//! A turn: take the events of the accounting program, read what each VM used, ask the [`CoreScheduler`], set the
//! priorities of the VMs whose rank changed, and sleep until the decision ends or an event comes. Nothing is
//! allocated after the start and all memory is locked. While nothing contends the only turns are heartbeats for
//! the watchdog.
//!
//! The thread runs on a core that is not managed, where there is one: a change of priority then reaches the
//! VMs' core as one reschedule interrupt, instead of a timer interrupt and two context switches there. How long
//! a VM has run is read from the accounting program's memory, so asking does not disturb the core either; a VM
//! with a budget b is looked at after b, or after what is then left of it, which it cannot exceed before.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use viola_meter::acct::{CoreView, EventKind, MAX_VMS as MAX_INDEX, Ring};
use viola_policy::slices::{
    Activity, CoreScheduler, Credit, Decision, FOREVER, Interleaved, Io, MAX_VMS, Nanos, Paper,
    Params, Rank,
};
use viola_policy::turbo::{
    OtherCoreUsage, PoolScheduler, RegularConfig, RegularCore, TurboConfig, TurboCore, portion,
};

use super::budget::Budget;
use super::filler::Filler;
use super::shared::{LocalPlan, SharedCore, SharedMemory, now};
use super::threads::{CONTROLLER_PRIORITY, VmThreads, set_cpu, set_fifo, set_ordinary};
use crate::plan::Algorithm;

/// Longest sleep: the watchdog wants a sign of life.
pub const HEARTBEAT: Nanos = 50_000_000;
/// Longest sleep while no VM wants to run here.
const IDLE_HEARTBEAT: Nanos = 2 * HEARTBEAT;
/// How often all priorities are set anew, in case somebody else changed one.
const DOUBT: Nanos = 1_000_000_000;
/// A packet that was not answered after this time will not be, ns.
const ANSWER: Nanos = 5_000_000;
/// Time that goes to switching while a budget is spent: a look this much later finds it spent, and need not be
/// repeated, ns.
const SWITCHING: Nanos = 20_000;
/// The same where slots are a few times as long as that.
const TURBO_SWITCHING: Nanos = 5_000;
/// How often the machine of a pool hears what its VMs ran on other cores.
const EXCHANGE: Nanos = 1_000_000;
/// After so many looks before which no VM woke, the controller has itself called when one of those that sleep and
/// outrank the running one does, instead of looking.
const CALM: u32 = 1;
/// Shortest sleep, so that a decision that is over already cannot spin.
const SHORTEST: Nanos = 5_000;

/// What a controller thread is given for its core.
pub struct CoreFiles {
    /// CPU number.
    pub cpu: u32,
    /// Where its controller runs: a core that is not managed, or the core itself.
    pub home: u32,
    /// Position on the shared.
    pub slot: usize,
    /// VM table of the accounting program.
    pub core_vms: OwnedFd,
    /// Core table of the accounting program.
    pub core_ctls: OwnedFd,
    /// Event ring of this core.
    pub ring: OwnedFd,
}

/// Runs the controller of one core until the shared says stop or `orphaned` is set. Returns when done; the
/// threads keep the priorities they had last (whoever called restores them).
pub fn run_core(
    shared: &SharedMemory,
    files: &CoreFiles,
    cpus: u32,
    orphaned: &AtomicBool,
) -> io::Result<()> {
    let view = CoreView::open(
        files.core_vms.as_fd(),
        files.core_ctls.as_fd(),
        files.cpu,
        cpus,
    )
    .map_err(io::Error::other)?;
    let ring = Ring::open(files.ring.as_fd()).map_err(io::Error::other)?;
    let mine = &shared.cores()[files.slot];
    let filler = Filler::start(files.cpu)?;
    let mut core = Core::new(view, ring, filler);
    // Real-time first, then onto its core: the other way round it might wait there behind guests.
    become_realtime(files.home, CONTROLLER_PRIORITY)?;
    core.view.set_managed(true);
    mine.ready.store(1, Ordering::Release);
    let fd = files.ring.as_raw_fd();
    while shared.stop.load(Ordering::Acquire) == 0 && !orphaned.load(Ordering::Acquire) {
        core.turn(shared, mine);
        core.sleep(fd, mine);
    }
    core.fetch_back(mine);
    core.view.set_managed(false);
    core.view.notify(false, false);
    core.filler.set(false);
    Ok(())
}

/// Makes the calling thread SCHED_FIFO and pins it.
pub fn become_realtime(cpu: u32, priority: i32) -> io::Result<()> {
    match set_fifo(0, priority) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    pin(&[cpu])
}

/// Pins the calling thread to CPUs.
pub fn pin(cpus: &[u32]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        set.set(cpu as usize);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Counters of a VM as they were at the last turn.
#[derive(Debug, Clone, Copy, Default)]
struct LastSeen {
    used: u64,
    blocks: u32,
    wakes: u64,
}

struct Core {
    view: CoreView,
    ring: Ring,
    filler: Filler,
    plan: LocalPlan,
    seq: u64,
    interleaved: Interleaved,
    paper: Paper,
    credit: Credit,
    plain: Credit,
    regular: RegularCore,
    turbo: TurboCore,
    budget: Budget,
    /// When the machine of a pool last heard of other cores, and by index in the accounting program how far.
    heard: Nanos,
    heard_of: [OtherCoreUsage; MAX_INDEX],
    elsewhere: Vec<OtherCoreUsage>,
    /// By index in the accounting program.
    threads: Vec<VmThreads>,
    /// Index in the accounting program by position in the plan.
    indexes: Vec<u32>,
    /// By index in the accounting program, so that nothing is forgotten when the plan changes.
    last_seen: [LastSeen; MAX_INDEX],
    seen: Vec<Activity>,
    params: Vec<Params>,
    decision: Decision,
    until: Nanos,
    last: Nanos,
    doubted: Nanos,
    lost: u32,
    /// Looks since one of the VMs woke.
    calm: u32,
}

impl Core {
    fn new(view: CoreView, ring: Ring, filler: Filler) -> Self {
        Self {
            view,
            ring,
            filler,
            plan: LocalPlan::new(),
            seq: 0,
            interleaved: Interleaved::default(),
            paper: Paper::default(),
            credit: Credit::new(true),
            plain: Credit::new(false),
            regular: RegularCore::default(),
            turbo: TurboCore::default(),
            budget: Budget::new(None),
            heard: 0,
            heard_of: [OtherCoreUsage::default(); MAX_INDEX],
            elsewhere: Vec::with_capacity(MAX_VMS),
            threads: (0..MAX_INDEX).map(|_| VmThreads::new()).collect(),
            indexes: Vec::with_capacity(MAX_VMS),
            last_seen: [LastSeen::default(); MAX_INDEX],
            seen: Vec::with_capacity(MAX_VMS),
            params: Vec::with_capacity(MAX_VMS),
            decision: Decision::default(),
            until: 0,
            last: 0,
            doubted: 0,
            lost: 0,
            calm: 0,
        }
    }

    fn turn(&mut self, shared: &SharedMemory, mine: &SharedCore) {
        self.take_events(mine);
        let now = now();
        if mine.seq() != self.seq {
            self.follow(shared, now, mine);
        }
        self.calm = self.calm.saturating_add(1);
        for (i, &index) in self.indexes.iter().enumerate() {
            let vm = self.view.vm(index);
            let used = self.view.used(index, now);
            let last = &mut self.last_seen[index as usize];
            self.seen[i] = Activity {
                used: used.saturating_sub(last.used),
                runnable: vm.runnable > 0,
                blocked: vm.blocks != last.blocks,
                // Until the VM has answered: a microslice may be too short for it.
                io: match self.plan.vms[i].sees_packets {
                    false => Io::Unknown,
                    true if vm.request_at > vm.reply_at && now < vm.request_at + ANSWER => {
                        Io::Pending
                    }
                    true => Io::Idle,
                },
            };
            last.used = used.max(last.used);
            last.blocks = vm.blocks;
            if vm.wakes != last.wakes {
                (last.wakes, self.calm) = (vm.wakes, 0);
            }
        }
        let used = self.seen.iter().map(|seen| seen.used).sum();
        let in_budget = self.budget.spend(now, used);
        self.hear_of_others(shared, now);
        let machine: &mut dyn CoreScheduler = match self.plan.algorithm {
            Algorithm::Interleaved => &mut self.interleaved,
            Algorithm::Paper => &mut self.paper,
            Algorithm::Credit { boost: true } => &mut self.credit,
            Algorithm::Credit { boost: false } => &mut self.plain,
            Algorithm::Regular => &mut self.regular,
            Algorithm::Turbo => &mut self.turbo,
        };
        machine.decide(now, &self.seen, &mut self.decision);
        self.tell_turbo_cores(mine);
        let (mut calls, mut switches, mut fill, mut again) = (0, 0, false, false);
        for (i, &index) in self.indexes.iter().enumerate() {
            let rank = self.decision.ranks[i];
            let park = self.plan.vms[i].hold_cpu;
            let held = self.plan.algorithm == Algorithm::Turbo && self.turbo.is_held(i);
            let threads = &mut self.threads[index as usize];
            if !held && threads.is_parked() {
                let cpu = mine.cpu.load(Ordering::Relaxed);
                calls += u64::from(threads.park(false, |tid| set_cpu(tid, cpu)).calls);
                // To see what it brings with it.
                again = true;
            }
            let applied = if in_budget {
                self.threads[index as usize].apply(rank, set_fifo)
            } else {
                self.threads[index as usize].release(set_ordinary)
            };
            if self.plan.vms[i].sees_packets {
                let Activity { runnable, io, .. } = self.seen[i];
                let waits = rank != Rank::Boost && runnable && io == Io::Idle;
                self.view.notify_io(index, waits);
            }
            if let (true, Some(cpu)) = (held, park) {
                let threads = &mut self.threads[index as usize];
                calls += u64::from(threads.park(true, |tid| set_cpu(tid, cpu)).calls);
            }
            let away = self.threads[index as usize].is_parked();
            fill |= rank == Rank::Capped && self.seen[i].runnable && !away;
            calls += u64::from(applied.calls);
            switches += u64::from(applied.calls > 0);
            if applied.refused != 0 {
                mine.refused
                    .store(applied.refused as u32, Ordering::Release);
            }
        }
        let called = self.end_of_decision(now);
        if again {
            self.until = now;
        }
        // Where the host works too a cap is no reason to keep it from that: the other cores see to the VM's cap.
        self.filler.set(fill && !self.budget.is_limited());
        self.view.notify(
            called || self.decision.notify_wake,
            self.decision.notify_block,
        );
        add(&mine.decisions, 1);
        add(&mine.switches, switches);
        add(&mine.calls, calls);
        if now - self.doubted >= DOUBT {
            self.doubted = now;
            for &index in &self.indexes {
                self.threads[index as usize].doubt();
            }
        }
        if now - self.last >= HEARTBEAT / 2 {
            self.last = now;
            let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            mine.cpu_ns.store(
                t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64,
                Ordering::Relaxed,
            );
        }
        mine.beat.store(now, Ordering::Release);
    }

    /// Sets the time of the next turn: that of the decision, or when one of those that can run now may have used
    /// its budget. Those are the highest-ranked that is runnable, and all above it, since they may wake; when they
    /// seldom do, it is cheaper to be called then. Returns whether to be.
    fn end_of_decision(&mut self, now: Nanos) -> bool {
        let top = std::iter::zip(&self.seen, &self.decision.ranks)
            .filter_map(|(seen, rank)| seen.runnable.then_some(*rank))
            .max();
        let (mut runs, mut may_wake) = (FOREVER, FOREVER);
        for (i, seen) in self.seen.iter().enumerate() {
            if top.is_some_and(|top| self.decision.ranks[i] < top) {
                continue;
            }
            let least = if seen.runnable {
                &mut runs
            } else {
                &mut may_wake
            };
            *least = self.decision.budgets[i].min(*least);
        }
        let mut end = self.decision.until.min(now.saturating_add(runs));
        let look = now.saturating_add(may_wake);
        let mut called = look < end && self.calm >= CALM;
        if !called {
            end = end.min(look);
        }
        if self.budget.is_limited() {
            // Nobody runs unseen.
            called = true;
            if top.is_some() {
                end = end.min(self.budget.look_at(now));
            }
        }
        self.until = end.saturating_add(match self.plan.algorithm {
            Algorithm::Turbo => TURBO_SWITCHING,
            _ => SWITCHING,
        });
        called
    }

    /// Tells the machine of a pool what its VMs ran on other cores.
    fn hear_of_others(&mut self, shared: &SharedMemory, now: Nanos) {
        if !self.plan.algorithm.is_pooled() || now < self.heard.saturating_add(EXCHANGE) {
            return;
        }
        self.heard = now;
        self.elsewhere.clear();
        for (i, &index) in self.indexes.iter().enumerate() {
            let all = self.ran_elsewhere(shared, i, index, now);
            let last = &mut self.heard_of[index as usize];
            self.elsewhere.push(OtherCoreUsage {
                turbo: all.turbo.saturating_sub(last.turbo),
                total: all.total.saturating_sub(last.total),
                due: all.due.saturating_sub(last.due),
                waits: all.waits,
            });
            last.turbo = last.turbo.max(all.turbo);
            last.total = last.total.max(all.total);
            // A core that begins anew counts from zero.
            last.due = all.due;
        }
        let machine: &mut dyn PoolScheduler = match self.plan.algorithm {
            Algorithm::Turbo => &mut self.turbo,
            _ => &mut self.regular,
        };
        machine.add_other_cores(&self.elsewhere);
    }

    /// All that a VM (position in the plan and index) ever ran on the other cores of the pools, as far as it matters
    /// here: what it ran on regular ones only counts against a cap. And what it was ever due there.
    fn ran_elsewhere(
        &self,
        shared: &SharedMemory,
        i: usize,
        index: u32,
        now: Nanos,
    ) -> OtherCoreUsage {
        let vm = &self.plan.vms[i];
        let mut all = OtherCoreUsage::default();
        for other in &self.plan.pool {
            if other.turbo || vm.params.cap_permille.is_some() {
                let ran = self.view.used_on(other.cpu, index, now);
                all.total += ran;
                all.turbo += if other.turbo { ran } else { 0 };
            }
        }
        let (here, of) = vm.regular_vcpus;
        all.turbo = portion(all.turbo, here, of);
        if self.plan.algorithm == Algorithm::Turbo {
            for core in shared.cores() {
                let (due, waits) = core.due(index);
                all.due += due;
                all.waits |= waits;
            }
        }
        all
    }

    /// Tells what each VM is due on this core, if it is a regular one.
    fn tell_turbo_cores(&self, mine: &SharedCore) {
        if self.plan.algorithm == Algorithm::Regular {
            for (i, &index) in self.indexes.iter().enumerate() {
                mine.set_due(index, self.regular.due(i));
            }
        }
    }

    /// Fetches threads back that wait on another core.
    fn fetch_back(&mut self, mine: &SharedCore) {
        let cpu = mine.cpu.load(Ordering::Relaxed);
        for threads in &mut self.threads {
            if threads.is_parked() {
                threads.park(false, |tid| set_cpu(tid, cpu));
            }
        }
    }

    fn take_events(&mut self, mine: &SharedCore) {
        while let Some(event) = self.ring.pop() {
            let Some(threads) = self
                .threads
                .get_mut(event.vm as usize)
                .filter(|t| t.is_planned())
            else {
                continue;
            };
            match event.kind {
                // What a vCPU thread forks (a guest process of UML) is a vCPU thread; the daemon corrects the
                // role where it knows better.
                // But a turbo vCPU is one thread: what it makes is work for the regular cores, where the daemon takes it.
                EventKind::Fork if self.plan.algorithm == Algorithm::Turbo => {
                    set_ordinary(event.tid);
                }
                EventKind::Fork => {
                    if !threads.add(event.tid, false) {
                        mine.resync.store(1, Ordering::Release);
                    }
                }
                EventKind::Io | EventKind::Wake | EventKind::Block => {}
            }
        }
        let lost = self.view.lost();
        if lost != self.lost {
            self.lost = lost;
            mine.resync.store(1, Ordering::Release);
        }
    }

    /// Takes over a new plan. Threads learnt since it was drawn up are kept.
    fn follow(&mut self, shared: &SharedMemory, now: Nanos, mine: &SharedCore) {
        let settings = |plan: &LocalPlan| (plan.algorithm, plan.batch_slice, plan.reserve_permille);
        let before = settings(&self.plan);
        let Some(seq) = mine.read(&mut self.plan) else {
            return;
        };
        let same = self.seq != 0
            && before == settings(&self.plan)
            && self
                .plan
                .vms
                .iter()
                .map(|vm| vm.params)
                .eq(self.params.iter().copied());
        self.params.clear();
        self.indexes.clear();
        self.seen.clear();
        for vm in &self.plan.vms {
            if (vm.index as usize) < self.threads.len() {
                self.params.push(vm.params);
                self.indexes.push(vm.index);
                self.seen.push(Activity::default());
            }
        }
        for (index, table) in self.threads.iter_mut().enumerate() {
            let planned = self.indexes.contains(&(index as u32));
            if planned && !table.is_planned() {
                let index = index as u32;
                let vm = self.view.vm(index);
                self.last_seen[index as usize] = LastSeen {
                    used: self.view.used(index, now),
                    blocks: vm.blocks,
                    wakes: vm.wakes,
                };
            } else if !planned && table.is_planned() {
                let cpu = mine.cpu.load(Ordering::Relaxed);
                table.park(false, |tid| set_cpu(tid, cpu));
                table.clear();
                mine.set_due(index as u32, (0, false));
            }
            table.set_planned(planned);
        }
        for &(at, thread) in &self.plan.threads {
            if let Some(table) = self
                .plan
                .vms
                .get(at)
                .and_then(|vm| self.threads.get_mut(vm.index as usize))
                && !table.add(thread.tid, thread.service)
            {
                mine.resync.store(1, Ordering::Release);
            }
        }
        let machine: &mut dyn CoreScheduler = match self.plan.algorithm {
            Algorithm::Interleaved => {
                self.interleaved.set_batch_slice(self.plan.batch_slice);
                &mut self.interleaved
            }
            Algorithm::Paper => {
                self.paper.set_slice(self.plan.batch_slice);
                &mut self.paper
            }
            Algorithm::Credit { boost } => {
                let c = if boost {
                    &mut self.credit
                } else {
                    &mut self.plain
                };
                c.set_slice(self.plan.batch_slice);
                c
            }
            Algorithm::Regular => {
                self.regular.set_config(RegularConfig {
                    slice: self.plan.batch_slice,
                    ..RegularConfig::default()
                });
                &mut self.regular
            }
            Algorithm::Turbo => {
                self.turbo.set_config(TurboConfig {
                    slice: self.plan.batch_slice,
                    reserve: self.plan.reserve_permille,
                    ..TurboConfig::default()
                });
                &mut self.turbo
            }
        };
        // Often only threads have changed, which is nothing to the algorithm.
        if !same {
            machine.configure(now, &self.params);
        }
        // From here on: which cores count, and how much of a VM's turbo time is this core's, may have changed.
        for (i, &index) in self.indexes.iter().enumerate() {
            self.heard_of[index as usize] = self.ran_elsewhere(shared, i, index, now);
            mine.set_due(index, (0, false));
        }
        self.heard = now;
        self.budget.set(self.plan.budget_permille);
        self.seq = seq;
        mine.followed.store(seq, Ordering::Release);
    }

    /// Waits for an event or for the end of the decision.
    fn sleep(&mut self, fd: i32, mine: &SharedCore) {
        let now = now();
        let longest = match self.seen.iter().any(|seen| seen.runnable) {
            true => HEARTBEAT,
            false => IDLE_HEARTBEAT,
        };
        let span = self.until.saturating_sub(now).clamp(SHORTEST, longest);
        let timeout = libc::timespec {
            tv_sec: 0,
            tv_nsec: span as i64,
        };
        let mut poll = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live pollfd and a live timespec, no signal mask.
        let ready = unsafe { libc::ppoll(&mut poll, 1, &timeout, std::ptr::null()) };
        if ready == 0 && span < longest {
            let late = self::now().saturating_sub(now + span);
            if late > mine.late_max.load(Ordering::Relaxed) {
                mine.late_max.store(late, Ordering::Relaxed);
            }
        }
    }
}

fn add(counter: &std::sync::atomic::AtomicU64, n: u64) {
    // One writer, so no read-modify-write is needed.
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// Locks all memory of the process, now and later, and makes page faults of the stack unlikely.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: a plain system call.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// How long to wait between looks at slow conditions.
pub const GLANCE: Duration = Duration::from_millis(20);
