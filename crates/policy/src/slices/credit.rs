// SPDX-License-Identifier: Apache-2.0
//! The dissertation's baseline: Xen's credit scheduler (Xen 3.4, one core).
//!
//! Slices of 30 ms. Each accounting period (30 ms) hands out credits by weight; running burns them. A VM with
//! credits is UNDER, one without is OVER; UNDER runs before OVER, each in turn. A VM that wakes while UNDER is
//! in BOOST: it preempts at once and the VM it preempts goes to the tail. The tick (10 ms) that finds a boosted
//! VM running takes its BOOST away, so a busy VM never has it.
//!
//! Where this departs from Xen 3.4, so that shares can be relied on:
//! - Credits are burnt by the time a VM ran, not by whom the tick finds running (which a VM can dodge).
//! - What is handed out is what was run, not the length of the period.
//! - A VM with more than a slice of credits stops earning only if it sleeps; Xen also takes it from a VM that
//!   waits behind many others.
//!
//! Without BOOST it is plain round robin of slices scaled by weight: the worst case for a VM that wakes.

use super::caps::{Cap, Windows};
use super::{
    Decision, FOREVER, MAX_VMS, MS, Machine, Nanos, Params, Rank, Seen, US, scaled_slice, seen_at,
};

/// Slice and accounting period unless set.
const SLICE: Nanos = 30 * MS;
const TICK: Nanos = 10 * MS;
/// A rest of a slice this short is not worth a decision.
const REST: i64 = US as i64;

#[derive(Debug, Clone, Copy)]
struct Vm {
    id: u32,
    weight: i64,
    slice: i64,
    credits: i64,
    /// Credits used up, as the last accounting found.
    over: bool,
    /// Woke (or would wake) in BOOST.
    boosted: bool,
    /// Earns credits: wanted the core since the last accounting.
    active: bool,
    /// What the last slice was short of (or over, negative).
    carried: i64,
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
    /// Indexes of the VMs that wait without BOOST, in the order they came.
    queue: Vec<usize>,
    current: Option<usize>,
    left: i64,
    next_tick: Nanos,
    next_accounting: Nanos,
    /// Run since the last accounting, ns.
    ran: i64,
    contended: bool,
}

impl Default for Credit {
    fn default() -> Self {
        Self::new(true)
    }
}

impl Credit {
    /// A machine without VMs and with slices of 30 ms; `boost` as in the module's text.
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

    /// Changes the slice (100 us ..= 1 s; 0 stands for 30 ms). Takes effect with the next
    /// [`Machine::configure`]. The tick stays at 10 ms, the accounting at 30 ms.
    pub fn set_slice(&mut self, slice: Nanos) {
        self.slice = if slice == 0 {
            SLICE
        } else {
            slice.clamp(100 * US, 1000 * MS)
        };
    }

    /// Hands out credits for what was run and sorts VMs into UNDER and OVER.
    fn hand_out(&mut self) {
        let weight: i64 = self
            .vms
            .iter()
            .filter(|vm| vm.active)
            .map(|vm| vm.weight)
            .sum();
        let ran = std::mem::take(&mut self.ran);
        let most = self.slice as i64;
        for vm in &mut self.vms {
            if vm.active {
                let earned = i128::from(ran) * i128::from(vm.weight) / i128::from(weight);
                vm.credits = (vm.credits + earned as i64).max(-most);
                vm.active = vm.ready;
                if !vm.ready && vm.credits > most {
                    vm.credits = 0;
                }
            }
            // A hundredth of a slice either way is the lateness of timers, not a debt.
            vm.over = vm.credits < -most / 100;
            if vm.over && !vm.ready {
                vm.boosted = false;
            }
        }
    }

    fn enqueue(&mut self, i: usize) {
        self.vms[i].queued = true;
        self.queue.push(i);
    }

    /// The tick: a boosted VM that it finds running goes on as an ordinary one.
    fn tick(&mut self, seen: &[Seen]) {
        let mut running = None;
        for (i, vm) in self.vms.iter().enumerate() {
            // Of several boosted VMs that want the core, the one that has run.
            if vm.ready && vm.boosted && (running.is_none() || seen_at(seen, i).used > 0) {
                running = Some(i);
            }
        }
        if let Some(i) = running {
            self.vms[i].boosted = false;
            self.preempt_current();
            self.current = Some(i);
            self.left = self.vms[i].slice - seen_at(seen, i).used.min(1 << 40) as i64;
        }
    }

    fn preempt_current(&mut self) {
        if let Some(old) = self.current.take()
            && self.vms[old].ready
        {
            self.enqueue(old);
        }
    }

    /// Ends the current VM's slice if it is used up or given up. Returns the VM if it goes on waiting.
    fn end_slice(&mut self, seen: &[Seen]) -> Option<usize> {
        let i = self.current?;
        let Seen { used, blocked, .. } = seen_at(seen, i);
        let mut used = used.min(1 << 40) as i64;
        if !self.contended {
            used = used.min(self.left.max(0));
        }
        self.left -= used;
        let vm = &mut self.vms[i];
        let gives_up = blocked || !vm.ready;
        if !gives_up && self.left > REST {
            return None;
        }
        vm.carried = if gives_up {
            0
        } else {
            self.left.max(-vm.slice / 2)
        };
        self.current = None;
        vm.ready.then_some(i)
    }

    /// First UNDER in the queue, else first OVER.
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
        self.left = (vm.slice + std::mem::take(&mut vm.carried)).max(REST + 1);
        self.current = Some(i);
    }

    /// Takes what was seen; returns how many VMs want to run and may.
    fn observe(&mut self, now: Nanos, seen: &[Seen]) -> usize {
        let begun = self.windows.roll(now);
        let mut contenders = 0;
        for (i, vm) in self.vms.iter_mut().enumerate() {
            let Seen { used, runnable, .. } = seen_at(seen, i);
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

impl Machine for Credit {
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
                    carried: 0,
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
        let mut n = 0;
        for k in 0..self.queue.len() {
            if let Some(i) = index(self.queue[k]) {
                self.queue[n] = i;
                n += 1;
            }
        }
        self.queue.truncate(n);
        if self.next_tick == 0 {
            self.next_tick = now + TICK;
            self.next_accounting = now + SLICE;
        }
    }

    fn decide(&mut self, now: Nanos, seen: &[Seen], out: &mut Decision) {
        let contenders = self.observe(now, seen);
        let vms = &self.vms;
        self.queue.retain(|&i| vms[i].queued);
        // A boosted VM that ran took the core from the current one.
        let preempted = self
            .vms
            .iter()
            .enumerate()
            .any(|(i, vm)| vm.boosted && seen_at(seen, i).used > 0);
        let ended = self.end_slice(seen);
        if now >= self.next_accounting {
            if self.boost {
                self.hand_out();
            }
            self.next_accounting += ((now - self.next_accounting) / SLICE + 1) * SLICE;
        }
        for i in 0..self.vms.len() {
            let vm = &mut self.vms[i];
            if !vm.ready {
                // Asleep: it would wake in BOOST.
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
            self.tick(seen);
            self.next_tick += ((now - self.next_tick) / TICK + 1) * TICK;
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

    fn run(machine: Credit, vms: &[SimVm], time: Nanos) -> Report {
        let driver = Driver {
            record: true,
            ..Driver::default()
        };
        Core::new(machine, vms, driver, 1)
            .run_until(time)
            .unwrap()
            .clone()
    }

    #[test]
    fn busy_vms_run_30_ms_in_turn_and_wait_for_all_others() {
        let vms: Vec<_> = (0..4).map(|id| vm(id, Behaviour::Busy)).collect();
        for boost in [false, true] {
            let report = run(Credit::new(boost), &vms, 480 * MS);
            let got: Vec<_> = report.stints.iter().map(|s| (s.id, s.len / MS)).collect();
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
        // Wants 60 % of the core, 25 % is its share.
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
        let got: Vec<_> = report.stints.iter().map(|s| (s.id, s.len / MS)).collect();
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
