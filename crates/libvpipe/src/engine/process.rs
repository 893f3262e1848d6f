// SPDX-License-Identifier: Apache-2.0
//! Values of which each process has its own: a forked child begins without any.
//!
//! A child of `vfork(2)` shares its parent's memory and must not change these values. Its process ID tells it apart.

use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use rustix::process::{Pid, getpid};

use super::marks;

/// Number of forks that led to this process.
static FORKS: AtomicU32 = AtomicU32::new(0);
static FORK_HANDLER: Once = Once::new();
/// Process ID of the process that has this memory. A child of vfork has another one, and so has a child of `_Fork`,
/// which runs no handlers.
static OWNER: AtomicI32 = AtomicI32::new(0);

extern "C" fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    OWNER.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
    marks::reset_after_fork();
}

/// From now on a forked child begins with values of its own. The preload library calls this before `main`; a signal
/// handler cannot be the first caller then.
pub fn watch_forks() {
    FORK_HANDLER.call_once(|| {
        OWNER.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        // SAFETY: the handler has no argument, touches only atomics, and makes system calls. Without memory for it,
        // forks are still noticed by their process ID.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    });
}

/// Whether the calling process may change the marks of descriptors: false for children of vfork and `_Fork`. Call
/// [`watch_forks`] before.
pub fn is_own() -> bool {
    OWNER.load(Ordering::Relaxed) == getpid().as_raw_nonzero().get()
}

struct Stored<T> {
    forks: u32,
    pid: Pid,
    value: T,
}

/// A value per process. The parent's value is never freed: another thread may have been using it.
pub struct PerProcess<T> {
    place: AtomicPtr<Stored<T>>,
    value: PhantomData<T>,
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> PerProcess<T> {
    /// A value that is not made yet.
    pub const fn new() -> Self {
        Self {
            place: AtomicPtr::new(null_mut()),
            value: PhantomData,
        }
    }
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    fn stored(&self) -> Option<&'static Stored<T>> {
        let place = self.place.load(Ordering::Acquire);
        // SAFETY: the pointer is null or a leaked box that no code changes.
        let stored = unsafe { place.as_ref() }?;
        (stored.forks == FORKS.load(Ordering::Relaxed)).then_some(stored)
    }

    /// The value without a system call; in a child of vfork it is the parent's.
    pub fn peek(&self) -> Option<&'static T> {
        Some(&self.stored()?.value)
    }

    /// The value, if it is this process's own.
    pub fn own(&self) -> Option<&'static T> {
        let stored = self.stored()?;
        (stored.pid == getpid()).then_some(&stored.value)
    }

    /// This process's value, made if needed. Not for children of vfork.
    pub fn get(&self) -> &'static T {
        if let Some(value) = self.own() {
            return value;
        }
        watch_forks();
        let before = self.place.load(Ordering::Acquire);
        let new = Box::into_raw(Box::new(Stored {
            forks: FORKS.load(Ordering::Relaxed),
            pid: getpid(),
            value: T::default(),
        }));
        let (full, empty) = (Ordering::AcqRel, Ordering::Acquire);
        let place = match self.place.compare_exchange(before, new, full, empty) {
            Ok(_) => new,
            Err(other) => other, // another thread was first; this box is leaked once
        };
        // SAFETY: a leaked box, ours or the other thread's, that no code changes.
        unsafe { &(*place).value }
    }
}
