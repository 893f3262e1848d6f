// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C and `kill`: a long run ends between two steps, and takes guests and daemon with it.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Failure, Outcome};

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT, SIGTERM and SIGHUP are only noted.
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
                "catching signals: {}",
                std::io::Error::last_os_error()
            )));
        }
    }
    Ok(())
}

/// Whether somebody asked for the end.
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Fails once somebody asked for the end.
pub fn check() -> Outcome {
    match asked() {
        true => Err(Failure::run(
            "ended by a signal; guests and daemon are gone, nothing was written",
        )),
        false => Ok(()),
    }
}

extern "C" fn note(_signal: libc::c_int) {
    ASKED.store(true, Ordering::Relaxed);
}
