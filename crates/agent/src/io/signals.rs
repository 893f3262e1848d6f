// SPDX-License-Identifier: Apache-2.0
//! Signals as descriptors.

use std::io;
use std::os::fd::FromRawFd;

use rustix::fd::OwnedFd;

/// The signals that end the agent.
pub const TERMINATION: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Blocks signals in the calling thread and in all that it starts later, and returns a signalfd that is readable when
/// one of them arrives.
///
/// # Errors
/// The kernel's error.
pub fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    // SAFETY: sigemptyset initialises the set before use, the results of the calls are checked, and the descriptor is new.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => {}
            errno => return Err(io::Error::from_raw_os_error(errno)),
        }
        match libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            raw if raw < 0 => Err(io::Error::last_os_error()),
            raw => Ok(OwnedFd::from_raw_fd(raw)),
        }
    }
}
