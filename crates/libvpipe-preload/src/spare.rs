// SPDX-License-Identifier: Apache-2.0
//! Waits of an event loop between two pieces of what the host has sent, which need no system call.
//!
//! A server asks for 256 KiB, is told that they are sent, and waits until the socket takes more before it asks for the next ones:
//! 1024 times for 256 MiB. It does, for this library has more to tell. So such a wait is over at once, with the event that the
//! kernel would report; a look without waiting, of a loop that goes on by itself, finds nothing. Each is answered here only after
//! bytes that were told, when more are there to be told, and when the last seven were not all answered here: whatever else there
//! is for the program comes with the eighth.

use std::cell::Cell;
use std::ffi::c_int;

use libc::epoll_event;

use crate::board;

/// One wait of so many is the kernel's.
const ONE_OF: u8 = 8;

#[derive(Clone, Copy)]
struct Waits {
    /// The socket of which bytes were told since the last one, when there are more.
    told: Option<c_int>,
    /// Answered here since the last one that was not.
    spared: u8,
}

thread_local! {
    static WAITS: Cell<Waits> = const { Cell::new(Waits { told: None, spared: 0 }) };
}

/// The program was told of bytes of a socket; whether there are more for it.
pub fn told(fd: c_int, more: bool) {
    let told = more.then_some(fd);
    WAITS.set(Waits {
        told,
        ..WAITS.get()
    });
}

/// The socket of which the program was told since it waited last, if this wait may be answered here.
fn next() -> Option<c_int> {
    let Waits { told, spared } = WAITS.get();
    let fd = told.filter(|_| spared + 1 < ONE_OF);
    let spared = if fd.is_some() { spared + 1 } else { 0 };
    WAITS.set(Waits { told: None, spared });
    fd
}

/// What `epoll_wait` answers without the kernel: the event that it reports, or none for who would not wait.
pub fn answer(set: c_int, timeout: c_int) -> Option<Option<epoll_event>> {
    let fd = next()?;
    match board::slot(fd)?.takes_more(set) {
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
        let spared: Vec<bool> = (0..16)
            .map(|_| {
                told(7, true);
                next() == Some(7)
            })
            .collect();
        let eight = [true, true, true, true, true, true, true, false];
        assert_eq!(spared, [eight, eight].concat());
        told(7, true);
        assert_eq!(next(), Some(7));
        // nobody has sent anything in between
        assert_eq!(next(), None);
        told(7, true);
        told(7, false);
        assert_eq!(next(), None);
    }
}
