// SPDX-License-Identifier: Apache-2.0
//! Moves bytes between files and sockets, in steps that never block on a socket.
//!
//! | | to a socket | to a file |
//! |---|---|---|
//! | from a file | [`FileToSocket`] | [`FileToFile`] |
//! | from a socket | [`SocketToSocket`] | [`SocketToFile`] |
//!
//! `SplicePipe` is the kernel pipe that the last two use; `Writeback` starts writeback of written files.

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

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// The step used up its budget.
    BudgetUsed,
    /// The sink accepts no more bytes for now.
    SinkFull,
    /// The source has no bytes for now.
    SourceEmpty,
    /// All bytes are in the sink.
    Done,
    /// The source has ended; all of its bytes are in the sink.
    SourceEnded,
}

/// Which side of a transfer failed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The source's connection.
    #[error("the source failed: {0}")]
    Source(#[source] io::Error),
    /// The sink's connection.
    #[error("the sink failed: {0}")]
    Sink(#[source] io::Error),
    /// The VM's disk image. Received bytes that were not written are lost: their connection cannot go on.
    #[error("the disk image failed: {0}")]
    Image(#[source] io::Error),
}
