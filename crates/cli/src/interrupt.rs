// SPDX-License-Identifier: Apache-2.0
//! SIGINT, SIGTERM and SIGHUP of long runs: the run ends between two steps, after it has ended its guests and daemon.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Failure, Outcome};

/// Interval at which a sleep looks for a signal.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Catches SIGINT, SIGTERM and SIGHUP: from now on they only set a flag.
///
/// # Errors
/// When the kernel refuses the handler.
pub fn watch() -> Outcome {
    let handler = note as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the structure is plain data for which zero is a value; the handler only stores an atomic.
        let done = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut())
        };
        if done != 0 {
            return Err(Failure::run(format!(
                "cannot catch signals: {}",
                std::io::Error::last_os_error()
            )));
        }
    }
    Ok(())
}

/// Sleeps for this time, or until one of the signals has come.
pub fn sleep(time: Duration) {
    let end = Instant::now() + time;
    while !asked() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(POLL_INTERVAL));
    }
}

/// Whether one of the signals has come.
pub fn asked() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// Fails once one of the signals has come.
///
/// # Errors
/// [`Failure::Run`] then.
pub fn check() -> Outcome {
    match asked() {
        true => Err(Failure::run(
            "ended by a signal: guests and daemon were ended, no result was written",
        )),
        false => Ok(()),
    }
}

extern "C" fn note(_signal: libc::c_int) {
    REQUESTED.store(true, Ordering::Relaxed);
}
