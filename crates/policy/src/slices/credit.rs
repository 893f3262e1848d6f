// SPDX-License-Identifier: Apache-2.0
//! The dissertation's baseline: Xen's credit scheduler (Xen 3.4, one core).
//!
//! Slices are 30 ms. Each accounting (every 30 ms) hands out credits by weight; running burns them. A VM with credits
//! is UNDER, one without is OVER. UNDER runs before OVER, each in turn. A VM that wakes while UNDER is in BOOST: it
//! preempts at once, and the VM it preempts goes to the tail. The tick (every 10 ms) ends the BOOST of the VM that it
//! finds running, so a busy VM is never boosted.
//!
//! Departures from Xen 3.4, which make shares reliable:
//! - A VM burns credits for the time it ran. In Xen the VM that the tick finds running pays, which a VM can evade.
//! - Each accounting hands out what was run, not the length of the period.
//! - A VM with more than a slice of credits stops earning only while it sleeps. Xen also takes the credits of a VM that
//!   waits behind many others.
//!
//! Without BOOST it is plain round robin of slices scaled by weight: the worst case for a VM that wakes.

use super::caps::{Cap, Windows};
use super::{
    Activity, CoreScheduler, Decision, FOREVER, MAX_VMS, MS, Nanos, Params, Rank, US, activity_of,
    scaled_slice,
};

/// Default slice, and the accounting interval.
const SLICE: Nanos = 30 * MS;
const TICK_INTERVAL: Nanos = 10 * MS;
/// Rest of a slice that is too short to be worth a decision, ns.
const MIN_REST: i64 = US as i64;

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    weight: i64,
    slice: i64,
    credits: i64,
    /// OVER: credits used up at the last accounting.
    over: bool,
    /// Runs in BOOST; of a sleeping VM: would wake in BOOST.
    boosted: bool,
    /// Earns credits: it wanted the core since the last accounting.
    active: bool,
    /// Part of its last slice that it did not run (negative: overran), ns.
    carry: i64,
    cap: Cap,
    ready: bool,
    queued: bool,
}

/// Xen's credit scheduler. See the module's text.
#[derive(Debug, Clone)]
pub struct Credit {
    boost: bool,
    slice: Nanos,
    windows: Windows,
    vms: Vec<Vm>,
    spare: Vec<Vm>,
    /// Indexes of the VMs that wait without BOOST, in order of arrival.
    queue: Vec<usize>,
    current: Option<usize>,
    left: i64,
    next_tick: Nanos,
    next_accounting: Nanos,
    /// What all VMs ran since the last accounting, ns.
    ran: i64,
    contended: bool,
}

impl Default for Credit {
    fn default() -> Self {
        Self::new(true)
    }
}

impl Credit {
    /// A scheduler without VMs, with slices of 30 ms; for `boost` see the module's text.
    pub fn new(boost: bool) -> Self {
        Self {
            boost,
            slice: SLICE,
            windows: Windows::new(SLICE),
            vms: Vec::with_capacity(MAX_VMS),
            spare: Vec::with_capacity(MAX_VMS),
            queue: Vec::with_capacity(MAX_VMS),
            current: None,
            left: 0,
            next_tick: 0,
            next_accounting: 0,
            ran: 0,
            contended: false,
        }
    }

    /// Changes the slice (100 us ..= 1 s; 0: 30 ms) from the next [`CoreScheduler::configure`] on. The intervals of
    /// tick and accounting stay at 10 and 30 ms.
    pub fn set_slice(&mut self, slice: Nanos) {
        self.slice = if slice == 0 {
            SLICE
        } else {
            slice.clamp(100 * US, 1000 * MS)
        };
    }

    /// Hands out credits for what was run, and sorts VMs into UNDER and OVER.
    fn distribute_credits(&mut self) {
        let weight: i64 = self
            .vms
            .iter()
            .filter(|vm| vm.active)
            .map(|vm| vm.weight)
            .sum();
        let ran = std::mem::take(&mut self.ran);
        let max_credits = self.slice as i64;
        for vm in &mut self.vms {
            if vm.active {
                let earned = i128::from(ran) * i128::from(vm.weight) / i128::from(weight);
                vm.credits = (vm.credits + earned as i64).max(-max_credits);
                vm.active = vm.ready;
                if !vm.ready && vm.credits > max_credits {
                    vm.credits = 0;
                }
            }
            // Timers are late by up to a hundredth of a slice: that is no debt.
            vm.over = vm.credits < -max_credits / 100;
            if vm.over && !vm.ready {
                vm.boosted = false;
            }
        }
    }

    fn enqueue(&mut self, i: usize) {
        self.vms[i].queued = true;
        self.queue.push(i);
    }

    /// Ends the BOOST of the VM that the tick finds running.
    fn tick(&mut self, activity: &[Activity]) {
        let mut running = None;
        for (i, vm) in self.vms.iter().enumerate() {
            // Of several boosted VMs that want the core, the one that ran.
            if vm.ready && vm.boosted && (running.is_none() || activity_of(activity, i).used > 0) {
                running = Some(i);
            }
        }
        if let Some(i) = running {
            self.vms[i].boosted = false;
            self.preempt_current();
            self.current = Some(i);
            self.left = self.vms[i].slice - activity_of(activity, i).used.min(1 << 40) as i64;
        }
    }

    fn preempt_current(&mut self) {
        if let Some(old) = self.current.take()
            && self.vms[old].ready
        {
            self.enqueue(old);
        }
    }

    /// Ends the current VM's slice if it is used up or given up. Returns the VM if it still wants to run.
    fn end_slice(&mut self, activity: &[Activity]) -> Option<usize> {
        let i = self.current?;
        let Activity { used, blocked, .. } = activity_of(activity, i);
        let mut used = used.min(1 << 40) as i64;
        if !self.contended {
            used = used.min(self.left.max(0));
        }
        self.left -= used;
        let vm = &mut self.vms[i];
        let gives_up = blocked || !vm.ready;
        if !gives_up && self.left > MIN_REST {
            return None;
        }
        vm.carry = if gives_up {
            0
        } else {
            self.left.max(-vm.slice / 2)
        };
        self.current = None;
        vm.ready.then_some(i)
    }

    /// Starts the first UNDER VM of the queue, or else the first OVER one.
    fn next(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        let at = self
            .queue
            .iter()
            .position(|&i| !self.vms[i].over)
            .unwrap_or(0);
        let i = self.queue.remove(at);
        let vm = &mut self.vms[i];
        vm.queued = false;
        self.left = (vm.slice + std::mem::take(&mut vm.carry)).max(MIN_REST + 1);
        self.current = Some(i);
    }

    /// Records the VMs' activity. Returns how many want to run and may.
    fn observe(&mut self, now: Nanos, activity: &[Activity]) -> usize {
        let begun = self.windows.roll(now);
        let mut contenders = 0;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let Activity { used, runnable, .. } = activity_of(activity, i);
            vm.cap.charge(used, begun);
            let used = used.min(1 << 40) as i64;
            vm.credits -= used;
            self.ran += used;
            vm.active |= used > 0 || runnable;
            vm.ready = runnable && !vm.cap.is_capped();
            vm.queued &= vm.ready;
            contenders += usize::from(vm.ready);
        }
        contenders
    }
}

impl CoreScheduler for Credit {
    fn configure(&mut self, now: Nanos, vms: &[Params]) {
        std::mem::swap(&mut self.vms, &mut self.spare);
        self.vms.clear();
        let vms = &vms[..vms.len().min(MAX_VMS)];
        let total: u64 = vms.iter().map(|p| u64::from(p.weight.max(1))).sum();
        for p in vms {
            let mut vm = match self.spare.iter().find(|old| old.id == p.id) {
                Some(old) => *old,
                None => Vm {
                    id: p.id,
                    weight: 1,
                    slice: 0,
                    credits: 0,
                    over: false,
                    boosted: false,
                    active: false,
                    carry: 0,
                    cap: Cap::new(p.cap_permille, &self.windows),
                    ready: false,
                    queued: false,
                },
            };
            vm.cap.set(p.cap_permille, &self.windows);
            vm.weight = i64::from(p.weight.max(1));
            // With credits the weights decide how often a VM runs, without them how long.
            vm.slice = if self.boost {
                self.slice
            } else {
                scaled_slice(self.slice, p.weight, total, vms.len())
            } as i64;
            self.vms.push(vm);
        }
        let (spare, kept) = (&self.spare, &self.vms);
        let index = |old: usize| kept.iter().position(|vm| vm.id == spare[old].id);
        self.current = self.current.and_then(index);
        self.queue.retain_mut(|k| match index(*k) {
            Some(i) => {
                *k = i;
                true
            }
            None => false,
        });
        if self.next_tick == 0 {
            self.next_tick = now + TICK_INTERVAL;
            self.next_accounting = now + SLICE;
        }
    }

    fn decide(&mut self, now: Nanos, activity: &[Activity], out: &mut Decision) {
        let contenders = self.observe(now, activity);
        let vms = &self.vms;
        self.queue.retain(|&i| vms[i].queued);
        // A boosted VM that ran took the core from the current one.
        let preempted = self
            .vms
            .iter()
            .enumerate()
            .any(|(i, vm)| vm.boosted && activity_of(activity, i).used > 0);
        let ended = self.end_slice(activity);
        if now >= self.next_accounting {
            if self.boost {
                self.distribute_credits();
            }
            self.next_accounting += ((now - self.next_accounting) / SLICE + 1) * SLICE;
        }
        for i in 0..self.vms.len() {
            let vm = &mut self.vms[i];
            if !vm.ready {
                // A VM that sleeps now would wake in BOOST.
                vm.boosted = self.boost && !vm.over;
            } else if !vm.boosted && !vm.queued && self.current != Some(i) && ended != Some(i) {
                self.enqueue(i);
            }
        }
        if let Some(i) = ended {
            self.enqueue(i);
        } else if preempted {
            self.preempt_current();
        }
        if now >= self.next_tick {
            self.tick(activity);
            self.next_tick += ((now - self.next_tick) / TICK_INTERVAL + 1) * TICK_INTERVAL;
        }
        if self.current.is_none() {
            self.next();
        }

        let contended = contenders > 1;
        self.contended = contended;
        (out.notify_wake, out.notify_block) = (!contended, contended);
        out.until = match (contended, self.boost) {
            (true, true) => self.next_tick.min(self.next_accounting),
            _ => FOREVER,
        };
        for (i, vm) in self.vms.iter().enumerate() {
            let is_current = self.current == Some(i);
            out.ranks[i] = if vm.cap.is_capped() {
                Rank::Capped
            } else if vm.boosted {
                Rank::Boost
            } else if is_current {
                Rank::Owner
            } else {
                Rank::Waiting
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
mod tests {
    use super::super::simulate::{Behaviour, Core, Driver, Report, SimVm};
    use super::super::{Class, DEFAULT_WEIGHT};
    use super::*;

    fn vm(id: u32, behaviour: Behaviour) -> SimVm {
        let params = Params {
            id,
            class: Class::Batch,
            weight: DEFAULT_WEIGHT,
            cap_permille: None,
            microslice: MS,
        };
        SimVm { params, behaviour }
    }

    fn run(scheduler: Credit, vms: &[SimVm], time: Nanos) -> Report {
        let driver = Driver {
            record: true,
            ..Driver::default()
        };
        Core::new(scheduler, vms, driver, 1)
            .run_until(time)
            .unwrap()
            .clone()
    }

    #[test]
    fn busy_vms_run_30_ms_in_turn_and_wait_for_all_others() {
        let vms: Vec<_> = (0..4).map(|id| vm(id, Behaviour::Busy)).collect();
        for boost in [false, true] {
            let report = run(Credit::new(boost), &vms, 480 * MS);
            let got: Vec<_> = report.runs.iter().map(|s| (s.id, s.len / MS)).collect();
            assert_eq!(
                got,
                [(0, 30), (1, 30), (2, 30), (3, 30)].repeat(4),
                "boost {boost}"
            );
            assert_eq!(report.vm(0).unwrap().preempt_waits[0], 90 * MS);
        }
    }

    #[test]
    fn a_vm_that_wakes_with_credit_is_boosted_and_without_boost_waits_for_its_turn() {
        let mut vms: Vec<_> = (0..3).map(|id| vm(id, Behaviour::Busy)).collect();
        vms.push(vm(
            3,
            Behaviour::Bursts {
                sleep: (20 * MS, 50 * MS),
                run: (100 * US, 300 * US),
            },
        ));
        let boosted = run(Credit::new(true), &vms, 5000 * MS);
        assert_eq!(boosted.vm(3).unwrap().worst_wait(), 0);
        let plain = run(Credit::new(false), &vms, 5000 * MS);
        let worst = plain.vm(3).unwrap().worst_wait();
        assert!(worst > 60 * MS && worst <= 90 * MS, "{worst}");
    }

    #[test]
    fn the_tick_ends_the_boost_and_using_up_credits_ends_it_for_longer() {
        let mut vms: Vec<_> = (0..3).map(|id| vm(id, Behaviour::Busy)).collect();
        // It wants 60 % of the core; its share is 25 %.
        vms.push(vm(
            3,
            Behaviour::Duty {
                period: 20 * MS,
                on: 12 * MS,
            },
        ));
        let report = run(Credit::new(true), &vms, 10_000 * MS);
        assert!(report.vm(3).unwrap().worst_wait() > 30 * MS);
        assert!((report.share(3) - 0.25).abs() < 0.03, "{}", report.share(3));
    }

    #[test]
    fn a_preempted_vm_goes_to_the_tail() {
        let once = Behaviour::Bursts {
            sleep: (15 * MS, 15 * MS),
            run: (MS, MS),
        };
        let vms = [vm(0, Behaviour::Busy), vm(1, Behaviour::Busy), vm(2, once)];
        let report = run(Credit::new(true), &vms, 30 * MS);
        let got: Vec<_> = report.runs.iter().map(|s| (s.id, s.len / MS)).collect();
        // VM 0 had 15 ms of its slice left when VM 2 woke.
        assert_eq!(got, [(0, 15), (2, 1), (1, 14)]);
    }

    #[test]
    fn weights_decide_shares() {
        for boost in [false, true] {
            let mut vms: Vec<_> = (0..4).map(|id| vm(id, Behaviour::Busy)).collect();
            vms[2].params.weight = 1024;
            let report = run(Credit::new(boost), &vms, 20_000 * MS);
            for id in 0..4 {
                let fair = if id == 2 { 4.0 / 7.0 } else { 1.0 / 7.0 };
                assert!(
                    (report.share(id) - fair).abs() < 0.01,
                    "boost {boost}, {id}: {}",
                    report.share(id)
                );
            }
        }
    }
}
