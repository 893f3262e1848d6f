// SPDX-License-Identifier: Apache-2.0
//! Leases and hazards in the orders of accesses that the memory model allows. `make loom` runs these models.
//!
//! A `Place` on the disk is memory whose unordered use loom reports: a read beside a write, or not ordered with it.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;
use rustix::fs::{MemfdFlags, memfd_create};

use crate::hazard::{self, CellPool, Cells};
use crate::table::{self, Lease, Table};

const TABLE: u32 = 7;
/// What the file system writes to a place that it gave to another file.
const OTHER_FILE: u64 = u64::MAX;

fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

fn file() -> File {
    memfd_create("viola-model", MemfdFlags::CLOEXEC)
        .unwrap()
        .into()
}

/// One table, one reader: each side with the mappings that its process has.
struct Bed {
    table: Table,
    hazards: hazard::View,
    leases: table::View,
    cells: Cells,
}

fn bed(slots: u32, cells: usize) -> Bed {
    let (table, hazards) = (file(), file());
    table::create(&table, TABLE, slots).unwrap();
    hazard::create(&hazards, cells).unwrap();
    Bed {
        leases: table::View::map(&table).unwrap(),
        table: Table::map(&table).unwrap(),
        cells: Cells::map(&hazards).unwrap(),
        hazards: hazard::View::map(&hazards).unwrap(),
    }
}

/// Where a block lies on the disk. The content of a block is the generation of its lease.
struct Place(UnsafeCell<u64>);

// SAFETY: loom checks that a write is ordered with all other accesses.
unsafe impl Sync for Place {}
// SAFETY: as above.
unsafe impl Send for Place {}

impl Place {
    fn read(&self) -> u64 {
        // SAFETY: the pointer is valid during the call; loom reports a write beside it.
        self.0.with(|place| unsafe { *place })
    }

    fn write(&self, value: u64) {
        // SAFETY: the pointer is valid during the call; loom reports an access beside it.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}

#[test]
fn the_reader_or_the_agent_worker_sees_the_other() {
    check(None, || {
        let Bed {
            table,
            hazards,
            leases,
            cells,
        } = bed(1, 1);
        let lease = table.lease(0).unwrap();
        let reader = thread::spawn(move || {
            let hazard = cells.publish(0, TABLE, lease.slot).unwrap();
            let reads = leases.holds(lease);
            // it reads for ever
            std::mem::forget(hazard);
            reads
        });
        table.withdraw(0);
        let confirmed = !hazards.is_reading(TABLE, 0);
        let reads = reader.join().unwrap();
        assert!(!reads || !confirmed);
    });
}

#[test]
fn the_end_of_an_epoch_waits_for_every_reader() {
    check(None, || {
        let Bed {
            table,
            hazards,
            leases,
            cells,
        } = bed(2, 1);
        let lease = table.lease(1).unwrap();
        let reader = thread::spawn(move || {
            let hazard = cells.publish(0, TABLE, lease.slot).unwrap();
            let reads = leases.holds(lease);
            std::mem::forget(hazard);
            reads
        });
        table.end_epoch();
        let confirmed = !hazards.is_reading_any(TABLE);
        let reads = reader.join().unwrap();
        assert!(!reads || !confirmed);
    });
}

/// Two readers and an agent worker. Once a withdrawal is confirmed, the place belongs to another file, and then to a
/// block with a new lease.
#[test]
fn no_block_is_read_after_its_withdrawal_is_confirmed() {
    check(Some(5), || {
        let Bed {
            table,
            hazards,
            leases,
            cells,
        } = bed(1, 2);
        let place = Arc::new(Place(UnsafeCell::new(0)));
        let lease = table.lease(0).unwrap();
        place.write(lease.generation);
        let named = Arc::new(Mutex::new(lease));
        let reader = Arc::new((cells, leases));
        let read = |cell: usize| {
            let (reader, place, named) = (reader.clone(), place.clone(), named.clone());
            thread::spawn(move || {
                let (cells, leases) = &*reader;
                let lease: Lease = *named.lock().unwrap();
                let hazard = cells.publish(cell, TABLE, lease.slot).unwrap();
                if leases.holds(lease) {
                    // the withdrawal may begin now, but must not be confirmed
                    assert_eq!(place.read(), lease.generation);
                }
                drop(hazard);
            })
        };
        let readers = [read(0), read(1)];
        table.withdraw(0);
        if !hazards.is_reading(TABLE, 0) {
            place.write(OTHER_FILE);
            let lease = table.lease(0).unwrap();
            place.write(lease.generation);
            *named.lock().unwrap() = lease;
        }
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

/// An agent worker waits for the end of a read; it does not wait for ever.
#[test]
fn a_withdrawal_is_confirmed_when_the_read_has_ended() {
    check(None, || {
        let Bed {
            table,
            hazards,
            leases,
            cells,
        } = bed(1, 1);
        let place = Arc::new(Place(UnsafeCell::new(0)));
        let lease = table.lease(0).unwrap();
        let theirs = place.clone();
        let reader = thread::spawn(move || {
            let hazard = cells.publish(0, TABLE, lease.slot).unwrap();
            let reads = leases.holds(lease);
            if reads {
                assert_eq!(theirs.read(), 0);
            }
            drop(hazard);
        });
        table.withdraw(0);
        while hazards.is_reading(TABLE, 0) {
            thread::yield_now();
        }
        place.write(OTHER_FILE);
        reader.join().unwrap();
    });
}

/// The VM is reset: its file system gives the place to another file as soon as the leases have ended, whoever reads.
#[test]
fn bytes_between_two_checks_are_the_blocks_own() {
    check(None, || {
        let Bed {
            table,
            leases,
            cells,
            ..
        } = bed(1, 1);
        let place = Arc::new(loom::sync::atomic::AtomicU64::new(0));
        let lease = table.lease(0).unwrap();
        let theirs = place.clone();
        let reader = thread::spawn(move || {
            let hazard = cells.publish(0, TABLE, lease.slot).unwrap();
            if leases.holds(lease) {
                let bytes = theirs.load(Ordering::Relaxed);
                if leases.holds(lease) {
                    assert_eq!(bytes, 0);
                }
            }
            drop(hazard);
        });
        table.end_epoch();
        place.store(OTHER_FILE, Ordering::Release);
        reader.join().unwrap();
    });
}

/// Two threads of a reader share a cell: what one of them does at the end of its read does not end the other's hazard.
#[test]
fn a_cell_that_changes_its_owner_keeps_the_new_hazard() {
    check(Some(5), || {
        let Bed {
            table,
            hazards,
            leases,
            cells,
        } = bed(1, 1);
        let place = Arc::new(Place(UnsafeCell::new(0)));
        let lease = table.lease(0).unwrap();
        let reader = Arc::new((CellPool::new(cells), leases));
        let read = || {
            let (reader, place) = (reader.clone(), place.clone());
            thread::spawn(move || {
                let (pool, leases) = &*reader;
                let Some(hazard) = pool.take(TABLE, lease.slot) else {
                    return;
                };
                if leases.holds(lease) {
                    assert_eq!(place.read(), 0);
                }
                drop(hazard);
            })
        };
        let readers = [read(), read()];
        table.withdraw(0);
        if !hazards.is_reading(TABLE, 0) {
            place.write(OTHER_FILE);
        }
        for reader in readers {
            reader.join().unwrap();
        }
        let pool = &reader.0;
        assert!(pool.take(TABLE, 0).is_some());
    });
}
