// SPDX-License-Identifier: Apache-2.0
//! Bytes from where they are to where they are wanted, in turns that do not block on a socket.
//!
//! | | into a connection | into a file |
//! |---|---|---|
//! | from a file | [`FileToSocket`] | [`FileToFile`] |
//! | from a connection | [`SocketToSocket`] | [`SocketToFile`] |

mod file_to_file;
mod file_to_socket;
mod socket_to_file;
mod socket_to_socket;
mod splice_pipe;
mod writeback;

use std::io;

pub use file_to_file::{FileRange, FileToFile};
pub use file_to_socket::FileToSocket;
pub use socket_to_file::SocketToFile;
pub use socket_to_socket::SocketToSocket;

/// What has come of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// The budget is used up.
    BudgetUsed,
    /// The sink takes no more for now.
    SinkFull,
    /// The source has nothing for now.
    SourceEmpty,
    /// All bytes are in the sink's hands.
    Done,
    /// The source will have no more; what it had is in the sink's hands.
    SourceEnded,
}

/// Who has failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
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

fn byte_count(result: isize) -> io::Result<u64> {
    u64::try_from(result).map_err(|_| io::Error::last_os_error())
}
