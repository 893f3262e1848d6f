// SPDX-License-Identifier: Apache-2.0
//! Turns by weight among the VMs of one pool on one core. Both schedulers of [`crate::turbo`] are made of it.
//!
//! The VM that is owed most for its weight has the turn for a slice of its own run time. A VM that wakes with positive
//! lag goes ahead of it for as long as that lag lasts. The ledger of lags keeps shares; quotas per window keep caps.

use super::floor::Floor;
use super::{ACCOUNTING_INTERVAL, OtherCoreUsage};
use crate::slices::caps::{Cap, Windows};
use crate::slices::lag::Ledger;
use crate::slices::{Activity, FOREVER, MAX_VMS, MS, Nanos, Params, US, activity_of};

/// Accounting window of caps.
const CAP_WINDOW: Nanos = 10 * MS;
/// Minimum budget, ns: a shorter one is not worth a decision.
const MIN_BUDGET: i64 = 2 * US as i64;

/// Position of a VM among those of its pool; the higher one runs first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Position {
    /// Over its cap, or held by its reserve.
    Held,
    /// Behind the VM that has the turn.
    Behind,
    /// Has the turn.
    Turn,
    /// Ahead of the VM that has the turn.
    Ahead,
}

/// The decision about one VM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    /// Index in the order of configuration.
    pub(super) index: usize,
    pub(super) position: Position,
    /// Whether it wants to run and may.
    pub(super) ready: bool,
    /// The driver asks again when it has run this long, ns.
    pub(super) budget: Nanos,
    /// When its cap lets it run again, if it is over its cap.
    pub(super) refill_at: Nanos,
}

/// Settings of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueConfig {
    /// Maximum lag of a sleeping VM, ns.
    pub(super) credit: Nanos,
    /// Minimum run of a VM that wakes with positive lag, ns.
    pub(super) min_run: Nanos,
    /// Maximum debt of a VM beyond two slices, ns.
    pub(super) max_debt: Nanos,
    /// Whether a VM over its cap may be owed a window's quota instead of one slice: it then reaches its cap, at the
    /// price of a longer wait for the others.
    pub(super) save_quota: bool,
}

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    /// Index in the order of configuration.
    index: usize,
    slice: i64,
    cap: Cap,
    ready: bool,
    slept: bool,
    /// How long it may still run ahead of its turn, ns.
    preempt_left: i64,
    /// When its present wait began.
    waits_since: Nanos,
    position: Position,
    other_cores: OtherCoreUsage,
    /// Whether its reserve holds it, whatever it is owed.
    held: bool,
    /// All it was ever due, in this pool and for what it pays for here, ns.
    due: Nanos,
}

/// A fair queue. See the module's text.
#[derive(Debug, Clone)]
pub(super) struct FairQueue {
    queue_config: QueueConfig,
    pub(super) floor: Floor,
    windows: Windows,
    vms: Vec<Vm>,
    spare: Vec<Vm>,
    ledger: Ledger,
    spare_ledger: Ledger,
    owner: Option<usize>,
    owner_left: i64,
    contenders: usize,
}

impl FairQueue {
    pub(super) fn new(queue_config: QueueConfig, floor: Floor) -> Self {
        Self {
            queue_config,
            floor,
            windows: Windows::new(CAP_WINDOW),
            vms: Vec::with_capacity(MAX_VMS),
            spare: Vec::with_capacity(MAX_VMS),
            ledger: Ledger::with_capacity(MAX_VMS),
            spare_ledger: Ledger::with_capacity(MAX_VMS),
            owner: None,
            owner_left: 0,
            contenders: 0,
        }
    }

    pub(super) fn set_config(&mut self, queue_config: QueueConfig) {
        self.queue_config = queue_config;
    }

    /// Sets the VMs of this pool with their index and slice (ns, more than 0), and keeps the state of those that stay.
    pub(super) fn configure<'a>(
        &mut self,
        now: Nanos,
        vms: impl Iterator<Item = (usize, &'a Params, Nanos)>,
    ) {
        std::mem::swap(&mut self.vms, &mut self.spare);
        self.vms.clear();
        self.ledger.begin_configure(&mut self.spare_ledger);
        let owner = self.owner.take();
        for (index, p, slice) in vms {
            let from = self.spare.iter().position(|old| old.id == p.id);
            let mut vm = match from {
                Some(k) => self.spare[k],
                None => Vm {
                    id: p.id,
                    index,
                    slice: 0,
                    cap: Cap::new(None, &self.windows),
                    ready: false,
                    slept: true,
                    preempt_left: 0,
                    waits_since: now,
                    position: Position::Behind,
                    other_cores: OtherCoreUsage::default(),
                    held: false,
                    due: 0,
                },
            };
            vm.index = index;
            vm.slice = slice.clamp(1, 1000 * MS) as i64;
            vm.cap.set_across_cores(p.cap_permille, &self.windows);
            if from.is_some() && owner == from {
                self.owner = Some(self.vms.len());
                self.owner_left = self.owner_left.min(vm.slice);
            }
            self.ledger.push(p.weight, &self.spare_ledger, from);
            self.vms.push(vm);
        }
    }

    /// As [`super::PoolScheduler::add_other_cores`]. With `pays` a VM's turbo usage counts against its share in this
    /// pool.
    pub(super) fn add_other_cores(&mut self, ran: &[OtherCoreUsage], pays: bool) {
        for vm in &mut self.vms {
            let ran = ran.get(vm.index).copied().unwrap_or_default();
            let sum = &mut vm.other_cores;
            if pays {
                sum.turbo = sum.turbo.saturating_add(ran.turbo);
            }
            sum.total = sum.total.saturating_add(ran.total);
        }
    }

    /// Holds VMs, by index.
    pub(super) fn set_held(&mut self, held: impl Fn(usize) -> bool) {
        for vm in &mut self.vms {
            vm.held = held(vm.index);
        }
    }

    /// As [`super::PoolScheduler::due`].
    pub(super) fn due(&self, index: usize) -> (Nanos, bool) {
        // A pool of all VMs of its core has them in order.
        let at = self.vms.get(index).filter(|vm| vm.index == index);
        let vm = at.or_else(|| self.vms.iter().find(|vm| vm.index == index));
        vm.map_or((0, false), |vm| (vm.due, vm.ready && self.contenders > 1))
    }

    /// Charges the VMs' activity (by index), and passes the turn.
    pub(super) fn decide(&mut self, now: Nanos, activity: &[Activity]) {
        self.account(now, activity);
        self.update_members(now, activity);
        self.pass_turn(now, activity);
        for k in 0..self.vms.len() {
            self.vms[k].position = self.position(k);
        }
    }

    /// Number of VMs that want to run and may.
    pub(super) fn contenders(&self) -> usize {
        self.contenders
    }

    pub(super) fn is_empty(&self) -> bool {
        self.vms.is_empty()
    }

    /// The decision about each VM.
    pub(super) fn answers(&self) -> impl Iterator<Item = Answer> {
        self.vms.iter().enumerate().map(|(k, vm)| Answer {
            index: vm.index,
            position: vm.position,
            ready: vm.ready,
            budget: self.budget(k),
            refill_at: vm.cap.refill_at(&self.windows),
        })
    }

    /// Whether a VM that sleeps now would have to wait behind the only VM that wants to run, which has no budget.
    pub(super) fn needs_wake_notification(&self) -> bool {
        let top = self.vms.iter().filter(|vm| vm.ready).map(|vm| vm.position);
        self.contenders == 1
            && top.max().is_some_and(|top| {
                let asleep = |vm: &Vm| !vm.ready && vm.position != Position::Held;
                self.vms.iter().any(|vm| asleep(vm) && vm.position <= top)
            })
    }

    fn account(&mut self, now: Nanos, activity: &[Activity]) {
        let begun = self.windows.roll(now);
        let mut ran = false;
        for (k, vm) in self.vms.iter_mut().enumerate() {
            let used = activity_of(activity, vm.index).used;
            let OtherCoreUsage { turbo, total, .. } = vm.other_cores;
            vm.cap.charge(used.saturating_add(total), begun);
            if used == 0 && turbo == 0 {
                continue;
            }
            ran = true;
            // It competed, here or on a turbo core, unless it was held or over its cap.
            if vm.position != Position::Held {
                self.ledger.set_member(k, true);
            }
        }
        if ran {
            let vms = &self.vms;
            let used = |k: usize| used_by(activity, &vms[k]);
            let before: [i64; MAX_VMS] = std::array::from_fn(|k| match k < vms.len() {
                true => self.ledger.lag(k),
                false => 0,
            });
            self.ledger.charge((0..vms.len()).map(|k| (k, used(k))));
            for (k, vm) in self.vms.iter_mut().enumerate() {
                let used = ns(used_by(activity, vm));
                let due = self.ledger.lag(k) - before[k] + used;
                vm.due = vm.due.saturating_add(due.max(0) as Nanos);
            }
            let vms = &self.vms;
            // One VM may have run all the service that the others have saved up.
            let credits = (self.queue_config.credit * vms.len() as u64) as i64;
            for (k, vm) in vms.iter().enumerate() {
                if used_by(activity, vm) > 0 {
                    let max_debt = 2 * vm.slice + self.queue_config.max_debt as i64 + credits;
                    self.ledger.limit_debt(k, -max_debt);
                }
            }
        }
        for vm in &mut self.vms {
            vm.other_cores = OtherCoreUsage::default();
        }
    }

    /// Decides which VMs earn lag from now on, and limits the credit of those that slept.
    fn update_members(&mut self, now: Nanos, activity: &[Activity]) {
        self.contenders = 0;
        for vm in &mut self.vms {
            let activity = activity_of(activity, vm.index);
            vm.slept = !vm.ready;
            vm.ready = activity.runnable && !vm.cap.is_capped() && !vm.held;
            self.contenders += usize::from(vm.ready);
            if vm.slept || activity.used > 0 {
                vm.waits_since = now;
            }
        }
        for (k, vm) in self.vms.iter().enumerate() {
            let credit = self.queue_config.credit as i64;
            if vm.ready {
                if vm.slept && vm.position != Position::Held {
                    self.ledger.limit_credit(k, credit);
                }
                self.ledger.set_member(k, true);
                continue;
            }
            // A VM over its cap earns the slice that the cap cut short, or its quota. Without the quota the other VMs,
            // which get what it cannot use, would go before it when it may run again, and it would stay below its cap.
            // A sleeping VM earns its credit, but only while another VM wants to run.
            let capped = vm.cap.is_capped();
            let max_lag = match (capped, self.queue_config.save_quota) {
                (false, _) => credit,
                (true, false) => vm.slice,
                (true, true) => vm.slice.max(vm.cap.quota()),
            };
            let full = self.ledger.lag(k) >= max_lag;
            if full {
                self.ledger.limit_credit(k, max_lag);
            }
            self.ledger
                .set_member(k, !full && (self.contenders > 0 || capped));
        }
    }

    /// Keeps the owner of the turn or chooses the next one.
    fn pass_turn(&mut self, now: Nanos, activity: &[Activity]) {
        let min_run = self.queue_config.min_run as i64;
        for (k, vm) in self.vms.iter_mut().enumerate() {
            if vm.ready && vm.position == Position::Held {
                // Its cap lets it run again: its lag of the last decision is out of date.
                let lag = self.ledger.lag(k);
                vm.preempt_left = if lag >= 0 { lag.max(min_run) } else { 0 };
                continue;
            }
            if vm.ready {
                vm.preempt_left =
                    (vm.preempt_left - ns(activity_of(activity, vm.index).used)).max(0);
                continue;
            }
            let lag = self.ledger.lag(k);
            if lag >= 0 {
                vm.preempt_left = lag.max(min_run);
            } else if lag < -min_run {
                vm.preempt_left = 0;
            }
        }
        if let Some(k) = self.owner {
            let vm = &self.vms[k];
            self.owner_left -= ns(activity_of(activity, vm.index).used);
            // A VM that is alone keeps the turn beyond its slice.
            if !(vm.ready && (self.owner_left > margin(vm.slice) || self.contenders <= 1)) {
                self.owner = None;
            }
        }
        if self.contenders <= 1 {
            return;
        }
        if self.owner.is_none() {
            for (k, vm) in self.vms.iter().enumerate() {
                // A VM that is ahead of its turn gets the turn afterwards.
                let can = vm.ready && vm.preempt_left == 0;
                if can && self.owner.is_none_or(|o| self.ledger.is_behind(k, o)) {
                    self.owner = Some(k);
                }
            }
            self.owner_left = self.owner.map_or(0, |k| self.vms[k].slice);
        }
        let (vms, owner) = (&self.vms, self.owner);
        let waiting = vms.iter().enumerate().filter_map(|(k, vm)| {
            (vm.ready && vm.preempt_left == 0 && owner != Some(k)).then_some((k, vm.waits_since))
        });
        if let Some(k) = self.floor.grant(now, waiting) {
            self.vms[k].preempt_left = self.floor.run as i64;
        }
    }

    fn position(&self, k: usize) -> Position {
        let vm = &self.vms[k];
        if vm.cap.is_capped() || vm.held {
            Position::Held
        } else if vm.preempt_left > 0 {
            Position::Ahead
        } else if self.owner == Some(k) {
            Position::Turn
        } else if self.contenders <= 1 && vm.ready {
            // No VM to outrank: a change would only cost a system call.
            vm.position.max(Position::Behind)
        } else {
            Position::Behind
        }
    }

    fn budget(&self, k: usize) -> Nanos {
        let vm = &self.vms[k];
        let ns = if self.contenders <= 1 && vm.ready {
            FOREVER
        } else if vm.preempt_left > 0 {
            let mut min_run = MIN_BUDGET;
            if self.contenders == 0 {
                // No VM waits, so a longer budget saves a decision per wake-up.
                min_run = vm.slice.min(self.queue_config.credit as i64).max(min_run);
            }
            vm.preempt_left.max(min_run) as Nanos
        } else if self.owner == Some(k) {
            self.owner_left.max(MIN_BUDGET) as Nanos
        } else {
            vm.slice as Nanos
        };
        ns.min(vm.cap.budget())
    }
}

/// Maximum debt beyond two slices of VMs that pay for turbo usage, ns: the usage of a whole
/// accounting interval may be charged at once.
pub(super) const MAX_TURBO_DEBT: Nanos = 2 * ACCOUNTING_INTERVAL;

/// What a VM ran that counts in its pool, ns.
fn used_by(activity: &[Activity], vm: &Vm) -> Nanos {
    let used = activity_of(activity, vm.index).used;
    used.saturating_add(vm.other_cores.turbo)
}

/// Run time as a signed number, at most 18 min.
fn ns(used: Nanos) -> i64 {
    used.min(1 << 40) as i64
}

/// How close to its end a slice counts as over: 1/32 of it, at least 1 us. The rest is not lost, because lags are
/// exact.
fn margin(slice: i64) -> i64 {
    (slice / 32).max(US as i64)
}
