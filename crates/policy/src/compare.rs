// SPDX-License-Identifier: Apache-2.0
//! Whether a change made a difference: pairs of windows, one without and one with the change.
//!
//! Wilcoxon's signed-rank test compares the logarithms of the pairs' ratios with zero. It assumes only that they are
//! distributed symmetrically about zero if the change has no effect. That holds if each pair's order is drawn by lot. The
//! estimate is the median of the means of any two of them (Walsh averages), with the interval of the test (Hodges and Lehmann,
//! Estimates of Location Based on Rank Tests, 1963; Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, section 3.3).

/// Maximum number of pairs that are compared; later ones are ignored.
pub const MAX_PAIRS: usize = 200;

/// Measurements without and with a change.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Comparison {
    /// Logarithms of with / without.
    ratios: Vec<f64>,
}

/// By how much the change altered a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// With the change, as a multiple of without.
    pub ratio: f64,
    /// Lower and upper bound of the ratio.
    pub interval: (f64, f64),
}

impl Comparison {
    /// Adds a pair. Ignores one in which a figure is not positive: it has no ratio.
    pub fn add(&mut self, without: f64, with: f64) {
        let ratio = (with / without).ln();
        if without > 0.0 && with > 0.0 && ratio.is_finite() && self.ratios.len() < MAX_PAIRS {
            self.ratios.push(ratio);
        }
    }

    /// Number of pairs.
    pub fn pairs(&self) -> usize {
        self.ratios.len()
    }

    /// The ratio, with an interval that misses the true one with at most this probability (between 0.0 and 1.0). `None` while
    /// there are too few pairs for such an interval: below 8 for 0.01.
    pub fn estimate(&self, error: f64) -> Option<Estimate> {
        let n = self.ratios.len();
        let cut = cut_off(n, error / 2.0)?;
        let mut means = Vec::with_capacity(n * (n + 1) / 2);
        for (i, a) in self.ratios.iter().enumerate() {
            means.extend(self.ratios[i..].iter().map(|b| f64::midpoint(*a, *b)));
        }
        means.sort_by(f64::total_cmp);
        let (middle, last) = (means.len() / 2, means.len() - 1);
        let median = match means.len() % 2 {
            0 => f64::midpoint(means[middle - 1], means[middle]),
            _ => means[middle],
        };
        Some(Estimate {
            ratio: median.exp(),
            interval: (means[cut].exp(), means[last - cut].exp()),
        })
    }
}

/// The largest k for which the signed-rank statistic of `n` pairs is at most k with no more than this probability; `None` if there
/// is none.
fn cut_off(n: usize, tail: f64) -> Option<usize> {
    let mut cumulative = 0.0;
    let mut cut = None;
    for (statistic, probability) in distribution(n).into_iter().enumerate() {
        cumulative += probability;
        if cumulative > tail {
            break;
        }
        cut = Some(statistic);
    }
    cut
}

/// The probability of each value of the signed-rank statistic of `n` pairs, if chance alone is at work: each rank 1..=n counts with
/// probability one half.
fn distribution(n: usize) -> Vec<f64> {
    let mut of = vec![0.0; n * (n + 1) / 2 + 1];
    of[0] = 1.0;
    for rank in 1..=n {
        let reached = rank * (rank - 1) / 2;
        for sum in (0..=reached).rev() {
            of[sum] *= 0.5;
            of[sum + rank] += of[sum];
        }
    }
    of
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_smaller(found: &Estimate) -> bool {
        found.interval.1 < 1.0
    }

    fn is_larger(found: &Estimate) -> bool {
        found.interval.0 > 1.0
    }

    fn of(pairs: &[(f64, f64)]) -> Comparison {
        let mut comparison = Comparison::default();
        pairs.iter().for_each(|(a, b)| comparison.add(*a, *b));
        comparison
    }

    #[test]
    fn critical_values_are_those_of_the_tables() {
        // Two-sided 0.05 and 0.01: Hollander, Wolfe and Chicken, table A.4.
        for (n, at_5, at_1) in [
            (8, Some(3), Some(0)),
            (10, Some(8), Some(3)),
            (20, Some(52), Some(37)),
        ] {
            assert_eq!((cut_off(n, 0.025), cut_off(n, 0.005)), (at_5, at_1), "{n}");
        }
        assert_eq!(cut_off(7, 0.005), None);
    }

    #[test]
    fn a_change_of_all_pairs_is_seen_and_its_size_found() {
        let pairs: Vec<_> = (0..12)
            .map(|i| (f64::from(10 + i), f64::from(10 + i) / 4.0))
            .collect();
        let comparison = of(&pairs);
        let found = comparison.estimate(0.01).unwrap();
        assert!(
            (found.ratio - 0.25).abs() < 1e-9 && is_smaller(&found),
            "{found:?}"
        );
        assert!(!is_larger(&found) && comparison.pairs() == 12);
    }

    #[test]
    fn one_wild_pair_does_not_decide() {
        let mut pairs = vec![(1.0, 1000.0)];
        pairs.extend((0..11).map(|i| (10.0, if i % 2 == 0 { 11.0 } else { 9.0 })));
        let found = of(&pairs).estimate(0.01).unwrap();
        assert!(!is_larger(&found) && !is_smaller(&found), "{found:?}");
    }

    #[test]
    fn pairs_without_a_ratio_are_ignored() {
        let comparison = of(&[
            (0.0, 1.0),
            (1.0, 0.0),
            (-1.0, 1.0),
            (f64::NAN, 1.0),
            (1.0, f64::INFINITY),
        ]);
        assert_eq!(comparison.pairs(), 0);
        assert_eq!(comparison.estimate(0.01), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Chance alone is taken for a difference in at most 1 of 100 comparisons. More than 5 of 40 would do so once in 300,000 batches.
        #[test]
        fn equal_sides_show_no_difference(
            batch in proptest::collection::vec(
                proptest::collection::vec((0.1f64..10.0, 0.1f64..10.0), 16), 40
            )
        ) {
            let seen = batch.iter().filter(|pairs| {
                let found = of(pairs).estimate(0.01).unwrap();
                is_larger(&found) || is_smaller(&found)
            });
            prop_assert!(seen.count() <= 5);
        }

        #[test]
        fn swapping_the_sides_inverts_the_ratio(pairs in proptest::collection::vec((0.1f64..10.0, 0.1f64..10.0), 8..40)) {
            let swapped: Vec<_> = pairs.iter().map(|(a, b)| (*b, *a)).collect();
            let (one, other) = (of(&pairs).estimate(0.01).unwrap(), of(&swapped).estimate(0.01).unwrap());
            prop_assert!((one.ratio * other.ratio - 1.0).abs() < 1e-9);
            prop_assert!((one.interval.0 * other.interval.1 - 1.0).abs() < 1e-9);
            prop_assert!(one.interval.0 <= one.ratio && one.ratio <= one.interval.1);
        }
    }
}
