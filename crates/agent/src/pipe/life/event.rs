// SPDX-License-Identifier: Apache-2.0
//! What a pipe connects, what happens to it, and what has to be done for it.

use viola_proto::pipe::library::Answer;

/// From where to where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From a file down a connection.
    Send,
    /// From a connection into a file.
    Receive,
    /// From a file into another one.
    Copy,
    /// From a connection down another one.
    Relay,
}

impl Kind {
    /// Which ends are connections.
    pub fn connections(self) -> Sides {
        Sides {
            source: matches!(self, Self::Receive | Self::Relay),
            sink: matches!(self, Self::Send | Self::Relay),
        }
    }

    /// A file is written to.
    pub fn is_into_file(self) -> bool {
        !self.connections().sink
    }

    /// Step 0 of [`viola_proto::pipe`] comes first.
    pub fn is_held_first(self) -> bool {
        self.connections().source
    }
}

/// Some of a pipe's ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sides {
    /// The one that bytes come from.
    pub source: bool,
    /// The one that they go to.
    pub sink: bool,
}

impl Sides {
    /// Neither.
    pub const NONE: Self = Self {
        source: false,
        sink: false,
    };

    /// At least one.
    pub fn any(self) -> bool {
        self.source || self.sink
    }

    /// These but for those.
    pub fn without(self, those: Self) -> Self {
        Self {
            source: self.source && !those.source,
            sink: self.sink && !those.sink,
        }
    }

    /// Those in either.
    pub fn and(self, those: Self) -> Self {
        Self {
            source: self.source || those.source,
            sink: self.sink || those.sink,
        }
    }
}

/// What happens to a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The files are ready, of a pipe whose source is to be held next.
    Ready,
    /// The host keeps what the source's peer sends.
    Held,
    /// So many bytes were moved by the agent since then, in all.
    Moved(u64),
    /// While it was held: all was moved, the source has no more, or these connections broke.
    SourceEnded(Sides),
    /// The connections were taken out of their sockets, and what is to be done is on its way to the host.
    HandedOver,
    /// It cannot be given, for this errno; sockets and files are as they were.
    Failed(i32),
    /// The host does not take it, or was never asked.
    Refused,
    /// The host has moved so many bytes.
    Progress(u64),
    /// The host does not touch the files any more.
    Returned {
        /// The connections that came with it.
        came: Sides,
        /// Bytes that the host has moved.
        sent: u64,
        /// Why it ended early; 0 when it did not.
        errno: i32,
    },
    /// Those connections that came back were put into their sockets, but for these.
    Restored(Sides),
    /// What was asked for by [`Action::Settle`] is done; with an errno when what the agent has moved is not in the file.
    Settled(i32),
    /// The session is over.
    SessionClosed,
    /// A session has begun.
    SessionOpened,
    /// The program wants it to end.
    Stop,
    /// The agent wants it to end: somebody wants to change the file, or nothing may be touched now.
    Halt,
    /// The program has closed a socket of it, or is dead.
    ProgramGone,
}

/// What the host is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostCommand {
    /// Keep what the source's peer sends.
    Hold,
    /// Move no more, and give it back; let go what is only held.
    Stop,
    /// Reset it.
    Reset,
    /// The connections are in the program's sockets.
    Taken,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Answer the program.
    Answer(Answer),
    /// Tell the host.
    Tell(HostCommand),
    /// Let the sockets go on with the connections that were taken from them.
    Resume,
    /// End these sockets' connections without a word.
    Kill(Sides),
    /// End all its connections with a reset: nobody knows whether the host has said one.
    Reset,
    /// Put the connections that came back into their sockets; [`Event::Restored`] follows.
    Restore,
    /// The source's file may change, as far as this pipe goes.
    ReleaseFile,
    /// Give the sink's file, to which so many bytes have come, back to the program; [`Event::Settled`] follows. Where the
    /// sink is a connection nothing is to be done for it.
    Settle(u64),
}
