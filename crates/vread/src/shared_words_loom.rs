// SPDX-License-Identifier: Apache-2.0
//! `shared_words.rs` for loom: the words of a file are atomics of the model. Only the models run with them.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use loom::sync::atomic::fence;

loom::lazy_static! {
    /// The words of each file, by its inode: all mappings of a file have the same ones.
    static ref FILES: Mutex<HashMap<u64, Arc<[AtomicU64]>>> = Mutex::default();
}

loom::thread_local! {
    /// Whether the last SeqCst access of the thread wrote.
    static HAS_WRITTEN: std::cell::Cell<bool> = std::cell::Cell::new(false);
}

/// A word.
///
/// Loom has no single order of SeqCst accesses, but one of SeqCst fences. So SeqCst accesses are Acquire, Release or AcqRel
/// here, and a fence stands between a SeqCst write and the next SeqCst read of the same thread. This is less than SeqCst
/// promises: two threads may see writes of two others in different order. It is more in one respect: an access that is not
/// SeqCst, after such a write and such a read, is ordered with the write.
#[derive(Debug)]
pub(crate) struct AtomicU64(loom::sync::atomic::AtomicU64);

impl AtomicU64 {
    pub(crate) fn new(value: u64) -> Self {
        Self(loom::sync::atomic::AtomicU64::new(value))
    }

    pub(crate) fn load(&self, order: Ordering) -> u64 {
        before_read(order);
        self.0.load(or(Ordering::Acquire, order))
    }

    pub(crate) fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, or(Ordering::Release, order));
        after_write(order);
    }

    pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        before_read(order);
        let old = self.0.fetch_add(value, or(Ordering::AcqRel, order));
        after_write(order);
        old
    }

    pub(crate) fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
        before_read(order);
        let old = self.0.fetch_or(value, or(Ordering::AcqRel, order));
        after_write(order);
        old
    }

    pub(crate) fn compare_exchange_weak(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange_weak(current, new, success, failure)
    }
}

/// The order of an access for loom; `seq_cst` in place of SeqCst.
fn or(seq_cst: Ordering, order: Ordering) -> Ordering {
    match order {
        Ordering::SeqCst => seq_cst,
        order => order,
    }
}

fn before_read(order: Ordering) {
    if order == Ordering::SeqCst && HAS_WRITTEN.with(|written| written.replace(false)) {
        fence(Ordering::SeqCst);
    }
}

fn after_write(order: Ordering) {
    if order == Ordering::SeqCst {
        HAS_WRITTEN.with(|written| written.set(true));
    }
}

/// The words of a file.
#[derive(Debug)]
pub(crate) struct SharedWords(Arc<[AtomicU64]>);

impl SharedWords {
    pub(crate) fn map(
        file: impl AsFd,
        _writable: bool,
        min_count: usize,
        max_count: usize,
    ) -> io::Result<Self> {
        let status = rustix::fs::fstat(&file)?;
        let count = usize::try_from(status.st_size).unwrap_or(usize::MAX) / size_of::<u64>();
        if count < min_count || count > max_count {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut files = FILES.lock().unwrap_or_else(PoisonError::into_inner);
        let words = files
            .entry(status.st_ino)
            .or_insert_with(|| (0..count).map(|_| AtomicU64::new(0)).collect());
        Ok(Self(words.clone()))
    }

    /// No model reads words by their address.
    pub(crate) fn start(&self) -> *mut u8 {
        unimplemented!("words of loom have no address in the file")
    }

    pub(crate) fn all(&self) -> &[AtomicU64] {
        &self.0
    }
}
