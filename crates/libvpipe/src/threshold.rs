// SPDX-License-Identifier: Apache-2.0
//! From how many bytes on a file is given away down a connection: what a hand-over takes against what this program sends itself.
//!
//! Where the VM's core is wanted by others, both a hand-over and the program's own sending take longer, each as measured by
//! the clock. So two times tell all: what a hand-over takes from the wish to the end, without what the host was at it and shared by the
//! hand-overs beside it; and how fast `sendfile(2)` takes bytes. A file of fewer than twice the bytes that would have been sent
//! meanwhile is left to the VM.
//!
//! | | |
//! |---|---|
//! | never fewer than, and before both are known, and when one was not measured for [`FRESH`] | [`DEFAULT_MINIMUM`] |
//! | never more than | [`MOST`] |
//! | `VIOLA_PIPE_MIN` | that, whatever is measured |
//!
//! Before the first hand-over, and [`FRESH`] after the last one, nothing is measured: such a program pays nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use crate::settings::{DEFAULT_MINIMUM, settings};

/// What is not smaller is given away whatever was measured: that it pays is not seen where it is not tried.
pub const MOST: u64 = 16 << 20;
/// What was measured counts for so long.
pub const FRESH: Duration = Duration::from_secs(10);

/// Own calls of fewer bytes say nothing about large files.
const PROBE: u64 = 256 << 10;
/// One own call is measured in so many bytes: in a guest whose clock is a system call that is a thousandth of what they cost.
const EVERY: u64 = 64 << 20;
/// As many of each are measured before they count.
const ENOUGH: u32 = 4;
/// A pipe is worth its while from this many times the bytes on that would have been sent during the hand-over.
const MARGIN: f64 = 2.0;

/// A mean in which each new value counts for an eighth; one far out counts as four times the mean.
#[derive(Debug, Clone, Copy)]
struct Mean {
    value: f64,
    of: u32,
    at: Instant,
}

impl Mean {
    fn add(old: Option<Self>, value: f64, at: Instant) -> Self {
        match old.filter(|old| at.saturating_duration_since(old.at) < FRESH) {
            None => Self { value, of: 1, at },
            Some(old) => {
                let value = value.clamp(old.value / 4.0, old.value * 4.0);
                // the first ones count alike
                let part = 1.0 / f64::from(old.of.saturating_add(1).min(8));
                Self {
                    value: old.value + (value - old.value) * part,
                    of: old.of.saturating_add(1),
                    at,
                }
            }
        }
    }

    fn known(this: Option<Self>, now: Instant) -> Option<f64> {
        this.filter(|mean| mean.of >= ENOUGH && now.saturating_duration_since(mean.at) < FRESH)
            .map(|mean| mean.value)
    }
}

/// What was measured.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measured {
    /// Of a hand-over, in seconds.
    cost: Option<Mean>,
    /// Of the program's own calls, in bytes a second.
    pace: Option<Mean>,
}

impl Measured {
    /// A file was given away and is sent: from the wish to the end it took `whole`, of which the host was at it for `host`; `beside` are the pipes
    /// that there were when it began, with itself.
    pub fn piped(&mut self, whole: Duration, host: Duration, beside: usize, now: Instant) {
        let cost = whole.saturating_sub(host).as_secs_f64() / beside.max(1) as f64;
        self.cost = Some(Mean::add(self.cost, cost, now));
    }

    /// The program has sent so many bytes itself.
    pub fn sent(&mut self, bytes: u64, took: Duration, now: Instant) {
        if bytes >= PROBE / 2 && !took.is_zero() {
            let pace = bytes as f64 / took.as_secs_f64();
            self.pace = Some(Mean::add(self.pace, pace, now));
        }
    }

    /// Fewest bytes that are worth a pipe.
    pub fn minimum(&self, now: Instant) -> u64 {
        let known = (Mean::known(self.cost, now), Mean::known(self.pace, now));
        let (Some(cost), Some(pace)) = known else {
            return DEFAULT_MINIMUM;
        };
        // a float that is too large becomes the largest number
        ((MARGIN * cost * pace) as u64).clamp(DEFAULT_MINIMUM, MOST)
    }
}

static MEASURED: Mutex<Measured> = Mutex::new(Measured {
    cost: None,
    pace: None,
});
/// The minimum, as it was found last.
static MINIMUM: AtomicU64 = AtomicU64::new(DEFAULT_MINIMUM);
/// What a hand-over takes was measured, and not long ago.
static LEARNS: AtomicBool = AtomicBool::new(false);
/// Bytes that the program has sent itself since it was measured last.
static UNSEEN: AtomicU64 = AtomicU64::new(EVERY);

/// Does something with what was measured. Nobody waits for it: whoever has it in a process that is forked has it for ever in the child.
fn with<T>(work: impl FnOnce(&mut Measured) -> T) -> Option<T> {
    match MEASURED.try_lock() {
        Ok(mut measured) => Some(work(&mut measured)),
        Err(TryLockError::Poisoned(measured)) => Some(work(&mut measured.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

fn set(measured: &Measured, now: Instant) {
    MINIMUM.store(measured.minimum(now), Ordering::Relaxed);
    LEARNS.store(Mean::known(measured.cost, now).is_some(), Ordering::Relaxed);
}

/// Whether so many bytes of a file are given away. Looks at the clock only where what was measured decides.
pub fn is_worth(length: u64) -> bool {
    let minimum = || MINIMUM.load(Ordering::Relaxed);
    if length < settings().minimum || !settings().adapts || length >= minimum() {
        return length >= settings().minimum;
    }
    let now = Instant::now();
    let _ = with(|measured| set(measured, now));
    length >= minimum()
}

/// See [`Measured::piped`].
pub(crate) fn piped(begun: Instant, host: Duration, beside: usize) {
    let now = Instant::now();
    let whole = now.saturating_duration_since(begun);
    let _ = with(|measured| {
        measured.piped(whole, host, beside, now);
        set(measured, now);
    });
}

/// Makes an own call of `sendfile` for so many bytes; `bytes` says of its result how many there were. One of many is measured.
pub fn measured<T>(count: u64, bytes: impl Fn(&T) -> u64, call: impl FnOnce() -> T) -> T {
    if count < PROBE || !LEARNS.load(Ordering::Relaxed) || !settings().adapts {
        return call();
    }
    if UNSEEN.load(Ordering::Relaxed) < EVERY {
        let sent = call();
        UNSEEN.fetch_add(bytes(&sent), Ordering::Relaxed);
        return sent;
    }
    let begun = Instant::now();
    let sent = call();
    let now = Instant::now();
    let _ = with(|measured| {
        measured.sent(bytes(&sent), now.saturating_duration_since(begun), now);
        // the first few are wanted soon
        let known = Mean::known(measured.pace, now).is_some();
        UNSEEN.store(if known { 0 } else { EVERY }, Ordering::Relaxed);
        set(measured, now);
    });
    sent
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn after(cost: Duration, bytes: u64, took: Duration, now: Instant) -> Measured {
        let mut measured = Measured::default();
        for _ in 0..ENOUGH {
            measured.piped(cost + 5 * MS, 5 * MS, 1, now);
            measured.sent(bytes, took, now);
        }
        measured
    }

    #[test]
    fn twice_what_would_have_been_sent_meanwhile() {
        let now = Instant::now();
        // a quiet guest: 2 ms, 1 MiB a millisecond
        let quiet = after(2 * MS, 1 << 20, MS, now);
        assert!(quiet.minimum(now).abs_diff(4 << 20) < 1 << 10);
        // its core shared with three others: both take four times as long
        let busy = after(8 * MS, 1 << 20, 4 * MS, now);
        assert!(busy.minimum(now).abs_diff(4 << 20) < 1 << 10);
        // hand-overs alone have become dear, or cheap
        assert_eq!(after(80 * MS, 1 << 20, MS, now).minimum(now), MOST);
        let cheap = after(MS / 10, 1 << 20, MS, now);
        assert_eq!(cheap.minimum(now), DEFAULT_MINIMUM);
        // one of many at a time
        let mut many = Measured::default();
        for _ in 0..ENOUGH {
            many.piped(32 * 2 * MS, Duration::ZERO, 32, now);
            many.sent(1 << 20, MS, now);
        }
        assert!(many.minimum(now).abs_diff(4 << 20) < 1 << 10);
    }

    #[test]
    fn too_little_and_too_old_is_not_known() {
        let now = Instant::now();
        let mut measured = Measured::default();
        for _ in 1..ENOUGH {
            measured.piped(80 * MS, MS, 1, now);
            measured.sent(1 << 20, MS, now);
        }
        assert_eq!(measured.minimum(now), DEFAULT_MINIMUM);
        let good = after(80 * MS, 1 << 20, MS, now);
        assert_eq!(good.minimum(now + FRESH - MS), MOST);
        assert_eq!(good.minimum(now + FRESH), DEFAULT_MINIMUM);
        // and what comes then begins anew
        let mut late = good;
        late.piped(2 * MS, MS, 1, now + FRESH);
        assert_eq!(late.minimum(now + FRESH), DEFAULT_MINIMUM);
        // a call of a few bytes says nothing
        let mut small = Measured::default();
        small.sent(PROBE / 2 - 1, MS, now);
        small.sent(PROBE, Duration::ZERO, now);
        assert!(small.pace.is_none());
    }

    #[test]
    fn it_follows_within_some_tens_and_one_far_out_is_none() {
        let now = Instant::now();
        let mut measured = after(2 * MS, 1 << 20, MS, now);
        measured.piped(10_000 * MS, MS, 1, now);
        assert!(measured.minimum(now) < 9 << 20);
        for _ in 0..40 {
            measured.piped(6 * MS, MS, 1, now);
        }
        assert!(measured.minimum(now).abs_diff(10 << 20) < 1 << 20);
    }

    proptest! {
        #[test]
        fn it_stays_within_its_bounds(
            seen in proptest::collection::vec((any::<bool>(), 0..u64::MAX, 0..u64::MAX, 0..64_usize), 0..64)
        ) {
            let now = Instant::now();
            let mut measured = Measured::default();
            for (piped, a, b, beside) in seen {
                match piped {
                    true => measured.piped(Duration::from_nanos(a), Duration::from_nanos(b), beside, now),
                    false => measured.sent(a, Duration::from_nanos(b), now),
                }
                prop_assert!((DEFAULT_MINIMUM..=MOST).contains(&measured.minimum(now)));
            }
        }
    }
}
