// SPDX-License-Identifier: Apache-2.0
//! Signals that end the agent, as a descriptor.

use std::os::fd::FromRawFd;

use rustix::fd::OwnedFd;

/// Blocks SIGTERM, SIGINT and SIGHUP in the calling thread and in all that it starts later, and returns a signalfd that is
/// readable when one of them arrives.
///
/// # Errors
/// The kernel's error.
pub fn termination_signals() -> std::io::Result<OwnedFd> {
    // SAFETY: sigemptyset initialises the set before use, and the results of the calls are checked.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let raw = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if raw < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(raw))
    }
}
