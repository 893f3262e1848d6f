// SPDX-License-Identifier: Apache-2.0
use proptest::prelude::*;

use super::*;

/// Times from 0 to 0.9 s, of all magnitudes.
fn times() -> impl Strategy<Value = Vec<u64>> {
    let time = (0..30_u32).prop_flat_map(|octave| 0..(1_u64 << octave).min(900_000_000));
    prop::collection::vec(time, 1..400)
}

fn waits(times: &[u64], whole: u64) -> Waits {
    let mut histogram = Histogram::default();
    times.iter().for_each(|t| histogram.add(*t, 1));
    Waits {
        histogram,
        time: whole,
    }
}

/// P(R > x) times the whole time.
fn excess(times: &[u64], x: f64) -> f64 {
    times.iter().map(|t| (*t as f64 - x).max(0.0)).sum()
}

proptest! {
    #[test]
    fn a_quantile_is_in_the_bucket_of_the_exact_value(mut times in times(), q in 0.0..=1.0_f64) {
        let got = waits(&times, 1).histogram.quantile(q).unwrap();
        times.sort_unstable();
        let rank = ((q * times.len() as f64).ceil() as usize).max(1);
        let (low, high) = bucket_bounds(bucket_of(times[rank - 1]));
        prop_assert_eq!(got, high, "exact {} in {}..{}", times[rank - 1], low, high);
    }

    #[test]
    fn the_mean_of_the_longest_is_at_most_a_quarter_octave_too_short(mut times in times(), part in 0.01..=1.0_f64) {
        let histogram = waits(&times, 1).histogram;
        times.sort_unstable_by(|a, b| b.cmp(a));
        let wanted = part * times.len() as f64;
        let weight = |i: usize| (wanted - i as f64).clamp(0.0, 1.0);
        let sum: f64 = times.iter().enumerate().map(|(i, t)| *t as f64 * weight(i)).sum();
        let (exact, got) = (sum / wanted, histogram.tail_mean(part).unwrap());
        // The first bucket begins at 0, so a time in it may be off by its length.
        prop_assert!(got <= exact * 1.000_001 && got >= exact / 1.26 - 1_024.0, "{got}, exact {exact}");
        let mean = times.iter().sum::<u64>() as f64 / times.len() as f64;
        prop_assert!((histogram.tail_mean(1.0).unwrap() - mean).abs() <= mean * 1e-9);
    }

    #[test]
    fn a_residual_wait_is_in_the_bucket_of_the_exact_value_and_not_shorter(
        times in times(), idle in 0.0..3.0_f64, q in 0.0..=1.0_f64,
    ) {
        let waited: u64 = times.iter().sum();
        let whole = (waited as f64 * (1.0 + idle)) as u64 + 1;
        let got = waits(&times, whole).residual_quantile(q).unwrap();
        let allowed = (1.0 - q) * whole as f64;
        // Bisection for the least x at which no more than `allowed` is beyond.
        let (mut low, mut high) = (0.0, 1e9);
        for _ in 0..100 {
            let middle = (low + high) / 2.0;
            if excess(&times, middle) > allowed { low = middle } else { high = middle }
        }
        let (least, most) = bucket_bounds(bucket_of(high as u64));
        prop_assert!(got as f64 >= high - 1.0, "{got}, exact {high}");
        prop_assert!(got + 1 >= least && got <= most, "{got}, exact {high} in {least}..{most}");
    }

    #[test]
    fn the_mean_residual_wait_is_within_a_hundredth_of_the_exact_value(times in times()) {
        let whole = times.iter().sum::<u64>() + 1;
        let got = waits(&times, whole).residual_mean().unwrap() as f64;
        let squares: f64 = times.iter().map(|t| (*t as f64).powi(2)).sum();
        let exact = squares / (2.0 * whole as f64);
        // In the first bucket, below 1.28 us, the error is half the bucket at most.
        prop_assert!((got - exact).abs() <= 0.01 * exact + 640.0, "{got}, exact {exact}");
    }
}

#[test]
fn many_short_waits_hide_a_long_one_from_the_quantile_of_waits_but_not_from_the_residual_wait() {
    // In a second: 10,000 waits of 2 us, and 50 of 10 ms.
    let mut w = waits(&[], 1_000_000_000);
    w.histogram.add(2_000, 10_000);
    w.histogram.add(10_000_000, 50);
    assert!(w.histogram.quantile(0.99).unwrap() < 3_000);
    // It waits for half of the time, so the median is 0, and 99 of 100 moments are among the rests up to 9.8 ms.
    assert!(w.residual_quantile(0.4).unwrap() < 3_000);
    let p99 = w.residual_quantile(0.99).unwrap();
    assert!((9_790_000..10_500_000).contains(&p99), "{p99}");
    // 50 * (10 ms)^2 / 2 in a second
    let mean = w.residual_mean().unwrap();
    assert!((2_480_000..2_520_000).contains(&mean), "{mean}");
}

#[test]
fn somebody_who_comes_while_nothing_waits_waits_0() {
    let mut w = waits(&[5_000_000], 1_000_000_000);
    assert_eq!(
        w.residual_quantile(0.99),
        Some(0),
        "it waits 0.5 % of the time"
    );
    assert!(w.residual_quantile(0.999).unwrap() > 3_900_000);
    w.merge(&waits(&[], 1_000_000_000));
    assert_eq!(
        w.residual_quantile(0.996),
        Some(0),
        "another vCPU never waits"
    );
    assert_eq!(Waits::default().residual_quantile(0.99), None);
    assert_eq!(Waits::default().residual_mean(), None);
}

#[test]
fn without_times_there_is_no_quantile() {
    assert_eq!(Histogram::default().quantile(0.99), None);
}

#[test]
fn counters_that_wrapped_count_on() {
    let (mut old, mut new) = (HistCounters::ZERO, HistCounters::ZERO);
    (old.counts[3], old.sums[3]) = (u32::MAX, u64::MAX - 1000);
    (new.counts[3], new.sums[3]) = (4, 7999);
    let mut h = Histogram::default();
    h.add_difference(&new, &old);
    assert_eq!((h.count(), h.sum()), (5, 9000));
    assert_eq!(h.count_below(1024 * 2), 5);
    assert_eq!(h.count_below(1024 + 512), 0);
}
