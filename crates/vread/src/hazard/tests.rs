// SPDX-License-Identifier: Apache-2.0
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::table;

fn cells(count: usize) -> (Cells, View) {
    let file = tempfile::tempfile().unwrap();
    create(&file, count).unwrap();
    (Cells::map(&file).unwrap(), View::map(&file).unwrap())
}

#[test]
fn a_hazard_is_seen_from_publishing_to_dropping() {
    let (cells, view) = cells(2);
    let hazard = cells.publish(1, 7, 0).unwrap();
    assert!(view.is_reading(7, 0) && view.is_reading_any(7));
    assert!(!view.is_reading(7, 1) && !view.is_reading(8, 0) && !view.is_reading_any(8));
    drop(hazard);
    assert!(!view.is_reading(7, 0) && !view.is_reading_any(7));
    assert!(cells.publish(2, 7, 0).is_none());
}

#[test]
fn a_file_without_cells_is_refused() {
    let file = tempfile::tempfile().unwrap();
    assert!(Cells::map(&file).is_err());
    file.set_len(4096).unwrap();
    assert!(View::map(&file).is_err());
    assert!(create(&file, 0).is_err());
    assert!(create(&file, MAX_CELLS + 1).is_err());
}

/// Reader threads read blocks (words that hold the generation of their lease) while a writer withdraws them, waits
/// for the confirmation, and replaces the bytes.
fn race(slots: u32, readers: usize, rounds: &[u32]) {
    let file = tempfile::tempfile().unwrap();
    table::create(&file, 3, slots).unwrap();
    let table = table::Table::map(&file).unwrap();
    let lease_view = table::View::map(&file).unwrap();
    let (cells, hazard_view) = cells(readers);
    const OTHERS: u64 = u64::MAX;
    let disk: Vec<AtomicU64> = (0..slots).map(|_| AtomicU64::new(0)).collect();
    let named: Vec<Mutex<Option<table::Lease>>> = (0..slots)
        .map(|slot| Mutex::new(table.lease(slot)))
        .collect();
    let end = AtomicBool::new(false);
    let (told, wrong) = mpsc::channel();
    std::thread::scope(|scope| {
        for cell in 0..readers {
            let (cells, lease_view, disk, named, end, told) =
                (&cells, &lease_view, &disk, &named, &end, told.clone());
            scope.spawn(move || {
                let mut slot = cell;
                while !end.load(Ordering::Relaxed) {
                    slot = (slot + 1) % disk.len();
                    let Some(lease) = *named[slot].lock().unwrap() else {
                        continue;
                    };
                    let hazard = cells.publish(cell, 3, lease.slot).unwrap();
                    if !lease_view.holds(lease) {
                        continue;
                    }
                    // From here to the drop the bytes must be the block's own, whether the lease is still valid or
                    // not.
                    for _ in 0..4 {
                        if disk[slot].load(Ordering::Relaxed) != lease.generation {
                            told.send(lease).unwrap();
                        }
                    }
                    drop(hazard);
                }
            });
        }
        for round in rounds {
            let slot = round % slots;
            let index = slot as usize;
            *named[index].lock().unwrap() = None;
            table.withdraw(slot);
            while hazard_view.is_reading(3, slot) {
                std::hint::spin_loop();
            }
            disk[index].store(OTHERS, Ordering::Relaxed);
            let lease = table.lease(slot).unwrap();
            disk[index].store(lease.generation, Ordering::Relaxed);
            *named[index].lock().unwrap() = Some(lease);
        }
        end.store(true, Ordering::Relaxed);
    });
    drop(told);
    assert_eq!(wrong.iter().count(), 0);
}

#[test]
fn no_reader_sees_a_block_after_its_withdrawal_is_confirmed() {
    let began = Instant::now();
    let rounds: Vec<u32> = (0..2000u32)
        .map(|i| i.wrapping_mul(2_654_435_761))
        .collect();
    while began.elapsed() < Duration::from_secs(2) {
        race(3, 3, &rounds);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn in_any_order_of_withdrawals(slots in 1u32..5, readers in 1usize..4, rounds in prop::collection::vec(any::<u32>(), 1..400)) {
        race(slots, readers, &rounds);
    }
}
