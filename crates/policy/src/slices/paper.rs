// SPDX-License-Identifier: Apache-2.0
//! Paper mode: Algorithm 1 of the dissertation (section 2.4), with its run queue, credits and micro credits.
//!
//! One run queue for all. When a slice is over, an NLSVM goes to the tail; an LSVM goes before the first NLSVM
//! (again in this T_S) while it has micro credits, behind it (next T_S of this period) when they are used up,
//! and to the tail (next period) when it has no credits. The head runs next: an NLSVM for T_NLSVM, an LSVM for
//! T_m.
//!
//! What the listing leaves open:
//! - Credits are those of Xen's credit scheduler: what all ran is credited by weight to those that want the
//!   core. A VM starts with one slice of credits and never has more.
//! - Micro credits are T_n = T_NLSVM / n for each T_S (eq 2.12), refilled when the LSVM goes behind an NLSVM; n
//!   counts the NLSVMs that want to run at that moment. The last microslice of a T_S is shortened if T_n is no
//!   multiple of T_m. Early or late ends are carried into the next slice of the VM.
//! - Weights: T_NLSVM and T_n of a VM are scaled by its weight over the mean weight.
//! - m = 0 is round robin of T_NLSVM. n = 0 (or no NLSVM wants to run) is round robin of microslices, the mean
//!   one scaled by each LSVM's weight so that shares hold. One or two VMs follow the same rules.
//! - A VM that blocks gives up the rest of its slice; waking puts it where the end of a slice would, without
//!   preempting anybody. One over its cap leaves the queue until the next accounting window that lets it run.

use super::caps::{Cap, Windows};
use super::{
    Class, Decision, FOREVER, MAX_VMS, MS, Machine, Nanos, Params, Rank, Seen, US, scaled_slice,
    seen_at,
};

/// T_NLSVM unless set: Xen's slice, as in the dissertation.
const SLICE: Nanos = 30 * MS;
/// Accounting window of the caps: Xen's.
const CAP_WINDOW: Nanos = 30 * MS;
/// A rest of a slice this short is not worth a decision.
const REST: i64 = US as i64;
/// Shortest run in the round robin of microslices.
const MICRO_LEAST: Nanos = 50 * US;

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    weight: i64,
    ls: bool,
    /// T_m.
    micro_slice: i64,
    /// T_NLSVM (= T_LSVM), scaled by weight.
    slice: i64,
    /// Run length when no NLSVM wants to run.
    alone: i64,
    credits: i64,
    micro_credits: i64,
    /// What the last slice of an NLSVM was short of (or over, negative).
    carried: i64,
    cap: Cap,
    ready: bool,
    queued: bool,
}

/// Paper mode. See the module's text.
#[derive(Debug, Clone)]
pub struct Paper {
    slice: Nanos,
    windows: Windows,
    vms: Vec<Vm>,
    spare: Vec<Vm>,
    /// Indexes of the VMs that wait, head first.
    queue: Vec<usize>,
    current: Option<usize>,
    /// Rest of the current VM's slice, ns.
    left: i64,
    /// More than one VM wanted the core at the last decision.
    contended: bool,
}

impl Default for Paper {
    fn default() -> Self {
        Self::new(SLICE)
    }
}

impl Paper {
    /// A machine without VMs, with T_NLSVM = `slice` (100 us ..= 1 s; 0 stands for 30 ms).
    pub fn new(slice: Nanos) -> Self {
        let mut machine = Self {
            slice,
            windows: Windows::new(CAP_WINDOW),
            vms: Vec::with_capacity(MAX_VMS),
            spare: Vec::with_capacity(MAX_VMS),
            queue: Vec::with_capacity(MAX_VMS),
            current: None,
            left: 0,
            contended: false,
        };
        machine.set_slice(slice);
        machine
    }

    /// Changes T_NLSVM. Takes effect with the next [`Machine::configure`].
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

    /// Line 1: credits are burnt by those that ran and handed out by weight to those that want the core.
    fn burn_credits(&mut self, seen: &[Seen]) {
        let (mut total, mut weight) = (0, 0);
        for (i, vm) in self.vms.iter().enumerate() {
            let used = seen_at(seen, i).used.min(1 << 40) as i64;
            total += used;
            if used > 0 || vm.ready {
                weight += vm.weight;
            }
        }
        if total == 0 {
            return;
        }
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let used = seen_at(seen, i).used.min(1 << 40) as i64;
            if used > 0 || vm.ready {
                let earned = i128::from(total) * i128::from(vm.weight) / i128::from(weight);
                vm.credits = (vm.credits + earned as i64 - used).clamp(-vm.slice, vm.slice);
            }
        }
    }

    fn insert_tail(&mut self, i: usize) {
        self.put(i, self.queue.len());
    }

    /// Behind the LSVMs that run before the first NLSVM.
    fn insert_before_nlsvm(&mut self, i: usize) {
        let at = self.queue.iter().position(|&k| !self.vms[k].ls);
        self.put(i, at.unwrap_or(self.queue.len()));
    }

    /// Behind the LSVMs that follow the first NLSVM.
    fn insert_after_nlsvm(&mut self, i: usize) {
        let first = self.queue.iter().position(|&k| !self.vms[k].ls);
        let at = first.and_then(|f| {
            let next = self.queue[f + 1..].iter().position(|&k| !self.vms[k].ls);
            next.map(|k| f + 1 + k)
        });
        self.put(i, at.unwrap_or(self.queue.len()));
    }

    fn put(&mut self, i: usize, at: usize) {
        self.vms[i].queued = true;
        self.queue.insert(at, i);
    }

    /// Lines 2 to 15, for a VM whose slice is over or that woke.
    fn insert(&mut self, i: usize) {
        let nlsvms = self.nlsvms();
        let vm = &mut self.vms[i];
        if !vm.ls || nlsvms == 0 {
            return self.insert_tail(i);
        }
        let refill = vm.micro_credits <= REST;
        if refill {
            let t_n = vm.slice / nlsvms;
            vm.micro_credits = (vm.micro_credits + t_n).clamp(REST + 1, t_n + REST);
        }
        if vm.credits <= 0 {
            self.insert_tail(i);
        } else if refill {
            self.insert_after_nlsvm(i);
        } else {
            self.insert_before_nlsvm(i);
        }
    }

    /// Ends the current VM's slice if it is used up or given up. Returns the VM if it goes on waiting.
    fn end_slice(&mut self, seen: &[Seen]) -> Option<usize> {
        let i = self.current?;
        let Seen { used, blocked, .. } = seen_at(seen, i);
        let mut used = used.min(1 << 40) as i64;
        if !self.contended {
            // Time that nobody else wanted ends the slice, but is not owed.
            used = used.min(self.left.max(0));
        }
        self.left -= used;
        let shared = self.nlsvms() > 0;
        let vm = &mut self.vms[i];
        let gives_up = blocked || !vm.ready;
        if !gives_up && self.left > REST {
            if vm.ls && shared {
                vm.micro_credits -= used;
            }
            return None;
        }
        self.current = None;
        if vm.ls {
            // Line 5. A given-up rest is burnt too.
            if shared {
                let burnt = used + if gives_up { self.left.max(0) } else { 0 };
                vm.micro_credits = (vm.micro_credits - burnt).max(-vm.slice);
            }
        } else {
            vm.carried = if gives_up {
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
            vm.slice + std::mem::take(&mut vm.carried)
        } else if shared {
            vm.micro_slice.min(vm.micro_credits)
        } else {
            vm.alone
        };
        self.left = self.left.max(REST + 1);
        self.current = Some(i);
    }
}

impl Machine for Paper {
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
        let per_weight = per_weight.max(MICRO_LEAST as f64 / f64::from(lightest));
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
                    alone: 0,
                    credits: slice,
                    micro_credits: 0,
                    carried: 0,
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
            vm.alone = if ls {
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
        let mut kept = 0;
        for k in 0..self.queue.len() {
            if let Some(i) = index(self.queue[k]) {
                self.queue[kept] = i;
                kept += 1;
            }
        }
        self.queue.truncate(kept);
    }

    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision) {
        let begun = self.windows.roll(now);
        self.burn_credits(seen);
        let mut contenders = 0;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let seen = seen_at(seen, i);
            vm.cap.charge(seen.used, begun);
            vm.ready = seen.runnable && !vm.cap.is_capped();
            vm.queued &= vm.ready;
            contenders += usize::from(vm.ready);
        }
        let vms = &self.vms;
        self.queue.retain(|&i| vms[i].queued);
        let ended = self.end_slice(seen);
        // Those that woke came before the slice ended.
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
                self.left.max(REST) as Nanos
            } else {
                FOREVER
            };
            out.budgets[i] = slice.min(vm.cap.budget());
            if vm.cap.is_capped() {
                out.until = out.until.min(vm.cap.refill(&self.windows));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::DEFAULT_WEIGHT;
    use super::super::simulate::{Behaviour, Core, Driver, Report, SimVm};
    use super::*;

    fn vm(id: u32, class: Class, microslice: Nanos, behaviour: Behaviour) -> SimVm {
        SimVm {
            params: Params {
                id,
                class,
                weight: DEFAULT_WEIGHT,
                cap_permille: None,
                microslice,
            },
            behaviour,
        }
    }

    fn busy(m: u32, n: u32, microslice: Nanos) -> Vec<SimVm> {
        let class = |id| if id <= m { Class::Ls } else { Class::Batch };
        (1..=m + n)
            .map(|id| vm(id, class(id), microslice, Behaviour::Busy))
            .collect()
    }

    fn run(vms: &[SimVm], time: Nanos) -> Report {
        let driver = Driver {
            record: true,
            ..Driver::default()
        };
        Core::new(Paper::default(), vms, driver, 1)
            .run_until(time)
            .unwrap()
            .clone()
    }

    /// Who ran, for how many ms.
    fn sequence(vms: &[SimVm], time: Nanos) -> Vec<(u32, u64)> {
        run(vms, time)
            .stints
            .iter()
            .map(|s| (s.id, s.len / MS))
            .collect()
    }

    #[test]
    fn figure_2_6_one_lsvm_runs_10_ms_before_each_of_three_nlsvms() {
        let period = [(1, 10), (2, 30), (1, 10), (3, 30), (1, 10), (4, 30)];
        assert_eq!(sequence(&busy(1, 3, 10 * MS), 480 * MS), period.repeat(4));
    }

    #[test]
    fn figure_2_7_two_lsvms_run_three_times_5_ms_before_each_of_two_nlsvms() {
        let t_s = [(1, 5), (2, 5)].repeat(3);
        let period = [t_s.clone(), vec![(3, 30)], t_s, vec![(4, 30)]].concat();
        assert_eq!(sequence(&busy(2, 2, 5 * MS), 480 * MS), period.repeat(4));
    }

    #[test]
    fn an_lsvm_that_comes_last_in_the_list_still_runs_first() {
        let mut vms = busy(1, 3, 10 * MS);
        vms.rotate_left(1);
        assert_eq!(sequence(&vms, 40 * MS), [(1, 10), (2, 30)]);
    }

    #[test]
    fn without_lsvm_it_is_round_robin_of_whole_slices() {
        assert_eq!(
            sequence(&busy(0, 3, MS), 180 * MS),
            [(1, 30), (2, 30), (3, 30)].repeat(2)
        );
    }

    #[test]
    fn without_nlsvm_it_is_round_robin_of_microslices() {
        assert_eq!(
            sequence(&busy(3, 0, 5 * MS), 45 * MS),
            [(1, 5), (2, 5), (3, 5)].repeat(3)
        );
    }

    #[test]
    fn one_of_each_alternate_by_the_same_rules() {
        assert_eq!(
            sequence(&busy(1, 1, 10 * MS), 120 * MS),
            [(1, 30), (2, 30)].repeat(2)
        );
    }

    #[test]
    fn slices_scale_with_the_weight() {
        let mut vms = busy(0, 3, MS);
        vms[0].params.weight = 512;
        // Mean weight 341.3.
        let report = run(&vms, 900 * MS);
        assert_eq!(report.stints[0].len, 45 * MS);
        assert_eq!(report.stints[1].len, 22_500 * US);
        vms[0].params.class = Class::Ls;
        let report = run(&vms, 3600 * MS);
        assert!((report.share(1) - 0.5).abs() < 0.002, "{}", report.share(1));
    }

    #[test]
    fn a_vm_that_blocks_gives_up_the_rest_of_its_slice() {
        let mut vms = busy(0, 2, MS);
        vms.push(vm(
            3,
            Class::Batch,
            MS,
            Behaviour::Duty {
                period: 100 * MS,
                on: 4 * MS,
            },
        ));
        let expected = [(1, 30), (2, 30), (3, 4), (1, 30), (2, 30)];
        assert_eq!(sequence(&vms, 124 * MS), expected);
    }

    #[test]
    fn late_timers_do_not_shift_shares() {
        let vms = busy(1, 3, MS);
        let driver = Driver {
            late: 200 * US,
            ..Driver::default()
        };
        let mut core = Core::new(Paper::default(), &vms, driver, 3);
        let report = core.run_until(12_000 * MS).unwrap();
        for id in 1..=4 {
            assert!(
                (report.share(id) - 0.25).abs() < 0.005,
                "{id}: {}",
                report.share(id)
            );
        }
    }

    #[test]
    fn the_queue_keeps_its_order_when_a_vm_comes() {
        let mut vms = busy(0, 3, MS);
        let driver = Driver {
            record: true,
            ..Driver::default()
        };
        let mut core = Core::new(Paper::default(), &vms, driver, 1);
        core.run_until(40 * MS).unwrap();
        vms.insert(0, vm(9, Class::Batch, MS, Behaviour::Busy));
        core.configure(&vms);
        let report = core.run_until(180 * MS).unwrap();
        let order: Vec<_> = report.stints.iter().map(|s| s.id).collect();
        assert_eq!(order, [1, 2, 3, 1, 9, 2]);
    }
}
