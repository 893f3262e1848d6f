// SPDX-License-Identifier: Apache-2.0
//! The ledger of the service that is owed to each VM: the lags of EEVDF (Stoica and Abdel-Wahab, 1995).
//!
//! Each VM has a virtual time v that advances by its run time over its weight w. The members of the ledger are the VMs
//! that compete; the virtual time V of the core advances by what all members run over the sum of their weights. A VM's
//! lag is (V - v)·w: positive service is owed to it, negative service it owes. Whatever the members run is therefore
//! credited to all members by weight and debited to those that ran. The ledger stores lags instead of v and V: it needs
//! no division per VM, and nothing drifts, because the remainder of each division is carried over.
//!
//! A VM that is not a member keeps its lag. The lags of all VMs sum up to zero. (Stock EEVDF moves V to the mean of the
//! members when one joins or leaves, which forgives or charges all of them. Here each lag is exactly the service that
//! the VM was entitled to while it competed, less what it ran.)

use super::Nanos;
use super::vm_set::VmSet;

/// Lags are stored in 1/1024 ns.
const LAG_UNIT: i64 = 1 << 10;
/// Upper bound of the interval between two decisions (about 13 days).
const MAX_INTERVAL: Nanos = 1 << 50;
/// Upper bound of times and lags that are multiplied with a weight (about 18 min), so that the product fits 64 bits.
const MAX_SCALED: i64 = 1 << 40;

#[derive(Debug, Clone, Copy)]
struct Entry {
    weight: i64,
    lag: i64,
    /// The weight of a member; 0 for other VMs.
    share: i64,
}

/// Lags of the VMs of one core, by index.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    entries: Vec<Entry>,
    members: VmSet,
    /// Sum of the members' weights.
    weight: i64,
    /// Service that is not credited yet: the remainder of a division, or service without members.
    remainder: i64,
}

/// Converts ns to the unit of lags.
fn lag_of(ns: i64) -> i64 {
    ns.clamp(-(MAX_INTERVAL as i64), MAX_INTERVAL as i64) * LAG_UNIT
}

impl Ledger {
    pub(crate) fn with_capacity(vms: usize) -> Self {
        Self {
            entries: Vec::with_capacity(vms),
            members: VmSet::default(),
            weight: 0,
            remainder: 0,
        }
    }

    /// Begins a new list of VMs; [`Ledger::push`] adds them in order. `old` receives the present state, from which VMs
    /// that stay are copied.
    pub(crate) fn begin_configure(&mut self, old: &mut Ledger) {
        std::mem::swap(self, old);
        self.entries.clear();
        self.members = VmSet::default();
        (self.weight, self.remainder) = (0, 0);
    }

    /// Adds a VM: a new one with lag 0, or the one at index `from` of `old`.
    pub(crate) fn push(&mut self, weight: u32, old: &Ledger, from: Option<usize>) {
        let weight = i64::from(weight.clamp(1, 65_535));
        let (lag, member) = from.map_or((0, false), |k| (old.entries[k].lag, old.is_member(k)));
        let share = if member { weight } else { 0 };
        self.members.set(self.entries.len(), member);
        self.entries.push(Entry { weight, lag, share });
        self.weight += share;
    }

    /// Credits `amount` (in 1/1024 ns) to the members by weight. Without members the ledger keeps
    /// it for the next ones.
    fn distribute(&mut self, amount: i64) {
        let amount = amount + self.remainder;
        if self.weight == 0 {
            self.remainder = amount;
            return;
        }
        let each = amount.div_euclid(self.weight);
        self.remainder = amount - each * self.weight;
        if each == 0 {
            return;
        }
        for e in &mut self.entries {
            e.lag += e.share * each;
        }
    }

    /// Charges what VMs ran since the last call. What a non-member ran is credited to the members.
    pub(crate) fn charge(&mut self, used: impl Iterator<Item = (usize, Nanos)>) {
        let mut total = 0;
        for (i, ran) in used {
            let ran = ran.min(MAX_INTERVAL) as i64 * LAG_UNIT;
            self.entries[i].lag -= ran;
            total += ran;
        }
        if total != 0 {
            self.distribute(total);
        }
    }

    pub(crate) fn is_member(&self, i: usize) -> bool {
        self.members.contains(i)
    }

    /// The VMs that compete.
    pub(crate) fn members(&self) -> VmSet {
        self.members
    }

    /// Makes a VM a member, or no member.
    pub(crate) fn set_member(&mut self, i: usize, member: bool) {
        let e = &mut self.entries[i];
        let share = if member { e.weight } else { 0 };
        self.weight += share - e.share;
        e.share = share;
        self.members.set(i, member);
    }

    /// Limits a VM's lag to `max` ns; the other members get the difference.
    pub(crate) fn limit_credit(&mut self, i: usize, max: i64) {
        let max = lag_of(max);
        if self.entries[i].lag > max {
            self.set_lag(i, max);
        }
    }

    /// Raises a VM's lag to `min` ns (negative); the other members pay the difference.
    pub(crate) fn limit_debt(&mut self, i: usize, min: i64) {
        let min = lag_of(min);
        if self.entries[i].lag < min {
            self.set_lag(i, min);
        }
    }

    fn set_lag(&mut self, i: usize, lag: i64) {
        // Distributed while the VM is no member, so that it gets none of it.
        let member = self.is_member(i);
        self.set_member(i, false);
        let was = std::mem::replace(&mut self.entries[i].lag, lag);
        self.distribute(was - lag);
        self.set_member(i, member);
    }

    /// Service owed to the VM, ns (rounded down).
    pub(crate) fn lag(&self, i: usize) -> i64 {
        self.entries[i].lag.div_euclid(LAG_UNIT)
    }

    /// Whether VM `a` has received less service for its weight than `b`.
    pub(crate) fn is_behind(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.entries[a], &self.entries[b]);
        i128::from(a.lag) * i128::from(b.weight) > i128::from(b.lag) * i128::from(a.weight)
    }

    /// Whether VM `a` is served before `b` by EEVDF: VMs with a lag of at least 0 first, then the earlier virtual deadline of
    /// a slice of `slice` ns, which is (slice - lag)/w after the core's virtual time.
    pub(crate) fn is_served_before(&self, a: usize, b: usize, slice: Nanos) -> bool {
        let (a, b) = (&self.entries[a], &self.entries[b]);
        if (a.lag >= 0) != (b.lag >= 0) {
            return a.lag >= 0;
        }
        let slice = lag_of(slice as i64);
        i128::from(a.lag - slice) * i128::from(b.weight)
            > i128::from(b.lag - slice) * i128::from(a.weight)
    }

    /// Sum of the weights of all members and the VM, and the other members' part of that sum.
    fn weights_with(&self, i: usize) -> (i64, i64) {
        let e = &self.entries[i];
        let others = self.weight - e.share;
        (others + e.weight, others)
    }

    /// Whether no other VM competes, so that the VM's lag does not change.
    pub(crate) fn is_alone(&self, i: usize) -> bool {
        self.weights_with(i).1 == 0
    }

    /// Lag (ns) of a VM that starts at 0 and runs `ns` without a break: -ns·(1 - s), where s is its share.
    pub(crate) fn lag_after(&self, i: usize, ns: Nanos) -> i64 {
        let (all, others) = self.weights_with(i);
        -(ns.min(MAX_SCALED as Nanos) as i64 * others / all)
    }

    /// How long (ns) the VM runs without a break until its lag falls to `stop` ns: (lag - stop) / (1 - s), at least 0.
    /// `None` if it is alone: its lag does not fall.
    pub(crate) fn run_down(&self, i: usize, stop: i64) -> Option<i64> {
        let (all, others) = self.weights_with(i);
        if others == 0 {
            return None;
        }
        Some((self.lag(i) - stop).clamp(0, MAX_SCALED) * all / others)
    }

    /// How long (ns) the others must run until the VM's lag rises to `target` ns: (target - lag) / s, rounded up; 0 if
    /// it is there.
    pub(crate) fn time_until(&self, i: usize, target: i64) -> Nanos {
        let (all, _) = self.weights_with(i);
        let e = &self.entries[i];
        let missing = lag_of(target) - e.lag;
        if missing <= 0 {
            return 0;
        }
        (missing.min(MAX_SCALED) * all / (e.weight * LAG_UNIT) + 1) as Nanos
    }

    #[cfg(test)]
    fn sum(&self) -> i64 {
        self.remainder + self.entries.iter().map(|e| e.lag).sum::<i64>()
    }
}

#[cfg(test)]
mod tests {
    use super::super::MS;
    use super::*;

    const MS_I: i64 = MS as i64;

    fn competing(weights: &[u32]) -> Ledger {
        let old = Ledger::with_capacity(8);
        let mut l = Ledger::with_capacity(8);
        for (i, &w) in weights.iter().enumerate() {
            l.push(w, &old, None);
            l.set_member(i, true);
        }
        l
    }

    #[test]
    fn what_a_vm_runs_is_credited_to_all_members_by_weight() {
        let mut l = competing(&[256, 256, 512]);
        l.charge([(0, 4 * MS)].into_iter());
        assert_eq!([l.lag(0), l.lag(1), l.lag(2)], [-3 * MS_I, MS_I, 2 * MS_I]);
        assert!(l.is_behind(1, 0) && !l.is_behind(1, 2) && !l.is_behind(2, 1));
    }

    #[test]
    fn nothing_is_lost_by_rounding() {
        let mut l = competing(&[255, 1, 65_535]);
        for k in 0..100_000_u64 {
            l.charge([((k % 3) as usize, 1 + k % 7)].into_iter());
            l.set_member(1, k % 5 > 0);
        }
        assert_eq!(l.sum(), 0);
    }

    #[test]
    fn a_vm_that_is_no_member_earns_nothing_and_keeps_its_lag() {
        let mut l = competing(&[256, 256, 256]);
        l.charge([(0, 6 * MS)].into_iter());
        l.set_member(1, false);
        l.charge([(0, 6 * MS)].into_iter());
        assert_eq!(
            [l.lag(0), l.lag(1), l.lag(2)],
            [-7 * MS_I, 2 * MS_I, 5 * MS_I]
        );
        l.set_member(0, false);
        l.charge([(2, 50 * MS)].into_iter());
        assert_eq!(l.lag(2), 5 * MS_I);
        assert_eq!(l.sum(), 0);
    }

    #[test]
    fn credit_above_the_limit_goes_to_the_other_members() {
        let mut l = competing(&[256, 256, 256]);
        l.charge([(0, 9 * MS)].into_iter());
        l.limit_credit(1, MS_I);
        assert_eq!([l.lag(0), l.lag(1), l.lag(2)], [-5 * MS_I, MS_I, 4 * MS_I]);
        assert_eq!(l.sum(), 0);
    }

    #[test]
    fn a_forgiven_debt_is_paid_by_the_other_members() {
        let mut l = competing(&[256, 256, 256]);
        l.charge([(0, 30 * MS)].into_iter());
        l.limit_debt(0, -8 * MS_I);
        assert_eq!(
            [l.lag(0), l.lag(1), l.lag(2)],
            [-8 * MS_I, 4 * MS_I, 4 * MS_I]
        );
        assert_eq!(l.sum(), 0);
    }

    #[test]
    fn credit_without_members_is_kept_for_the_next_member() {
        let mut l = competing(&[256, 256]);
        l.charge([(0, 6 * MS)].into_iter());
        l.set_member(0, false);
        l.set_member(1, false);
        l.limit_credit(1, MS_I);
        assert_eq!(l.sum(), 0);
        l.set_member(0, true);
        l.charge([(0, MS)].into_iter());
        assert_eq!([l.lag(0), l.lag(1)], [-MS_I, MS_I]);
    }

    #[test]
    fn times_to_run_down_and_to_recover_follow_the_share() {
        let mut l = competing(&[256, 256, 256, 256]);
        assert_eq!(l.run_down(0, l.lag_after(0, 300_000)), Some(300_000));
        l.charge([(0, 300_000)].into_iter());
        assert_eq!(l.lag(0), l.lag_after(0, 300_000));
        let back = l.time_until(0, 0);
        assert!((900_000..900_010).contains(&back), "{back}");
        l.charge([(1, back)].into_iter());
        assert!(l.lag(0) >= 0);
        assert_eq!(l.time_until(0, 0), 0);
        (1..4).for_each(|i| l.set_member(i, false));
        assert!(l.is_alone(0));
        assert_eq!(
            (l.run_down(0, -300_000), l.lag_after(0, 300_000)),
            (None, 0)
        );
    }

    #[test]
    fn vms_that_stay_keep_their_lag_when_others_arrive_and_leave() {
        let mut l = competing(&[256, 256, 512]);
        l.charge([(0, 8 * MS)].into_iter());
        let mut old = Ledger::with_capacity(8);
        l.begin_configure(&mut old);
        l.push(256, &old, Some(0));
        l.push(512, &old, Some(2));
        l.push(100, &old, None);
        assert_eq!([l.lag(0), l.lag(1), l.lag(2)], [-6 * MS_I, 4 * MS_I, 0]);
        assert!(l.is_member(0) && l.is_member(1) && !l.is_member(2));
    }
}
