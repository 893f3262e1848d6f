// SPDX-License-Identifier: Apache-2.0
//! Answers `epoll_wait` between two reports of sent bytes without a system call.
//!
//! A server asks for 256 KiB, learns that they are sent, and waits until the socket accepts more before it asks
//! again: 1024 times for 256 MiB. While the library has more to report, such a wait returns at once with the event
//! that the kernel would report; a wait with timeout 0 returns no event. The library answers a wait only after it has
//! reported bytes and has more to report, and at most seven waits in a row: the eighth goes to the kernel, which
//! reports all other events.

use std::cell::Cell;
use std::ffi::c_int;

use libc::epoll_event;

use crate::epoll_sets;

/// One of this many waits goes to the kernel.
const KERNEL_WAIT_PERIOD: u8 = 8;

#[derive(Clone, Copy)]
struct Waits {
    /// Socket whose bytes were reported since the last wait, if it has more.
    reported: Option<c_int>,
    /// Waits answered since the last one that went to the kernel.
    answered: u8,
}

thread_local! {
    static WAITS: Cell<Waits> = const { Cell::new(Waits { reported: None, answered: 0 }) };
}

/// Notes that the program has got a report of sent bytes, and whether there are more.
pub fn note_reported(fd: c_int, more: bool) {
    let reported = more.then_some(fd);
    WAITS.set(Waits {
        reported,
        ..WAITS.get()
    });
}

/// The socket of the last report, if this wait may be answered here.
fn next() -> Option<c_int> {
    let Waits { reported, answered } = WAITS.get();
    let fd = reported.filter(|_| answered + 1 < KERNEL_WAIT_PERIOD);
    let answered = if fd.is_some() { answered + 1 } else { 0 };
    WAITS.set(Waits {
        reported: None,
        answered,
    });
    fd
}

/// The answer of `epoll_wait` without the kernel: an event, or none for a caller that does not wait. `None` when the
/// kernel must answer.
pub fn event_without_wait(set: c_int, timeout: c_int) -> Option<Option<epoll_event>> {
    let fd = next()?;
    match epoll_sets::descriptor(fd)?.writable_event(set) {
        Some(event) => Some(Some(event)),
        None => (timeout == 0).then_some(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_of_eight_and_none_without_news() {
        assert_eq!(next(), None);
        let answered: Vec<bool> = (0..16)
            .map(|_| {
                note_reported(7, true);
                next() == Some(7)
            })
            .collect();
        let eight = [true, true, true, true, true, true, true, false];
        assert_eq!(answered, [eight, eight].concat());
        note_reported(7, true);
        assert_eq!(next(), Some(7));
        // nothing was reported in between
        assert_eq!(next(), None);
        note_reported(7, true);
        note_reported(7, false);
        assert_eq!(next(), None);
    }
}
