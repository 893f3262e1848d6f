// SPDX-License-Identifier: Apache-2.0
//! The shared memory's lock-free parts in the orders of accesses that the memory model allows. `make loom` runs these models.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicU64;
use loom::thread;

use super::lock_free::{LastRows, SequenceCount};

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(5);
    builder.check(model);
}

/// A plan of two words: both are the sequence count of the plan.
struct Plan {
    seq: SequenceCount,
    words: [AtomicU64; 2],
}

impl Plan {
    fn new() -> Self {
        Self {
            seq: SequenceCount::new(),
            words: [AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    fn publish(&self, value: u64) {
        let write = || {
            for word in &self.words {
                word.store(value, Ordering::Relaxed);
            }
        };
        assert_eq!(self.seq.write(write).0, value);
    }

    fn read(&self) -> Option<u64> {
        let mut copy = [0; 2];
        let seq = self.seq.read(|| {
            copy = [0, 1].map(|i: usize| self.words[i].load(Ordering::Relaxed));
        });
        seq.inspect(|seq| assert_eq!(copy, [*seq; 2], "a torn plan was used"))
    }
}

#[test]
fn a_torn_plan_is_never_used() {
    check(|| {
        let plan = Arc::new(Plan::new());
        let theirs = plan.clone();
        let daemon = thread::spawn(move || {
            theirs.publish(2);
            theirs.publish(4);
        });
        let first = plan.read().unwrap_or(0);
        let second = plan.read().unwrap_or(first);
        assert!(second >= first, "an older plan came after a newer one");
        daemon.join().unwrap();
        assert_eq!(plan.read(), Some(4));
    });
}

#[test]
fn a_new_plan_that_was_seen_is_read_whole() {
    check(|| {
        let plan = Arc::new(Plan::new());
        let theirs = plan.clone();
        let daemon = thread::spawn(move || theirs.publish(2));
        // the controller compares the count with that of its plan first
        let seen = plan.seq.current();
        if let Some(read) = plan.read() {
            assert!(read >= seen);
        }
        daemon.join().unwrap();
    });
}

/// The controller reports threads, the daemon reads the reports.
#[test]
fn every_reported_thread_is_read_or_the_loss_is_seen() {
    check(|| {
        let rows = Arc::new(LastRows::<2>::new());
        let theirs = rows.clone();
        let controller = thread::spawn(move || (0..4).for_each(|row| theirs.push(row)));
        let mut from = 0;
        for _ in 0..2 {
            let mut found = Vec::new();
            let (n, is_whole) = rows.read(from, |row| found.push(row));
            if is_whole {
                assert_eq!(found, (from..n).collect::<Vec<u64>>());
            }
            from = n;
        }
        controller.join().unwrap();
    });
}
