// SPDX-License-Identifier: Apache-2.0
//! The scheduling model of vSlicer: equations 2.1 to 2.12 of the dissertation (section 2.3.1) as functions.
//!
//! One core has `m` latency-sensitive VMs (LSVMs) and `n` others (NLSVMs) of equal weight. A scheduling period
//! alternates between one micro-round of all LSVMs (T_S) and one whole slice of one NLSVM (T_NLSVM). Each function says
//! what holds where the equations are silent (no LSVM, no NLSVM, fewer than three VMs); every VM gets T_NLSVM of each
//! period (eq 2.1).

use super::Nanos;

/// Why a microslice does not fit a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// T_m does not divide T_n (eq 2.12).
    #[error(
        "microslice of {t_m} ns does not divide the {t_n} ns that an LSVM gets per round: take {nearest} ns"
    )]
    NotADivisor {
        /// The requested T_m, ns.
        t_m: Nanos,
        /// T_n of the round, ns.
        t_n: Nanos,
        /// The nearest valid T_m, ns.
        nearest: Nanos,
    },
    /// A round without LSVMs has no microslice.
    #[error(
        "no VM on this core is latency sensitive, so there is no microslice: give one the class ls"
    )]
    NoLsvm,
    /// The slice has no length.
    #[error("the slice of a round must be longer than 0 ns: take 30 ms, as Xen does")]
    EmptySlice,
}

/// A scheduling round of one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Round {
    /// Number of LSVMs.
    pub m: u32,
    /// Number of NLSVMs.
    pub n: u32,
    /// Slice of an NLSVM (T_NLSVM), ns.
    pub t_nlsvm: Nanos,
}

impl Round {
    /// Number of NLSVM slices that divide a period: `n`, or 1 without NLSVMs, so that LSVMs alone share a period of
    /// m·T_NLSVM in one long micro-round.
    fn cuts(self) -> u64 {
        u64::from(self.n.max(1))
    }

    /// Whether Algorithm 1 covers this round (n >= 1 and m + n >= 3).
    pub fn in_paper_domain(self) -> bool {
        self.n >= 1 && self.m + self.n >= 3
    }

    /// T_LSVM, what an LSVM runs in a period, ns (eq 2.1).
    pub fn t_lsvm(self) -> Nanos {
        self.t_nlsvm
    }

    /// T_n, what an LSVM runs in one T_S, ns (eq 2.12); T_NLSVM if n = 0. Rounded down.
    pub fn t_n(self) -> Nanos {
        self.t_nlsvm / self.cuts()
    }

    /// T_S, the length of one micro-round of all LSVMs, ns (eqs 2.2, 2.5, 2.12); 0 if m = 0, m·T_NLSVM if n = 0.
    pub fn t_s(self) -> Nanos {
        u64::from(self.m) * self.t_nlsvm / self.cuts()
    }

    /// T_P, the scheduling period, ns (eqs 2.7 to 2.11); 0 on an empty core.
    pub fn t_p(self) -> Nanos {
        (u64::from(self.m) + u64::from(self.n)) * self.t_nlsvm
    }

    /// r, how often an LSVM runs during T_S with microslices of `t_m` ns (eqs 2.3, 2.4, 2.12).
    ///
    /// # Errors
    /// [`ModelError::NotADivisor`] unless T_n is a multiple of `t_m`, up to rounding of `t_m` to whole ns;
    /// [`ModelError::NoLsvm`] if m = 0; [`ModelError::EmptySlice`] if T_NLSVM is 0.
    pub fn r(self, t_m: Nanos) -> Result<u64, ModelError> {
        if self.m == 0 {
            return Err(ModelError::NoLsvm);
        }
        if self.t_nlsvm == 0 {
            return Err(ModelError::EmptySlice);
        }
        // r·t_m = T_NLSVM / n, multiplied out so that nothing is rounded.
        let cuts = self.cuts();
        let fits =
            |r: u64| t_m > 0 && (r * cuts).saturating_mul(t_m).abs_diff(self.t_nlsvm) < r * cuts;
        let down = (self.t_nlsvm / cuts.saturating_mul(t_m.max(1))).max(1);
        for r in [down, down + 1] {
            if fits(r) {
                return Ok(r);
            }
        }
        let part = |r: u64| self.t_nlsvm / (cuts * r);
        let (long, short) = (part(down), part(down + 1).max(1));
        let nearest = if long.abs_diff(t_m) <= short.abs_diff(t_m) {
            long
        } else {
            short
        };
        Err(ModelError::NotADivisor {
            t_m,
            t_n: self.t_n(),
            nearest,
        })
    }

    /// Longest T_m (ns) that keeps an LSVM's wait during T_S at or below `t_l` ns: T_l / (m - 1), rounded down (section
    /// 2.3.1). `None` (no bound) with fewer than two LSVMs.
    pub fn longest_t_m(self, t_l: Nanos) -> Option<Nanos> {
        (self.m >= 2).then(|| t_l / u64::from(self.m - 1))
    }

    /// Longest wait of a busy LSVM, T_NLSVM + (m - 1)·T_m, ns (section 2.3.1); (m - 1)·T_m without NLSVMs. `None` if
    /// m = 0.
    pub fn worst_wait(self, t_m: Nanos) -> Option<Nanos> {
        let slice = if self.n == 0 { 0 } else { self.t_nlsvm };
        self.best_wait(t_m).map(|best| slice + best)
    }

    /// Shortest wait of a busy LSVM, ns: one microslice of each other LSVM. `None` if m = 0.
    pub fn best_wait(self, t_m: Nanos) -> Option<Nanos> {
        self.m.checked_sub(1).map(|others| u64::from(others) * t_m)
    }

    /// Mean wait of a busy LSVM over its turns, ns: (m - 1)·T_m + T_NLSVM / r.
    ///
    /// # Errors
    /// As [`Round::r`].
    pub fn mean_wait(self, t_m: Nanos) -> Result<Nanos, ModelError> {
        let r = self.r(t_m)?;
        let slice = if self.n == 0 { 0 } else { self.t_nlsvm };
        Ok(u64::from(self.m - 1) * t_m + slice / r)
    }

    /// Microslices per slice of the credit scheduler's period, m·n·r / (m + n): the dissertation's measure of how many
    /// more context switches microslices cost.
    ///
    /// # Errors
    /// As [`Round::r`].
    pub fn microslice_ratio(self, t_m: Nanos) -> Result<f64, ModelError> {
        let vms = f64::from(self.m) + f64::from(self.n);
        Ok(f64::from(self.m) * self.cuts() as f64 * self.r(t_m)? as f64 / vms)
    }

    /// All context switches per slice of the credit scheduler's period, (m·n·r + n) / (m + n):
    /// [`Round::microslice_ratio`] plus the switches to NLSVMs.
    ///
    /// # Errors
    /// As [`Round::r`]. m = 0 is no error: the answer is 1, because no slice is divided.
    pub fn switch_ratio(self, t_m: Nanos) -> Result<f64, ModelError> {
        if self.m == 0 {
            return Ok(1.0);
        }
        let vms = f64::from(self.m) + f64::from(self.n);
        Ok(self.microslice_ratio(t_m)? + f64::from(self.n) / vms)
    }

    /// Longest wait of a busy VM under the credit scheduler, (m + n - 1)·T_NLSVM, ns (section 2.3.1).
    pub fn credit_wait(self) -> Nanos {
        u64::from((self.m + self.n).saturating_sub(1)) * self.t_nlsvm
    }

    /// Slice (ns) of the credit scheduler at which no VM waits longer than `wait` ns. `None` if a VM is alone and never
    /// waits.
    pub fn credit_slice_for(self, wait: Nanos) -> Option<Nanos> {
        match self.m + self.n {
            0 | 1 => None,
            vms => Some(wait / u64::from(vms - 1)),
        }
    }

    /// Context switches of the credit scheduler with slices of `slice` ns, per switch with T_NLSVM.
    pub fn credit_switch_ratio(self, slice: Nanos) -> f64 {
        self.t_nlsvm as f64 / slice.max(1) as f64
    }
}

/// Longest wait (ns) of a busy LSVM under [`super::Interleaved`]: after its microslice the others run T_m·(1 - s)/s,
/// which keeps its share `s` exact, then each other LSVM may finish one microslice of its own.
///
/// `share` is the VM's part of the core in (0, 1], `others` the microslices (ns) of the other LSVMs on the core.
pub fn interleaved_wait(share: f64, t_m: Nanos, others: impl IntoIterator<Item = Nanos>) -> Nanos {
    let share = share.clamp(1e-6, 1.0);
    (t_m as f64 * (1.0 - share) / share).round() as Nanos + others.into_iter().sum::<Nanos>()
}

#[cfg(test)]
mod tests {
    use super::super::{MS, US};
    use super::*;

    /// Figure 2.6: one LSVM, three NLSVMs.
    const ONE: Round = Round {
        m: 1,
        n: 3,
        t_nlsvm: 30 * MS,
    };
    /// Figure 2.7: two of each.
    const TWO: Round = Round {
        m: 2,
        n: 2,
        t_nlsvm: 30 * MS,
    };

    #[test]
    fn one_lsvm_waits_30_ms_instead_of_90() {
        assert_eq!(ONE.credit_wait(), 90 * MS);
        assert_eq!(ONE.t_n(), 10 * MS);
        assert_eq!(ONE.r(10 * MS), Ok(1));
        assert_eq!(ONE.worst_wait(10 * MS), Some(30 * MS));
    }

    #[test]
    fn two_lsvms_wait_5_to_35_ms_and_15_on_average() {
        assert_eq!(TWO.t_s(), 30 * MS);
        assert_eq!(TWO.t_n(), 15 * MS);
        assert_eq!(TWO.r(5 * MS), Ok(3));
        assert_eq!(TWO.best_wait(5 * MS), Some(5 * MS));
        assert_eq!(TWO.worst_wait(5 * MS), Some(35 * MS));
        assert_eq!(TWO.mean_wait(5 * MS), Ok(15 * MS));
    }

    #[test]
    fn for_15_ms_the_credit_scheduler_switches_6_times_as_often_and_vslicer_3_times() {
        assert_eq!(TWO.credit_slice_for(15 * MS), Some(5 * MS));
        assert_eq!(TWO.credit_switch_ratio(5 * MS), 6.0);
        assert_eq!(TWO.microslice_ratio(5 * MS), Ok(3.0));
        assert_eq!(TWO.switch_ratio(5 * MS), Ok(3.5));
    }

    #[test]
    fn a_period_gives_every_vm_one_slice() {
        for m in 0..6 {
            for n in 0..6 {
                let round = Round {
                    m,
                    n,
                    t_nlsvm: 60 * MS,
                };
                let (m, n) = (u64::from(m), u64::from(n));
                // Eqs 2.7 and 2.10.
                assert_eq!(round.t_p(), m * round.t_lsvm() + n * round.t_nlsvm);
                // Eqs 2.5, 2.6 and 2.9; n = 0 counts as one NLSVM slice.
                assert_eq!(round.t_s(), m * round.t_n());
                if n > 0 {
                    assert_eq!(round.t_lsvm(), n * round.t_n());
                    assert_eq!(round.t_p(), n * round.t_s() + n * round.t_nlsvm);
                }
            }
        }
    }

    #[test]
    fn a_microslice_that_does_not_fit_is_refused_with_the_nearest_that_does() {
        let Err(ModelError::NotADivisor { nearest, .. }) = TWO.r(4 * MS) else {
            panic!("4 ms is no part of 15 ms")
        };
        assert_eq!(nearest, 3_750 * US);
        assert_eq!(TWO.r(nearest), Ok(4));
        // Longer than T_n: T_n itself is the longest that fits.
        let Err(ModelError::NotADivisor { nearest, .. }) = TWO.r(20 * MS) else {
            panic!("20 ms is longer than T_n")
        };
        assert_eq!(nearest, 15 * MS);
        // A nearest value that is no whole number of ns is accepted when it is given back.
        assert!(TWO.r(Nanos::MAX).is_err());
        let seven = Round {
            m: 1,
            n: 7,
            t_nlsvm: 30 * MS,
        };
        let Err(ModelError::NotADivisor { nearest, .. }) = seven.r(MS) else {
            panic!("30/7 is no multiple of 1")
        };
        assert_eq!(seven.r(nearest), Ok(4));
        assert!(matches!(
            seven.r(0),
            Err(ModelError::NotADivisor { nearest: 1, .. })
        ));
        let text = TWO.r(4 * MS).unwrap_err().to_string();
        assert!(text.contains("take 3750000 ns"), "{text}");
    }

    #[test]
    fn the_latency_asked_for_bounds_the_microslice() {
        assert_eq!(TWO.longest_t_m(5 * MS), Some(5 * MS));
        assert_eq!(Round { m: 4, ..TWO }.longest_t_m(10 * MS), Some(3_333_333));
        assert_eq!(ONE.longest_t_m(5 * MS), None);
    }

    #[test]
    fn rounds_outside_the_papers_domain_are_defined() {
        let no_ls = Round {
            m: 0,
            n: 3,
            t_nlsvm: 30 * MS,
        };
        assert_eq!((no_ls.t_s(), no_ls.worst_wait(MS)), (0, None));
        assert_eq!(no_ls.r(MS), Err(ModelError::NoLsvm));
        assert_eq!(no_ls.switch_ratio(MS), Ok(1.0));
        let only_ls = Round {
            m: 3,
            n: 0,
            t_nlsvm: 30 * MS,
        };
        assert_eq!(
            (only_ls.t_n(), only_ls.t_s(), only_ls.t_p()),
            (30 * MS, 90 * MS, 90 * MS)
        );
        assert_eq!(only_ls.worst_wait(5 * MS), Some(10 * MS));
        let pair = Round {
            m: 1,
            n: 1,
            t_nlsvm: 30 * MS,
        };
        assert_eq!(
            (pair.t_p(), pair.worst_wait(10 * MS)),
            (60 * MS, Some(30 * MS))
        );
        let alone = Round {
            m: 1,
            n: 0,
            t_nlsvm: 30 * MS,
        };
        assert_eq!((alone.credit_wait(), alone.worst_wait(MS)), (0, Some(0)));
        assert_eq!(alone.credit_slice_for(MS), None);
        let empty = Round {
            m: 0,
            n: 0,
            t_nlsvm: 30 * MS,
        };
        assert_eq!((empty.t_p(), empty.credit_wait()), (0, 0));
        assert!(ONE.in_paper_domain() && !only_ls.in_paper_domain() && !pair.in_paper_domain());
        assert_eq!(
            Round { t_nlsvm: 0, ..ONE }.r(1),
            Err(ModelError::EmptySlice)
        );
    }

    #[test]
    fn interleaving_brings_the_wait_below_the_slice_of_the_others() {
        assert_eq!(interleaved_wait(0.25, 300 * US, []), 900 * US);
        assert_eq!(interleaved_wait(0.25, 300 * US, [100 * US, MS]), 2_000 * US);
        assert_eq!(interleaved_wait(1.0, 300 * US, []), 0);
    }
}
