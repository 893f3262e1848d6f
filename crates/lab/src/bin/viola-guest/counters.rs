// SPDX-License-Identifier: Apache-2.0
//! Counters of a workload in memory shared between its processes and the channel's server.

use std::fs::OpenOptions;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::RUN;

/// Processes with a counter of their own; more of them share the last.
const SLOTS: usize = 64;

/// One process's counters, on a cache line of its own.
#[repr(C, align(64))]
pub struct Slot {
    units: AtomicU64,
    bytes: AtomicU64,
}

impl Slot {
    /// Counts `units` units that moved `bytes` bytes.
    pub fn add(&self, units: u64, bytes: u64) {
        self.units.fetch_add(units, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The counters of one workload. The mapping stays for the life of the process.
pub struct Counters(&'static [Slot; SLOTS]);

impl Counters {
    /// File of the workload's counters.
    pub fn path(name: &str) -> String {
        format!("{RUN}/{name}.counters")
    }

    /// Opens, or with `new` makes, the counters of the workload.
    pub fn open(name: &str, new: bool) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(new)
            .truncate(new)
            .open(Self::path(name))?;
        let size = size_of::<[Slot; SLOTS]>();
        if new {
            file.set_len(size as u64)?;
        } else if file.metadata()?.len() != size as u64 {
            return Err(io::Error::other("counters of a wrong size"));
        }
        // SAFETY: a fresh shared mapping of a file of this size on tmpfs; Slot is made of atomics
        // for which every bit pattern is a value, and a page is aligned enough. Never unmapped.
        let slots = unsafe {
            let page = mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?;
            &*page.cast::<[Slot; SLOTS]>()
        };
        Ok(Self(slots))
    }

    /// The counters of process number `index`.
    pub fn slot(&self, index: usize) -> &'static Slot {
        &self.0[index.min(SLOTS - 1)]
    }

    /// Units and bytes of all processes together.
    pub fn total(&self) -> (u64, u64) {
        self.0.iter().fold((0, 0), |(units, bytes), slot| {
            (
                units + slot.units.load(Ordering::Relaxed),
                bytes + slot.bytes.load(Ordering::Relaxed),
            )
        })
    }
}
