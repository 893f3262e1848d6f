// SPDX-License-Identifier: Apache-2.0
//! The boost of LSVMs: the range of lags in which they outrank other VMs, and the turn among them.

use super::super::{Activity, Io, Nanos, RequestCounts, US};
use super::{Interleaved, MIN_BUDGET, Vm, margin};

/// The boost of one LSVM.
#[derive(Debug, Clone, Copy)]
pub(super) struct Boost {
    /// Lag (ns) from which the LSVM is boosted.
    pub(super) start_lag: i64,
    /// Lag (ns) at which the boost ends.
    pub(super) stop_lag: i64,
    /// Length of the present piece, ns.
    pub(super) slice: Nanos,
    /// Length of its pieces beyond the reserve, ns.
    cycle: Nanos,
    /// Moving mean of the run time that its open requests need, ns; 0: unknown. A new value counts a quarter.
    queue: Nanos,
    /// Run time since the last piece ended, ns, and [`RequestCounts::answered`] at that time.
    ran: Nanos,
    answered: u32,
    /// Number of open requests when its present piece began: those that waited for it. Some of them came after the last
    /// piece, from clients that had just got an answer.
    waited: u32,
    /// Length of its pieces without packets, ns.
    quiet: Nanos,
    /// Lag from which it is boosted while no packet waits, ns.
    level: i64,
    /// Lag that it saves in the present cycle, ns.
    saving: i64,
    /// Whether its packets are seen.
    pub(super) sees_packets: bool,
    /// Whether it runs without requests.
    pub(super) is_quiet: bool,
    /// Number of pieces without packets at whose ends it still wanted to run, since it last slept; at most
    /// [`MIN_IDLE_PIECES`].
    idle_pieces: u32,
    /// Whether it runs to answer a request.
    pub(super) is_for_request: bool,
}

/// Number of pieces without packets after which a VM that has not slept computes beside its requests.
const MIN_IDLE_PIECES: u32 = 3;
/// Time for the rest of an answer after its first packet, ns.
const ANSWER_TAIL: Nanos = 50 * US;
/// Time for the next request of a client that asks again at once, ns.
const NEXT_REQUEST_TAIL: Nanos = 200 * US;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    /// It has a reserve.
    Reserve,
    /// Its requests have spent its reserve, or its packets are not seen.
    Spent,
    /// It has no requests.
    Quiet,
}

impl Boost {
    /// A boost with microslices of `micro` ns.
    pub(super) fn new(micro: Nanos) -> Self {
        Self {
            start_lag: 0,
            stop_lag: 0,
            slice: micro,
            cycle: micro,
            queue: 0,
            ran: 0,
            answered: 0,
            waited: 0,
            quiet: micro,
            level: 0,
            saving: 0,
            sees_packets: false,
            is_quiet: false,
            idle_pieces: 0,
            is_for_request: false,
        }
    }

    /// Whether the VM computes beside its requests. The piece of such a VM ends with the answer,
    /// and the VM saves lag in large steps. A VM that does not compute but wants to run may have
    /// the rest of an answer to send, and sleeps after it.
    fn computes(&self) -> bool {
        self.idle_pieces >= MIN_IDLE_PIECES
    }

    /// Updates the mean of what the open requests need, at the end of a piece.
    fn measure_queue(&mut self, requests: RequestCounts) {
        let answered = requests.answered.wrapping_sub(self.answered);
        if answered > 0 {
            let queue = self.ran / Nanos::from(answered) * Nanos::from(self.waited);
            self.queue = match self.queue {
                0 => queue,
                mean => (3 * mean + queue) / 4,
            };
        }
        (self.ran, self.answered) = (0, requests.answered);
    }
}

/// Length of a piece (ns) of a VM beyond its share whose open requests need `queue` ns, 0: unknown or none. `usual` is
/// [`super::Config::cycle_slice`].
///
/// A closed loop of clients asks as much as the VM answers, so by Little's law the mean response time is given. What the length
/// `p` of a piece decides is its spread: the requests that are open when the next piece begins have waited for `p·(1 - s)/s`,
/// and in a steady state they are `queue/p` of all. So the piece is just so long that a tenth of all requests wait, or half of
/// them, or all of them once: whatever the limits allow.
fn cycle_piece(queue: Nanos, usual: Nanos) -> Nanos {
    if queue == 0 {
        return usual;
    }
    let (shortest, longest) = (usual * 5 / 6, usual * 5 / 3);
    // Somewhat longer, because means vary. A piece that misses its part would be too long for nothing.
    let (safe, all) = (queue + queue / 8, queue + queue / 20);
    let wanted = if 10 * safe <= usual {
        10 * safe
    } else if 2 * safe <= longest {
        2 * safe
    } else {
        all / all.div_ceil(longest)
    };
    wanted.clamp(shortest, longest)
}

impl Interleaved {
    /// Updates an LSVM's boost range. Returns whether it is boosted from now on.
    fn update_boost(&mut self, i: usize, activity: &Activity) -> bool {
        let io = activity.io;
        let micro = self.vms[i].micro;
        let (ready, boosted) = (self.ready.contains(i), self.boosted.contains(i));
        let lag = self.ledger.lag(i);
        // Lag that one microslice costs (negative).
        let one = self.ledger.lag_after(i, micro);
        if io == Io::Unknown {
            let boost = &mut self.vms[i].boost;
            *boost = Boost::new(micro);
            boost.stop_lag = one;
            return self.stays_boosted(i, lag, true);
        }
        self.vms[i].boost.sees_packets = true;
        self.vms[i].boost.ran += activity.used;
        if self.capped.contains(i) {
            // The boost goes on unchanged when the VM may run again.
            self.vms[i].boost.is_quiet = !io.is_open();
            return false;
        }
        if !ready {
            self.rest(i, lag);
            return self.stays_boosted(i, lag, true);
        }
        let max_lag = self.vms[i].credit;
        let boost = &mut self.vms[i].boost;
        boost.is_quiet &= !io.is_open();
        let floor = self.ledger.lag_after(i, boost.cycle);
        if boosted && io.is_open() {
            // An open request buys more time, as far as the reserve allows.
            boost.is_for_request = boost.computes();
            boost.stop_lag = (boost.stop_lag.min(lag + one)).max(boost.stop_lag.min(floor));
        } else if boosted && io == Io::Expected && boost.computes() {
            // The next request finds the VM on the core.
            boost.is_for_request = false;
            let tail = self.ledger.lag_after(i, NEXT_REQUEST_TAIL);
            boost.stop_lag = (lag + tail).max(boost.stop_lag.min(floor));
        } else if boosted && io == Io::Answered && boost.is_for_request {
            // An answer may have more packets.
            boost.is_for_request = false;
            let tail = self.ledger.lag_after(i, ANSWER_TAIL);
            boost.stop_lag = (lag + tail).max(boost.stop_lag.min(floor));
        } else if !boosted && io.is_open() && lag < boost.start_lag - margin(boost.slice) {
            boost.is_for_request = boost.computes();
            boost.start_lag = 0;
            (boost.slice, boost.stop_lag) = if lag < -one {
                (boost.cycle, floor)
            } else {
                // A request costs a microslice of the reserve, not all of it. The VM may also run
                // the lag beyond the reserve now: it would do so soon in any case.
                (micro, (lag + one).min(max_lag))
            };
        }
        let stays = self.stays_boosted(i, lag, !boosted) && !self.keeps_quota(i);
        if boosted && !stays {
            self.end_boost(i, lag, activity);
        } else if !boosted && stays {
            self.vms[i].boost.waited = activity.requests.open;
        }
        stays
    }

    /// Whether an LSVM is boosted in its present range. A boost begins only if it `may_begin`.
    fn stays_boosted(&self, i: usize, lag: i64, may_begin: bool) -> bool {
        let boost = &self.vms[i].boost;
        let margin = margin(boost.slice);
        may_begin && lag >= boost.start_lag - margin
            || self.boosted.contains(i)
                && (self.ledger.is_alone(i) || lag > boost.stop_lag + margin)
    }

    /// Whether the requests of an LSVM have spent its reserve: its pieces are longer than its microslice, and the present one is not
    /// paid from what it has saved since.
    pub(super) fn is_beyond_share(&self, i: usize) -> bool {
        let Vm { boost, micro, .. } = &self.vms[i];
        boost.sees_packets && boost.cycle > *micro && boost.stop_lag < 0
    }

    /// Whether an LSVM with a cap waits because it keeps the rest of its quota for requests.
    pub(super) fn keeps_quota(&self, i: usize) -> bool {
        let vm = &self.vms[i];
        self.ready.contains(i) && vm.boost.is_quiet && vm.cap.budget_above_reserve() <= MIN_BUDGET
    }

    /// A sleeping LSVM gets the core when it wakes, as far as its reserve goes. What it saves up is its reserve.
    fn rest(&mut self, i: usize, lag: i64) {
        let vm = &mut self.vms[i];
        let one = self.ledger.lag_after(i, vm.micro);
        if lag > -one {
            vm.boost.cycle = vm.micro;
        }
        let boost = &mut vm.boost;
        (boost.is_for_request, boost.is_quiet, boost.idle_pieces) = (false, false, 0);
        boost.quiet = vm.micro;
        boost.saving = 0;
        boost.level = lag.clamp(0, vm.credit);
        boost.slice = boost.cycle;
        boost.start_lag = 0;
        boost.stop_lag = self.ledger.lag_after(i, boost.cycle);
    }

    /// Chooses the next piece of a busy LSVM whose boost ends at `lag`.
    fn end_boost(&mut self, i: usize, lag: i64, activity: &Activity) {
        let io = activity.io;
        let vm = &mut self.vms[i];
        let (micro, max_lag) = (vm.micro, vm.credit);
        let usual = self.config.cycle_slice;
        let quiet_slice = self.config.quiet_slice.max(micro);
        let one = self.ledger.lag_after(i, micro);
        let boost = &mut vm.boost;
        (boost.is_for_request, boost.is_quiet) = (false, false);
        boost.measure_queue(activity.requests);
        if io == Io::Idle {
            boost.idle_pieces = (boost.idle_pieces + 1).min(MIN_IDLE_PIECES);
        }
        let paid = lag - self.ledger.lag_after(i, boost.slice);
        let floor = self.ledger.lag_after(i, boost.cycle);
        if io.has_packets() && lag <= floor + margin(boost.cycle) {
            // With packets at the end of its reserve it wants more than its share. It goes on when its debt is paid.
            boost.quiet = micro;
            boost.saving = 0;
            boost.cycle = match io {
                // It has many requests in a microslice.
                Io::Flood => micro,
                _ => (boost.cycle * 3 / 2).min(cycle_piece(boost.queue, usual).max(micro)),
            };
            boost.slice = boost.cycle;
            boost.level = 0;
            boost.start_lag = 0;
            boost.stop_lag = self.ledger.lag_after(i, boost.slice);
            return;
        }
        // The VM saves the lag that its packets do not need.
        let is_full = boost.stop_lag >= max_lag && io == Io::Idle;
        boost.cycle = (boost.cycle * 2 / 3).max(micro);
        boost.quiet = match is_full {
            true => (2 * boost.quiet).min(quiet_slice),
            false => micro,
        };
        boost.slice = if is_full { boost.quiet } else { boost.cycle };
        let cost = self.ledger.lag_after(i, boost.slice);
        boost.saving = match (boost.computes(), io) {
            (true, Io::Idle) => 2 * boost.saving,
            (true, _) => boost.saving,
            (false, _) => 0,
        };
        boost.saving = boost.saving.clamp(-one / 2, max_lag.max(-one / 2));
        boost.level = match is_full {
            true => max_lag - cost,
            false => (boost.level.min(paid).max(0) + boost.saving).min(max_lag - cost),
        };
        boost.start_lag = boost.level;
        boost.stop_lag = boost.level + cost;
        boost.is_quiet = true;
    }

    /// Begins and ends the boost of LSVMs, and passes the boost turn among them.
    pub(super) fn pass_boost_turn(&mut self, activity: &[Activity]) {
        if let Some(holder) = self.turn {
            self.turn_left -= activity[holder].used as i64;
        }
        for i in self.ls.iter() {
            let boosted = self.update_boost(i, &activity[i]);
            self.boosted.set(i, boosted);
        }
        let queued = self.boosted.intersection(self.ready);
        for i in queued.difference(self.queued).iter() {
            self.tickets += 1;
            self.vms[i].ticket = self.tickets;
        }
        self.queued = queued;
        let first = queued.iter().map(|i| self.urgency(i)).min();
        if let Some(holder) = self.turn.filter(|&i| queued.contains(i)) {
            let is_first = first == Some(self.urgency(holder));
            let vm = &mut self.vms[holder];
            if is_first && self.turn_left > margin(vm.boost.slice) {
                return;
            }
            // Its piece is over, or a more urgent one came: it goes behind the LSVMs that wait.
            self.tickets += 1;
            vm.ticket = self.tickets;
        }
        self.turn = queued
            .iter()
            .min_by_key(|&i| (self.urgency(i), self.vms[i].ticket));
        if let Some(i) = self.turn {
            self.turn_left = self.vms[i].boost.slice as i64;
        }
    }

    /// Order of LSVMs that are boosted at once: those with a reserve first, those without requests last.
    fn urgency(&self, i: usize) -> Urgency {
        let vm = &self.vms[i];
        if vm.boost.is_quiet {
            Urgency::Quiet
        } else if !vm.boost.sees_packets || self.ledger.lag(i) <= 0 {
            Urgency::Spent
        } else {
            Urgency::Reserve
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_as_long_as_its_requests_need() {
        // Run time of the open requests, and the part of all requests that waits, us and percent.
        for (queue, piece, waiting) in [
            (0, 1500, 0),
            // One connection, 0.12 ms a request: less than a tenth waits.
            (120, 1350, 8),
            // One connection, 0.25 ms a request: a tenth is out of reach, so the wait is short.
            (250, 1250, 20),
            (1000, 2250, 44),
            // 16 connections, 0.11 ms a request: each waits for one piece.
            (1760, 1848, 95),
            // Three pieces for all of them.
            (5000, 1750, 285),
        ] {
            let found = cycle_piece(queue * US, 1500 * US) / US;
            assert_eq!((found, queue * 100 / found), (piece, waiting), "{queue}");
        }
    }
}
