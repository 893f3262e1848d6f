// SPDX-License-Identifier: Apache-2.0
//! What is measured of a VM: DI2 (eq 1) and the traffic behind IF (eq 2).

use std::collections::VecDeque;

use crate::slices::Nanos;

/// How a VM spent its time on one CPU, in the same window for all CPUs (XenMon's terms, section 3.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuTime {
    /// Time it ran, ns.
    pub gotten: Nanos,
    /// Time it was blocked, ns.
    pub blocked: Nanos,
}

/// Upper bound of blocked/gotten, above all values of Table 2, so that one CPU on which a VM hardly ran does not
/// dominate the mean.
const RATIO_MOST: f64 = 10_000.0;

/// DI2, the degree of I/O intensity: the mean of blocked/gotten over all CPUs (eq 1), each ratio at most 10,000. CPUs
/// on which the VM neither ran nor blocked do not count. 0 without CPUs.
pub fn di2(cpus: &[CpuTime]) -> f64 {
    let (mut sum, mut num) = (0.0, 0u32);
    for cpu in cpus.iter().filter(|c| c.gotten > 0 || c.blocked > 0) {
        sum += (cpu.blocked as f64 / cpu.gotten as f64).min(RATIO_MOST);
        num += 1;
    }
    if num == 0 { 0.0 } else { sum / f64::from(num) }
}

/// Traffic of a NIC over a number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Traffic {
    /// Traffic_freq: part of the samples with packets, percent, 0.0 ..= 100.0.
    pub freq: f64,
    /// Traffic_avg: mean number of packets per sample, empty samples included.
    pub avg: f64,
}

impl Traffic {
    /// IF, the intensive factor: alpha·Traffic_freq + (1 - alpha)·Traffic_avg (eq 2). At least 0.
    pub fn intensity(self, alpha: f64) -> f64 {
        let alpha = alpha.clamp(0.0, 1.0);
        let value = alpha * self.freq + (1.0 - alpha) * self.avg;
        // NaN counts as 0.
        value.max(0.0)
    }
}

/// The latest samples of a NIC's packets, sent and received (section 3.5).
#[derive(Debug, Clone)]
pub struct Samples {
    max_samples: usize,
    packets: VecDeque<u64>,
    busy: usize,
    sum: u128,
}

impl Samples {
    /// Keeps the latest `max_samples` samples, at least 1.
    pub fn new(max_samples: usize) -> Self {
        let max_samples = max_samples.max(1);
        Self {
            max_samples,
            packets: VecDeque::with_capacity(max_samples),
            busy: 0,
            sum: 0,
        }
    }

    /// Adds the number of packets of one more sample.
    pub fn push(&mut self, packets: u64) {
        if self.packets.len() == self.max_samples
            && let Some(old) = self.packets.pop_front()
        {
            self.busy -= usize::from(old > 0);
            self.sum -= u128::from(old);
        }
        self.packets.push_back(packets);
        self.busy += usize::from(packets > 0);
        self.sum += u128::from(packets);
    }

    /// Frequency and mean over the samples so far.
    pub fn traffic(&self) -> Traffic {
        let total = self.packets.len().max(1) as f64;
        Traffic {
            freq: 100.0 * self.busy as f64 / total,
            avg: self.sum as f64 / total,
        }
    }
}

/// Table 2 of the Raccoon paper: VM, Traffic_freq and Traffic_avg, and the printed IF.
pub const TABLE_2: [(u32, Traffic, f64); 10] = [
    (6, traffic(19.0, 187_965.0), 37_385.3),
    (7, traffic(34.0, 326_492.0), 65_827.9),
    (8, traffic(56.0, 517_295.0), 110_838.2),
    (9, traffic(78.0, 692_703.0), 158_362.0),
    (10, traffic(98.0, 892_601.0), 170_329.0),
    (11, traffic(17.0, 201_876.0), 24_032.0),
    (12, traffic(39.0, 418_351.0), 80_256.6),
    (13, traffic(59.0, 581_063.0), 118_932.0),
    (14, traffic(79.0, 802_873.0), 138_549.4),
    (15, traffic(96.0, 895_520.0), 192_650.0),
];

const fn traffic(freq: f64, avg: f64) -> Traffic {
    Traffic { freq, avg }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(gotten: Nanos, blocked: Nanos) -> CpuTime {
        CpuTime { gotten, blocked }
    }

    #[test]
    fn di2_is_the_mean_over_the_cpus_that_a_vm_was_on() {
        assert_eq!(di2(&[cpu(10, 90), cpu(50, 50)]), 5.0);
        assert_eq!(di2(&[cpu(10, 90), cpu(0, 0)]), 9.0);
        assert_eq!(di2(&[cpu(100, 0)]), 0.0);
        assert_eq!(di2(&[]), 0.0);
        assert_eq!(di2(&[cpu(0, 100)]), RATIO_MOST);
    }

    #[test]
    fn a_sample_that_leaves_the_window_no_longer_counts() {
        let mut samples = Samples::new(4);
        assert_eq!(samples.traffic(), Traffic::default());
        for packets in [1000, 0, 30, 0, 50] {
            samples.push(packets);
        }
        let traffic = samples.traffic();
        assert_eq!((traffic.freq, traffic.avg), (50.0, 20.0));
        assert_eq!(traffic.intensity(0.8), 44.0);
        for _ in 0..4 {
            samples.push(0);
        }
        assert_eq!(samples.traffic(), Traffic::default());
    }

    /// Three rows are more than 10 % off eq 2 with the stated alpha of 0.8; the others are within 8 %.
    #[test]
    fn eq_2_gives_the_ifs_of_table_2_but_for_three_rows() {
        let off = |row: &&(u32, Traffic, f64)| (row.2 / row.1.intensity(0.8) - 1.0).abs();
        let far = TABLE_2.iter().filter(|row| off(row) > 0.1);
        assert_eq!(far.map(|row| row.0).collect::<Vec<_>>(), [9, 11, 14]);
        assert!(TABLE_2.iter().filter(|row| off(row) < 0.08).count() == 7);
        assert_eq!(Traffic::default().intensity(0.8), 0.0);
    }

    #[test]
    fn an_intensity_is_never_negative_and_always_a_number() {
        for value in [f64::NAN, -1.0, f64::NEG_INFINITY] {
            let traffic = Traffic {
                freq: value,
                avg: value,
            };
            assert_eq!(traffic.intensity(0.5), 0.0);
        }
        let traffic = Traffic {
            freq: 10.0,
            avg: 5.0,
        };
        assert_eq!(traffic.intensity(7.0), 10.0);
    }
}
