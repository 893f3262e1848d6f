// SPDX-License-Identifier: Apache-2.0
//! The ledger of who is owed how much of a core: the lags of EEVDF (Stoica and Abdel-Wahab, 1995).
//!
//! Each VM has a virtual time v that advances by what it runs over its weight w. The members of the ledger are
//! the VMs that compete; V advances by what they all run over the sum of their weights. A VM's lag is (V - v)·w:
//! the service it is owed (positive) or owes (negative). So whatever the members run is credited to all of them
//! by weight and debited to those that ran. The ledger keeps the lags themselves instead of v and V: no division
//! per VM, and nothing drifts, because the remainder of each division is carried on.
//!
//! A VM that is no member keeps its lag as it is. All lags, the members' and the others', sum up to zero. (Stock
//! EEVDF moves V to the mean of the members when one comes or goes, which forgives or charges all of them; here
//! each lag is exactly what the VM was entitled to while it competed, less what it ran.)

use super::Nanos;
use super::set::Set;

/// Lags are kept in 1/1024 ns.
const ONE: i64 = 1 << 10;
/// No interval between two decisions is taken as longer than this (about 13 days).
const LONGEST: Nanos = 1 << 50;
/// Times and lags that are multiplied with a weight are limited to this (about 18 min), which keeps them in 64 bits.
const SCALED: i64 = 1 << 40;

#[derive(Debug, Clone, Copy)]
struct Entry {
    weight: i64,
    lag: i64,
    /// The weight of a member, 0 of others.
    share: i64,
}

/// Lags of the VMs of one core, by index.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    entries: Vec<Entry>,
    members: Set,
    /// Sum of the members' weights.
    weight: i64,
    /// What could not be divided yet.
    rest: i64,
}

/// To lag units.
fn lag_of(ns: i64) -> i64 {
    ns.clamp(-(LONGEST as i64), LONGEST as i64) * ONE
}

impl Ledger {
    pub(crate) fn with_capacity(vms: usize) -> Self {
        Self {
            entries: Vec::with_capacity(vms),
            members: Set::default(),
            weight: 0,
            rest: 0,
        }
    }

    /// Begins a new set of VMs; [`Ledger::push`] them in order. `old` takes the present state, so that those
    /// that stay can be copied from it.
    pub(crate) fn begin(&mut self, old: &mut Ledger) {
        std::mem::swap(self, old);
        self.entries.clear();
        self.members = Set::default();
        (self.weight, self.rest) = (0, 0);
    }

    /// Adds a VM: a new one with lag 0, or the one that has index `from` in `old`.
    pub(crate) fn push(&mut self, weight: u32, old: &Ledger, from: Option<usize>) {
        let weight = i64::from(weight.clamp(1, 65_535));
        let (lag, member) = from.map_or((0, false), |k| (old.entries[k].lag, old.is_member(k)));
        let share = if member { weight } else { 0 };
        self.members.put(self.entries.len(), member);
        self.entries.push(Entry { weight, lag, share });
        self.weight += share;
    }

    /// Credits `amount` to the members by weight; it waits while there is none.
    fn share_out(&mut self, amount: i64) {
        let amount = amount + self.rest;
        if self.weight == 0 {
            self.rest = amount;
            return;
        }
        let each = amount.div_euclid(self.weight);
        self.rest = amount - each * self.weight;
        if each == 0 {
            return;
        }
        for e in &mut self.entries {
            e.lag += e.share * each;
        }
    }

    /// Takes what VMs ran since the last call. The members are owed what one ran that is no member.
    pub(crate) fn charge(&mut self, used: impl Iterator<Item = (usize, Nanos)>) {
        let mut total = 0;
        for (i, ran) in used {
            let ran = ran.min(LONGEST) as i64 * ONE;
            self.entries[i].lag -= ran;
            total += ran;
        }
        if total != 0 {
            self.share_out(total);
        }
    }

    pub(crate) fn is_member(&self, i: usize) -> bool {
        self.members.has(i)
    }

    /// Those that compete.
    pub(crate) fn members(&self) -> Set {
        self.members
    }

    /// Begins or ends a membership.
    pub(crate) fn set_member(&mut self, i: usize, member: bool) {
        let e = &mut self.entries[i];
        let share = if member { e.weight } else { 0 };
        self.weight += share - e.share;
        e.share = share;
        self.members.put(i, member);
    }

    /// Limits what a VM is owed to `most` ns; what it loses goes to the other members.
    pub(crate) fn limit_credit(&mut self, i: usize, most: i64) {
        let most = lag_of(most);
        if self.entries[i].lag > most {
            self.move_to(i, most);
        }
    }

    /// Limits what a VM owes to `least` ns (negative); what it is forgiven is the other members' loss.
    pub(crate) fn limit_debt(&mut self, i: usize, least: i64) {
        let least = lag_of(least);
        if self.entries[i].lag < least {
            self.move_to(i, least);
        }
    }

    fn move_to(&mut self, i: usize, lag: i64) {
        // Shared out while the VM is no member, so that none of it comes back.
        let member = self.is_member(i);
        self.set_member(i, false);
        let was = std::mem::replace(&mut self.entries[i].lag, lag);
        self.share_out(was - lag);
        self.set_member(i, member);
    }

    /// Service that the VM is owed, ns (rounded down).
    pub(crate) fn lag(&self, i: usize) -> i64 {
        self.entries[i].lag.div_euclid(ONE)
    }

    /// Whether VM `a` has had less service for its weight than `b`.
    pub(crate) fn behind(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.entries[a], &self.entries[b]);
        i128::from(a.lag) * i128::from(b.weight) > i128::from(b.lag) * i128::from(a.weight)
    }

    /// Weight of the members, counting the VM as one, and what of it is the others'.
    fn weights_with(&self, i: usize) -> (i64, i64) {
        let e = &self.entries[i];
        let others = self.weight - e.share;
        (others + e.weight, others)
    }

    /// Whether nobody else competes, so that the VM's lag stands still.
    pub(crate) fn is_alone(&self, i: usize) -> bool {
        self.weights_with(i).1 == 0
    }

    /// The lag (ns) that a VM starting at 0 has after running `ns` in one go: -ns·(1 - s), s its share.
    pub(crate) fn after(&self, i: usize, ns: Nanos) -> i64 {
        let (all, others) = self.weights_with(i);
        -(ns.min(SCALED as Nanos) as i64 * others / all)
    }

    /// How long the VM runs in one go from its lag down to `stop` (ns): (lag - stop) / (1 - s), at least 0. `None`
    /// when alone: it never gets there.
    pub(crate) fn run_down(&self, i: usize, stop: i64) -> Option<i64> {
        let (all, others) = self.weights_with(i);
        if others == 0 {
            return None;
        }
        Some((self.lag(i) - stop).clamp(0, SCALED) * all / others)
    }

    /// How long the others must run until the VM's lag is up to `target` (ns): (target - lag) / s, rounded up; 0
    /// when it is there.
    pub(crate) fn time_to(&self, i: usize, target: i64) -> Nanos {
        let (all, _) = self.weights_with(i);
        let e = &self.entries[i];
        let missing = lag_of(target) - e.lag;
        if missing <= 0 {
            return 0;
        }
        (missing.min(SCALED) * all / (e.weight * ONE) + 1) as Nanos
    }

    #[cfg(test)]
    fn sum(&self) -> i64 {
        self.rest + self.entries.iter().map(|e| e.lag).sum::<i64>()
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
    fn what_one_runs_is_owed_to_all_by_weight() {
        let mut l = competing(&[256, 256, 512]);
        l.charge([(0, 4 * MS)].into_iter());
        assert_eq!([l.lag(0), l.lag(1), l.lag(2)], [-3 * MS_I, MS_I, 2 * MS_I]);
        assert!(l.behind(1, 0) && !l.behind(1, 2) && !l.behind(2, 1));
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
    fn one_who_does_not_compete_earns_nothing_and_keeps_what_it_has() {
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
    fn credit_beyond_the_limit_goes_to_the_others() {
        let mut l = competing(&[256, 256, 256]);
        l.charge([(0, 9 * MS)].into_iter());
        l.limit_credit(1, MS_I);
        assert_eq!([l.lag(0), l.lag(1), l.lag(2)], [-5 * MS_I, MS_I, 4 * MS_I]);
        assert_eq!(l.sum(), 0);
    }

    #[test]
    fn a_debt_forgiven_is_a_loss_of_the_others() {
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
    fn what_nobody_can_take_waits_for_the_next_who_competes() {
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
    fn times_to_run_down_and_to_come_back_are_those_of_the_share() {
        let mut l = competing(&[256, 256, 256, 256]);
        assert_eq!(l.run_down(0, l.after(0, 300_000)), Some(300_000));
        l.charge([(0, 300_000)].into_iter());
        assert_eq!(l.lag(0), l.after(0, 300_000));
        let back = l.time_to(0, 0);
        assert!((900_000..900_010).contains(&back), "{back}");
        l.charge([(1, back)].into_iter());
        assert!(l.lag(0) >= 0);
        assert_eq!(l.time_to(0, 0), 0);
        (1..4).for_each(|i| l.set_member(i, false));
        assert!(l.is_alone(0));
        assert_eq!((l.run_down(0, -300_000), l.after(0, 300_000)), (None, 0));
    }

    #[test]
    fn those_that_stay_keep_their_lag_when_others_come_and_go() {
        let mut l = competing(&[256, 256, 512]);
        l.charge([(0, 8 * MS)].into_iter());
        let mut old = Ledger::with_capacity(8);
        l.begin(&mut old);
        l.push(256, &old, Some(0));
        l.push(512, &old, Some(2));
        l.push(100, &old, None);
        assert_eq!([l.lag(0), l.lag(1), l.lag(2)], [-6 * MS_I, 4 * MS_I, 0]);
        assert!(l.is_member(0) && l.is_member(1) && !l.is_member(2));
    }
}
