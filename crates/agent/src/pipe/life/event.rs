// SPDX-License-Identifier: Apache-2.0
//! What a pipe connects, what happens to it, and what has to be done for it.

use viola_proto::pipe::library::LibraryReply;

/// What a pipe connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From a file to a connection.
    Send,
    /// From a connection to a file.
    Receive,
    /// From a file to another file.
    Copy,
    /// From a connection to another connection.
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

    /// Whether the sink is a file.
    pub fn is_into_file(self) -> bool {
        !self.connections().sink
    }

    /// Whether step 0 of [`viola_proto::pipe`] comes first: the host holds the source before it gets the pipe.
    pub fn is_held_first(self) -> bool {
        self.connections().source
    }
}

/// A subset of a pipe's two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sides {
    /// The end that bytes come from.
    pub source: bool,
    /// The end that bytes go to.
    pub sink: bool,
}

impl Sides {
    /// Neither end.
    pub const NONE: Self = Self {
        source: false,
        sink: false,
    };

    /// Whether at least one end is in it.
    pub fn any(self) -> bool {
        self.source || self.sink
    }

    /// The ends of `self` that are not in `those`.
    pub fn without(self, those: Self) -> Self {
        Self {
            source: self.source && !those.source,
            sink: self.sink && !those.sink,
        }
    }

    /// The ends in either.
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
    /// The ends are ready, and the source is to be held next.
    Ready,
    /// The host holds the source.
    Held,
    /// The agent has moved so many bytes in all while the source is held.
    Moved(u64),
    /// While the source was held: everything was moved, the source ended, or these connections broke.
    SourceEnded(Sides),
    /// The connections were extracted, and the hand-over is on its way to the host.
    HandedOver,
    /// The pipe cannot be handed over, for this errno; sockets and files are as they were.
    Failed(i32),
    /// The host has refused the pipe, or was never asked.
    Refused,
    /// The host has moved so many bytes.
    Progress(u64),
    /// The host has returned the pipe and does not touch the files any more.
    Returned {
        /// The connections that it returned.
        returned: Sides,
        /// Bytes that the host has moved.
        sent: u64,
        /// Why the pipe ended early; 0 when it did not.
        errno: i32,
    },
    /// The returned connections were restored, except for these.
    Restored(Sides),
    /// [`Action::Settle`] is done. 0, or the errno when bytes that the agent has moved are not in
    /// the file.
    Settled(i32),
    /// The session has ended.
    SessionClosed,
    /// A session has opened.
    SessionOpened,
    /// The program stops the pipe.
    Stop,
    /// The agent stops the pipe: a writer waits for the file, or the agent pauses.
    Halt,
    /// The program has hung up or reset the pipe.
    ProgramGone,
}

/// What the agent tells the host about a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostCommand {
    /// Hold the source: keep what its peer sends.
    Hold,
    /// Stop moving and return the pipe; release a source that is only held.
    Stop,
    /// Reset the connections.
    Reset,
    /// The connections are back in the program's sockets.
    Restored,
}

/// What the engine has to do for a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Answer the program.
    Answer(LibraryReply),
    /// Send the host a command.
    Tell(HostCommand),
    /// Resume the extracted connections in their sockets.
    Resume,
    /// Drop these connections without a packet.
    Drop(Sides),
    /// Reset all connections: it is not known whether the host has sent a reset.
    Reset,
    /// Restore the returned connections; [`Event::Restored`] follows.
    Restore,
    /// Release the source file's lease for this pipe.
    ReleaseFile,
    /// Return the sink file, to which so many bytes have come, to the program; [`Event::Settled`] follows. A sink
    /// connection needs nothing.
    Settle(u64),
}
