// SPDX-License-Identifier: Apache-2.0
//! What the driver is told: ranks, budgets, and when to ask again.

use super::super::{Decision, FOREVER, Nanos, Rank};
use super::{Interleaved, MICRO_LEAST, SHORTEST};

impl Interleaved {
    /// Fills in the decision from the state that [`super::Machine::decide`] has brought up to date.
    pub(super) fn answer(&mut self, now: Nanos, out: &mut Decision) {
        self.patience = self.patience();

        let contended = self.contenders > 1;
        out.notify_block = false;
        let mut until = FOREVER;
        for i in self.ls.iter() {
            let is_owner = self.owner == Some(i);
            let rank = self.rank_of_ls(i, is_owner);
            out.ranks[i] = rank;
            out.budgets[i] = self.budget_of_ls(i, rank);
            if contended && rank != Rank::Capped {
                if !self.boosted.has(i) && self.ledger.is_member(i) && !is_owner {
                    let back = self.ledger.time_to(i, self.vms[i].start).max(SHORTEST);
                    until = until.min(now.saturating_add(back));
                }
                // One LSVM waits for the microslice of another: it comes next when that one sleeps.
                out.notify_block |= rank == Rank::Eager;
            }
            self.ranks[i] = rank;
        }
        for i in self.all.without(self.ls).iter() {
            let is_owner = self.owner == Some(i);
            let rank = self.rank_of_batch(i, is_owner);
            out.ranks[i] = rank;
            out.budgets[i] = self.budget_of_batch(i, rank, is_owner);
            self.ranks[i] = rank;
        }
        if !contended {
            self.ready.iter().for_each(|i| out.budgets[i] = FOREVER);
        }
        for i in self.limited.iter() {
            let cap = &self.vms[i].cap;
            out.budgets[i] = out.budgets[i].min(cap.budget());
            until = until.min(cap.refill(&self.windows));
        }
        out.until = until;
        out.notify_wake = self.is_wake_to_be_told(&out.ranks);
    }

    /// The only one that wants to run has no budget, so the machine must hear of others that wake, unless they take the core
    /// from it at once and have a budget themselves. While all sleep, all have a budget.
    fn is_wake_to_be_told(&self, ranks: &[Rank]) -> bool {
        if self.contenders != 1 || self.all.len() < 2 {
            return false;
        }
        let asleep = self.all.without(self.ready).without(self.capped);
        let running = self.ready.iter().map(|i| ranks[i]).max();
        let lowest = asleep.iter().map(|i| ranks[i]).min();
        lowest.unwrap_or(Rank::Boost) <= running.unwrap_or(Rank::Capped)
    }

    /// While nothing contends nobody asks when an LSVM that is out comes back. It waits for a microslice at most
    /// until the machine hears of those that woke before it.
    fn patience(&self) -> Nanos {
        if self.contenders > 1 {
            return FOREVER;
        }
        let out = self.ls.without(self.boosted).iter();
        let batch = self.all.without(self.ls).len().max(1) as u64;
        out.map(|i| self.vms[i].micro)
            .min()
            .map_or(FOREVER, |micro| (micro / batch).max(MICRO_LEAST))
    }

    fn rank_of_ls(&self, i: usize, is_owner: bool) -> Rank {
        if self.capped.has(i) {
            return Rank::Capped;
        }
        match (self.boosted.has(i), self.ready.has(i)) {
            (true, false) => Rank::Boost,
            (true, true) if self.turn == Some(i) => Rank::Boost,
            (true, true) => Rank::Eager,
            (false, _) if is_owner => Rank::Owner,
            (false, _) => Rank::Out,
        }
    }

    fn rank_of_batch(&self, i: usize, is_owner: bool) -> Rank {
        if self.capped.has(i) {
            return Rank::Capped;
        }
        let was = self.ranks[i];
        if is_owner && (self.waiting > 1 || was == Rank::Owner) {
            Rank::Owner
        } else if is_owner {
            // Nobody to outrank: not worth a change.
            Rank::Waiting
        } else if self.eager.has(i) {
            Rank::Eager
        } else if self.contenders <= 1
            && self.ready.has(i)
            && matches!(was, Rank::Owner | Rank::Eager)
        {
            was
        } else {
            Rank::Waiting
        }
    }

    /// How long an LSVM may run from now before the machine must be asked, while somebody else wants to run.
    fn budget_of_ls(&self, i: usize, rank: Rank) -> Nanos {
        let vm = &self.vms[i];
        let turn = if self.turn == Some(i) {
            self.turn_left
        } else {
            vm.piece as i64
        };
        match rank {
            Rank::Owner => to_budget(self.owner_left),
            Rank::Boost => match self.ledger.run_down(i, vm.stop) {
                // Nobody competes now, but somebody may when it wakes.
                None => to_budget(self.ledger.lag(i).max(0) + vm.micro as i64),
                // Others may want their microslice.
                Some(ns) if self.ls.len() > 1 => to_budget(ns.min(turn)),
                Some(ns) => to_budget(ns),
            },
            _ => to_budget(turn),
        }
    }

    /// The same of a batch VM.
    fn budget_of_batch(&self, i: usize, rank: Rank, is_owner: bool) -> Nanos {
        let ns = match rank {
            _ if is_owner => to_budget(self.owner_left),
            Rank::Eager => to_budget(self.vms[i].eager),
            _ => self.config.batch_slice,
        };
        ns.min(self.patience)
    }
}

fn to_budget(ns: i64) -> Nanos {
    ns.max(SHORTEST as i64) as Nanos
}
