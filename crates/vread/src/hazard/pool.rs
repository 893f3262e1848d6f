// SPDX-License-Identifier: Apache-2.0
//! Hands a reader's hazard cells out to its threads, one for each read.

use std::sync::atomic::Ordering;

use super::{Cells, Hazard};
use crate::shared_words::AtomicU64;

/// A reader's cells, and which of them are free.
#[derive(Debug)]
pub(crate) struct CellPool {
    cells: Cells,
    /// Free cells, one bit each.
    free: AtomicU64,
}

impl CellPool {
    pub(crate) fn new(cells: Cells) -> Self {
        let free = u64::MAX >> (u64::BITS as usize - cells.count());
        Self {
            cells,
            free: AtomicU64::new(free),
        }
    }

    /// Takes a free cell and publishes in it that a slot of a table is read; `None` when no cell is free.
    pub(crate) fn take(&self, table: u32, slot: u32) -> Option<HeldHazard<'_>> {
        let mut free = self.free.load(Ordering::Relaxed);
        loop {
            let bit = free & free.wrapping_neg();
            if bit == 0 {
                return None;
            }
            let new = free & !bit;
            match self
                .free
                .compare_exchange_weak(free, new, Ordering::Acquire, Ordering::Relaxed)
            {
                Err(now) => free = now,
                Ok(_) => {
                    let cell = bit.trailing_zeros() as usize;
                    return Some(HeldHazard {
                        hazard: self.cells.publish(cell, table, slot),
                        bit,
                        free: &self.free,
                    });
                }
            }
        }
    }
}

/// A hazard and its cell; dropping it frees both.
#[derive(Debug)]
#[must_use = "the hazard ends when this is dropped"]
pub(crate) struct HeldHazard<'a> {
    hazard: Option<Hazard<'a>>,
    bit: u64,
    free: &'a AtomicU64,
}

impl Drop for HeldHazard<'_> {
    fn drop(&mut self) {
        // the next owner of the cell must not have its hazard ended by this one
        drop(self.hazard.take());
        self.free.fetch_or(self.bit, Ordering::Release);
    }
}
