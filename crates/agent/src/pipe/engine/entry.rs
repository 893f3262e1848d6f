// SPDX-License-Identifier: Apache-2.0
//! One pipe of the engine: its ends, and what has come back of them.

use std::net::SocketAddr;

use viola_proto::pipe::{Connection, PipeId, PipeRequest};

use super::drain_poll::DrainPoll;
use crate::pipe::counters::Counters;
use crate::pipe::lease::FileKey;
use crate::pipe::life::{HostCommand, Life, Sides};
use crate::pipe::programs::ProgramId;
use crate::pipe::reason::Reason;
use crate::pipe::sink::Target;
use crate::pipe::socket::Stream;

#[derive(Debug)]
pub(super) struct Pipe {
    pub(super) life: Life,
    pub(super) program: ProgramId,
    pub(super) source: Source,
    pub(super) sink: Sink,
    /// Bytes that the program wants to move.
    pub(super) length: u64,
    /// Bytes of them that the agent has moved itself.
    pub(super) moved: u64,
    /// Addresses of a source that is to be held.
    pub(super) ends: Option<(SocketAddr, SocketAddr)>,
    pub(super) drain: Option<DrainPoll>,
    /// Why the pipe is refused.
    pub(super) reason: Option<Reason>,
    /// How long the host had the pipe, in microseconds.
    pub(super) host_us: u64,
}

/// The end that bytes come from.
#[derive(Debug)]
pub(super) enum Source {
    File {
        key: FileKey,
        device: String,
        offset: u64,
    },
    Socket(SocketEnd),
}

/// The end that bytes go to.
#[derive(Debug)]
pub(super) enum Sink {
    File { target: Target, device: String },
    Socket(SocketEnd),
}

/// A program's socket, and what the host has returned for it.
#[derive(Debug)]
pub(super) struct SocketEnd {
    pub(super) stream: Stream,
    pub(super) returned: Option<Box<Connection>>,
    /// Bytes that the host has received and the program has not read; they come before those in the returned
    /// connection.
    pub(super) unread: Vec<u8>,
}

impl SocketEnd {
    pub(super) fn new(stream: Stream) -> Self {
        let (returned, unread) = (None, Vec::new());
        Self {
            stream,
            returned,
            unread,
        }
    }
}

impl Pipe {
    /// The message for a command; `None` when the addresses are not known.
    pub(super) fn host_message(&self, pipe: PipeId, command: HostCommand) -> Option<PipeRequest> {
        Some(match command {
            HostCommand::Hold => {
                let (local, peer) = self.ends?;
                PipeRequest::Hold { pipe, local, peer }
            }
            HostCommand::Stop => PipeRequest::Stop { pipe },
            HostCommand::Reset => PipeRequest::Reset { pipe },
            HostCommand::Restored => PipeRequest::Restored { pipe },
        })
    }

    /// The sockets of these sides.
    pub(super) fn socket_ends(&mut self, of: Sides) -> impl Iterator<Item = &mut SocketEnd> {
        let source = match &mut self.source {
            Source::Socket(end) if of.source => Some(end),
            _ => None,
        };
        let sink = match &mut self.sink {
            Sink::Socket(end) if of.sink => Some(end),
            _ => None,
        };
        source.into_iter().chain(sink)
    }

    /// Restores the returned connections. Returns the sides where that failed.
    pub(super) fn restore(&mut self, counters: &Counters) -> Sides {
        let put = |end: &mut SocketEnd| match end.returned.take() {
            Some(mut connection) => {
                connection.unread.0.splice(..0, end.unread.drain(..));
                let restored = end.stream.restore(*connection);
                if let Err(e) = &restored {
                    counters.set_last_detail(format!("a connection could not be restored: {e}"));
                }
                restored.is_err()
            }
            // the connection was dropped
            None => false,
        };
        Sides {
            source: match &mut self.source {
                Source::Socket(end) => put(end),
                Source::File { .. } => false,
            },
            sink: match &mut self.sink {
                Sink::Socket(end) => put(end),
                Sink::File { .. } => false,
            },
        }
    }
}

pub(super) const BOTH: Sides = Sides {
    source: true,
    sink: true,
};
