// SPDX-License-Identifier: Apache-2.0
//! Plans of an open loop: when each request is due, fixed before the run.

use std::time::Duration;

use super::{MAX_REQUESTS, Random};
use crate::error::{Error, Result};

/// Time between two requests of an open loop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Spacing {
    /// Exponentially distributed: requests of many clients that know nothing of each other.
    #[default]
    Poisson,
    /// Always the same, from a random first moment on.
    Even,
}

/// Plans the moments, in nanoseconds from the start of a run of length `time`, at which requests are
/// due: `rate` of them a second. The same seed gives the same plan.
///
/// # Errors
/// [`Error::Load`] for a rate that is not positive, or for more than [`MAX_REQUESTS`] requests.
pub fn plan_arrivals(rate: f64, time: Duration, spacing: Spacing, seed: u64) -> Result<Vec<u64>> {
    let expected = rate * time.as_secs_f64();
    if !(rate > 0.0 && expected <= MAX_REQUESTS as f64) {
        return Err(Error::Load(format!(
            "{rate} requests/s for {} s; the rate must be above 0, and the requests at most {MAX_REQUESTS}",
            time.as_secs_f64()
        )));
    }
    let mut random = Random::new(seed);
    let gap = 1e9 / rate;
    let end = time.as_nanos() as f64;
    let mut plan = Vec::with_capacity(expected as usize + 1);
    let mut due = match spacing {
        Spacing::Poisson => random.exponential() * gap,
        Spacing::Even => random.unit() * gap,
    };
    let first = due;
    while due < end {
        plan.push(due as u64);
        due = match spacing {
            Spacing::Poisson => due + random.exponential() * gap,
            // from the first one, so that rounding errors do not add up
            Spacing::Even => first + plan.len() as f64 * gap,
        };
    }
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gaps(plan: &[u64]) -> Vec<f64> {
        plan.windows(2)
            .map(|pair| (pair[1] - pair[0]) as f64)
            .collect()
    }

    proptest! {
        /// A Poisson plan has rate x time requests, within six standard deviations, in order, and
        /// none after the end.
        #[test]
        fn a_poisson_plan_keeps_its_rate(
            rate in 10.0..5000.0_f64,
            ms in 100..4000_u64,
            seed: u64,
        ) {
            let time = Duration::from_millis(ms);
            let plan = plan_arrivals(rate, time, Spacing::Poisson, seed).unwrap();
            let expected = rate * time.as_secs_f64();
            let off = (plan.len() as f64 - expected).abs();
            prop_assert!(off <= 6.0 * expected.sqrt() + 6.0, "{} of {expected}", plan.len());
            prop_assert!(plan.is_sorted());
            prop_assert!(plan.iter().all(|due| *due < time.as_nanos() as u64));
            prop_assert_eq!(&plan, &plan_arrivals(rate, time, Spacing::Poisson, seed).unwrap());
            if plan.len() > 3 {
                let other = plan_arrivals(rate, time, Spacing::Poisson, seed.wrapping_add(1));
                prop_assert_ne!(plan, other.unwrap());
            }
        }

        /// An even plan has the same gap everywhere, and one request more or less than rate x time.
        #[test]
        fn an_even_plan_has_one_gap(rate in 1.0..5000.0_f64, ms in 100..4000_u64, seed: u64) {
            let time = Duration::from_millis(ms);
            let plan = plan_arrivals(rate, time, Spacing::Even, seed).unwrap();
            let expected = rate * time.as_secs_f64();
            prop_assert!((plan.len() as f64 - expected).abs() <= 1.0, "{} of {expected}", plan.len());
            prop_assert!(gaps(&plan).iter().all(|gap| (gap - 1e9 / rate).abs() <= 1.0));
            prop_assert!(plan.iter().all(|due| *due < time.as_nanos() as u64));
        }
    }

    /// The standard deviation of exponential gaps is their mean, and a part e^-1 of them is longer
    /// than the mean. Uniform gaps of the same mean fail both.
    #[test]
    fn gaps_of_a_poisson_plan_are_exponential() {
        for seed in 1..6 {
            let time = Duration::from_secs(20);
            let gaps = gaps(&plan_arrivals(1000.0, time, Spacing::Poisson, seed).unwrap());
            let count = gaps.len() as f64;
            let mean = gaps.iter().sum::<f64>() / count;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count;
            let spread = variance.sqrt() / mean;
            assert!((0.95..1.05).contains(&spread), "{spread}");
            let longer = gaps.iter().filter(|gap| **gap > mean).count() as f64 / count;
            assert!((longer - (-1.0_f64).exp()).abs() < 0.02, "{longer}");
        }
    }

    #[test]
    fn an_impossible_rate_is_refused() {
        for rate in [0.0, -1.0, f64::NAN, 1e12] {
            let plan = plan_arrivals(rate, Duration::from_secs(1), Spacing::Even, 1);
            assert!(matches!(plan, Err(Error::Load(_))), "{rate}");
        }
    }
}
