// SPDX-License-Identifier: Apache-2.0
//! Turns by weight among the VMs of one pool on one core; both machines are made of it.
//!
//! The VM that is owed most for its weight has the turn for a slice of its own run time. One that slept with lag in
//! hand goes before it for as long as that lasts. Shares are kept by the ledger of lags, caps by quotas per window.

use super::floor::Floor;
use super::{ACCOUNTING, Elsewhere};
use crate::slices::caps::{Cap, Windows};
use crate::slices::lag::Ledger;
use crate::slices::{FOREVER, MAX_VMS, MS, Nanos, Params, Seen, US, seen_at};

/// Window of the caps.
const CAP_WINDOW: Nanos = 10 * MS;
/// Budgets below this are not worth a decision.
const SHORTEST: i64 = 2 * US as i64;

/// Where a VM stands among those of its pool; the higher runs first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// Over its cap, or held.
    Capped,
    /// Behind the one that has the turn.
    Waits,
    /// Has the turn.
    Turn,
    /// Goes before the one that has the turn.
    First,
}

/// What the machine is told about one VM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    /// Index in the order of configuration.
    pub(super) index: usize,
    pub(super) place: Place,
    /// Wants to run and may.
    pub(super) ready: bool,
    /// Ask again when it has run so long.
    pub(super) budget: Nanos,
    /// When its cap lets it run again; only if capped.
    pub(super) refill: Nanos,
}

/// How a pool takes turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rules {
    /// Most service that a sleeping VM is owed, ns.
    pub(super) credit: Nanos,
    /// A VM that wakes with lag in hand may run at least so long before it waits for its turn, ns.
    pub(super) least: Nanos,
    /// Most that a VM can owe beside two slices, ns.
    pub(super) debt: Nanos,
    /// Whether a VM over its cap is owed what it may run in a window, instead of one slice: where the longest wait of
    /// the others matters less than that it reaches its cap.
    pub(super) quotas: bool,
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
    /// What it may still run before it must wait for its turn, ns.
    eager: i64,
    /// Since when it waits.
    since: Nanos,
    place: Place,
    elsewhere: Elsewhere,
    /// Must not run, whatever it is owed.
    held: bool,
    /// All it was ever due in this pool and what it pays for here, ns.
    due: Nanos,
}

/// See the module's text.
#[derive(Debug, Clone)]
pub(super) struct Turns {
    rules: Rules,
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

impl Turns {
    pub(super) fn new(rules: Rules, floor: Floor) -> Self {
        Self {
            rules,
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

    pub(super) fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// Takes the VMs of this pool with their index and slice (ns, more than 0), keeping what is known by id.
    pub(super) fn configure<'a>(
        &mut self,
        now: Nanos,
        vms: impl Iterator<Item = (usize, &'a Params, Nanos)>,
    ) {
        std::mem::swap(&mut self.vms, &mut self.spare);
        self.vms.clear();
        self.ledger.begin(&mut self.spare_ledger);
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
                    eager: 0,
                    since: now,
                    place: Place::Waits,
                    elsewhere: Elsewhere::default(),
                    held: false,
                    due: 0,
                },
            };
            vm.index = index;
            vm.slice = slice.clamp(1, 1000 * MS) as i64;
            vm.cap.set_total(p.cap_permille, &self.windows);
            if from.is_some() && owner == from {
                self.owner = Some(self.vms.len());
                self.owner_left = self.owner_left.min(vm.slice);
            }
            self.ledger.push(p.weight, &self.spare_ledger, from);
            self.vms.push(vm);
        }
    }

    /// As [`super::Pooled::elsewhere`]; `pays` if what a VM ran on turbo cores counts against its share in this pool.
    pub(super) fn elsewhere(&mut self, ran: &[Elsewhere], pays: bool) {
        for vm in &mut self.vms {
            let ran = ran.get(vm.index).copied().unwrap_or_default();
            let sum = &mut vm.elsewhere;
            if pays {
                sum.turbo = sum.turbo.saturating_add(ran.turbo);
            }
            sum.total = sum.total.saturating_add(ran.total);
        }
    }

    /// Keeps VMs from running, by index.
    pub(super) fn hold(&mut self, held: impl Fn(usize) -> bool) {
        for vm in &mut self.vms {
            vm.held = held(vm.index);
        }
    }

    /// All that the VM of an index was ever due (ns), and whether it wants to run while others do.
    pub(super) fn due(&self, index: usize) -> (Nanos, bool) {
        // In a pool that has all VMs of its core they are in order.
        let at = self.vms.get(index).filter(|vm| vm.index == index);
        let vm = at.or_else(|| self.vms.iter().find(|vm| vm.index == index));
        vm.map_or((0, false), |vm| (vm.due, vm.ready && self.contenders > 1))
    }

    /// Takes what was seen (by index) and passes the turn.
    pub(super) fn decide(&mut self, now: Nanos, seen: &[Seen]) {
        self.account(now, seen);
        self.gather(now, seen);
        self.pass(now, seen);
        for k in 0..self.vms.len() {
            self.vms[k].place = self.place(k);
        }
    }

    /// VMs that want to run and may.
    pub(super) fn contenders(&self) -> usize {
        self.contenders
    }

    pub(super) fn is_empty(&self) -> bool {
        self.vms.is_empty()
    }

    /// What became of each VM at the last [`Turns::decide`].
    pub(super) fn answers(&self) -> impl Iterator<Item = Answer> {
        self.vms.iter().enumerate().map(|(k, vm)| Answer {
            index: vm.index,
            place: vm.place,
            ready: vm.ready,
            budget: self.budget(k),
            refill: vm.cap.refill(&self.windows),
        })
    }

    /// Whether a VM that now sleeps would have to wait behind the only one that wants to run, which has no budget.
    pub(super) fn must_hear_of_wakes(&self) -> bool {
        let top = self.vms.iter().filter(|vm| vm.ready).map(|vm| vm.place);
        self.contenders == 1
            && top.max().is_some_and(|top| {
                let asleep = |vm: &Vm| !vm.ready && vm.place != Place::Capped;
                self.vms.iter().any(|vm| asleep(vm) && vm.place <= top)
            })
    }

    fn account(&mut self, now: Nanos, seen: &[Seen]) {
        let begun = self.windows.roll(now);
        let mut ran = false;
        for (k, vm) in self.vms.iter_mut().enumerate() {
            let used = seen_at(seen, vm.index).used;
            let Elsewhere { turbo, total, .. } = vm.elsewhere;
            vm.cap.charge(used.saturating_add(total), begun);
            if used == 0 && turbo == 0 {
                continue;
            }
            ran = true;
            // It competed, here or on a turbo core, unless it was not to run at all.
            if vm.place != Place::Capped {
                self.ledger.set_member(k, true);
            }
        }
        if ran {
            let vms = &self.vms;
            let used = |k: usize| used_by(seen, &vms[k]);
            let before: [i64; MAX_VMS] = std::array::from_fn(|k| match k < vms.len() {
                true => self.ledger.lag(k),
                false => 0,
            });
            self.ledger.charge((0..vms.len()).map(|k| (k, used(k))));
            for (k, vm) in self.vms.iter_mut().enumerate() {
                let used = ns(used_by(seen, vm));
                let due = self.ledger.lag(k) - before[k] + used;
                vm.due = vm.due.saturating_add(due.max(0) as Nanos);
            }
            let vms = &self.vms;
            // All may have saved up, and then one run, what the others are owed.
            let credits = (self.rules.credit * vms.len() as u64) as i64;
            for (k, vm) in vms.iter().enumerate() {
                if used_by(seen, vm) > 0 {
                    let most = 2 * vm.slice + self.rules.debt as i64 + credits;
                    self.ledger.limit_debt(k, -most);
                }
            }
        }
        for vm in &mut self.vms {
            vm.elsewhere = Elsewhere::default();
        }
    }

    /// Who competes from now on; limits the credit of those that slept.
    fn gather(&mut self, now: Nanos, seen: &[Seen]) {
        self.contenders = 0;
        for vm in &mut self.vms {
            let seen = seen_at(seen, vm.index);
            vm.slept = !vm.ready;
            vm.ready = seen.runnable && !vm.cap.is_capped() && !vm.held;
            self.contenders += usize::from(vm.ready);
            if vm.slept || seen.used > 0 {
                vm.since = now;
            }
        }
        for (k, vm) in self.vms.iter().enumerate() {
            let credit = self.rules.credit as i64;
            if vm.ready {
                if vm.slept && vm.place != Place::Capped {
                    self.ledger.limit_credit(k, credit);
                }
                self.ledger.set_member(k, true);
                continue;
            }
            // Over its cap it collects the turn that the cap cut short, or what it may run in a window: what it cannot
            // use is the others', who would else come before it when it may run again, and it would miss its cap.
            // Asleep it collects its credit; and what others run while nobody waits is nobody's loss.
            let capped = vm.cap.is_capped();
            let most = match (capped, self.rules.quotas) {
                (false, _) => credit,
                (true, false) => vm.slice,
                (true, true) => vm.slice.max(vm.cap.quota()),
            };
            let full = self.ledger.lag(k) >= most;
            if full {
                self.ledger.limit_credit(k, most);
            }
            self.ledger
                .set_member(k, !full && (self.contenders > 0 || capped));
        }
    }

    /// Keeps the owner of the turn or chooses the next.
    fn pass(&mut self, now: Nanos, seen: &[Seen]) {
        let least = self.rules.least as i64;
        for (k, vm) in self.vms.iter_mut().enumerate() {
            if vm.ready && vm.place == Place::Capped {
                // Its cap lets it run again: what it was owed at the last decision is out of date.
                let lag = self.ledger.lag(k);
                vm.eager = if lag >= 0 { lag.max(least) } else { 0 };
                continue;
            }
            if vm.ready {
                vm.eager = (vm.eager - ns(seen_at(seen, vm.index).used)).max(0);
                continue;
            }
            let lag = self.ledger.lag(k);
            if lag >= 0 {
                vm.eager = lag.max(least);
            } else if lag < -least {
                vm.eager = 0;
            }
        }
        if let Some(k) = self.owner {
            let vm = &self.vms[k];
            self.owner_left -= ns(seen_at(seen, vm.index).used);
            // Alone it keeps the turn beyond its slice: nobody is there to take it.
            if !(vm.ready && (self.owner_left > margin(vm.slice) || self.contenders <= 1)) {
                self.owner = None;
            }
        }
        if self.contenders <= 1 {
            return;
        }
        if self.owner.is_none() {
            for (k, vm) in self.vms.iter().enumerate() {
                // One that goes first anyway gets its turn when that is over.
                let can = vm.ready && vm.eager == 0;
                if can && self.owner.is_none_or(|o| self.ledger.behind(k, o)) {
                    self.owner = Some(k);
                }
            }
            self.owner_left = self.owner.map_or(0, |k| self.vms[k].slice);
        }
        let (vms, owner) = (&self.vms, self.owner);
        let waiting = vms.iter().enumerate().filter_map(|(k, vm)| {
            (vm.ready && vm.eager == 0 && owner != Some(k)).then_some((k, vm.since))
        });
        if let Some(k) = self.floor.grant(now, waiting) {
            self.vms[k].eager = self.floor.run as i64;
        }
    }

    fn place(&self, k: usize) -> Place {
        let vm = &self.vms[k];
        if vm.cap.is_capped() || vm.held {
            Place::Capped
        } else if vm.eager > 0 {
            Place::First
        } else if self.owner == Some(k) {
            Place::Turn
        } else if self.contenders <= 1 && vm.ready {
            // Nobody to outrank: not worth a change.
            vm.place.max(Place::Waits)
        } else {
            Place::Waits
        }
    }

    fn budget(&self, k: usize) -> Nanos {
        let vm = &self.vms[k];
        let ns = if self.contenders <= 1 && vm.ready {
            FOREVER
        } else if vm.eager > 0 {
            let mut least = SHORTEST;
            if self.contenders == 0 {
                // Nobody is there to be kept waiting, so a decision at each wake-up can be saved.
                least = vm.slice.min(self.rules.credit as i64).max(least);
            }
            vm.eager.max(least) as Nanos
        } else if self.owner == Some(k) {
            self.owner_left.max(SHORTEST) as Nanos
        } else {
            vm.slice as Nanos
        };
        ns.min(vm.cap.budget())
    }
}

/// Debt beside two slices for VMs that pay for what they run on turbo cores: it may come in one lump per accounting.
pub(super) const LUMP: Nanos = 2 * ACCOUNTING;

/// What a VM ran that counts here.
fn used_by(seen: &[Seen], vm: &Vm) -> Nanos {
    let used = seen_at(seen, vm.index).used;
    used.saturating_add(vm.elsewhere.turbo)
}

/// Run time as a signed number; more than 18 min at once counts as that.
fn ns(used: Nanos) -> i64 {
    used.min(1 << 40) as i64
}

/// How close to its end a slice counts as over: 1/32 of it, at least 1 us. What is left is not lost, lags are exact.
fn margin(slice: i64) -> i64 {
    (slice / 32).max(US as i64)
}
