// SPDX-License-Identifier: Apache-2.0
//! One pipe, from the moment at which the host has the connection until the VM has it again.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use viola_proto::pipe::shown::Transfer;
use viola_proto::pipe::{Connection, PipeId, ToGuest};

use crate::send::Turn;
use crate::{Flow, Flows, Pipe, Result};

/// Bytes that one pipe sends before the next one's turn.
const BUDGET: u64 = 1 << 20;
/// The agent hears so often how far it is.
const PROGRESS: Duration = Duration::from_secs(2);
/// What is to end early is reset after so long: a peer that does not read keeps the VM from its own file no longer. (A lease in the
/// VM is broken by its kernel after 45 s: `/proc/sys/fs/lease-break-time`.)
const PATIENCE: Duration = Duration::from_secs(20);
/// The VM has so long to take a connection back.
const TAKING: Duration = Duration::from_secs(30);
/// Pauses between two looks whether the peer has all: the first one, and the longest.
const LOOK: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(5));

#[derive(Debug)]
enum Stage {
    Sending,
    Draining { errno: i32, pause: Duration },
}

/// See the module.
#[derive(Debug)]
pub(super) struct One {
    id: PipeId,
    pipe: Pipe,
    stage: Stage,
    begun: Instant,
    told: Instant,
    /// When it is reset at the latest.
    ends: Option<Instant>,
}

/// What has become of it.
#[derive(Debug)]
pub(super) enum Next {
    /// It is to be asked again: at once, after a while, or when the socket takes more.
    Again(Wait),
    /// It is over, with this to be said. The VM has to take it back if `returned`.
    Over { say: ToGuest, returned: bool },
}

/// What it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Nothing,
    Socket,
    Time(Duration),
}

impl One {
    pub(super) fn new(id: PipeId, pipe: Pipe, now: Instant) -> Self {
        Self {
            id,
            pipe,
            stage: Stage::Sending,
            begun: now,
            told: now,
            ends: None,
        }
    }

    pub(super) fn pipe(&self) -> &Pipe {
        &self.pipe
    }

    pub(super) fn flow(&self) -> Flow {
        *self.pipe.flow()
    }

    /// For people.
    pub(super) fn shown(&self, now: Instant) -> Transfer {
        let flow = self.flow();
        let age = now.saturating_duration_since(self.begun);
        Transfer {
            local: flow.guest,
            peer: flow.peer,
            length: self.pipe.length(),
            sent: self.pipe.sent(),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Whether it is to be reset now.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| now >= ends)
    }

    /// Sends no more.
    pub(super) fn stop(&mut self, now: Instant) {
        self.ends = Some(now + PATIENCE);
        if let Stage::Sending = self.stage {
            self.stage = Stage::Draining {
                errno: 0,
                pause: LOOK.0,
            };
        }
    }

    /// How far it is, when that is due.
    pub(super) fn progress(&mut self, now: Instant) -> Option<ToGuest> {
        if now < self.told + PROGRESS {
            return None;
        }
        self.told = now;
        Some(ToGuest::Progress {
            pipe: self.id,
            sent: self.pipe.sent(),
        })
    }

    /// Goes on as far as it can without waiting.
    pub(super) fn step(mut self, now: Instant, flows: &Flows, parked: u32) -> (Option<Self>, Next) {
        if self.is_late(now) {
            return (None, self.broken(libc::ETIMEDOUT));
        }
        let (errno, pause) = match self.stage {
            Stage::Draining { errno, pause } => (errno, pause),
            Stage::Sending => match self.pipe.turn(BUDGET) {
                Ok((_, Turn::More)) => return (Some(self), Next::Again(Wait::Nothing)),
                Ok((_, Turn::Full)) => return (Some(self), Next::Again(Wait::Socket)),
                Ok((_, Turn::Done)) => (0, LOOK.0),
                Err(e) if is_connections(&e) => {
                    return (None, self.broken(e.raw_os_error().unwrap_or(libc::EIO)));
                }
                // what is sent is sent; the VM finds out itself what its disk says about the rest
                Err(_) => (libc::EIO, LOOK.0),
            },
        };
        match self.pipe.is_drained() {
            Ok(true) => (None, self.give_back(flows, parked, errno)),
            Ok(false) => {
                self.stage = Stage::Draining {
                    errno,
                    pause: (pause * 2).min(LOOK.1),
                };
                (Some(self), Next::Again(Wait::Time(pause)))
            }
            Err(_) => (None, self.broken(libc::ECONNRESET)),
        }
    }

    /// Ends it with a reset.
    pub(super) fn broken(self, errno: i32) -> Next {
        let say = ToGuest::Back {
            pipe: self.id,
            connection: None,
            sent: self.pipe.sent(),
            errno,
        };
        Next::Over {
            say,
            returned: false,
        }
    }

    fn give_back(self, flows: &Flows, parked: u32, errno: i32) -> Next {
        let (id, sent) = (self.id, self.pipe.sent());
        let returned = self.pipe.give_back(flows, Some(parked));
        let connection = match returned.map(|r| r.state.map(viola_handover::to_wire)) {
            Ok(Some(Ok(connection))) => Some(Box::new(connection)),
            // more was received than a message holds, or the peer has ended it: its socket is reset
            _ => None,
        };
        let errno = match connection {
            None => libc::ECONNRESET,
            Some(_) => errno,
        };
        Next::Over {
            returned: connection.is_some(),
            say: ToGuest::Back {
                pipe: id,
                connection,
                sent,
                errno,
            },
        }
    }
}

/// Whether an error is the connection's, and not the image's.
fn is_connections(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::TimedOut
            | io::ErrorKind::NotConnected
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}

/// A connection that the VM has not taken back yet.
#[derive(Debug)]
pub(super) struct Going {
    pub(super) flow: Flow,
    since: Instant,
    connection: Connection,
}

impl Going {
    pub(super) fn new(flow: Flow, connection: Connection, now: Instant) -> Self {
        Self {
            flow,
            since: now,
            connection,
        }
    }

    /// Resets it: nobody will ever take it back, and the peer is not to wait for that.
    pub(super) fn reset(self, flows: &Flows, veth: u32, socket: OwnedFd) -> Result<()> {
        let state = viola_handover::from_wire(self.connection);
        Pipe::begin(flows, veth, socket, self.flow, &state, None).map(drop)
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now >= self.since + TAKING
    }
}
