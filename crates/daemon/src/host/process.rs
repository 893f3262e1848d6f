// SPDX-License-Identifier: Apache-2.0
//! Kills processes without killing another one that got the same number.

use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use viola_host::{Tid, proc};

/// A killed process is gone within this time, unless the kernel holds it.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether this process runs: `start_time` (clock ticks since boot) tells it from a later one with its number.
pub fn is_alive(pid: Tid, start_time: u64) -> bool {
    matches!(proc::stat(pid), Ok(Some(s)) if s.start_time == start_time && !s.is_dead())
}

/// Kills a process and waits until it is gone, at most 2 s; `false` when it was gone before, or the
/// number belongs to another process now.
pub fn kill(pid: Tid, start_time: u64) -> bool {
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    // Opened before it is checked, so the signal goes to the process that was checked.
    let Ok(fd) = pidfd_open(number, PidfdFlags::empty()) else {
        return false;
    };
    if pid == std::process::id()
        || !is_alive(pid, start_time)
        || pidfd_send_signal(&fd, Signal::KILL).is_err()
    {
        return false;
    }
    let deadline = Instant::now() + KILL_TIMEOUT;
    while is_alive(pid, start_time) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}
