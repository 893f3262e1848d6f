// SPDX-License-Identifier: Apache-2.0
//! The ring in the orders of accesses that the memory model allows. `make loom` runs these models.
//!
//! The producer is a model of the kernel's (kernel/bpf/ringbuf.c, Linux 6.12): programs on several cores reserve records under
//! a lock and commit them without it.

use std::sync::atomic::Ordering;

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::memory::{Memory, RECORD};
use super::*;
use crate::acct::EventKind;

fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// The kernel's side.
#[derive(Clone)]
struct Producer {
    memory: Memory,
    lock: Arc<Mutex<()>>,
}

impl Producer {
    /// As `__bpf_ringbuf_reserve`; `None` when the ring is full. The kernel never fills the last byte. With records of one size
    /// that byte would be a whole record, so this producer fills it.
    fn reserve(&self) -> Option<u64> {
        let consumed = self.memory.consumed().load(Ordering::Acquire);
        let guard = self.lock.lock().unwrap();
        let at = self.memory.producer_position();
        let end = at + RECORD;
        if end - consumed > self.memory.bytes() {
            return None;
        }
        let header = Event::BYTES as u32 | BUSY;
        self.memory.header(at).store(header, Ordering::Relaxed);
        self.memory.produced().store(end, Ordering::Release);
        drop(guard);
        Some(at)
    }

    /// As `bpf_ringbuf_commit`, whose exchange is sequentially consistent. A release is what the consumer relies on.
    fn commit(&self, at: u64, flag: u32) {
        let header = Event::BYTES as u32 | flag;
        self.memory.header(at).swap(header, Ordering::Release);
    }

    /// Sends an event whose fields all are `n`; returns whether it had room.
    fn send(&self, n: u32) -> bool {
        let Some(at) = self.reserve() else {
            return false;
        };
        self.memory.write(at, fork(n));
        self.commit(at, 0);
        true
    }

    fn discard(&self) {
        if let Some(at) = self.reserve() {
            self.memory.write(at, fork(0));
            self.commit(at, DISCARD);
        }
    }
}

/// An event whose fields all are `n`.
fn fork(n: u32) -> [u8; Event::BYTES] {
    let mut bytes = [0; Event::BYTES];
    bytes[0] = 4;
    for field in [4, 8, 12, 16] {
        bytes[field..field + 4].copy_from_slice(&n.to_ne_bytes());
    }
    bytes
}

fn ring(places: usize) -> (Producer, Ring) {
    let memory = Memory::new(places);
    let producer = Producer {
        memory: memory.clone(),
        lock: Arc::new(Mutex::new(())),
    };
    (producer, Ring { memory })
}

/// Takes all events that are there.
fn take(ring: &mut Ring, into: &mut Vec<u32>) {
    while let Some(event) = ring.pop() {
        let n = event.vm;
        assert_eq!(event.kind, EventKind::Fork);
        assert_eq!(
            (event.account, event.tid, event.now),
            (n, n as i32, n.into())
        );
        into.push(n);
    }
}

/// More events than there are places: each place is used again while the consumer reads.
#[test]
fn events_come_whole_once_and_in_order() {
    check(None, || {
        let (producer, mut ring) = ring(2);
        let kernel =
            thread::spawn(move || -> Vec<u32> { (1..=3).filter(|n| producer.send(*n)).collect() });
        let mut taken = Vec::new();
        take(&mut ring, &mut taken);
        take(&mut ring, &mut taken);
        let sent = kernel.join().unwrap();
        take(&mut ring, &mut taken);
        assert_eq!(taken, sent);
    });
}

#[test]
fn a_discarded_record_is_passed_over() {
    check(None, || {
        let (producer, mut ring) = ring(4);
        let kernel = thread::spawn(move || {
            producer.discard();
            producer.send(1)
        });
        let mut taken = Vec::new();
        take(&mut ring, &mut taken);
        let is_sent = kernel.join().unwrap();
        take(&mut ring, &mut taken);
        assert_eq!(taken.len(), usize::from(is_sent));
    });
}

/// Two cores: a record that was reserved later is committed earlier.
#[test]
fn an_event_waits_for_those_before_it() {
    check(Some(5), || {
        let (producer, mut ring) = ring(4);
        let send = |n| {
            let producer = producer.clone();
            thread::spawn(move || producer.send(n))
        };
        let cores = [send(1), send(2)];
        let mut taken = Vec::new();
        take(&mut ring, &mut taken);
        let sent = cores.map(|core| core.join().unwrap());
        take(&mut ring, &mut taken);
        taken.sort_unstable();
        let mut expected = vec![1, 2];
        expected.retain(|n| sent[*n as usize - 1]);
        assert_eq!(taken, expected);
    });
}
