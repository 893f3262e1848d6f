// SPDX-License-Identifier: Apache-2.0
//! Marks of descriptors, cheap enough for a check in every system call: while nothing is marked it is one relaxed load
//! of a counter.
//!
//! A signal handler may use this module wherever it interrupts the program: the words are static, and every function
//! except [`wait_for_end`] consists of atomic operations.

use std::os::fd::RawFd;
use std::sync::atomic::{
    AtomicI32, AtomicU16, AtomicUsize,
    Ordering::{Acquire, Relaxed, SeqCst},
};

use super::change::Change;
use super::process;

/// The descriptor has a pipe, or an error that the program must still get.
pub const PIPE: u16 = 1;
/// The library has sent the descriptor to the agent since the program opened it.
pub const LENT: u16 = 2;
/// The last write was the head of a response.
pub const HEAD: u16 = 4;
/// The descriptor was checked and is the file of a pipe; it has not been closed since.
pub const FILE: u16 = 8;
/// The host has the connection.
pub const HELD: u16 = 16;
/// Another descriptor may be the same socket. The library never hands it over.
pub const SHARED: u16 = 32;
/// Another descriptor of the same socket, perhaps of another process, may have a pipe. The kernel knows whether the
/// host has the connection.
pub const ALIAS: u16 = 64;
const MARKS: u16 = 0xff;

/// Deferred: resets the pipe, because its number is another file's now.
pub const RESET: u16 = 1 << 8;
/// Deferred: resets the pipe and closes the descriptor.
pub const CLOSE: u16 = 2 << 8;
/// Deferred: adds the descriptor to its epoll sets.
pub const ADD: u16 = 4 << 8;
/// Deferred: as [`ADD`]; sets that have it report again what is ready.
pub const ADD_AGAIN: u16 = 8 << 8;
const DEFERRED: u16 = !MARKS;

/// Descriptors below this number can have marks.
pub const MAX_DESCRIPTORS: u32 = 1 << 20;

/// A word for each descriptor. The kernel gives a page of it memory when it is first written.
static WORDS: [AtomicU16; MAX_DESCRIPTORS as usize] =
    [const { AtomicU16::new(0) }; MAX_DESCRIPTORS as usize];
/// Words that are not 0, or more: a descriptor counts before it has its first mark.
static MARKED: AtomicUsize = AtomicUsize::new(0);
/// Words with deferred work, or more.
static DEFERRING: AtomicUsize = AtomicUsize::new(0);
/// All words above this descriptor are 0.
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
/// Number of closed descriptors with the mark [`FILE`].
static FILES_CLOSED: AtomicUsize = AtomicUsize::new(0);
/// Changes when a descriptor loses [`HELD`].
static ENDS: Change = Change::new();
/// Threads that wait for [`ENDS`].
static WAITERS: AtomicUsize = AtomicUsize::new(0);

fn word(fd: RawFd) -> Option<&'static AtomicU16> {
    WORDS.get(usize::try_from(fd).ok()?)
}

/// Whether any descriptor is marked.
#[inline]
pub fn any() -> bool {
    MARKED.load(Relaxed) != 0
}

/// A descriptor's marks.
#[inline]
pub fn of(fd: RawFd) -> u16 {
    if any() { load(fd) & MARKS } else { 0 }
}

#[inline]
fn load(fd: RawFd) -> u16 {
    word(fd).map_or(0, |word| word.load(Acquire))
}

fn add(fd: RawFd, bits: u16) -> Option<u16> {
    process::watch_forks();
    let word = word(fd)?;
    HIGHEST.fetch_max(fd, SeqCst);
    MARKED.fetch_add(1, SeqCst);
    let before = word.fetch_or(bits, SeqCst);
    if before != 0 {
        MARKED.fetch_sub(1, SeqCst);
    }
    Some(before)
}

/// Removes bits and returns those that were there.
fn remove(fd: RawFd, bits: u16) -> u16 {
    let Some(word) = word(fd) else { return 0 };
    if word.load(Relaxed) & bits == 0 {
        return 0;
    }
    let before = word.fetch_and(!bits, SeqCst);
    if before != 0 && before & !bits == 0 {
        MARKED.fetch_sub(1, SeqCst);
    }
    if before & DEFERRED != 0 && before & !bits & DEFERRED == 0 {
        DEFERRING.fetch_sub(1, SeqCst);
    }
    before & bits
}

/// Sets marks; false when the number is too large. Not for children of vfork.
pub fn set(fd: RawFd, bits: u16) -> bool {
    add(fd, bits & MARKS).is_some()
}

/// Clears marks, and returns those that were set.
pub fn clear(fd: RawFd, bits: u16) -> u16 {
    let cleared = remove(fd, bits & MARKS);
    if cleared & HELD != 0 {
        ENDS.note();
        if WAITERS.load(SeqCst) != 0 {
            ENDS.wake();
        }
    }
    cleared
}

/// Clears all marks, and drops deferred work.
pub fn clear_all(fd: RawFd) {
    clear(fd, MARKS);
    remove(fd, DEFERRED);
}

/// Waits until a descriptor loses the mark [`HELD`]; also returns at a signal, and without a reason.
pub fn wait_for_end(fd: RawFd) {
    WAITERS.fetch_add(1, SeqCst);
    let seen = ENDS.now();
    if of(fd) & HELD != 0 {
        ENDS.wait(seen, None);
    }
    WAITERS.fetch_sub(1, SeqCst);
}

/// Defers work on a descriptor until a lock is free.
pub fn defer(fd: RawFd, work: u16) {
    DEFERRING.fetch_add(1, SeqCst);
    if add(fd, work & DEFERRED).is_none_or(|before| before & DEFERRED != 0) {
        DEFERRING.fetch_sub(1, SeqCst);
    }
}

/// Whether work is deferred.
#[inline]
pub fn any_deferred() -> bool {
    DEFERRING.load(SeqCst) != 0
}

/// The deferred work of a descriptor.
pub fn deferred(fd: RawFd) -> u16 {
    load(fd) & DEFERRED
}

/// Takes this deferred work, as far as it is still there.
pub fn take_deferred(fd: RawFd, work: u16) -> u16 {
    remove(fd, work & DEFERRED)
}

/// Descriptors that may have deferred work.
pub fn marked() -> impl Iterator<Item = RawFd> {
    (0..=HIGHEST.load(SeqCst)).filter(|&fd| load(fd) != 0)
}

/// Number of closed files of pipes. While it stays the same, a descriptor that was checked before
/// is still the same file.
pub fn files_closed() -> usize {
    FILES_CLOSED.load(Acquire)
}

/// The file of a pipe is about to be closed.
pub fn file_closing(fd: RawFd) {
    FILES_CLOSED.fetch_add(1, SeqCst);
    clear(fd, FILE);
}

/// In the child of a fork: it has no pipes, but its sockets may be those of its parent's pipes. Closes the descriptors
/// that the parent has closed.
pub(super) fn reset_after_fork() {
    let mut marked = 0;
    for fd in 0..=HIGHEST.load(Relaxed) {
        let Some(word) = word(fd) else { break };
        let before = word.load(Relaxed);
        if before == 0 {
            continue;
        }
        let closed = before & CLOSE != 0;
        if closed {
            // SAFETY: the program has closed it, and its parent's library kept it open.
            unsafe { rustix::io::close(fd) };
        }
        let left = match before & (HELD | ALIAS | SHARED) {
            0 => 0,
            _ if closed => 0,
            SHARED => SHARED,
            _ => SHARED | ALIAS,
        };
        word.store(left, Relaxed);
        marked += usize::from(left != 0);
    }
    MARKED.store(marked, SeqCst);
    DEFERRING.store(0, SeqCst);
    WAITERS.store(0, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_has_several_marks() {
        let fd = 700_000;
        assert!(set(fd, PIPE) && set(fd, LENT) && any());
        assert_eq!(of(fd), PIPE | LENT);
        assert_eq!((of(fd + 1), of(-1)), (0, 0));
        assert_eq!(clear(fd, PIPE | HEAD), PIPE);
        assert_eq!((of(fd), clear(fd, PIPE)), (LENT, 0));
        clear_all(fd);
        assert_eq!(of(fd), 0);
        assert!(!set(-1, PIPE) && !set(1 << 20, PIPE));
    }

    #[test]
    fn deferred_work_is_taken_once() {
        let fd = 700_002;
        set(fd, PIPE);
        defer(fd, CLOSE);
        defer(fd, ADD);
        assert!(any_deferred() && marked().any(|it| it == fd));
        assert_eq!((of(fd), deferred(fd)), (PIPE, CLOSE | ADD));
        assert_eq!(take_deferred(fd, CLOSE), CLOSE);
        assert_eq!((take_deferred(fd, CLOSE | ADD), deferred(fd)), (ADD, 0));
        clear_all(fd);
    }

    #[test]
    fn a_thread_waits_until_the_connection_is_back() {
        let fd = 700_003;
        set(fd, HELD);
        let waiting = std::thread::spawn(move || {
            while of(fd) & HELD != 0 {
                wait_for_end(fd);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        clear_all(fd);
        waiting.join().unwrap();
    }
}
