// SPDX-License-Identifier: Apache-2.0
//! Looks that a loop makes between two pieces of what the host has sent, and that need no system call.
//!
//! A server asks for 256 KiB, is told that they are sent, and looks whether there is something else to do, without waiting, before
//! it asks for the next ones: 1024 times for 256 MiB. Each look is only passed over after bytes that were told, when more
//! are there to be told, and when the last seven were not all passed over.

use std::cell::Cell;

/// One look of so many is the kernel's.
const ONE_OF: u8 = 8;

#[derive(Clone, Copy)]
struct Looks {
    /// Bytes were told since the last one, and there are more.
    told: bool,
    /// Passed over since the last one that was not.
    spared: u8,
}

thread_local! {
    static LOOKS: Cell<Looks> = const { Cell::new(Looks { told: false, spared: 0 }) };
}

/// The program was told of bytes; whether there are more for it.
pub fn told(more: bool) {
    let spared = LOOKS.get().spared;
    LOOKS.set(Looks { told: more, spared });
}

/// Whether a look that would not wait is passed over.
pub fn is_spared() -> bool {
    let Looks { told, spared } = LOOKS.get();
    let is_spared = told && spared + 1 < ONE_OF;
    LOOKS.set(Looks {
        told: false,
        spared: if is_spared { spared + 1 } else { 0 },
    });
    is_spared
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_of_eight_and_none_without_news() {
        assert!(!is_spared());
        let spared: Vec<bool> = (0..16)
            .map(|_| {
                told(true);
                is_spared()
            })
            .collect();
        let eight = [true, true, true, true, true, true, true, false];
        assert_eq!(spared, [eight, eight].concat());
        told(true);
        assert!(is_spared());
        // nobody has sent anything in between
        assert!(!is_spared());
        told(true);
        told(false);
        assert!(!is_spared());
    }
}
