// SPDX-License-Identifier: Apache-2.0
//! Counters of a workload, in memory that its processes share with the channel's server.

use std::fs::OpenOptions;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::RUN;

/// Number of counters; further processes share the last one.
const MAX_COUNTERS: usize = 64;

/// Counters of one process, on a cache line of their own.
#[repr(C, align(64))]
pub struct Slot {
    units: AtomicU64,
    bytes: AtomicU64,
}

impl Slot {
    /// Adds units and the bytes that they moved.
    pub fn add(&self, units: u64, bytes: u64) {
        self.units.fetch_add(units, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The counters of one workload, mapped until the process ends.
pub struct Counters(&'static [Slot; MAX_COUNTERS]);

impl Counters {
    /// File of the workload's counters.
    pub fn path(name: &str) -> String {
        format!("{RUN}/{name}.counters")
    }

    /// Opens the counters of a workload; with `new` creates them.
    pub fn open(name: &str, new: bool) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(new)
            .truncate(new)
            .open(Self::path(name))?;
        let size = size_of::<[Slot; MAX_COUNTERS]>();
        if new {
            file.set_len(size as u64)?;
        } else if file.metadata()?.len() != size as u64 {
            return Err(io::Error::other("counters of a wrong size"));
        }
        // SAFETY: a new shared mapping of a tmpfs file of this size, never unmapped. Slot consists
        // of atomics, for which every bit pattern is valid, and a page is sufficiently aligned.
        let slots = unsafe {
            let page = mmap(
                std::ptr::null_mut(),
                size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?;
            &*page.cast::<[Slot; MAX_COUNTERS]>()
        };
        Ok(Self(slots))
    }

    /// The counters of process number `index`.
    pub fn slot(&self, index: usize) -> &'static Slot {
        &self.0[index.min(MAX_COUNTERS - 1)]
    }

    /// Total units and bytes of all processes.
    pub fn total(&self) -> (u64, u64) {
        self.0.iter().fold((0, 0), |(units, bytes), slot| {
            (
                units + slot.units.load(Ordering::Relaxed),
                bytes + slot.bytes.load(Ordering::Relaxed),
            )
        })
    }
}

/// Reports to the channel's server that the workload is ready.
pub fn ready() {
    println!("ready");
}
