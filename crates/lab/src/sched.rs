// SPDX-License-Identifier: Apache-2.0
//! What a process gets from the one that starts it, set between fork and exec: scheduling class,
//! signal mask, descriptors. By the system call itself where not every C library has it.

use std::io;

/// Puts the calling thread into `SCHED_OTHER` (priority 0) or a real-time class (1 to 99).
///
/// Only a system call: may be used between fork and exec.
pub fn set_policy(policy: i32, priority: i32) -> io::Result<()> {
    // struct sched_param of the kernel is one int
    // SAFETY: concerns this thread only; the parameter is only read.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Has all descriptors from `first` on closed at exec. As above.
pub(crate) fn close_at_exec(first: u32) {
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    // SAFETY: only sets a flag of descriptors; nothing is closed before exec.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, CLOSE_RANGE_CLOEXEC) };
}

/// Blocks no signal in the calling thread: a supervisor blocks those that end it, and what it starts
/// would inherit that.
pub(crate) fn unblock_signals() {
    // SAFETY: the set is initialised before it is used.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}
