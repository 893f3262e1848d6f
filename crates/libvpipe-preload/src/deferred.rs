// SPDX-License-Identifier: Apache-2.0
//! Work that waits for a lock that is not free.
//!
//! `close` and similar calls may come from a signal handler that has interrupted the thread that has the lock. Waiting
//! would never end, and blocking signals would cost two system calls for each `sendfile`. So these calls only try to
//! lock; otherwise they mark the descriptor, and the thread that has the lock does the work when it unlocks. A
//! descriptor whose `close` is deferred stays open until then, so its number has no other file.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use vpipe::engine::{Engine, Table, is_own, marks};

use crate::epoll_sets::{self, Try};

/// Attempts to lock the table that failed while work was deferred.
static MISSED: AtomicUsize = AtomicUsize::new(0);

/// Defers work, and does it now if that is possible.
pub fn defer(fd: RawFd, work: u16) {
    marks::defer(fd, work);
    run();
}

/// Does the deferred work whose locks are free. A thread that unlocks calls this; so does a handler, which may have
/// deferred work just after a thread has unlocked.
#[cold]
pub fn run() {
    while marks::any_deferred() && is_own() {
        let engine = Engine::peek();
        let mut table = engine.and_then(Engine::try_lock);
        if engine.is_some() && table.is_none() {
            // the thread that has the table either sees this, or has unlocked it
            MISSED.fetch_add(1, Ordering::SeqCst);
            table = engine.and_then(Engine::try_lock);
            if table.is_none() {
                return;
            }
        }
        let missed = MISSED.load(Ordering::SeqCst);
        for fd in marks::marked().filter(|&fd| marks::deferred(fd) != 0) {
            work_on(fd, table.as_deref_mut());
        }
        if let Some(table) = table {
            table.unlock_quietly();
        }
        fence(Ordering::SeqCst);
        if MISSED.load(Ordering::SeqCst) == missed {
            return;
        }
    }
}

fn work_on(fd: RawFd, table: Option<&mut Table>) {
    let work = marks::deferred(fd);
    if work & (marks::RESET | marks::CLOSE) != 0
        && let Some(table) = table
    {
        table.reset(fd);
        marks::take_deferred(fd, marks::RESET);
    }
    let mut descriptor = match epoll_sets::try_descriptor(fd) {
        Try::Busy => return, // the thread that has it comes here when it unlocks
        Try::Locked(descriptor) => Some(descriptor),
        Try::None => None,
    };
    let work = marks::take_deferred(fd, marks::CLOSE | marks::ADD | marks::ADD_AGAIN);
    if work & marks::CLOSE != 0 {
        if let Some(mut descriptor) = descriptor {
            descriptor.forget(fd);
            descriptor.unlock_quietly();
        }
        marks::file_closing(fd);
        marks::clear_all(fd);
        // SAFETY: the program has closed it, and its close left it open.
        unsafe { rustix::io::close(fd) };
        return;
    }
    if let Some(descriptor) = &mut descriptor
        && work != 0
    {
        descriptor.add_to_sets(fd, work & marks::ADD_AGAIN != 0);
    }
    if let Some(descriptor) = descriptor {
        descriptor.unlock_quietly();
    }
}
