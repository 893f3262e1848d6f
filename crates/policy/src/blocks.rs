// SPDX-License-Identifier: Apache-2.0
//! Whether a VM reads HDFS blocks of another VM of its host (vRead): then it could read them from the other VM's disk.

pub use crate::hysteresis::Patience;
use crate::hysteresis::Sustained;
use crate::slices::{MS, Nanos};

/// Settings of a [`BlockReader`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Bytes of blocks per second from which a VM counts as a reader, and below which it no longer does.
    pub bytes: (f64, f64),
    /// How long it takes until it counts, and until it no longer does.
    pub patience: Patience,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            bytes: (8e6, 2e6),
            patience: Patience {
                windows: (2, 6),
                hold: 30_000 * MS,
            },
        }
    }
}

/// Whether one VM reads blocks of another one, sample by sample.
#[derive(Debug, Clone)]
pub struct BlockReader {
    thresholds: Thresholds,
    reads: Sustained,
}

impl BlockReader {
    /// A VM that does not, so far.
    pub fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            reads: Sustained::new(),
        }
    }

    /// Whether it does.
    pub fn reads(&self) -> bool {
        self.reads.is_there()
    }

    /// Takes a sample that ended at `now` (ns, never goes back): bytes of blocks per second. Returns whether [`BlockReader::reads`] has
    /// changed.
    pub fn observe(&mut self, now: Nanos, bytes: f64) -> bool {
        let (begins, lasts) = (
            bytes >= self.thresholds.bytes.0,
            bytes >= self.thresholds.bytes.1,
        );
        self.reads
            .observe(now, begins, lasts, &self.thresholds.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it reads after each of these samples, 30 s apart.
    fn reads(samples: &[f64]) -> Vec<bool> {
        let mut reader = BlockReader::new(Thresholds::default());
        let samples = samples.iter().enumerate();
        let after = samples.map(|(i, bytes)| {
            reader.observe(i as Nanos * 30_000 * MS, *bytes);
            reader.reads()
        });
        after.collect()
    }

    #[test]
    fn a_reader_is_found_after_two_samples_and_forgotten_after_six_without_blocks() {
        let mut samples = vec![100e6; 2];
        samples.extend([0.0; 7]);
        let found = reads(&samples);
        assert_eq!(found.iter().position(|reads| *reads), Some(1));
        assert_eq!(found.iter().filter(|reads| **reads).count(), 6);
        // Pauses between jobs are no end, and single blocks no begin.
        assert_eq!(reads(&[9e6, 9e6, 0.0, 3e6, 0.0, 9e6])[1..], [true; 5]);
        assert_eq!(reads(&[9e6, 0.0, 9e6, 0.0, 7e6, 7e6]), [false; 6]);
    }
}
