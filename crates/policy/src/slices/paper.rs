// SPDX-License-Identifier: Apache-2.0
//! Paper mode: Algorithm 1 of the dissertation (section 2.4), with its run queue, credits and micro credits.
//!
//! All VMs share one run queue. When the slice of an NLSVM is over, it goes to the tail. An LSVM goes before the first
//! NLSVM (it runs again in this T_S) while it has micro credits, behind that NLSVM (the next T_S of this period) when
//! they are used up, and to the tail (the next period) when it has no credits. The head of the queue runs next: an
//! NLSVM for T_NLSVM, an LSVM for T_m.
//!
//! Choices where the listing is silent:
//! - Credits are those of Xen's credit scheduler: what all VMs ran is credited by weight to those that want the core. A
//!   VM starts with one slice of credits, which is also its maximum.
//! - Micro credits are T_n = T_NLSVM / n for each T_S (eq 2.12), refilled when the LSVM goes behind an NLSVM; n counts
//!   the NLSVMs that want to run at that moment. The last microslice of a T_S is shorter if T_n is not a multiple of
//!   T_m. A slice that ends early or late is made up in the VM's next one.
//! - Weights scale T_NLSVM and T_n of a VM by its weight over the mean weight.
//! - m = 0 is round robin of T_NLSVM. n = 0 (or no NLSVM wants to run) is round robin of microslices: their mean,
//!   scaled by each LSVM's weight so that shares hold. One or two VMs follow the same rules.
//! - A VM that blocks gives up the rest of its slice. A VM that wakes is queued as at the end of a slice and preempts
//!   no VM. A VM over its cap leaves the queue until an accounting window lets it run again.

use super::caps::{Cap, Windows};
use super::{
    Activity, Class, CoreScheduler, Decision, FOREVER, MAX_VMS, MS, Nanos, Params, Rank, US,
    activity_of, scaled_slice,
};

/// Default of T_NLSVM: Xen's slice, as in the dissertation.
const SLICE: Nanos = 30 * MS;
/// Accounting window of caps: Xen's.
const CAP_WINDOW: Nanos = 30 * MS;
/// Rest of a slice that is too short to be worth a decision, ns.
const MIN_REST: i64 = US as i64;
/// Minimum run in the round robin of microslices.
const MIN_MICROSLICE: Nanos = 50 * US;

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    weight: i64,
    ls: bool,
    /// T_m, ns.
    micro_slice: i64,
    /// T_NLSVM (= T_LSVM) scaled by weight, ns.
    slice: i64,
    /// Slice of an LSVM while no NLSVM wants to run, ns.
    lsvm_only_slice: i64,
    credits: i64,
    micro_credits: i64,
    /// Part of its last slice that an NLSVM did not run (negative: overran), ns.
    carry: i64,
    cap: Cap,
    ready: bool,
    queued: bool,
}

/// Algorithm 1 of the dissertation. See the module's text.
#[derive(Debug, Clone)]
pub struct Paper {
    slice: Nanos,
    windows: Windows,
    vms: Vec<Vm>,
    spare: Vec<Vm>,
    /// Indexes of the waiting VMs, head first.
    queue: Vec<usize>,
    current: Option<usize>,
    /// Rest of the current VM's slice, ns.
    left: i64,
    /// Whether more than one VM wanted the core at the last decision.
    contended: bool,
}

impl Default for Paper {
    fn default() -> Self {
        Self::new(SLICE)
    }
}

impl Paper {
    /// A scheduler without VMs, with T_NLSVM = `slice` (100 us ..= 1 s; 0: 30 ms).
    pub fn new(slice: Nanos) -> Self {
        let mut scheduler = Self {
            slice,
            windows: Windows::new(CAP_WINDOW),
            vms: Vec::with_capacity(MAX_VMS),
            spare: Vec::with_capacity(MAX_VMS),
            queue: Vec::with_capacity(MAX_VMS),
            current: None,
            left: 0,
            contended: false,
        };
        scheduler.set_slice(slice);
        scheduler
    }

    /// Changes T_NLSVM from the next [`CoreScheduler::configure`] on.
    pub fn set_slice(&mut self, slice: Nanos) {
        self.slice = if slice == 0 {
            SLICE
        } else {
            slice.clamp(100 * US, 1000 * MS)
        };
    }

    /// Number of NLSVMs that want to run.
    fn nlsvms(&self) -> i64 {
        self.vms.iter().filter(|vm| !vm.ls && vm.ready).count() as i64
    }

    /// Line 1: debits credits of the VMs that ran, and hands out credits by weight to those that want the core.
    fn burn_credits(&mut self, activity: &[Activity]) {
        let (mut total, mut weight) = (0, 0);
        for (i, vm) in self.vms.iter().enumerate() {
            let used = activity_of(activity, i).used.min(1 << 40) as i64;
            total += used;
            if used > 0 || vm.ready {
                weight += vm.weight;
            }
        }
        if total == 0 {
            return;
        }
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let used = activity_of(activity, i).used.min(1 << 40) as i64;
            if used > 0 || vm.ready {
                let earned = i128::from(total) * i128::from(vm.weight) / i128::from(weight);
                vm.credits = (vm.credits + earned as i64 - used).clamp(-vm.slice, vm.slice);
            }
        }
    }

    fn insert_tail(&mut self, i: usize) {
        self.insert_at(i, self.queue.len());
    }

    /// Inserts behind the LSVMs that run before the first NLSVM.
    fn insert_before_nlsvm(&mut self, i: usize) {
        let at = self.queue.iter().position(|&k| !self.vms[k].ls);
        self.insert_at(i, at.unwrap_or(self.queue.len()));
    }

    /// Inserts behind the LSVMs that follow the first NLSVM.
    fn insert_after_nlsvm(&mut self, i: usize) {
        let first = self.queue.iter().position(|&k| !self.vms[k].ls);
        let at = first.and_then(|f| {
            let next = self.queue[f + 1..].iter().position(|&k| !self.vms[k].ls);
            next.map(|k| f + 1 + k)
        });
        self.insert_at(i, at.unwrap_or(self.queue.len()));
    }

    fn insert_at(&mut self, i: usize, at: usize) {
        self.vms[i].queued = true;
        self.queue.insert(at, i);
    }

    /// Lines 2 to 15, for a VM that woke or whose slice is over.
    fn insert(&mut self, i: usize) {
        let nlsvms = self.nlsvms();
        let vm = &mut self.vms[i];
        if !vm.ls || nlsvms == 0 {
            return self.insert_tail(i);
        }
        let refill = vm.micro_credits <= MIN_REST;
        if refill {
            let t_n = vm.slice / nlsvms;
            vm.micro_credits = (vm.micro_credits + t_n).clamp(MIN_REST + 1, t_n + MIN_REST);
        }
        if vm.credits <= 0 {
            self.insert_tail(i);
        } else if refill {
            self.insert_after_nlsvm(i);
        } else {
            self.insert_before_nlsvm(i);
        }
    }

    /// Ends the current VM's slice if it is used up or given up. Returns the VM if it still wants to run.
    fn end_slice(&mut self, activity: &[Activity]) -> Option<usize> {
        let i = self.current?;
        let Activity { used, blocked, .. } = activity_of(activity, i);
        let mut used = used.min(1 << 40) as i64;
        if !self.contended {
            // Time that no other VM wanted ends the slice but is not owed.
            used = used.min(self.left.max(0));
        }
        self.left -= used;
        let shared = self.nlsvms() > 0;
        let vm = &mut self.vms[i];
        let gives_up = blocked || !vm.ready;
        if !gives_up && self.left > MIN_REST {
            if vm.ls && shared {
                vm.micro_credits -= used;
            }
            return None;
        }
        self.current = None;
        if vm.ls {
            // Line 5. The rest that the VM gave up is debited too.
            if shared {
                let burnt = used + if gives_up { self.left.max(0) } else { 0 };
                vm.micro_credits = (vm.micro_credits - burnt).max(-vm.slice);
            }
        } else {
            vm.carry = if gives_up {
                0
            } else {
                self.left.max(-vm.slice / 2)
            };
        }
        vm.ready.then_some(i)
    }

    /// Lines 16 to 22.
    fn next(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let i = self.queue.remove(0);
        let shared = self.nlsvms() > 0;
        let vm = &mut self.vms[i];
        vm.queued = false;
        self.left = if !vm.ls {
            vm.slice + std::mem::take(&mut vm.carry)
        } else if shared {
            vm.micro_slice.min(vm.micro_credits)
        } else {
            vm.lsvm_only_slice
        };
        self.left = self.left.max(MIN_REST + 1);
        self.current = Some(i);
    }
}

impl CoreScheduler for Paper {
    fn configure(&mut self, _now: Nanos, vms: &[Params]) {
        std::mem::swap(&mut self.vms, &mut self.spare);
        self.vms.clear();
        let vms = &vms[..vms.len().min(MAX_VMS)];
        let total: u64 = vms.iter().map(|p| u64::from(p.weight.max(1))).sum();
        let lsvms = || vms.iter().filter(|p| p.class == Class::Ls);
        let (micro, heavy) = lsvms().fold((0, 0), |(t, w), p| {
            (
                t + p.microslice.min(1000 * MS),
                w + u64::from(p.weight.max(1)),
            )
        });
        let per_weight = micro as f64 / heavy.max(1) as f64;
        let lightest = lsvms().map(|p| p.weight.max(1)).min().unwrap_or(1);
        let per_weight = per_weight.max(MIN_MICROSLICE as f64 / f64::from(lightest));
        for p in vms {
            let from = self.spare.iter().position(|old| old.id == p.id);
            let weight = i64::from(p.weight.max(1));
            let slice = scaled_slice(self.slice, p.weight, total, vms.len()) as i64;
            let ls = p.class == Class::Ls;
            let mut vm = match from {
                Some(k) => self.spare[k],
                None => Vm {
                    id: p.id,
                    weight,
                    ls,
                    micro_slice: 0,
                    slice,
                    lsvm_only_slice: 0,
                    credits: slice,
                    micro_credits: 0,
                    carry: 0,
                    cap: Cap::new(p.cap_permille, &self.windows),
                    ready: false,
                    queued: false,
                },
            };
            if from.is_none() || !vm.ls {
                // T_n of the first T_S.
                let nlsvms = vms
                    .iter()
                    .filter(|p| p.class == Class::Batch)
                    .count()
                    .max(1) as i64;
                vm.micro_credits = slice / nlsvms;
            }
            vm.cap.set(p.cap_permille, &self.windows);
            (vm.weight, vm.ls, vm.slice) = (weight, ls, slice);
            vm.micro_slice = p.microslice.clamp(10 * US, 1000 * MS) as i64;
            vm.lsvm_only_slice = if ls {
                (per_weight * weight as f64) as i64
            } else {
                0
            };
            self.vms.push(vm);
        }
        // The queue and the current VM keep their places.
        let (spare, now) = (&self.spare, &self.vms);
        let index = |old: usize| now.iter().position(|vm| vm.id == spare[old].id);
        self.current = self.current.and_then(index);
        self.queue.retain_mut(|k| match index(*k) {
            Some(i) => {
                *k = i;
                true
            }
            None => false,
        });
    }

    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision) {
        let begun = self.windows.roll(now);
        self.burn_credits(activity);
        let mut contenders = 0;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let activity = activity_of(activity, i);
            vm.cap.charge(activity.used, begun);
            vm.ready = activity.runnable && !vm.cap.is_capped();
            vm.queued &= vm.ready;
            contenders += usize::from(vm.ready);
        }
        let vms = &self.vms;
        self.queue.retain(|&i| vms[i].queued);
        let ended = self.end_slice(activity);
        // VMs that woke queue before the one whose slice ended.
        for i in 0..self.vms.len() {
            if self.vms[i].ready
                && !self.vms[i].queued
                && self.current != Some(i)
                && ended != Some(i)
            {
                self.insert(i);
            }
        }
        if let Some(i) = ended {
            self.insert(i);
        }
        if self.current.is_none() {
            self.next();
        }

        let contended = contenders > 1;
        self.contended = contended;
        (out.notify_wake, out.notify_block, out.until) = (!contended, contended, FOREVER);
        for (i, vm) in self.vms.iter().enumerate() {
            let is_current = self.current == Some(i);
            out.ranks[i] = match (vm.cap.is_capped(), is_current) {
                (true, _) => Rank::Capped,
                (false, true) => Rank::Owner,
                (false, false) => Rank::Waiting,
            };
            let slice = if is_current && contended {
                self.left.max(MIN_REST) as Nanos
            } else {
                FOREVER
            };
            out.budgets[i] = slice.min(vm.cap.budget());
            if vm.cap.is_capped() {
                out.until = out.until.min(vm.cap.refill_at(&self.windows));
            }
        }
    }
}

#[cfg(test)]
mod tests;
