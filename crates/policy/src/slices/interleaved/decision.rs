// SPDX-License-Identifier: Apache-2.0
//! Fills in the decision: ranks, budgets, and the time of the next call.

use super::super::{Decision, FOREVER, Nanos, Rank};
use super::{Interleaved, MIN_BUDGET, MIN_MICROSLICE, Vm};

impl Interleaved {
    /// Fills in the decision from the state that [`super::CoreScheduler::decide`] has updated.
    pub(super) fn fill_decision(&mut self, now: Nanos, out: &mut Decision) {
        self.wake_budget = self.wake_budget();

        let contended = self.contenders > 1;
        out.notify_block = false;
        let mut until = FOREVER;
        for i in self.ls.iter() {
            let is_owner = self.owner == Some(i);
            let rank = self.rank_of_ls(i, is_owner);
            out.ranks[i] = rank;
            out.budgets[i] = self.budget_of_ls(i, rank);
            // Within its share each packet counts, beyond it throughput.
            out.gathers[i] = self.is_beyond_share(i);
            out.notify_reply[i] =
                contended && rank == Rank::Boost && self.vms[i].boost.is_for_request;
            if contended && rank != Rank::Capped {
                if !self.boosted.contains(i) && self.ledger.is_member(i) && !is_owner {
                    let back = self
                        .ledger
                        .time_until(i, self.vms[i].boost.start_lag)
                        .max(MIN_BUDGET);
                    until = until.min(match self.keeps_quota(i) {
                        true => self.windows.begin_of(1),
                        false => now.saturating_add(back),
                    });
                }
                // An LSVM waits for the microslice of another; it is next when that one blocks.
                out.notify_block |= rank == Rank::Preempt;
            }
            self.ranks[i] = rank;
        }
        for i in self.all.difference(self.ls).iter() {
            let is_owner = self.owner == Some(i);
            let rank = self.rank_of_batch(i, is_owner);
            out.ranks[i] = rank;
            out.notify_reply[i] = false;
            out.gathers[i] = true;
            out.budgets[i] = self.budget_of_batch(i, rank, is_owner);
            self.ranks[i] = rank;
        }
        if !contended {
            self.ready.iter().for_each(|i| out.budgets[i] = FOREVER);
        }
        for i in self.limited.iter() {
            let Vm { cap, boost, .. } = &self.vms[i];
            let budget = match contended && boost.is_quiet && self.ls.contains(i) {
                true => cap.budget_above_reserve().max(MIN_BUDGET),
                false => cap.budget(),
            };
            out.budgets[i] = out.budgets[i].min(budget);
            until = until.min(cap.refill_at(&self.windows));
        }
        out.until = until;
        out.notify_wake = self.needs_wake_notification(&out.ranks);
    }

    /// Whether a wake-up needs a decision. The only VM that wants to run has no budget, so the scheduler must learn of
    /// each VM that wakes, unless that VM preempts at once and has a budget of its own. While all VMs sleep, all have a
    /// budget.
    fn needs_wake_notification(&self, ranks: &[Rank]) -> bool {
        if self.contenders != 1 || self.all.len() < 2 {
            return false;
        }
        let asleep = self.all.difference(self.ready).difference(self.capped);
        let running = self.ready.iter().map(|i| ranks[i]).max();
        let lowest = asleep.iter().map(|i| ranks[i]).min();
        lowest.unwrap_or(Rank::Boost) <= running.unwrap_or(Rank::Capped)
    }

    /// Budget of a VM that wakes while at most one VM wants the core. Without contention the scheduler is not asked
    /// when an LSVM in the background may be boosted again, so the batch VMs that woke before it may delay it by a
    /// microslice at most.
    fn wake_budget(&self) -> Nanos {
        if self.contenders > 1 {
            return FOREVER;
        }
        let out = self.ls.difference(self.boosted).iter();
        let batch = self.all.difference(self.ls).len().max(1) as u64;
        out.map(|i| self.vms[i].micro)
            .min()
            .map_or(FOREVER, |micro| (micro / batch).max(MIN_MICROSLICE))
    }

    fn rank_of_ls(&self, i: usize, is_owner: bool) -> Rank {
        if self.capped.contains(i) {
            return Rank::Capped;
        }
        match (self.boosted.contains(i), self.ready.contains(i)) {
            (true, false) => Rank::Boost,
            (true, true) if self.turn == Some(i) => Rank::Boost,
            (true, true) => Rank::Preempt,
            (false, _) if is_owner => Rank::Owner,
            (false, _) => Rank::Background,
        }
    }

    fn rank_of_batch(&self, i: usize, is_owner: bool) -> Rank {
        if self.capped.contains(i) {
            return Rank::Capped;
        }
        let was = self.ranks[i];
        if is_owner && (self.waiting > 1 || was == Rank::Owner) {
            Rank::Owner
        } else if is_owner {
            // No VM to outrank: a change of rank would only cost a system call.
            Rank::Waiting
        } else if self.preempting.contains(i) {
            Rank::Preempt
        } else if self.contenders <= 1
            && self.ready.contains(i)
            && matches!(was, Rank::Owner | Rank::Preempt)
        {
            was
        } else {
            Rank::Waiting
        }
    }

    /// How long an LSVM may run before the next decision while another VM wants the core, ns.
    fn budget_of_ls(&self, i: usize, rank: Rank) -> Nanos {
        let vm = &self.vms[i];
        let turn = if self.turn == Some(i) {
            self.turn_left
        } else {
            vm.boost.slice as i64
        };
        match rank {
            Rank::Owner => to_budget(self.owner_left),
            Rank::Boost => match self.ledger.run_down(i, vm.boost.stop_lag) {
                // No other VM competes now, but one may after it wakes.
                None => to_budget(self.ledger.lag(i).max(0) + vm.micro as i64),
                // Other LSVMs may wait for their microslice.
                Some(ns) if self.ls.len() > 1 => to_budget(ns.min(turn)),
                Some(ns) => to_budget(ns),
            },
            _ => to_budget(turn),
        }
    }

    /// The same for a batch VM.
    fn budget_of_batch(&self, i: usize, rank: Rank, is_owner: bool) -> Nanos {
        let ns = match rank {
            _ if is_owner => to_budget(self.owner_left),
            Rank::Preempt => to_budget(self.vms[i].preempt_left),
            _ => self.config.batch_slice,
        };
        ns.min(self.wake_budget)
    }
}

fn to_budget(ns: i64) -> Nanos {
    ns.max(MIN_BUDGET as i64) as Nanos
}
