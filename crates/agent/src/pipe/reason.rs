// SPDX-License-Identifier: Apache-2.0
//! Why a program moves its bytes by itself.

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It may not ask.
    User,
    /// There is no session with the host, or nothing may be read now.
    Host,
    /// The host does not know the disk yet.
    Disk,
    /// As many as there may be are at it.
    Many,
    /// It is no regular file that the program may read, or write anywhere in.
    File,
    /// It is on a file system that is not piped from, or stored in a way that cannot be named.
    Place,
    /// Not all of it is in the file.
    Range,
    /// `[pipe]` does not have it.
    Off,
    /// It cannot be kept as it is while the host writes to it, or the kernel cannot tell.
    Sink,
    /// There is no room for it on the file system.
    Room,
    /// Somebody writes to it.
    Written,
    /// It is no TCP connection that can be handed over.
    Socket,
    /// It could not be emptied in time.
    Slow,
    /// The next hop to the peer is not known.
    Hop,
    /// More bytes wait in the connection than a message holds.
    Queue,
    /// What is to be said does not fit.
    Line,
    /// The host does not take it.
    Refused,
    /// The system failed.
    System,
}

impl Reason {
    /// What the program is told.
    pub fn errno(self) -> i32 {
        match self {
            Self::User => libc::EPERM,
            Self::File | Self::Place | Self::Socket | Self::Sink | Self::Off => libc::EOPNOTSUPP,
            Self::Range => libc::EINVAL,
            _ => libc::EAGAIN,
        }
    }

    /// For people; each is said of a count.
    pub fn text(self) -> &'static str {
        match self {
            Self::User => "a user who may not ask",
            Self::Host => "no session with the host",
            Self::Disk => "a disk that the host does not know yet",
            Self::Many => "too many at a time",
            Self::File => "not a regular file that the program may read or write",
            Self::Place => "a file whose places on the disk cannot be named",
            Self::Range => "bytes that the file does not have",
            Self::Off => "not allowed by [pipe]",
            Self::Sink => "a file that is immutable, append-only, set-uid or mapped",
            Self::Room => "no room on the file system",
            Self::Slow => "a connection that could not be emptied in time",
            Self::Written => "a file that somebody writes to",
            Self::Socket => "not a connection that can be handed over",
            Self::Hop => "a next hop that is not known",
            Self::Queue => "a connection with many bytes under way",
            Self::Line => "no room on the way to the host",
            Self::Refused => "refused by the host",
            Self::System => "a failed system call",
        }
    }
}
