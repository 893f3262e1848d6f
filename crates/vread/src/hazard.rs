// SPDX-License-Identifier: Apache-2.0
//! What each reader thread reads right now, told to the agent workers.
//!
//! Every reader worker has a small shared file of cells, one per thread. A thread writes into its cell
//! which slot of which table it is about to read, then looks whether the lease holds. An agent worker
//! that withdraws a block ends the lease first and looks at the cells then. All four steps are
//! sequentially consistent, so one of the two always sees the other: either the reader finds its lease
//! ended, or the agent worker finds the hazard and waits.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use crate::shared_words::SharedWords;

const MAGIC: u64 = u64::from_le_bytes(*b"violaHZ1");
/// SharedWords of a cell: a cache line, so that threads do not disturb each other.
const CELL_WORDS: usize = 8;

/// Most cells, and so threads, of a reader.
pub const MAX_CELLS: usize = 64;

fn value(table: u32, slot: u32) -> u64 {
    // Tables are never numbered zero, so no hazard is zero.
    u64::from(table) << 32 | u64::from(slot)
}

/// Makes the cells of a new reader in `file`: for the daemon.
///
/// # Errors
/// When the file cannot be sized or written, or `cells` is zero or above [`MAX_CELLS`].
pub fn create(file: &File, cells: usize) -> io::Result<()> {
    if cells == 0 || cells > MAX_CELLS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{cells} hazard cells cannot be made"),
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
            "it holds no hazard cells",
        ));
    }
    Ok(words)
}

/// The reader's side.
#[derive(Debug)]
pub struct Cells {
    words: SharedWords,
}

impl Cells {
    /// Maps cells that [`create`] made.
    ///
    /// # Errors
    /// When the file holds no cells, or may not be written.
    pub fn map(file: impl AsFd) -> io::Result<Self> {
        open(file, true).map(|words| Self { words })
    }

    /// How many threads may read at once.
    pub fn count(&self) -> usize {
        self.words.all().len() / CELL_WORDS - 1
    }

    /// Publishes that the thread that owns `cell` is going to read a slot of a table, until the
    /// returned guard is dropped. The lease must be looked at after this, and nothing may be read
    /// when it does not hold. `None` when there is no such cell.
    pub fn publish(&self, cell: usize, table: u32, slot: u32) -> Option<Hazard<'_>> {
        if cell >= self.count() {
            return None;
        }
        let word = self.words.all().get(CELL_WORDS * (1 + cell))?;
        word.store(value(table, slot), Ordering::SeqCst);
        Some(Hazard { word })
    }
}

/// A published hazard.
#[derive(Debug)]
#[must_use = "the hazard ends when this is dropped"]
pub struct Hazard<'a> {
    word: &'a std::sync::atomic::AtomicU64,
}

impl Drop for Hazard<'_> {
    fn drop(&mut self) {
        self.word.store(0, Ordering::SeqCst);
    }
}

/// An agent worker's side: sees what a reader reads. The mapping is read-only.
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
