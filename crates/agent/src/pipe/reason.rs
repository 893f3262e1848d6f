// SPDX-License-Identifier: Apache-2.0
//! Why a pipe is refused, so that the program moves its bytes itself.

/// Why a pipe is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The program's user may not ask.
    NotAllowed,
    /// No session with the host, or the agent is paused.
    NoSession,
    /// The host does not know the disk yet.
    UnprovenDisk,
    /// `max_pipes` pipes exist already.
    TooManyPipes,
    /// Not a regular file that the program may read, or write at any offset.
    BadFile,
    /// A file system that pipes may not use, or extents that cannot be named.
    Unmappable,
    /// The range is not in the file.
    OutOfRange,
    /// `[pipe]` does not allow it.
    Disabled,
    /// The sink file cannot be frozen while the host writes to it.
    UnfitSink,
    /// No space on the file system.
    NoSpace,
    /// The file is open for writing.
    HasWriter,
    /// Not a TCP connection that can be handed over.
    BadSocket,
    /// The connection could not be drained in time.
    DrainTimeout,
    /// The peer's next hop is not known.
    NoNextHop,
    /// More bytes wait in the connection's queues than a message holds.
    QueueTooLong,
    /// The channel to the host has no room for the message.
    ChannelFull,
    /// The host refused the pipe.
    RefusedByHost,
    /// A system call failed.
    SystemError,
}

impl Reason {
    /// The errno for the program.
    pub fn errno(self) -> i32 {
        match self {
            Self::NotAllowed => libc::EPERM,
            Self::BadFile
            | Self::Unmappable
            | Self::BadSocket
            | Self::UnfitSink
            | Self::Disabled => libc::EOPNOTSUPP,
            Self::OutOfRange => libc::EINVAL,
            _ => libc::EAGAIN,
        }
    }

    /// A noun phrase for people, shown behind a count.
    pub fn text(self) -> &'static str {
        match self {
            Self::NotAllowed => "a user who may not ask",
            Self::NoSession => "no session with the host",
            Self::UnprovenDisk => "a disk that the host does not know yet",
            Self::TooManyPipes => "too many at a time",
            Self::BadFile => "not a regular file that the program may read or write",
            Self::Unmappable => "a file whose places on the disk cannot be named",
            Self::OutOfRange => "bytes that the file does not have",
            Self::Disabled => "not allowed by [pipe]",
            Self::UnfitSink => "a file that is immutable, append-only, set-uid or mapped",
            Self::NoSpace => "no room on the file system",
            Self::DrainTimeout => "a connection that could not be emptied in time",
            Self::HasWriter => "a file that somebody writes to",
            Self::BadSocket => "not a connection that can be handed over",
            Self::NoNextHop => "a next hop that is not known",
            Self::QueueTooLong => "a connection with many bytes under way",
            Self::ChannelFull => "no room on the way to the host",
            Self::RefusedByHost => "refused by the host",
            Self::SystemError => "a failed system call",
        }
    }
}
