// SPDX-License-Identifier: Apache-2.0
//! Random numbers from a seed (SplitMix64): the same seed gives the same numbers on every computer.

use viola_policy::slices::Nanos;

/// Mixes the bits of a number (the finalizer of SplitMix64).
pub fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of random numbers.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `min ..= max`; `min` if that range is empty.
    pub fn within(&mut self, min: Nanos, max: Nanos) -> Nanos {
        match max.checked_sub(min) {
            None | Some(0) => min,
            Some(span) => min + self.next() % (span + 1),
        }
    }

    /// Exponential with mean `mean`, ns.
    pub fn exponential(&mut self, mean: f64) -> Nanos {
        (-mean * (1.0 - self.unit()).ln()).round() as Nanos
    }

    /// An independent stream.
    pub fn fork(&mut self) -> Random {
        Random(self.next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_numbers_with_the_means_they_should_have() {
        let (mut a, mut b) = (Random::new(7), Random::new(7));
        let (mut unit, mut exponential, mut within) = (0.0, 0.0, 0.0);
        for _ in 0..20_000 {
            let x = a.unit();
            assert_eq!(x, b.unit());
            unit += x / 20_000.0;
            exponential += a.exponential(1e6) as f64 / 20_000.0;
            let w = a.within(10, 20);
            assert!((10..=20).contains(&w));
            within += w as f64 / 20_000.0;
            b = a.clone();
        }
        assert!(
            (unit - 0.5).abs() < 0.01 && (within - 15.0).abs() < 0.1,
            "{unit} {within}"
        );
        assert!((exponential / 1e6 - 1.0).abs() < 0.03, "{exponential}");
        assert_eq!(a.within(5, 5), 5);
        assert_ne!(a.fork().unit(), a.unit());
    }
}
