// SPDX-License-Identifier: Apache-2.0
//! The host-wide lock of a core: at most one mechanism of one viola manages it.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use crate::mechanism::SchedError;

/// Longest wait for another mechanism to release the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Takes the lock of a core, which the descriptor holds.
///
/// # Errors
/// [`SchedError::Unavailable`] when another mechanism holds the lock.
pub(crate) fn lock_core(cpu: u32, mechanism: &'static str) -> Result<OwnedFd, SchedError> {
    let path = format!("/run/viola-cpu{cpu}.lock");
    let io = |source: std::io::Error| SchedError::Io {
        what: path.clone(),
        source,
    };
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(io)?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file.into()),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(SchedError::unavailable(
                    mechanism,
                    format!(
                        "another viola manages core {cpu} ({path} is locked); stop that one first"
                    ),
                ));
            }
            Err(e) => return Err(io(e.into())),
        }
    }
}
