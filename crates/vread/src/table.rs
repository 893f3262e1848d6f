// SPDX-License-Identifier: Apache-2.0
//! The lease table of a DataNode VM, in memory that its agent worker and all readers share.
//!
//! A named block occupies a slot. A reader holds a [`Lease`]: the slot, its generation, and the table's epoch when
//! the block was named. Withdrawing the block increments the slot's generation; a new or restarted agent increments
//! the epoch. Neither ever decreases, so an ended lease never becomes valid again.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use crate::shared_words::{AtomicU64, SharedWords, fence};

const MAGIC: u64 = u64::from_le_bytes(*b"violaTB1");
/// Words before the first slot: magic, table number, epoch, reserved; a cache line.
const HEADER: usize = 8;
const ID: usize = 1;
const EPOCH: usize = 2;

/// Maximum slots of a table.
pub const MAX_SLOTS: u32 = 1 << 20;

/// The right to read a block while its slot's generation and the table's epoch are unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lease {
    /// The block's slot in its table.
    pub slot: u32,
    /// The slot's generation when the block was named.
    pub generation: u64,
    /// The table's epoch when the block was named.
    pub epoch: u64,
}

/// Creates an empty table in `file`, before anyone maps it; the daemon calls it. `id` identifies the table among all
/// tables of a reader and must not be 0.
///
/// # Errors
/// When the file cannot be sized or written, or `id` or `slots` is out of range.
pub fn create(file: &File, id: u32, slots: u32) -> io::Result<()> {
    if id == 0 || slots == 0 || slots > MAX_SLOTS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "cannot create a table with number {id} and {slots} slots; expected a number above 0 and 1 to {MAX_SLOTS} slots"
            ),
        ));
    }
    let words = HEADER + slots as usize;
    file.set_len(0)?;
    file.set_len((words * size_of::<u64>()) as u64)?;
    let map = SharedWords::map(file, true, words, words)?;
    map.all()[ID].store(id.into(), Ordering::SeqCst);
    map.all()[EPOCH].store(1, Ordering::SeqCst);
    map.all()[0].store(MAGIC, Ordering::SeqCst);
    Ok(())
}

/// A reader's side: a read-only mapping that checks leases.
#[derive(Debug)]
pub struct View {
    words: SharedWords,
    id: u32,
}

impl View {
    /// Maps a table that [`create`] made.
    ///
    /// # Errors
    /// When the file is not a table.
    pub fn map(file: impl AsFd) -> io::Result<Self> {
        Self::open(file, false)
    }

    fn open(file: impl AsFd, writable: bool) -> io::Result<Self> {
        let words = SharedWords::map(file, writable, HEADER + 1, HEADER + MAX_SLOTS as usize)?;
        let id = u32::try_from(words.all()[ID].load(Ordering::SeqCst)).unwrap_or(0);
        if words.all()[0].load(Ordering::SeqCst) != MAGIC || id == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the file is not a lease table",
            ));
        }
        Ok(Self { words, id })
    }

    /// The table's number, which tells it from others in a hazard cell.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Whether a lease is still valid. Bytes read between two calls that return true, with a hazard published before
    /// the first, are the block's own.
    pub fn holds(&self, lease: Lease) -> bool {
        // orders what the caller has read before this check; no instruction on x86-64
        fence(Ordering::Acquire);
        let generation = self.slot(lease.slot);
        generation.is_some_and(|g| g.load(Ordering::SeqCst) == lease.generation)
            && self.words.all()[EPOCH].load(Ordering::SeqCst) == lease.epoch
    }

    fn slot(&self, slot: u32) -> Option<&AtomicU64> {
        self.words.all()[HEADER..].get(slot as usize)
    }
}

/// The agent worker's side: a writable mapping that ends leases.
#[derive(Debug)]
pub struct Table(View);

impl std::ops::Deref for Table {
    type Target = View;

    fn deref(&self) -> &View {
        &self.0
    }
}

impl Table {
    /// Maps a table that [`create`] made.
    ///
    /// # Errors
    /// When the file is not a table or not writable.
    pub fn map(file: impl AsFd) -> io::Result<Self> {
        View::open(file, true).map(Self)
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        (self.words.all().len() - HEADER) as u32
    }

    /// The current epoch.
    pub fn epoch(&self) -> u64 {
        self.words.all()[EPOCH].load(Ordering::SeqCst)
    }

    /// Returns the lease for a block that is put into `slot` now. The slot must be free: never used, or withdrawn and
    /// confirmed.
    pub fn lease(&self, slot: u32) -> Option<Lease> {
        let generation = self.slot(slot)?.load(Ordering::SeqCst);
        Some(Lease {
            slot,
            generation,
            epoch: self.epoch(),
        })
    }

    /// Ends the lease of a slot. The block is out of use only when no hazard names the slot any more
    /// ([`crate::hazard::View::is_reading`]).
    pub fn withdraw(&self, slot: u32) {
        if let Some(generation) = self.slot(slot) {
            generation.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Ends all leases and returns the new epoch. The blocks are out of use only when no hazard names the table any
    /// more ([`crate::hazard::View::is_reading_any`]).
    pub fn end_epoch(&self) -> u64 {
        self.words.all()[EPOCH].fetch_add(1, Ordering::SeqCst) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(slots: u32) -> (File, Table, View) {
        let file = tempfile::tempfile().unwrap();
        create(&file, 7, slots).unwrap();
        let table = Table::map(&file).unwrap();
        let view = View::map(&file).unwrap();
        (file, table, view)
    }

    #[test]
    fn a_lease_holds_until_its_slot_is_withdrawn() {
        let (_file, table, view) = table(4);
        let (a, b) = (table.lease(0).unwrap(), table.lease(3).unwrap());
        assert!(view.holds(a) && view.holds(b) && table.lease(4).is_none());
        table.withdraw(0);
        assert!(!view.holds(a) && view.holds(b));
        assert!(view.holds(table.lease(0).unwrap()));
        assert_eq!((view.id(), table.id(), table.slots()), (7, 7, 4));
    }

    #[test]
    fn the_end_of_an_epoch_ends_every_lease_for_good() {
        let (_file, table, view) = table(2);
        let old = [table.lease(0).unwrap(), table.lease(1).unwrap()];
        assert_eq!(table.end_epoch(), 2);
        assert!(!old.iter().any(|lease| view.holds(*lease)));
        assert!(view.holds(table.lease(1).unwrap()));
    }

    #[test]
    fn a_lease_out_of_the_table_never_holds() {
        let (_file, table, view) = table(2);
        let lease = Lease {
            slot: u32::MAX,
            ..table.lease(0).unwrap()
        };
        assert!(!view.holds(lease));
        table.withdraw(u32::MAX);
    }

    #[test]
    fn a_file_that_is_not_a_table_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(View::map(&file).is_err());
        file.set_len(4096).unwrap();
        assert!(View::map(&file).is_err());
        assert!(create(&file, 0, 4).is_err());
        assert!(create(&file, 1, 0).is_err());
        assert!(create(&file, 1, MAX_SLOTS + 1).is_err());
        create(&file, 1, 4).unwrap();
        assert!(View::map(&file).is_ok());
    }
}
