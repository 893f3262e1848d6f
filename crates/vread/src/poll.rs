// SPDX-License-Identifier: Apache-2.0
//! Waits for descriptors.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, poll};
use rustix::io::Errno;

/// Waits until a descriptor is ready, a signal arrives, or `limit` is over; without a limit it may wait forever.
///
/// # Errors
/// Errors of `poll(2)` other than `EINTR`.
pub(crate) fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit
        .map(TryInto::try_into)
        .transpose()
        .map_err(io::Error::other)?;
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}
