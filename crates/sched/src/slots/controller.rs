// SPDX-License-Identifier: Apache-2.0
//! The slot controller: one real-time thread per managed core that carries out the policy's decisions.
//!
//! A step: take the events of the accounting program, read what each VM used, ask the [`CoreScheduler`], set the priorities of the
//! VMs whose rank changed, and sleep until the decision ends or an event comes. After the start the thread allocates nothing, and
//! all memory is locked. While no VMs compete, its only steps are heartbeats for the watchdog.
//!
//! The thread runs on a core that is not managed, if there is one: a change of priority then reaches the VMs' core as one
//! reschedule interrupt, instead of a timer interrupt and two context switches there. It reads a VM's run time from the accounting
//! program's memory, which does not disturb the core either. A VM with a budget b is checked after b, or after what is left of it
//! then; it cannot exceed its budget before.

mod adopt;
mod min_sleep;
mod moderation;
mod pool;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use viola_meter::acct::{CoreView, EventKind, MAX_VMS as MAX_INDEX, NotifyIo, Ring};
use viola_policy::slices::{
    Activity, CoreScheduler, Credit, Decision, FOREVER, Interleaved, Io, MAX_VMS, Nanos,
    OpenRequests, Paper, Params, Rank,
};
use viola_policy::turbo::{OtherCoreUsage, RegularCore, TurboCore};

use self::min_sleep::MinSleep;
use self::moderation::Moderation;
use super::budget::Budget;
use super::filler::Filler;
use super::packets::packets_of;
use super::shared::{LocalPlan, SharedCore, SharedMemory, now};
use super::threads::{VmThreads, become_realtime, set_cpu, set_fifo, set_fifo_alone, set_ordinary};
use crate::plan::Algorithm;
use crate::priorities::CONTROLLER_PRIORITY;

/// Longest sleep: the watchdog expects a heartbeat, ns.
pub const HEARTBEAT_INTERVAL: Nanos = 50_000_000;
/// Longest sleep while no VM is runnable here, ns.
const IDLE_HEARTBEAT_INTERVAL: Nanos = 2 * HEARTBEAT_INTERVAL;
/// Interval at which all priorities are set anew, in case another program changed one, ns.
const PRIORITY_REFRESH_INTERVAL: Nanos = 1_000_000_000;
/// Time that context switches take while a budget is spent: a check this much later finds the budget spent and need not be
/// repeated, ns.
const SWITCH_COST: Nanos = 20_000;
/// The same where slots are only a few times as long, ns.
const TURBO_SWITCH_COST: Nanos = 5_000;
/// Time that the service threads of a VM have to carry what its vCPUs have sent in their turn, ns.
const TRAIL: Nanos = 150_000;
/// Checks without a wake-up after which the controller stops polling for VMs that sleep and outrank the running one: the
/// accounting program notifies it when one wakes.
const IDLE_POLLS_BEFORE_NOTIFY: u32 = 1;

/// What a controller thread gets for its core.
pub struct CoreFiles {
    /// CPU number.
    pub cpu: u32,
    /// CPU of the controller thread: one that is not managed, or the core itself.
    pub cpu_of_controller: u32,
    /// Position in the shared memory.
    pub slot: usize,
    /// VM table of the accounting program.
    pub core_vms: OwnedFd,
    /// Core table of the accounting program.
    pub core_ctls: OwnedFd,
    /// Event ring of this core.
    pub ring: OwnedFd,
}

/// Runs the controller of one core until `shared.stop` or `orphaned` is set. The threads keep the priorities they had last; the
/// caller restores them.
///
/// # Errors
/// The kernel's error.
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
    let own = &shared.cores()[files.slot];
    let filler = Filler::start(files.cpu)?;
    let mut core = Core::new(view, ring, filler);
    // Real-time first, then onto its core: an ordinary thread might wait there behind the VMs.
    become_realtime(files.cpu_of_controller, CONTROLLER_PRIORITY)?;
    core.view.set_managed(true);
    own.ready.store(1, Ordering::Release);
    let fd = files.ring.as_raw_fd();
    while shared.stop.load(Ordering::Acquire) == 0 && !orphaned.load(Ordering::Acquire) {
        core.step(shared, own);
        core.sleep(fd, own);
    }
    core.release_held(own);
    core.view.set_managed(false);
    core.view.notify(false, false);
    core.filler.set(false);
    Ok(())
}

/// Pins the calling thread to CPUs.
///
/// # Errors
/// The kernel's error.
pub fn pin(cpus: &[u32]) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for &cpu in cpus {
        set.set(cpu as usize);
    }
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Counters of a VM as of the last step.
#[derive(Debug, Clone, Copy, Default)]
struct LastCounters {
    used: u64,
    blocks: u32,
    wakes: u64,
    service_wakes: u32,
    requests: OpenRequests,
    moderation: Moderation,
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
    /// When the core last exchanged usage with the pool's other cores, and by index in the accounting program up to what.
    exchanged_at: Nanos,
    exchanged: Vec<OtherCoreUsage>,
    elsewhere: Vec<OtherCoreUsage>,
    /// By index in the accounting program.
    threads: Vec<VmThreads>,
    /// Index in the accounting program by position in the plan.
    indexes: Vec<u32>,
    /// By index in the accounting program, so that a new plan does not lose them.
    last_counters: Vec<LastCounters>,
    seen: Vec<Activity>,
    params: Vec<Params>,
    decision: Decision,
    until: Nanos,
    last: Nanos,
    /// Time of the last decision.
    decided_at: Nanos,
    priorities_refreshed: Nanos,
    lost: u32,
    /// Steps since one of the VMs woke.
    idle_polls: u32,
    min_sleep: MinSleep,
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
            exchanged_at: 0,
            exchanged: vec![OtherCoreUsage::default(); MAX_INDEX],
            elsewhere: Vec::with_capacity(MAX_VMS),
            threads: (0..MAX_INDEX).map(|_| VmThreads::new()).collect(),
            indexes: Vec::with_capacity(MAX_VMS),
            last_counters: vec![LastCounters::default(); MAX_INDEX],
            seen: Vec::with_capacity(MAX_VMS),
            params: Vec::with_capacity(MAX_VMS),
            decision: Decision::default(),
            until: 0,
            last: 0,
            decided_at: 0,
            priorities_refreshed: 0,
            lost: 0,
            idle_polls: 0,
            min_sleep: MinSleep::default(),
        }
    }

    fn step(&mut self, shared: &SharedMemory, own: &SharedCore) {
        self.handle_events(own);
        let now = now();
        if own.seq() != self.seq {
            self.adopt_plan(shared, now, own);
        }
        self.idle_polls = self.idle_polls.saturating_add(1);
        for (i, &index) in self.indexes.iter().enumerate() {
            let vm = self.view.vm(index);
            let used = self.view.used(index, now);
            let last = &mut self.last_counters[index as usize];
            let ran = used.saturating_sub(last.used);
            last.requests.observe(packets_of(&vm), ran);
            let runnable = vm.runnable > 0;
            if !runnable {
                last.requests.rest();
            }
            self.seen[i] = Activity {
                used: ran,
                runnable,
                blocked: vm.blocks != last.blocks,
                io: match self.plan.vms[i].sees_packets {
                    false => Io::Unknown,
                    true => last.requests.io(self.decided_at),
                },
                requests: last.requests.counts(),
            };
            last.used = used.max(last.used);
            last.blocks = vm.blocks;
            last.service_wakes = vm.service_wakes;
            if vm.wakes != last.wakes {
                (last.wakes, self.idle_polls) = (vm.wakes, 0);
            }
        }
        self.decided_at = now;
        let used = self.seen.iter().map(|seen| seen.used).sum();
        let is_runnable = self.seen.iter().any(|seen| seen.runnable);
        self.min_sleep.step(used > 0, is_runnable);
        let in_budget = self.budget.spend(now, used);
        self.exchange_pool_usage(shared, now);
        let scheduler: &mut dyn CoreScheduler = match self.plan.algorithm {
            Algorithm::Interleaved => &mut self.interleaved,
            Algorithm::Paper => &mut self.paper,
            Algorithm::Credit { boost: true } => &mut self.credit,
            Algorithm::Credit { boost: false } => &mut self.plain,
            Algorithm::Regular => &mut self.regular,
            Algorithm::Turbo => &mut self.turbo,
        };
        scheduler.decide(now, &self.seen, &mut self.decision);
        self.publish_dues(own);
        let (mut calls, mut switches, mut fill, mut step_again, mut trails) =
            (0, 0, false, false, false);
        let contended = self.seen.iter().filter(|seen| seen.runnable).count() > 1;
        for (i, &index) in self.indexes.iter().enumerate() {
            let rank = self.decision.ranks[i];
            let hold_cpu = self.plan.vms[i].hold_cpu;
            let held = self.plan.algorithm == Algorithm::Turbo && self.turbo.is_held(i);
            let threads = &mut self.threads[index as usize];
            if !held && threads.is_held_elsewhere() {
                let cpu = own.cpu.load(Ordering::Relaxed);
                calls += u64::from(threads.hold(false, |tid| set_cpu(tid, cpu)).calls);
                // Step again at once: the threads that came back may change the decision.
                step_again = true;
            }
            let set = match self.plan.vms[i].resets_on_fork {
                true => set_fifo_alone,
                false => set_fifo,
            };
            let gathers = self.decision.gathers[i];
            let last = &mut self.last_counters[index as usize];
            let (moderation, wakes) = (&mut last.moderation, last.service_wakes);
            let leads = self.seen[i].used > 0 && moderation.step(now, wakes) && gathers;
            threads.set_level(gathers && moderation.is_on());
            let applied = match in_budget {
                true => threads.apply(rank, set),
                false => threads.release(set_ordinary),
            };
            if leads && in_budget && applied.calls == 0 {
                calls += u64::from(threads.lead(set).calls);
            }
            trails |= in_budget && threads.trails();
            if self.plan.vms[i].sees_packets {
                let Activity { runnable, io, .. } = self.seen[i];
                let waits = contended && rank != Rank::Boost && runnable && !io.is_open();
                let packet = match (self.decision.notify_reply[i], waits) {
                    (true, _) => NotifyIo::Reply,
                    (_, true) => NotifyIo::Request,
                    _ => NotifyIo::None,
                };
                let last = &self.last_counters[index as usize].requests;
                self.view.notify_io(index, packet, last.ignored());
                // A packet that came since the step began sent no event.
                step_again |= packet == NotifyIo::Request
                    && self.view.vm(index).request_at != last.last_request_at();
            }
            if let (true, Some(cpu)) = (held, hold_cpu) {
                let threads = &mut self.threads[index as usize];
                calls += u64::from(threads.hold(true, |tid| set_cpu(tid, cpu)).calls);
            }
            let away = self.threads[index as usize].is_held_elsewhere();
            fill |= rank == Rank::Capped && self.seen[i].runnable && !away;
            calls += u64::from(applied.calls);
            switches += u64::from(applied.calls > 0);
            if applied.refused != 0 {
                own.refused.store(applied.refused as u32, Ordering::Release);
            }
        }
        let notify_wake = self.set_next_step(now);
        if trails {
            self.until = self.until.min(now + TRAIL);
        }
        if step_again {
            self.until = now;
        }
        // Not on a core that the host uses too: there the filler would keep the host from working, and the VM's other cores
        // enforce its cap.
        self.filler.set(fill && !self.budget.is_limited());
        self.view.notify(
            notify_wake || self.decision.notify_wake,
            self.decision.notify_block,
        );
        add(&own.decisions, 1);
        add(&own.switches, switches);
        add(&own.calls, calls);
        if now - self.priorities_refreshed >= PRIORITY_REFRESH_INTERVAL {
            self.priorities_refreshed = now;
            for &index in &self.indexes {
                self.threads[index as usize].forget_priorities();
            }
        }
        if now - self.last >= HEARTBEAT_INTERVAL / 2 {
            self.last = now;
            let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
            own.cpu_ns.store(
                t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64,
                Ordering::Relaxed,
            );
        }
        own.beat.store(now, Ordering::Release);
    }

    /// Sets the time of the next step: the end of the decision, or when a VM that can run now may
    /// have used its budget. The VMs that can run now are the runnable one of the highest rank, and
    /// those above it, which may wake. When they seldom wake, a notification is cheaper than
    /// polling. Returns whether to request it.
    fn set_next_step(&mut self, now: Nanos) -> bool {
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
            let last = &self.last_counters[self.indexes[i] as usize];
            let gathers = seen.runnable && self.decision.gathers[i];
            if let (true, Some(at)) = (gathers, last.moderation.next_step()) {
                runs = runs.min(at.saturating_sub(now));
            }
        }
        let mut end = self.decision.until.min(now.saturating_add(runs));
        let look = now.saturating_add(may_wake);
        let mut notify_wake = look < end && self.idle_polls >= IDLE_POLLS_BEFORE_NOTIFY;
        if !notify_wake {
            end = end.min(look);
        }
        if self.budget.is_limited() {
            // With a budget, the controller must know of every run.
            notify_wake = true;
            if top.is_some() {
                end = end.min(self.budget.next_check(now));
            }
        }
        self.until = end.saturating_add(match self.plan.algorithm {
            Algorithm::Turbo => TURBO_SWITCH_COST,
            _ => SWITCH_COST,
        });
        notify_wake
    }

    /// Moves threads back that are held on another core.
    fn release_held(&mut self, own: &SharedCore) {
        let cpu = own.cpu.load(Ordering::Relaxed);
        for threads in &mut self.threads {
            if threads.is_held_elsewhere() {
                threads.hold(false, |tid| set_cpu(tid, cpu));
            }
        }
    }

    fn handle_events(&mut self, own: &SharedCore) {
        while let Some(event) = self.ring.pop() {
            let Some(threads) = self
                .threads
                .get_mut(event.vm as usize)
                .filter(|t| t.is_planned())
            else {
                continue;
            };
            match event.kind {
                // What a vCPU thread forks (UML: a guest process) is a vCPU thread; the daemon corrects the role where it knows better. A
                // turbo vCPU is one thread, however: what it forks is work for the regular cores, to which the daemon moves it.
                EventKind::Fork if self.plan.algorithm == Algorithm::Turbo => {
                    set_ordinary(event.tid);
                }
                EventKind::Fork => match threads.add(event.tid, false) {
                    true => own.report_fork(event.vm, event.tid),
                    false => own.resync.store(1, Ordering::Release),
                },
                EventKind::Io | EventKind::Wake | EventKind::Block => {}
            }
        }
        let lost = self.view.lost();
        if lost != self.lost {
            self.lost = lost;
            own.resync.store(1, Ordering::Release);
        }
    }

    /// Waits for an event or the time of the next step.
    fn sleep(&mut self, fd: i32, own: &SharedCore) {
        let now = now();
        let longest = match self.seen.iter().any(|seen| seen.runnable) {
            true => HEARTBEAT_INTERVAL,
            false => IDLE_HEARTBEAT_INTERVAL,
        };
        let span = self
            .until
            .saturating_sub(now)
            .clamp(self.min_sleep.get(), longest);
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
            if late > own.late_max.load(Ordering::Relaxed) {
                own.late_max.store(late, Ordering::Relaxed);
            }
        }
    }
}

fn add(counter: &std::sync::atomic::AtomicU64, n: u64) {
    // One writer, so no read-modify-write is needed.
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// Locks all present and future memory of the process, so that it has no page faults.
///
/// # Errors
/// The kernel's error.
pub fn lock_memory() -> io::Result<()> {
    // SAFETY: a plain system call.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
