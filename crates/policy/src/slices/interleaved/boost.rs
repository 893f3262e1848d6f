// SPDX-License-Identifier: Apache-2.0
//! The boost of LSVMs: the range of lags in which they outrank other VMs, and the turn among them.

use super::super::{Activity, Io, Nanos};
use super::{Interleaved, Vm, margin};

impl Interleaved {
    /// Updates an LSVM's boost range. Returns whether it is boosted from now on.
    fn update_boost(&mut self, i: usize, io: Io) -> bool {
        let Vm {
            micro,
            mut current_slice,
            mut start_lag,
            mut stop_lag,
            ..
        } = self.vms[i];
        let (ready, boosted) = (self.ready.contains(i), self.boosted.contains(i));
        let lag = self.ledger.lag(i);
        let quiet = ready && io == Io::Idle;
        if !boosted || !ready {
            (current_slice, start_lag, stop_lag) = self.boost_range(i, quiet);
            if ready && io == Io::Pending && lag > start_lag {
                // A packet is worth one microslice, not the whole reserve. What exceeds the reserve the VM would run
                // soon anyway.
                stop_lag = (lag + self.ledger.lag_after(i, micro)).min(self.vms[i].credit);
            }
        } else if io == Io::Unknown {
            (current_slice, start_lag, stop_lag) = (micro, 0, self.ledger.lag_after(i, micro));
        } else if io == Io::Pending {
            // Another packet buys one more microslice, as far as the reserve allows.
            let one = self.ledger.lag_after(i, micro);
            stop_lag = stop_lag.min(lag + one).max(one);
        }
        let margin = margin(current_slice);
        let stays_boosted = lag >= start_lag - margin && (!boosted || !ready || io == Io::Unknown)
            || boosted && (self.ledger.is_alone(i) || lag > stop_lag + margin);
        if boosted && !stays_boosted {
            // Undo what a packet changed.
            (current_slice, start_lag, stop_lag) = self.boost_range(i, quiet);
        }
        let vm = &mut self.vms[i];
        (vm.current_slice, vm.start_lag, vm.stop_lag) = (current_slice, start_lag, stop_lag);
        stays_boosted
    }

    /// Length of an LSVM's slice (ns), and the lags at which its boost begins and ends.
    fn boost_range(&self, i: usize, quiet: bool) -> (Nanos, i64, i64) {
        let Vm { micro, credit, .. } = self.vms[i];
        if quiet {
            // The slice ends with as much lag in reserve as a sleeping LSVM has.
            let current_slice = micro.max(self.config.quiet_slice);
            (
                current_slice,
                credit - self.ledger.lag_after(i, current_slice),
                credit,
            )
        } else {
            (micro, 0, self.ledger.lag_after(i, micro))
        }
    }

    /// Begins and ends the boost of LSVMs, and passes the boost turn among them.
    pub(super) fn pass_boost_turn(&mut self, activity: &[Activity]) {
        if let Some(holder) = self.turn {
            self.turn_left -= activity[holder].used as i64;
        }
        for i in self.ls.iter() {
            let boosted = self.update_boost(i, activity[i].io);
            self.boosted.set(i, boosted);
        }
        let queued = self.boosted.intersection(self.ready);
        for i in queued.difference(self.queued).iter() {
            self.tickets += 1;
            self.vms[i].ticket = self.tickets;
        }
        self.queued = queued;
        if let Some(holder) = self.turn.filter(|&i| queued.contains(i)) {
            let vm = &mut self.vms[holder];
            if self.turn_left > margin(vm.current_slice) {
                return;
            }
            // Its microslice is over: it goes behind the LSVMs that wait.
            self.tickets += 1;
            vm.ticket = self.tickets;
        }
        self.turn = queued.iter().min_by_key(|&i| self.vms[i].ticket);
        if let Some(i) = self.turn {
            self.turn_left = self.vms[i].current_slice as i64;
        }
    }
}
