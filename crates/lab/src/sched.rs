// SPDX-License-Identifier: Apache-2.0
//! Scheduling class, signal mask and descriptors of a child process, set between fork and exec, by
//! system calls that not every C library wraps.

use std::io;

/// Sets the scheduling class of the calling thread: `SCHED_OTHER` (priority 0) or a real-time class
/// (1 to 99).
///
/// Makes only a system call, so it may run between fork and exec.
///
/// # Errors
/// Errors of sched_setscheduler(2), for example without CAP_SYS_NICE.
pub fn set_policy(policy: i32, priority: i32) -> io::Result<()> {
    // SAFETY: changes this thread only; the kernel only reads the parameter, whose struct
    // sched_param is one int.
    let result =
        unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const priority) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Marks all descriptors from `first` on as close-on-exec. May run between fork and exec.
pub(crate) fn close_at_exec(first: u32) {
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    // SAFETY: only sets a flag of descriptors.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, CLOSE_RANGE_CLOEXEC) };
}

/// Unblocks all signals in the calling thread. A supervisor blocks those that end it, and its
/// children would inherit that.
pub(crate) fn unblock_signals() {
    // SAFETY: the set is initialised before it is used.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
}
