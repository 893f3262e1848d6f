// SPDX-License-Identifier: Apache-2.0
//! Computes from which size on a file is worth a pipe, from the duration of a handover and the
//! program's own speed.
//!
//! When other VMs use the VM's core, a handover and the program's own calls both take longer, each as measured by the
//! clock. So two measurements suffice: the duration of a handover without the host's part, divided by the concurrent
//! handovers; and the rate of `sendfile(2)`. A file is worth a pipe from twice the bytes that the program would have
//! sent during the handover.
//!
//! | bound | value |
//! |---|---|
//! | minimum; also before both are measured, and when one is older than [`MEASUREMENT_LIFETIME`] | [`DEFAULT_MIN_BYTES`] |
//! | maximum | [`MAX_MINIMUM_BYTES`] |
//! | with `VIOLA_PIPE_MIN` | that number, whatever is measured |
//!
//! Before the first handover, and [`MEASUREMENT_LIFETIME`] after the last one, the library measures nothing and costs
//! the program nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use crate::engine::PerProcess;
use crate::settings::{DEFAULT_MIN_BYTES, settings};

/// Upper bound of the computed minimum. The library always pipes a file of this size: only a pipe
/// tells it how long a handover takes now.
pub const MAX_MINIMUM_BYTES: u64 = 16 << 20;
/// How long a measurement counts.
pub const MEASUREMENT_LIFETIME: Duration = Duration::from_secs(10);

/// Shortest `sendfile` call that is measured; shorter ones say nothing about large files.
const MIN_SAMPLE_BYTES: u64 = 256 << 10;
/// Bytes between two measured calls. Where reading the guest's clock is a system call, a
/// measurement then costs about 1/1000 of what sending the bytes costs.
const SAMPLE_INTERVAL_BYTES: u64 = 64 << 20;
/// Measurements before the mean counts.
const MIN_SAMPLES: u32 = 4;
/// A pipe pays from this many times the bytes that the program would send during the handover.
const MARGIN: f64 = 2.0;

/// A moving mean: a new value has weight 1/8 and is limited to four times the mean.
#[derive(Debug, Clone, Copy)]
struct Mean {
    value: f64,
    samples: u32,
    at: Instant,
}

impl Mean {
    fn add(old: Option<Self>, value: f64, at: Instant) -> Self {
        match old.filter(|old| at.saturating_duration_since(old.at) < MEASUREMENT_LIFETIME) {
            None => Self {
                value,
                samples: 1,
                at,
            },
            Some(old) => {
                let value = value.clamp(old.value / 4.0, old.value * 4.0);
                // the first values have equal weight
                let part = 1.0 / f64::from(old.samples.saturating_add(1).min(8));
                Self {
                    value: old.value + (value - old.value) * part,
                    samples: old.samples.saturating_add(1),
                    at,
                }
            }
        }
    }

    fn known(this: Option<Self>, now: Instant) -> Option<f64> {
        this.filter(|mean| {
            mean.samples >= MIN_SAMPLES
                && now.saturating_duration_since(mean.at) < MEASUREMENT_LIFETIME
        })
        .map(|mean| mean.value)
    }
}

/// Measurements of this process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measurements {
    /// Duration of a handover, in seconds.
    handover_s: Option<Mean>,
    /// Rate of the program's own calls, in bytes per second.
    bytes_per_s: Option<Mean>,
}

impl Measurements {
    /// Adds a finished pipe: it took `whole`, of which the host had the connection for `host`; `concurrent` pipes
    /// were active at its start, itself included.
    pub fn add_handover(
        &mut self,
        whole: Duration,
        host: Duration,
        concurrent: usize,
        now: Instant,
    ) {
        let handover_s = whole.saturating_sub(host).as_secs_f64() / concurrent.max(1) as f64;
        self.handover_s = Some(Mean::add(self.handover_s, handover_s, now));
    }

    /// Adds a call of the program that sent `bytes` in `took`.
    pub fn add_sendfile(&mut self, bytes: u64, took: Duration, now: Instant) {
        if bytes >= MIN_SAMPLE_BYTES / 2 && !took.is_zero() {
            let bytes_per_s = bytes as f64 / took.as_secs_f64();
            self.bytes_per_s = Some(Mean::add(self.bytes_per_s, bytes_per_s, now));
        }
    }

    /// Fewest bytes that are worth a pipe now.
    pub fn minimum(&self, now: Instant) -> u64 {
        let known = (
            Mean::known(self.handover_s, now),
            Mean::known(self.bytes_per_s, now),
        );
        let (Some(handover_s), Some(bytes_per_s)) = known else {
            return DEFAULT_MIN_BYTES;
        };
        // a cast of a large float saturates
        ((MARGIN * handover_s * bytes_per_s) as u64).clamp(DEFAULT_MIN_BYTES, MAX_MINIMUM_BYTES)
    }
}

static MEASUREMENTS: PerProcess<Mutex<Measurements>> = PerProcess::new();
/// The last computed minimum.
static MINIMUM: AtomicU64 = AtomicU64::new(DEFAULT_MIN_BYTES);
/// Whether a recent measurement of handovers exists.
static SAMPLING: AtomicBool = AtomicBool::new(false);
/// Bytes that the program has sent itself since the last measured call.
static BYTES_SINCE_SAMPLE: AtomicU64 = AtomicU64::new(SAMPLE_INTERVAL_BYTES);

/// Runs `work` on the measurements unless another thread has them.
fn with_measurements<T>(work: impl FnOnce(&mut Measurements) -> T) -> Option<T> {
    // `peek` makes no system call
    let all = MEASUREMENTS.peek().unwrap_or_else(|| MEASUREMENTS.get());
    match all.try_lock() {
        Ok(mut measured) => Some(work(&mut measured)),
        Err(TryLockError::Poisoned(measured)) => Some(work(&mut measured.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn publish(measured: &Measurements, now: Instant) {
    MINIMUM.store(measured.minimum(now), Ordering::Relaxed);
    SAMPLING.store(
        Mean::known(measured.handover_s, now).is_some(),
        Ordering::Relaxed,
    );
}

/// Whether a file of this size is worth a pipe. Reads the clock only where measurements decide.
pub fn is_worthwhile(length: u64) -> bool {
    let minimum = || MINIMUM.load(Ordering::Relaxed);
    if length < settings().min_bytes || !settings().is_adaptive || length >= minimum() {
        return length >= settings().min_bytes;
    }
    let now = Instant::now();
    let _ = with_measurements(|measured| publish(measured, now));
    length >= minimum()
}

/// Adds a pipe that began at `begun` and ends now: see [`Measurements::add_handover`].
pub(crate) fn record_handover(begun: Instant, host: Duration, concurrent: usize) {
    let now = Instant::now();
    let whole = now.saturating_duration_since(begun);
    let _ = with_measurements(|measured| {
        measured.add_handover(whole, host, concurrent, now);
        publish(measured, now);
    });
}

/// Makes a `sendfile` call for `count` bytes. Measures one call for each 64 MiB that the program
/// sends; `bytes` returns the number of bytes of a call's result.
pub fn time_sendfile<T>(count: u64, bytes: impl Fn(&T) -> u64, call: impl FnOnce() -> T) -> T {
    if count < MIN_SAMPLE_BYTES || !SAMPLING.load(Ordering::Relaxed) || !settings().is_adaptive {
        return call();
    }
    if BYTES_SINCE_SAMPLE.load(Ordering::Relaxed) < SAMPLE_INTERVAL_BYTES {
        let sent = call();
        BYTES_SINCE_SAMPLE.fetch_add(bytes(&sent), Ordering::Relaxed);
        return sent;
    }
    let begun = Instant::now();
    let sent = call();
    let now = Instant::now();
    let _ = with_measurements(|measured| {
        measured.add_sendfile(bytes(&sent), now.saturating_duration_since(begun), now);
        // measure the first few soon
        let known = Mean::known(measured.bytes_per_s, now).is_some();
        BYTES_SINCE_SAMPLE.store(
            if known { 0 } else { SAMPLE_INTERVAL_BYTES },
            Ordering::Relaxed,
        );
        publish(measured, now);
    });
    sent
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn after(handover_s: Duration, bytes: u64, took: Duration, now: Instant) -> Measurements {
        let mut measured = Measurements::default();
        for _ in 0..MIN_SAMPLES {
            measured.add_handover(handover_s + 5 * MS, 5 * MS, 1, now);
            measured.add_sendfile(bytes, took, now);
        }
        measured
    }

    #[test]
    fn the_minimum_is_twice_the_bytes_sent_during_a_handover() {
        let now = Instant::now();
        // a quiet guest: 2 ms, 1 MiB a millisecond
        let quiet = after(2 * MS, 1 << 20, MS, now);
        assert!(quiet.minimum(now).abs_diff(4 << 20) < 1 << 10);
        // its core shared with three others: both take four times as long
        let busy = after(8 * MS, 1 << 20, 4 * MS, now);
        assert!(busy.minimum(now).abs_diff(4 << 20) < 1 << 10);
        // hand-overs alone have become dear, or cheap
        assert_eq!(
            after(80 * MS, 1 << 20, MS, now).minimum(now),
            MAX_MINIMUM_BYTES
        );
        let cheap = after(MS / 10, 1 << 20, MS, now);
        assert_eq!(cheap.minimum(now), DEFAULT_MIN_BYTES);
        // one of many at a time
        let mut many = Measurements::default();
        for _ in 0..MIN_SAMPLES {
            many.add_handover(32 * 2 * MS, Duration::ZERO, 32, now);
            many.add_sendfile(1 << 20, MS, now);
        }
        assert!(many.minimum(now).abs_diff(4 << 20) < 1 << 10);
    }

    #[test]
    fn few_and_old_measurements_do_not_count() {
        let now = Instant::now();
        let mut measured = Measurements::default();
        for _ in 1..MIN_SAMPLES {
            measured.add_handover(80 * MS, MS, 1, now);
            measured.add_sendfile(1 << 20, MS, now);
        }
        assert_eq!(measured.minimum(now), DEFAULT_MIN_BYTES);
        let good = after(80 * MS, 1 << 20, MS, now);
        assert_eq!(
            good.minimum(now + MEASUREMENT_LIFETIME - MS),
            MAX_MINIMUM_BYTES
        );
        assert_eq!(good.minimum(now + MEASUREMENT_LIFETIME), DEFAULT_MIN_BYTES);
        // and what comes then begins anew
        let mut late = good;
        late.add_handover(2 * MS, MS, 1, now + MEASUREMENT_LIFETIME);
        assert_eq!(late.minimum(now + MEASUREMENT_LIFETIME), DEFAULT_MIN_BYTES);
        // a call of a few bytes says nothing
        let mut small = Measurements::default();
        small.add_sendfile(MIN_SAMPLE_BYTES / 2 - 1, MS, now);
        small.add_sendfile(MIN_SAMPLE_BYTES, Duration::ZERO, now);
        assert!(small.bytes_per_s.is_none());
    }

    #[test]
    fn the_mean_follows_within_forty_values_and_limits_outliers() {
        let now = Instant::now();
        let mut measured = after(2 * MS, 1 << 20, MS, now);
        measured.add_handover(10_000 * MS, MS, 1, now);
        assert!(measured.minimum(now) < 9 << 20);
        for _ in 0..40 {
            measured.add_handover(6 * MS, MS, 1, now);
        }
        assert!(measured.minimum(now).abs_diff(10 << 20) < 1 << 20);
    }

    proptest! {
        #[test]
        fn it_stays_within_its_bounds(
            seen in proptest::collection::vec((any::<bool>(), 0..u64::MAX, 0..u64::MAX, 0..64_usize), 0..64)
        ) {
            let now = Instant::now();
            let mut measured = Measurements::default();
            for (piped, a, b, concurrent) in seen {
                match piped {
                    true => measured.add_handover(Duration::from_nanos(a), Duration::from_nanos(b), concurrent, now),
                    false => measured.add_sendfile(a, Duration::from_nanos(b), now),
                }
                prop_assert!((DEFAULT_MIN_BYTES..=MAX_MINIMUM_BYTES).contains(&measured.minimum(now)));
            }
        }
    }
}
