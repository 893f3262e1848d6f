// SPDX-License-Identifier: Apache-2.0
//! Whether the process uses `io_uring`. Requests in a ring pass no function of the C library, so the library hands no
//! socket of such a process over.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::read;

/// Time between two looks at the process's mappings.
const RECHECK_INTERVAL_MS: u64 = 1000;
/// The kernel's name of a mapped ring.
const NAME: &[u8] = b"[io_uring]";

static USED: AtomicBool = AtomicBool::new(false);
/// Time of the next look, in milliseconds of the monotonic clock.
static NEXT_LOOK: AtomicU64 = AtomicU64::new(0);

/// Whether the process had a mapped ring at the last look, which was at most a second ago. Once it had one, the answer
/// stays.
pub fn is_used() -> bool {
    if USED.load(Ordering::Relaxed) {
        return true;
    }
    let now = now_ms();
    let next = NEXT_LOOK.load(Ordering::Relaxed);
    if now < next {
        return false;
    }
    NEXT_LOOK.store(now + RECHECK_INTERVAL_MS, Ordering::Relaxed);
    let is_used = look();
    if is_used {
        USED.store(true, Ordering::Relaxed);
    }
    is_used
}

/// The monotonic clock, ms, by the C library: rustix expects functions of the kernel's vDSO that a UML kernel does not have.
fn now_ms() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

fn look() -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let Ok(maps) = open("/proc/self/maps", flags, Mode::empty()) else {
        return false;
    };
    let mut bytes = vec![0; 32 << 10];
    let found = search(&mut bytes, |room| read(&maps, room).unwrap_or(0));
    // the program's `close` would look for marks
    let maps = std::os::fd::IntoRawFd::into_raw_fd(maps);
    // SAFETY: it was owned here only.
    unsafe { rustix::io::close(maps) };
    found
}

/// Whether what `read` reads has the name of a ring. It returns 0 at the end.
fn search(bytes: &mut [u8], mut read: impl FnMut(&mut [u8]) -> usize) -> bool {
    let mut kept = 0;
    loop {
        let Some(room) = bytes.get_mut(kept..) else {
            return false;
        };
        let n = read(room);
        let end = kept + n;
        let Some(have) = bytes.get(..end).filter(|_| n > 0) else {
            return false;
        };
        if have.windows(NAME.len()).any(|part| part == NAME) {
            return true;
        }
        // the name may go on in the next part
        let rest = end.min(NAME.len() - 1);
        bytes.copy_within(end - rest..end, 0);
        kept = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_found_wherever_a_read_ends() {
        let maps = "7f00-7f01 rw-p 00000000 00:00 0 [heap]\n7f01-7f02 rw-s 10000000 00:0e 1 anon_inode:[io_uring]\n\
                    7f02-7f03 r-xp 00000000 00:00 0 [vdso]\n";
        for (text, found) in [
            (maps.to_owned(), true),
            (maps.replace("io_u", "io-u"), false),
        ] {
            for piece in 1..text.len() {
                let mut rest = text.as_bytes();
                let mut bytes = [0; 64];
                let searched = search(&mut bytes, |room| {
                    let n = piece.min(room.len()).min(rest.len());
                    room[..n].copy_from_slice(&rest[..n]);
                    rest = &rest[n..];
                    n
                });
                assert_eq!(searched, found, "{piece}");
            }
        }
        assert!(!is_used());
    }
}
