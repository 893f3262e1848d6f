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
        let (mut running, mut lowest_asleep) = (Rank::Capped, Rank::Boost);
        for i in 0..self.vms.len() {
            let rank = self.rank(i);
            self.vms[i].rank = rank;
            out.ranks[i] = rank;
            out.budgets[i] = self.budget(i, rank);
            let vm = &self.vms[i];
            if rank == Rank::Capped {
                until = until.min(vm.cap.refill(&self.windows));
                continue;
            }
            if vm.ready {
                running = running.max(rank);
            } else {
                lowest_asleep = lowest_asleep.min(rank);
            }
            if contended && vm.ls {
                if !vm.boosted && self.ledger.is_member(i) && self.owner != Some(i) {
                    let back = self.ledger.time_to(i, vm.start).max(SHORTEST);
                    until = until.min(now.saturating_add(back));
                }
                // One LSVM waits for the microslice of another: it comes next when that one sleeps.
                out.notify_block |= rank == Rank::Eager;
            }
        }
        out.until = until;
        // The only one that wants to run has no budget, so the machine must hear of others that wake, unless they
        // take the core from it at once and have a budget themselves. While all sleep, all have a budget.
        out.notify_wake = self.contenders == 1 && self.vms.len() > 1 && lowest_asleep <= running;
    }

    /// While nothing contends nobody asks when an LSVM that is out comes back. It waits for a microslice at most
    /// until the machine hears of those that woke before it.
    fn patience(&self) -> Nanos {
        if self.contenders > 1 {
            return FOREVER;
        }
        let out = self
            .vms
            .iter()
            .filter(|vm| vm.ls && !vm.boosted)
            .map(|vm| vm.micro)
            .min();
        out.map_or(FOREVER, |micro| {
            (micro / (self.vms.len() - self.n_ls).max(1) as u64).max(MICRO_LEAST)
        })
    }

    fn rank(&self, i: usize) -> Rank {
        let vm = &self.vms[i];
        if vm.cap.is_capped() {
            return Rank::Capped;
        }
        if vm.ls {
            return match (vm.boosted, vm.ready) {
                (true, false) => Rank::Boost,
                (true, true) if self.turn == Some(i) => Rank::Boost,
                (true, true) => Rank::Eager,
                (false, _) if self.owner == Some(i) => Rank::Owner,
                (false, _) => Rank::Out,
            };
        }
        if self.owner == Some(i) && (self.waiting > 1 || vm.rank == Rank::Owner) {
            Rank::Owner
        } else if self.owner == Some(i) {
            // Nobody to outrank: not worth a change.
            Rank::Waiting
        } else if vm.eager > 0 {
            Rank::Eager
        } else if self.contenders <= 1 && vm.ready && matches!(vm.rank, Rank::Owner | Rank::Eager) {
            vm.rank
        } else {
            Rank::Waiting
        }
    }

    /// How long the VM may run from now before the machine must be asked.
    fn budget(&self, i: usize, rank: Rank) -> Nanos {
        let vm = &self.vms[i];
        let ns = if self.contenders <= 1 && vm.ready {
            FOREVER
        } else if vm.ls {
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
                    Some(ns) if self.n_ls > 1 => to_budget(ns.min(turn)),
                    Some(ns) => to_budget(ns),
                },
                _ => to_budget(turn),
            }
        } else {
            let ns = match rank {
                _ if self.owner == Some(i) => to_budget(self.owner_left),
                Rank::Eager => to_budget(vm.eager),
                _ => self.config.batch_slice,
            };
            ns.min(self.patience)
        };
        ns.min(vm.cap.budget())
    }
}

fn to_budget(ns: i64) -> Nanos {
    ns.max(SHORTEST as i64) as Nanos
}
