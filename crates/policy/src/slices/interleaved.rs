// SPDX-License-Identifier: Apache-2.0
//! The default algorithm: LSVM microslices cut the slices of the other VMs, which do not lose their turn.
//!
//! Algorithm 1 of the dissertation runs LSVMs only between whole NLSVM slices, so an LSVM waits for one. Here
//! shares are kept by the lags of EEVDF (service owed to a VM), over VMs and with slices that end exactly:
//!
//! - An LSVM outranks everybody from lag 0 until it has run its microslice T_m, which takes it to
//!   -T_m·(1 - s), s being its share; then it is out until the others have run T_m·(1 - s)/s and it is back at 0.
//!   While it sleeps it collects lag up to [`Config::credit_ls`], so it takes the core at once when it wakes.
//! - The batch VM that had least service for its weight owns the core for a slice of its own run time.
//!   Microslices interrupt it; sleeping ends its turn. One that slept with lag in hand outranks the owner for
//!   that long.
//! - Several LSVMs that may run take turns by microslices.
//! - Where the driver sees an LSVM's packets ([`Io`]), a busy LSVM is cut into microslices only when one waits: it
//!   runs in pieces of [`Config::quiet_slice`], higher up on the scale of its lag, so that it has in reserve what one
//!   that slept would have saved up. A packet gets it the core at once, for microslices until it is answered or the
//!   reserve is spent. Two preemptions per cycle are what microslices cost; this way they are spent when there is
//!   something to answer.
//!
//! Nobody gets more than its share plus the credit it saved up, whenever it sleeps and wakes.

mod answer;

use super::caps::{Cap, Windows};
use super::lag::Ledger;
use super::set::Set;
use super::{
    Class, Decision, FOREVER, Io, MAX_VMS, MS, Machine, Nanos, Params, Rank, Seen, US, seen_at,
};

/// Settings of [`Interleaved`], the same for all VMs of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Slice of a batch VM, 100 us ..= 1 s. 4 ms is what stock EEVDF comes to at HZ 250.
    pub batch_slice: Nanos,
    /// Most service a sleeping LSVM is owed; at least one of its microslices, at most 100 ms.
    pub credit_ls: Nanos,
    /// Most service a sleeping batch VM is owed, 100 us ..= 100 ms.
    pub credit_batch: Nanos,
    /// Slice of a busy LSVM while none of its packets waits, at least its microslice, at most 100 ms. Only where
    /// packets are seen.
    pub quiet_slice: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            batch_slice: 4 * MS,
            credit_ls: 3 * MS,
            credit_batch: MS,
            quiet_slice: 4 * MS,
        }
    }
}

/// Window of the caps.
const CAP_WINDOW: Nanos = 10 * MS;
/// A batch VM that wakes with lag in hand may run at least this long before it must wait for its turn.
const EAGER_LEAST: i64 = 100 * US as i64;
/// Budgets and waits below this are not worth a decision.
const SHORTEST: Nanos = 2 * US;
/// Shortest microslice.
const MICRO_LEAST: Nanos = 10 * US;

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    /// T_m (LSVMs).
    micro: Nanos,
    cap: Cap,
    /// Most lag while asleep, ns.
    credit: i64,
    /// Length of its present slice: the microslice, or the longer one of a busy LSVM without packets.
    piece: Nanos,
    /// Lag at which an LSVM that is out gets the core.
    start: i64,
    /// Lag at which one that is boosted gives it up.
    stop: i64,
    /// Order in which boosted LSVMs that want to run get their turn.
    ticket: u64,
    /// Lag before the time since the last decision was charged, ns.
    before: i64,
    /// What a batch VM may still run before it must wait for its turn, ns.
    eager: i64,
}

/// Interleaved mode. See the module's text.
#[derive(Debug, Clone)]
pub struct Interleaved {
    config: Config,
    windows: Windows,
    vms: Vec<Vm>,
    spare: Vec<Vm>,
    /// Their ranks at the last decision. Apart from the rest, of which most is asked for seldom.
    ranks: [Rank; MAX_VMS],
    ledger: Ledger,
    spare_ledger: Ledger,
    /// All of them; LSVMs, and those that have a cap.
    all: Set,
    ls: Set,
    limited: Set,
    /// Over their caps.
    capped: Set,
    /// Want to run and may; did not so at the last decision.
    ready: Set,
    slept: Set,
    /// LSVMs between the lag at which they get the core and the one at which they give it up.
    boosted: Set,
    /// Boosted and ready at the last decision: have a ticket, or the turn.
    queued: Set,
    /// Batch VMs that may run before it is their turn.
    eager: Set,
    /// Whose turn it is below the boosted LSVMs, and the rest of its slice, ns.
    owner: Option<usize>,
    owner_left: i64,
    /// Boosted LSVM whose turn it is, and the rest of its microslice, ns.
    turn: Option<usize>,
    turn_left: i64,
    tickets: u64,
    /// VMs that wanted to run and might, at the last decision, and whether a batch VM was among them.
    contenders: usize,
    batch_ready: bool,
    /// Batch VMs that want to run and must wait for their turn, the owner included.
    waiting: usize,
    /// Most that a batch VM may run after it wakes before the machine is asked, while nothing contends.
    patience: Nanos,
    /// Most that all VMs can have saved up together, ns.
    credits: i64,
}

impl Default for Interleaved {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl Interleaved {
    /// A machine without VMs. Settings out of range are moved to the nearest that is in it.
    pub fn new(config: Config) -> Self {
        let mut machine = Self {
            config,
            windows: Windows::new(CAP_WINDOW),
            vms: Vec::with_capacity(MAX_VMS),
            spare: Vec::with_capacity(MAX_VMS),
            ranks: [Rank::Waiting; MAX_VMS],
            ledger: Ledger::with_capacity(MAX_VMS),
            spare_ledger: Ledger::with_capacity(MAX_VMS),
            all: Set::default(),
            ls: Set::default(),
            limited: Set::default(),
            capped: Set::default(),
            ready: Set::default(),
            slept: Set::default(),
            boosted: Set::default(),
            queued: Set::default(),
            eager: Set::default(),
            owner: None,
            owner_left: 0,
            turn: None,
            turn_left: 0,
            tickets: 0,
            contenders: 0,
            batch_ready: false,
            waiting: 0,
            patience: FOREVER,
            credits: 0,
        };
        machine.set_config(config);
        machine
    }

    /// Changes the settings. Takes effect with the next [`Machine::configure`].
    pub fn set_config(&mut self, config: Config) {
        self.config = Config {
            batch_slice: config.batch_slice.clamp(100 * US, 1000 * MS),
            credit_ls: config.credit_ls.min(100 * MS),
            credit_batch: config.credit_batch.clamp(EAGER_LEAST as Nanos, 100 * MS),
            quiet_slice: config.quiet_slice.min(100 * MS),
        };
    }

    /// Changes only [`Config::batch_slice`]; 0 stands for the default.
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

    /// Most that a VM can owe, ns (negative). What it ran while others waited for it is paid back up to two
    /// slices, so that a stalled controller does not bar a VM for seconds. Batch VMs together also owe what those
    /// asleep have saved up.
    fn deepest(&self, i: usize) -> i64 {
        if self.ls.has(i) {
            -2 * self.slice().max(self.vms[i].micro as i64)
        } else {
            -2 * self.slice() - self.credits
        }
    }

    /// Charges what the VMs ran, and finds those that want to run and may.
    fn account(&mut self, now: Nanos, seen: &[Seen]) {
        let begun = self.windows.roll(now);
        let (mut ran, mut ready) = (Set::default(), Set::default());
        for i in self.limited.iter() {
            let cap = &mut self.vms[i].cap;
            cap.charge(seen[i].used, begun);
            self.capped.put(i, cap.is_capped());
        }
        for (i, seen) in seen.iter().enumerate() {
            ran.add_if(i, seen.used != 0);
            ready.add_if(i, seen.runnable);
        }
        self.slept = self.all.without(self.ready);
        self.ready = ready.without(self.capped);
        for i in ran.iter() {
            self.vms[i].before = self.ledger.lag(i);
            // One that slept, woke and ran in between competed, unless it was not to run at all.
            if self.ranks[i] != Rank::Capped {
                self.ledger.set_member(i, true);
            }
        }
        self.ledger.charge(ran.iter().map(|i| (i, seen[i].used)));
        for i in ran.iter() {
            let vm = &self.vms[i];
            let mut least = self.deepest(i);
            // An LSVM that was out ran only because nobody else wanted the core. It owes no more for that than
            // for a microslice, else it would wait for long when the others wake.
            if self.ranks[i] == Rank::Out && self.ls.has(i) {
                least = least.max(self.ledger.after(i, vm.micro).min(vm.before));
            }
            self.ledger.limit_debt(i, least);
        }
    }

    /// Who competes from now on; limits the credit of those that slept.
    fn gather(&mut self) {
        self.contenders = self.ready.len();
        self.batch_ready = !self.ready.without(self.ls).is_empty();
        let as_before = (self.ready.without(self.slept)).and(self.ledger.members());
        for i in self.all.without(as_before).iter() {
            let vm = &self.vms[i];
            if self.ready.has(i) {
                if self.slept.has(i) && self.ranks[i] != Rank::Capped {
                    self.ledger.limit_credit(i, vm.credit);
                }
                self.ledger.set_member(i, true);
                continue;
            }
            // Over its cap an LSVM collects what it owes, but no credit: else it would run a whole quota at once.
            // A batch VM collects the turn that the cap cut short.
            let capped = self.capped.has(i);
            let most = match (capped, self.ls.has(i)) {
                (false, _) => vm.credit,
                (true, true) => 0,
                (true, false) => self.slice(),
            };
            let full = self.ledger.lag(i) >= most;
            if full {
                self.ledger.limit_credit(i, most);
            }
            // What LSVMs run while no batch VM wants the core is nobody else's loss.
            self.ledger
                .set_member(i, !full && (self.batch_ready || capped));
        }
    }

    /// Whether an LSVM is boosted from now on; sets the lags between which it is.
    fn begin_or_end(&mut self, i: usize, io: Io) -> bool {
        let Vm {
            micro,
            mut piece,
            mut start,
            mut stop,
            ..
        } = self.vms[i];
        let (ready, boosted) = (self.ready.has(i), self.boosted.has(i));
        let lag = self.ledger.lag(i);
        let quiet = ready && io == Io::Quiet;
        if !boosted || !ready {
            (piece, start, stop) = self.bounds(i, quiet);
            if ready && io == Io::Pending && lag > start {
                // The packet is worth one microslice, not all that was saved up; and what is above the reserve it
                // would run soon anyway.
                stop = (lag + self.ledger.after(i, micro)).min(self.vms[i].credit);
            }
        } else if io == Io::Unseen {
            (piece, start, stop) = (micro, 0, self.ledger.after(i, micro));
        } else if io == Io::Pending {
            // One more microslice, as far as it is in reserve.
            let one = self.ledger.after(i, micro);
            stop = stop.min(lag + one).max(one);
        }
        let margin = margin(piece);
        let goes_on = lag >= start - margin && (!boosted || !ready || io == Io::Unseen)
            || boosted && (self.ledger.is_alone(i) || lag > stop + margin);
        if boosted && !goes_on {
            // What a packet had changed is over.
            (piece, start, stop) = self.bounds(i, quiet);
        }
        let vm = &mut self.vms[i];
        (vm.piece, vm.start, vm.stop) = (piece, start, stop);
        goes_on
    }

    /// Length of an LSVM's slice, and the lags at which it begins and ends.
    fn bounds(&self, i: usize, quiet: bool) -> (Nanos, i64, i64) {
        let Vm { micro, credit, .. } = self.vms[i];
        if quiet {
            // It gives the core up with as much in reserve as one that slept.
            let piece = micro.max(self.config.quiet_slice);
            (piece, credit - self.ledger.after(i, piece), credit)
        } else {
            (micro, 0, self.ledger.after(i, micro))
        }
    }

    /// Begins and ends the boost of LSVMs and passes the turn among them.
    fn boost(&mut self, seen: &[Seen]) {
        if let Some(holder) = self.turn {
            self.turn_left -= seen[holder].used as i64;
        }
        for i in self.ls.iter() {
            let boosted = self.begin_or_end(i, seen[i].io);
            self.boosted.put(i, boosted);
        }
        let queued = self.boosted.and(self.ready);
        for i in queued.without(self.queued).iter() {
            self.tickets += 1;
            self.vms[i].ticket = self.tickets;
        }
        self.queued = queued;
        if let Some(holder) = self.turn.filter(|&i| queued.has(i)) {
            let vm = &mut self.vms[holder];
            if self.turn_left > margin(vm.piece) {
                return;
            }
            // The turn is over: to the back, behind those that wait.
            self.tickets += 1;
            vm.ticket = self.tickets;
        }
        self.turn = queued.iter().min_by_key(|&i| self.vms[i].ticket);
        if let Some(i) = self.turn {
            self.turn_left = self.vms[i].piece as i64;
        }
    }

    /// Keeps the owner or chooses the next.
    fn own(&mut self, seen: &[Seen]) {
        let those = self.all.without(self.ls);
        for i in those.and(self.eager).and(self.ready).iter() {
            let vm = &mut self.vms[i];
            vm.eager = (vm.eager - seen[i].used as i64).max(0);
            self.eager.put(i, vm.eager > 0);
        }
        for i in those.without(self.ready).iter() {
            let vm = &mut self.vms[i];
            let lag = self.ledger.lag(i);
            if lag >= 0 {
                vm.eager = lag.max(EAGER_LEAST);
            } else if lag < -EAGER_LEAST {
                vm.eager = 0;
            }
            self.eager.put(i, vm.eager > 0);
        }
        self.waiting = (those.and(self.ready)).without(self.eager).len();
        let batch = self.batch_ready;
        if let Some(owner) = self.owner {
            self.owner_left -= seen[owner].used as i64;
            let vm = &self.vms[owner];
            let mine =
                self.ready.has(owner) && (!self.ls.has(owner) || (!batch && self.turn.is_none()));
            // Alone it keeps the rank even beyond its slice: nobody is there to take the turn.
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
        // A batch VM that outranks the owner anyway gets its turn when that is over. When only LSVMs that are out
        // want the core, they are owners in turn.
        let those = match batch {
            true => self.ready.without(self.ls).without(self.eager),
            false => self.ready.and(self.ls),
        };
        for i in those.iter() {
            if self.owner.is_none_or(|o| self.ledger.behind(i, o)) {
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

/// How close to the end of a slice, or to the lag at which it begins, counts as there: 1/32 of it, at least 1 us. A
/// VM runs a little less than the time that passes, so without this an end would take several looks. What is left
/// is not lost: lags are exact.
fn margin(slice: Nanos) -> i64 {
    (slice / 32).max(US) as i64
}

impl Machine for Interleaved {
    fn configure(&mut self, _now: Nanos, vms: &[Params]) {
        std::mem::swap(&mut self.vms, &mut self.spare);
        self.vms.clear();
        self.ledger.begin(&mut self.spare_ledger);
        let (owner, turn) = (self.owner.take(), self.turn.take());
        let old_ranks = self.ranks;
        let [old_ls, old_ready] = [self.ls, self.ready];
        let [old_boosted, old_queued, old_eager] = [self.boosted, self.queued, self.eager];
        (self.ls, self.limited, self.capped) = Default::default();
        (self.ready, self.boosted, self.queued, self.eager) = Default::default();
        for (i, p) in vms.iter().take(MAX_VMS).enumerate() {
            let ls = p.class == Class::Ls;
            let micro = p.microslice.clamp(MICRO_LEAST, 1000 * MS);
            let from = self.spare.iter().position(|old| old.id == p.id);
            let mut vm = match from {
                Some(k) => self.spare[k],
                None => Vm {
                    id: p.id,
                    micro,
                    cap: Cap::new(p.cap_permille, &self.windows),
                    credit: 0,
                    piece: micro,
                    start: 0,
                    stop: 0,
                    ticket: 0,
                    before: 0,
                    eager: 0,
                },
            };
            self.ranks[i] = from.map_or(Rank::Waiting, |k| old_ranks[k]);
            if let Some(k) = from {
                self.ready.put(i, old_ready.has(k));
                if old_ls.has(k) != ls {
                    vm.eager = 0;
                } else {
                    self.boosted.put(i, old_boosted.has(k));
                    self.queued.put(i, old_queued.has(k));
                    self.eager.put(i, old_eager.has(k));
                    if owner == from {
                        self.owner = Some(i);
                    }
                    if turn == from {
                        self.turn = Some(i);
                    }
                }
            }
            self.ls.put(i, ls);
            (vm.micro, vm.piece) = (micro, micro);
            vm.credit = if ls {
                self.config.credit_ls.max(micro)
            } else {
                self.config.credit_batch
            } as i64;
            vm.cap.set(p.cap_permille, &self.windows);
            self.limited.put(i, vm.cap.quota() != 0);
            self.capped.put(i, vm.cap.is_capped());
            self.vms.push(vm);
            self.ledger.push(p.weight, &self.spare_ledger, from);
        }
        self.all = Set::first(self.vms.len());
        self.credits = self.vms.iter().map(|vm| vm.credit).sum();
        self.owner_left = self.owner_left.min(self.slice());
    }

    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision) {
        let filled_up;
        let seen = match seen.get(..self.vms.len()) {
            Some(seen) => seen,
            None => {
                filled_up = std::array::from_fn::<_, MAX_VMS, _>(|i| seen_at(seen, i));
                &filled_up[..self.vms.len()]
            }
        };
        self.account(now, seen);
        self.gather();
        self.boost(seen);
        self.own(seen);
        self.answer(now, out);
    }
}

#[cfg(test)]
mod tests;
