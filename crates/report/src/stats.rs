// SPDX-License-Identifier: Apache-2.0
//! Quantiles, and medians over rounds with their spread.

use serde::Serialize;

/// Samples in ascending order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sorted(Vec<f64>);

impl Sorted {
    /// Sorts samples and drops NaN.
    pub fn new(mut samples: Vec<f64>) -> Self {
        samples.retain(|x| !x.is_nan());
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    /// Pools several sets of samples.
    pub fn pooled<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        Self::new(all.into_iter().flat_map(|s| s.0.iter().copied()).collect())
    }

    /// The quantile `q` (0..=1), interpolated between neighbours (type 7 of Hyndman and Fan 1996,
    /// the default of numpy and R); `None` without samples.
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let last = self.0.len().checked_sub(1)?;
        let at = q.clamp(0.0, 1.0) * last as f64;
        let below = at.floor() as usize;
        let (low, high) = (self.0[below], self.0[(below + 1).min(last)]);
        Some(low + (high - low) * (at - below as f64))
    }

    /// The median; `None` without samples.
    pub fn median(&self) -> Option<f64> {
        self.quantile(0.5)
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Spread of a figure over several rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Median over the rounds.
    pub median: f64,
    /// First quartile.
    pub p25: f64,
    /// Third quartile.
    pub p75: f64,
}

impl Spread {
    /// Spread of the figures of all rounds; `None` without figures.
    pub fn of(rounds: impl IntoIterator<Item = f64>) -> Option<Self> {
        let sorted = Sorted::new(rounds.into_iter().collect());
        Some(Self {
            median: sorted.median()?,
            p25: sorted.quantile(0.25)?,
            p75: sorted.quantile(0.75)?,
        })
    }
}

/// Formats a figure with three significant digits and at most three decimals.
pub fn figure(x: f64) -> String {
    let decimals = match x.abs() {
        a if a >= 99.95 => 0,
        a if a >= 9.995 => 1,
        a if a >= 0.9995 => 2,
        _ => 3,
    };
    format!("{x:.decimals$}")
}

/// Formats a ratio: below one half as a fraction such as `1/22`, otherwise as a multiple such as
/// `1.20x`; `-` for a ratio that is not positive and finite.
pub fn ratio(x: f64) -> String {
    match x {
        x if x <= 0.0 || !x.is_finite() => "-".into(),
        x if x < 0.102 => format!("1/{:.0}", 1.0 / x),
        x if x < 0.4995 => format!("1/{:.1}", 1.0 / x),
        x => format!("{}x", figure(x)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated_between_neighbours() {
        let s = Sorted::new(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!(s.quantile(0.0), Some(1.0));
        assert_eq!(s.median(), Some(2.5));
        assert_eq!(s.quantile(0.25), Some(1.75));
        assert_eq!(s.quantile(1.0), Some(4.0));
    }

    #[test]
    fn without_samples_there_is_no_quantile() {
        assert_eq!(Sorted::new(vec![]).quantile(0.5), None);
        assert_eq!(Sorted::new(vec![f64::NAN]).len(), 0);
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn one_sample_is_every_quantile() {
        assert_eq!(Sorted::new(vec![7.0]).quantile(0.99), Some(7.0));
    }

    #[test]
    fn a_spread_has_the_quartiles_of_the_rounds() {
        let spread = Spread::of([10.0, 50.0, 30.0, 20.0, 40.0]).unwrap();
        assert_eq!(
            spread,
            Spread {
                median: 30.0,
                p25: 20.0,
                p75: 40.0
            }
        );
    }

    #[test]
    fn figures_keep_three_digits() {
        for (x, text) in [
            (0.053_21, "0.053"),
            (0.999_6, "1.00"),
            (4.718, "4.72"),
            (16.53, "16.5"),
            (99.96, "100"),
            (1234.5, "1234"),
            (0.0, "0.000"),
        ] {
            assert_eq!(figure(x), text);
        }
    }

    #[test]
    fn small_ratios_are_fractions() {
        for (x, text) in [
            (0.045, "1/22"),
            (0.1, "1/10"),
            (0.125, "1/8.0"),
            (0.25, "1/4.0"),
            (0.98, "0.980x"),
            (12.3, "12.3x"),
            (f64::NAN, "-"),
            (0.0, "-"),
        ] {
            assert_eq!(ratio(x), text);
        }
    }
}
