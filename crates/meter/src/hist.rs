// SPDX-License-Identifier: Apache-2.0
//! Wait-time histograms: how long a vCPU waited for a CPU each time it became runnable.

use serde::{Deserialize, Serialize};

use crate::acct::{HIST_BUCKETS, bucket_bounds, bucket_of};

/// Counts of waits by length, in quarter octaves from about 1 us to 1 s (see [`bucket_bounds`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WaitHist(Vec<u64>);

impl Default for WaitHist {
    fn default() -> Self {
        Self(vec![0; HIST_BUCKETS])
    }
}

impl WaitHist {
    /// Adds the waits between two readings of the accounting program, whose counters wrap at 2^32.
    pub fn add_difference(&mut self, new: &[u32; HIST_BUCKETS], old: &[u32; HIST_BUCKETS]) {
        for ((sum, n), o) in self.0.iter_mut().zip(new).zip(old) {
            *sum += u64::from(n.wrapping_sub(*o));
        }
    }

    /// Adds `count` waits of `ns` each.
    pub fn add(&mut self, ns: u64, count: u64) {
        self.0[bucket_of(ns)] += count;
    }

    /// Adds all counts of another.
    pub fn merge(&mut self, other: &Self) {
        for (sum, n) in self.0.iter_mut().zip(&other.0) {
            *sum += n;
        }
    }

    /// Number of waits.
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The wait (ns) that the fraction `q` (0..=1) of all waits does not exceed: the upper bound of its bucket, so within a
    /// quarter octave. `None` without waits.
    pub fn quantile(&self, q: f64) -> Option<u64> {
        let total = self.count();
        if total == 0 {
            return None;
        }
        let rank = ((q.clamp(0.0, 1.0) * total as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (b, n) in self.0.iter().enumerate() {
            seen += n;
            if seen >= rank {
                let (low, high) = bucket_bounds(b);
                return Some(if high == u64::MAX { low } else { high });
            }
        }
        None
    }

    /// Non-empty buckets as (lower bound ns, upper bound ns, count).
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
        self.0
            .iter()
            .enumerate()
            .filter(|(_, n)| **n > 0)
            .map(|(b, n)| {
                let (low, high) = bucket_bounds(b);
                (low, high, *n)
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_within_a_quarter_octave_of_the_truth() {
        let mut h = WaitHist::default();
        h.add(100_000, 99);
        h.add(5_000_000, 1);
        let p50 = h.quantile(0.5).unwrap() as f64;
        assert!((100_000.0..125_001.0).contains(&p50), "{p50}");
        let p100 = h.quantile(1.0).unwrap() as f64;
        assert!((5_000_000.0..6_250_001.0).contains(&p100), "{p100}");
        assert_eq!(h.quantile(0.99).unwrap() as f64, p50);
    }

    #[test]
    fn without_waits_there_is_no_quantile() {
        assert_eq!(WaitHist::default().quantile(0.99), None);
    }

    #[test]
    fn a_counter_that_wrapped_counts_on() {
        let (mut old, mut new) = ([0; HIST_BUCKETS], [0; HIST_BUCKETS]);
        old[3] = u32::MAX;
        new[3] = 4;
        let mut h = WaitHist::default();
        h.add_difference(&new, &old);
        assert_eq!(h.count(), 5);
    }
}
