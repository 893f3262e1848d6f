// SPDX-License-Identifier: Apache-2.0
//! Hazard cells: each reader thread publishes what it reads, for the agent workers.
//!
//! Every reader worker has a small shared file of cells, one per thread. Before a thread reads, it writes the table
//! and slot into its cell and then checks the lease. An agent worker that withdraws a block first ends the lease and
//! then checks the cells. All four steps are sequentially consistent, so one side always sees the other: either the
//! reader finds its lease ended, or the agent worker finds the hazard and waits. (Hazard pointers: Michael, IEEE TPDS
//! 15(6), 2004.)

mod pool;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use crate::shared_words::{AtomicU64, SharedWords};
pub(crate) use pool::{CellPool, HeldHazard};

const MAGIC: u64 = u64::from_le_bytes(*b"violaHZ1");
/// Words per cell: a cache line, to avoid false sharing.
const CELL_WORDS: usize = 8;

/// Maximum cells, and so threads, of a reader.
pub const MAX_CELLS: usize = 64;

fn value(table: u32, slot: u32) -> u64 {
    // No table has number 0, so no hazard is 0.
    u64::from(table) << 32 | u64::from(slot)
}

/// Creates the cells of a new reader in `file`; the daemon calls it.
///
/// # Errors
/// When the file cannot be sized or written, or `cells` is zero or above [`MAX_CELLS`].
pub fn create(file: &File, cells: usize) -> io::Result<()> {
    if cells == 0 || cells > MAX_CELLS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("cannot create {cells} hazard cells; expected 1 to {MAX_CELLS}"),
        ));
    }
    let words = CELL_WORDS * (1 + cells);
    file.set_len(0)?;
    file.set_len((words * size_of::<u64>()) as u64)?;
    let map = SharedWords::map(file, true, words, words)?;
    map.all()[0].store(MAGIC, Ordering::SeqCst);
    Ok(())
}

fn open(file: impl AsFd, writable: bool) -> io::Result<SharedWords> {
    let words = SharedWords::map(file, writable, 2 * CELL_WORDS, CELL_WORDS * (1 + MAX_CELLS))?;
    if words.all()[0].load(Ordering::SeqCst) != MAGIC
        || !words.all().len().is_multiple_of(CELL_WORDS)
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the file holds no hazard cells",
        ));
    }
    Ok(words)
}

/// The reader's side: a writable mapping.
#[derive(Debug)]
pub struct Cells {
    words: SharedWords,
}

impl Cells {
    /// Maps cells that [`create`] made.
    ///
    /// # Errors
    /// When the file holds no cells or is not writable.
    pub fn map(file: impl AsFd) -> io::Result<Self> {
        open(file, true).map(|words| Self { words })
    }

    /// Number of cells, and so of threads that may read at once.
    pub fn count(&self) -> usize {
        self.words.all().len() / CELL_WORDS - 1
    }

    /// Publishes that the owner of `cell` is going to read a slot of a table, until the returned guard is dropped.
    /// The caller must check the lease afterwards and must not read if it has ended. Returns `None` if there is no
    /// such cell.
    pub fn publish(&self, cell: usize, table: u32, slot: u32) -> Option<Hazard<'_>> {
        if cell >= self.count() {
            return None;
        }
        let word = self.words.all().get(CELL_WORDS * (1 + cell))?;
        word.store(value(table, slot), Ordering::SeqCst);
        Some(Hazard { word })
    }
}

/// A published hazard; dropping it ends the hazard.
#[derive(Debug)]
#[must_use = "the hazard ends when this is dropped"]
pub struct Hazard<'a> {
    word: &'a AtomicU64,
}

impl Drop for Hazard<'_> {
    fn drop(&mut self) {
        self.word.store(0, Ordering::SeqCst);
    }
}

/// The agent worker's side: a read-only mapping.
#[derive(Debug)]
pub struct View {
    words: SharedWords,
}

impl View {
    /// Maps cells that [`create`] made.
    ///
    /// # Errors
    /// When the file holds no cells.
    pub fn map(file: impl AsFd) -> io::Result<Self> {
        open(file, false).map(|words| Self { words })
    }

    /// Whether the reader may be reading this slot of this table.
    pub fn is_reading(&self, table: u32, slot: u32) -> bool {
        self.cells().any(|cell| cell == value(table, slot))
    }

    /// Whether the reader may be reading any slot of this table.
    pub fn is_reading_any(&self, table: u32) -> bool {
        self.cells().any(|cell| cell >> 32 == u64::from(table))
    }

    fn cells(&self) -> impl Iterator<Item = u64> {
        let cells = self.words.all()[CELL_WORDS..].iter().step_by(CELL_WORDS);
        cells.map(|cell| cell.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests;
