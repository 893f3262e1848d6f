// SPDX-License-Identifier: Apache-2.0
//! Bytes from where they are to where they are wanted, in turns that do not block on a socket.
//!
//! | | into a connection | into a file |
//! |---|---|---|
//! | from a file | [`Sending`] | [`Copying`] |
//! | from a connection | [`Relaying`] | [`Receiving`] |

mod behind;
mod copy;
mod receive;
mod relay;
mod send;
mod tube;

use std::io;

pub use copy::{Copying, Part};
pub use receive::Receiving;
pub use relay::Relaying;
pub use send::Sending;

/// What has come of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The budget is used up.
    More,
    /// The sink takes no more for now.
    Full,
    /// The source has nothing for now.
    Empty,
    /// All bytes are in the sink's hands.
    Done,
    /// The source will have no more; what it had is in the sink's hands.
    Ended,
}

/// Who has failed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The connection that bytes come from.
    #[error("the source: {0}")]
    Source(#[source] io::Error),
    /// The connection that they go to.
    #[error("the sink: {0}")]
    Sink(#[source] io::Error),
    /// The VM's disk. Bytes that were received, and not written, are lost: the connection they came by cannot go on.
    #[error("the image: {0}")]
    Image(#[source] io::Error),
}

fn count(result: isize) -> io::Result<u64> {
    u64::try_from(result).map_err(|_| io::Error::last_os_error())
}
