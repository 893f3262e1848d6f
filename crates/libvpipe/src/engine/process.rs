// SPDX-License-Identifier: Apache-2.0
//! What each process has for itself: the child of a fork begins with nothing.
//!
//! A child of `vfork(2)` shares its parent's memory. It must not change what is here, and is told from the others by its
//! number.

use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::process::{Pid, getpid};

/// Forks on the way to this process.
static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCHED: Once = Once::new();

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    super::marks::none();
}

struct Held<T> {
    forks: u32,
    pid: Pid,
    value: T,
}

/// A value of which each process has one. What a parent had is never freed: another thread may have been at it.
pub struct PerProcess<T> {
    place: AtomicPtr<Held<T>>,
    value: PhantomData<T>,
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> PerProcess<T> {
    /// Nothing is made yet.
    pub const fn new() -> Self {
        Self {
            place: AtomicPtr::new(null_mut()),
            value: PhantomData,
        }
    }
}

impl<T: Default + Send + Sync + 'static> PerProcess<T> {
    fn held(&self) -> Option<&'static Held<T>> {
        let place = self.place.load(Ordering::Acquire);
        // SAFETY: the place is null or a leaked box, which nobody changes any more.
        let held = unsafe { place.as_ref() }?;
        (held.forks == FORKS.load(Ordering::Relaxed)).then_some(held)
    }

    /// What is there, without a system call; in a child of vfork that is its parent's.
    pub fn peek(&self) -> Option<&'static T> {
        Some(&self.held()?.value)
    }

    /// What is there and belongs to this process.
    pub fn own(&self) -> Option<&'static T> {
        let held = self.held()?;
        (held.pid == getpid()).then_some(&held.value)
    }

    /// What belongs to this process; made when it is not there. Not for children of vfork.
    pub fn get(&self) -> &'static T {
        if let Some(value) = self.own() {
            return value;
        }
        WATCHED.call_once(|| {
            // SAFETY: the handler takes nothing and touches only atomics. When there is no memory for it, forks are still
            // noticed by their process number.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let before = self.place.load(Ordering::Acquire);
        let new = Box::into_raw(Box::new(Held {
            forks: FORKS.load(Ordering::Relaxed),
            pid: getpid(),
            value: T::default(),
        }));
        let (full, empty) = (Ordering::AcqRel, Ordering::Acquire);
        let place = match self.place.compare_exchange(before, new, full, empty) {
            Ok(_) => new,
            Err(other) => other, // another thread was first; this one's is lost, once
        };
        // SAFETY: a leaked box, ours or the other thread's, which nobody changes any more.
        unsafe { &(*place).value }
    }
}
