// SPDX-License-Identifier: Apache-2.0
//! The default algorithm: microslices of LSVMs interrupt the slices of batch VMs, which keep their turn.
//!
//! Algorithm 1 of the dissertation runs LSVMs only between whole NLSVM slices, so an LSVM waits for a whole slice. This
//! algorithm keeps shares by the lags of EEVDF (the service owed to a VM), with VMs as its entities and slices that end
//! exactly:
//!
//! - An LSVM outranks all others from lag 0 until it has run its microslice T_m. Its lag is then -T_m·(1 - s), where s
//!   is its share, and it stays in the background until the others have run T_m·(1 - s)/s and its lag is 0 again. While
//!   it sleeps it collects lag up to [`Config::credit_ls`], so it gets the core at once when it wakes.
//! - Batch VMs own the core in turn, in EEVDF's order, each for a slice of its own run time. Microslices interrupt the
//!   slice; blocking ends it. A batch VM that wakes with positive lag preempts the owner for that long.
//! - Several LSVMs that may run take turns by microslices.
//! - Where the driver sees an LSVM's packets ([`super::Io`]), each LSVM has a reserve of lag, up to
//!   [`Config::credit_ls`]. A packet gets a busy LSVM the core at once and spends one microslice of the reserve. Without
//!   packets the LSVM runs in pieces that grow up to [`Config::quiet_slice`]: each microslice costs two preemptions, so
//!   it spends them only when there is a packet to answer.
//! - An LSVM whose packets have spent the reserve wants more than its share. It goes on in a cycle: it runs a piece, and
//!   the others run until its lag is 0 again. The pieces grow from the microslice to about [`Config::cycle_slice`] while it
//!   stays so. The reserve returns by one microslice in each cycle without a packet, and at once as far as the VM sleeps.
//!
//! An LSVM therefore waits for as long as its piece takes the others to make up for: (1 - s)/s of the piece, and a
//! microslice more while its reserve returns. The longest wait is the one after a piece of
//! [`Config::quiet_slice`].
//!
//! No pattern of sleeping and waking gets a VM more than its share plus the credit it saved up.

mod boost;
mod decision;

use boost::Boost;

use super::caps::{Cap, Windows};
use super::lag::Ledger;
use super::vm_set::VmSet;
use super::{
    Activity, Class, CoreScheduler, Decision, FOREVER, MAX_VMS, MS, Nanos, Params, Rank, US,
    activity_of,
};

/// Settings of [`Interleaved`], the same for all VMs of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Slice of a batch VM, 100 us ..= 1 s. 4 ms is the effective slice of stock EEVDF at HZ 250.
    pub batch_slice: Nanos,
    /// Maximum lag of a sleeping LSVM: at least one of its microslices, at most 100 ms.
    pub credit_ls: Nanos,
    /// Maximum lag of a sleeping batch VM, 100 us ..= 100 ms.
    pub credit_batch: Nanos,
    /// Longest slice of a busy LSVM without packets, used only where packets are seen: at least its microslice, at most
    /// 100 ms.
    pub quiet_slice: Nanos,
    /// Usual slice of an LSVM whose packets have spent its reserve: at least its microslice, at most 100 ms. Its slices are
    /// 5/6 to 5/3 of it, as its requests need (decision 031 has measurements).
    pub cycle_slice: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            batch_slice: 4 * MS,
            credit_ls: 3 * MS,
            credit_batch: MS,
            quiet_slice: 4 * MS,
            cycle_slice: 1500 * US,
        }
    }
}

/// Accounting window of caps.
const CAP_WINDOW: Nanos = 10 * MS;
/// Minimum run of a batch VM that preempts the owner when it wakes.
const MIN_PREEMPT_RUN: i64 = 100 * US as i64;
/// Minimum budget and wait: a shorter one is not worth a decision.
const MIN_BUDGET: Nanos = 2 * US;
/// Shortest microslice.
const MIN_MICROSLICE: Nanos = 10 * US;

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    /// Microslice T_m, ns (LSVMs only).
    micro: Nanos,
    cap: Cap,
    /// Maximum lag while asleep, ns.
    credit: i64,
    /// The range of lags in which an LSVM is boosted, and its pieces.
    boost: Boost,
    /// Place in the order in which boosted LSVMs take turns: the lowest is next.
    ticket: u64,
    /// Lag before the last charge, ns.
    lag_before: i64,
    /// How long a batch VM may still run ahead of its turn, ns.
    preempt_left: i64,
}

/// The default algorithm. See the module's text.
#[derive(Debug, Clone)]
pub struct Interleaved {
    config: Config,
    windows: Windows,
    vms: Vec<Vm>,
    spare: Vec<Vm>,
    /// Ranks at the last decision, by index.
    ranks: [Rank; MAX_VMS],
    ledger: Ledger,
    spare_ledger: Ledger,
    /// All VMs; the LSVMs among them; those with a cap.
    all: VmSet,
    ls: VmSet,
    limited: VmSet,
    /// VMs over their cap.
    capped: VmSet,
    /// VMs that want to run and may; those that did not at the last decision.
    ready: VmSet,
    slept: VmSet,
    /// LSVMs whose lag is within their boost range.
    boosted: VmSet,
    /// LSVMs that were boosted and ready at the last decision: each has a ticket.
    queued: VmSet,
    /// Batch VMs that may run ahead of their turn.
    preempting: VmSet,
    /// VM that owns the turn below the boosted LSVMs, and the rest of its slice, ns.
    owner: Option<usize>,
    owner_left: i64,
    /// Boosted LSVM whose turn it is, and the rest of its microslice, ns.
    turn: Option<usize>,
    turn_left: i64,
    tickets: u64,
    /// Number of VMs in `ready` at the last decision, and whether a batch VM was among them.
    contenders: usize,
    batch_ready: bool,
    /// Number of ready batch VMs that wait for their turn, the owner included.
    waiting: usize,
    /// Budget of a batch VM that wakes while at most one VM wants the core, ns.
    wake_budget: Nanos,
    /// Sum of all VMs' maximum lags, ns.
    credit_sum: i64,
}

impl Default for Interleaved {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl Interleaved {
    /// A scheduler without VMs. Settings out of range are clamped.
    pub fn new(config: Config) -> Self {
        let mut scheduler = Self {
            config,
            windows: Windows::new(CAP_WINDOW),
            vms: Vec::with_capacity(MAX_VMS),
            spare: Vec::with_capacity(MAX_VMS),
            ranks: [Rank::Waiting; MAX_VMS],
            ledger: Ledger::with_capacity(MAX_VMS),
            spare_ledger: Ledger::with_capacity(MAX_VMS),
            all: VmSet::default(),
            ls: VmSet::default(),
            limited: VmSet::default(),
            capped: VmSet::default(),
            ready: VmSet::default(),
            slept: VmSet::default(),
            boosted: VmSet::default(),
            queued: VmSet::default(),
            preempting: VmSet::default(),
            owner: None,
            owner_left: 0,
            turn: None,
            turn_left: 0,
            tickets: 0,
            contenders: 0,
            batch_ready: false,
            waiting: 0,
            wake_budget: FOREVER,
            credit_sum: 0,
        };
        scheduler.set_config(config);
        scheduler
    }

    /// Changes the settings from the next [`CoreScheduler::configure`] on.
    pub fn set_config(&mut self, config: Config) {
        self.config = Config {
            batch_slice: config.batch_slice.clamp(100 * US, 1000 * MS),
            credit_ls: config.credit_ls.min(100 * MS),
            credit_batch: config
                .credit_batch
                .clamp(MIN_PREEMPT_RUN as Nanos, 100 * MS),
            quiet_slice: config.quiet_slice.min(100 * MS),
            cycle_slice: config.cycle_slice.min(100 * MS),
        };
    }

    /// Changes [`Config::batch_slice`] only; 0 means the default.
    pub fn set_batch_slice(&mut self, slice: Nanos) {
        let batch_slice = if slice == 0 {
            Config::default().batch_slice
        } else {
            slice
        };
        self.set_config(Config {
            batch_slice,
            ..self.config
        });
    }

    fn slice(&self) -> i64 {
        self.config.batch_slice as i64
    }

    /// Lower bound of a VM's lag, ns (negative). A VM pays back at most two slices of what it ran while others waited,
    /// so that a stalled controller does not bar it for seconds. Batch VMs may also owe what all sleeping VMs have
    /// saved up.
    fn min_lag(&self, i: usize) -> i64 {
        if self.ls.contains(i) {
            -2 * self.slice().max(self.vms[i].micro as i64)
        } else {
            -2 * self.slice() - self.credit_sum
        }
    }

    /// Charges what the VMs ran, and finds the VMs that want to run and may.
    fn account(&mut self, now: Nanos, activity: &[Activity]) {
        let begun = self.windows.roll(now);
        let (mut ran, mut ready) = (VmSet::default(), VmSet::default());
        for i in self.limited.iter() {
            let cap = &mut self.vms[i].cap;
            cap.charge(activity[i].used, begun);
            self.capped.set(i, cap.is_capped());
        }
        for (i, activity) in activity.iter().enumerate() {
            ran.insert_if(i, activity.used != 0);
            ready.insert_if(i, activity.runnable);
        }
        self.slept = self.all.difference(self.ready);
        self.ready = ready.difference(self.capped);
        for i in ran.iter() {
            self.vms[i].lag_before = self.ledger.lag(i);
            // A VM that slept, woke and ran since the last decision competed, unless it was over its cap.
            if self.ranks[i] != Rank::Capped {
                self.ledger.set_member(i, true);
            }
        }
        self.ledger
            .charge(ran.iter().map(|i| (i, activity[i].used)));
        for i in ran.iter() {
            let vm = &self.vms[i];
            let mut min_lag = self.min_lag(i);
            // An LSVM in the background ran only because no other VM wanted the core. It owes at most a microslice for
            // that; otherwise it would wait for long when the others wake.
            if self.ranks[i] == Rank::Background && self.ls.contains(i) {
                min_lag = min_lag.max(self.ledger.lag_after(i, vm.micro).min(vm.lag_before));
            }
            self.ledger.limit_debt(i, min_lag);
        }
    }

    /// Decides which VMs earn lag from now on, and limits the credit of those that slept.
    fn update_members(&mut self) {
        self.contenders = self.ready.len();
        self.batch_ready = !self.ready.difference(self.ls).is_empty();
        let unchanged = (self.ready.difference(self.slept)).intersection(self.ledger.members());
        for i in self
            .limited
            .intersection(self.ls)
            .intersection(self.ready)
            .iter()
        {
            // A cap below its share would let its lag grow without end.
            if self.vms[i].boost.sees_packets {
                let max_credit = self.vms[i].credit + self.slice();
                self.ledger.limit_credit(i, max_credit);
            }
        }
        for i in self.all.difference(unchanged).iter() {
            let vm = &self.vms[i];
            if self.ready.contains(i) {
                if self.slept.contains(i) && self.ranks[i] != Rank::Capped {
                    self.ledger.limit_credit(i, vm.credit);
                }
                self.ledger.set_member(i, true);
                continue;
            }
            // Over its cap an LSVM pays off its debt but earns no credit; otherwise it would run a whole quota at once.
            // A batch VM earns the slice that the cap cut short.
            let capped = self.capped.contains(i);
            let max_lag = match (capped, self.ls.contains(i)) {
                (false, _) => vm.credit,
                (true, true) => 0,
                (true, false) => self.slice(),
            };
            let full = self.ledger.lag(i) >= max_lag;
            if full {
                self.ledger.limit_credit(i, max_lag);
            }
            // What LSVMs run while no batch VM wants the core is not owed to sleeping VMs.
            self.ledger
                .set_member(i, !full && (self.batch_ready || capped));
        }
    }

    /// Keeps the owner of the turn or chooses the next one.
    fn choose_owner(&mut self, activity: &[Activity]) {
        let batch_vms = self.all.difference(self.ls);
        for i in batch_vms
            .intersection(self.preempting)
            .intersection(self.ready)
            .iter()
        {
            let vm = &mut self.vms[i];
            vm.preempt_left = (vm.preempt_left - activity[i].used as i64).max(0);
            self.preempting.set(i, vm.preempt_left > 0);
        }
        for i in batch_vms.difference(self.ready).iter() {
            let vm = &mut self.vms[i];
            let lag = self.ledger.lag(i);
            if lag >= 0 {
                vm.preempt_left = lag.max(MIN_PREEMPT_RUN);
            } else if lag < -MIN_PREEMPT_RUN {
                vm.preempt_left = 0;
            }
            self.preempting.set(i, vm.preempt_left > 0);
        }
        self.waiting = (batch_vms.intersection(self.ready))
            .difference(self.preempting)
            .len();
        let batch = self.batch_ready;
        if let Some(owner) = self.owner {
            self.owner_left -= activity[owner].used as i64;
            let vm = &self.vms[owner];
            let mine = self.ready.contains(owner)
                && (!self.ls.contains(owner) || (!batch && self.turn.is_none()));
            // A VM that is alone keeps the turn beyond its slice.
            let slice = if batch {
                self.config.batch_slice
            } else {
                vm.micro
            };
            if mine && (self.owner_left > margin(slice) || self.contenders <= 1) {
                return;
            }
        }
        self.owner = None;
        if self.contenders <= 1 || (!batch && self.turn.is_some()) {
            return;
        }
        // A batch VM that preempts the owner gets its own turn afterwards. If only LSVMs in the background want the
        // core, they take turns as owners.
        let candidates = match batch {
            true => self.ready.difference(self.ls).difference(self.preempting),
            false => self.ready.intersection(self.ls),
        };
        for i in candidates.iter() {
            let is_before = |o| match batch {
                true => self.ledger.is_served_before(i, o, self.config.batch_slice),
                false => self.ledger.is_behind(i, o),
            };
            if self.owner.is_none_or(is_before) {
                self.owner = Some(i);
            }
        }
        self.owner_left = self.owner.map_or(0, |o| {
            if batch {
                self.slice()
            } else {
                self.vms[o].micro as i64
            }
        });
    }
}

/// How close to its end a slice counts as over: 1/32 of it, at least 1 us. A VM runs a little less than the time that
/// passes, so an exact end would take several decisions. The rest is not lost, because lags are exact.
fn margin(slice: Nanos) -> i64 {
    (slice / 32).max(US) as i64
}

impl CoreScheduler for Interleaved {
    fn configure(&mut self, _now: Nanos, vms: &[Params]) {
        std::mem::swap(&mut self.vms, &mut self.spare);
        self.vms.clear();
        self.ledger.begin_configure(&mut self.spare_ledger);
        let (owner, turn) = (self.owner.take(), self.turn.take());
        let old_ranks = self.ranks;
        let [old_ls, old_ready] = [self.ls, self.ready];
        let [old_boosted, old_queued, old_preempting] =
            [self.boosted, self.queued, self.preempting];
        (self.ls, self.limited, self.capped) = Default::default();
        (self.ready, self.boosted, self.queued, self.preempting) = Default::default();
        for (i, p) in vms.iter().take(MAX_VMS).enumerate() {
            let ls = p.class == Class::Ls;
            let micro = p.microslice.clamp(MIN_MICROSLICE, 1000 * MS);
            let from = self.spare.iter().position(|old| old.id == p.id);
            let mut vm = match from {
                Some(k) => self.spare[k],
                None => Vm {
                    id: p.id,
                    micro,
                    cap: Cap::new(p.cap_permille, &self.windows),
                    credit: 0,
                    boost: Boost::new(micro),
                    ticket: 0,
                    lag_before: 0,
                    preempt_left: 0,
                },
            };
            self.ranks[i] = from.map_or(Rank::Waiting, |k| old_ranks[k]);
            if let Some(k) = from {
                self.ready.set(i, old_ready.contains(k));
                if old_ls.contains(k) != ls {
                    vm.preempt_left = 0;
                } else {
                    self.boosted.set(i, old_boosted.contains(k));
                    self.queued.set(i, old_queued.contains(k));
                    self.preempting.set(i, old_preempting.contains(k));
                    if owner == from {
                        self.owner = Some(i);
                    }
                    if turn == from {
                        self.turn = Some(i);
                    }
                }
            }
            self.ls.set(i, ls);
            if vm.micro != micro || from.is_some_and(|k| old_ls.contains(k) != ls) {
                vm.boost = Boost::new(micro);
            }
            vm.micro = micro;
            vm.credit = if ls {
                self.config.credit_ls.max(micro)
            } else {
                self.config.credit_batch
            } as i64;
            vm.cap.set(p.cap_permille, &self.windows);
            self.limited.set(i, vm.cap.quota() != 0);
            self.capped.set(i, vm.cap.is_capped());
            self.vms.push(vm);
            self.ledger.push(p.weight, &self.spare_ledger, from);
        }
        self.all = VmSet::first_n(self.vms.len());
        self.credit_sum = self.vms.iter().map(|vm| vm.credit).sum();
        self.owner_left = self.owner_left.min(self.slice());
    }

    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision) {
        let filled_up;
        let activity = match activity.get(..self.vms.len()) {
            Some(activity) => activity,
            None => {
                filled_up = std::array::from_fn::<_, MAX_VMS, _>(|i| activity_of(activity, i));
                &filled_up[..self.vms.len()]
            }
        };
        self.account(now, activity);
        self.update_members();
        self.pass_boost_turn(activity);
        self.choose_owner(activity);
        self.fill_decision(now, out);
    }
}

#[cfg(test)]
mod tests;
