// SPDX-License-Identifier: Apache-2.0
//! One pipe, from restored connections until they are returned.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use viola_proto::agent::{Bytes, SERIAL_LINE_BYTES};
use viola_proto::pipe::status::{Transfer as TransferStatus, TransferKind};
use viola_proto::pipe::{Connection, PipeId, PipeReply};

use super::drain_poll::DrainPoll;
use super::rate_limit::RateLimit;
use crate::transfer::{FileToSocket, SocketToFile, SocketToSocket, StepOutcome, TransferError};
use crate::{Flow, FlowTable, HostConnection};

/// Bytes that one pipe moves before the next pipe.
const STEP_BYTES: u64 = 1 << 20;
/// Time between two progress replies.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// Time for an early end. Then the host resets the pipe: otherwise a peer that stops reading would
/// keep the VM from its own file. (The VM's kernel breaks a lease after 45 s:
/// `/proc/sys/fs/lease-break-time`.)
const EARLY_END_TIMEOUT: Duration = Duration::from_secs(20);
/// Most received bytes that go back to the VM after an error. A sender that never stops has more under way: a serial
/// line would take seconds for these and delay all other messages, so the host resets that connection.
const MAX_UNREAD_RETURN_BYTES: u64 = 256 << 10;
/// Bytes of the receive queue in one message: with their frame they fit into what a serial line holds
/// ([`SERIAL_LINE_BYTES`]). A longer message may hang the line of a guest that does not read.
const UNREAD_PART_BYTES: usize = SERIAL_LINE_BYTES as usize / 3;

/// The transfer of a pipe.
#[derive(Debug)]
pub(super) enum Transfer {
    Send(FileToSocket),
    Receive(SocketToFile),
    Relay(SocketToSocket),
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Moving,
    /// The source gives no more; buffered bytes still move.
    Emptying,
    /// All bytes are moved; the sink's peer must acknowledge them.
    Draining {
        errno: i32,
        poll: Option<DrainPoll>,
    },
}

/// One pipe.
#[derive(Debug)]
pub(super) struct Pipe {
    id: PipeId,
    transfer: Transfer,
    source: Option<HostConnection>,
    sink: Option<HostConnection>,
    /// Bytes to move.
    length: u64,
    stage: Stage,
    started: Instant,
    progress_sent: Instant,
    /// When an early end times out.
    reset_at: Option<Instant>,
}

/// Result of a step.
#[derive(Debug)]
pub(super) enum Next {
    /// The pipe goes on after a wait.
    Again(Wait),
    /// The pipe has ended with these replies, [`PipeReply::Finished`] last. The VM must restore the connections in
    /// it.
    Ended(Vec<PipeReply>),
}

/// What a pipe waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Nothing,
    /// The source has bytes.
    Source,
    /// The sink accepts bytes.
    Sink,
    Time(Duration),
}

/// Where connections go when a pipe ends.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReturnPath<'a> {
    pub(super) flows: &'a FlowTable,
    pub(super) hold_veth: u32,
}

impl Pipe {
    pub(super) fn new(
        id: PipeId,
        transfer: Transfer,
        (source, sink): (Option<HostConnection>, Option<HostConnection>),
        now: Instant,
    ) -> Self {
        Self {
            id,
            length: transfer.left(),
            transfer,
            source,
            sink,
            stage: Stage::Moving,
            started: now,
            progress_sent: now,
            reset_at: None,
        }
    }

    /// The connections of the pipe.
    pub(super) fn ends(&self) -> impl Iterator<Item = &HostConnection> {
        self.source.iter().chain(&self.sink)
    }

    /// Their sockets, and whether each is the source.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool)> {
        let source = self.source.iter().map(|end| (end.socket(), true));
        source.chain(self.sink.iter().map(|end| (end.socket(), false)))
    }

    pub(super) fn flows(&self) -> Vec<Flow> {
        self.ends().map(|end| *end.flow()).collect()
    }

    /// For `viola pipe` and metrics.
    pub(super) fn status(&self, now: Instant) -> TransferStatus {
        let age = now.saturating_duration_since(self.started);
        let end = self.sink.as_ref().or(self.source.as_ref());
        TransferStatus {
            kind: match self.transfer {
                Transfer::Send(_) => TransferKind::Send,
                Transfer::Receive(_) => TransferKind::Receive,
                Transfer::Relay(_) => TransferKind::Relay,
            },
            local: end.map(|end| end.flow().guest),
            peer: end.map(|end| end.flow().peer),
            length: self.length,
            sent: self.moved(),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn moved(&self) -> u64 {
        match &self.transfer {
            Transfer::Send(sending) => self.length - sending.left(),
            Transfer::Receive(receiving) => receiving.moved(),
            Transfer::Relay(relaying) => relaying.moved(),
        }
    }

    /// Whether an early end has timed out.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.reset_at.is_some_and(|at| now >= at)
    }

    /// Resumes after a pause of the VM of length `time`.
    pub(super) fn resume(&mut self, time: Duration) {
        self.reset_at = self.reset_at.map(|at| at + time);
        for end in self.ends() {
            end.send_window_probe();
        }
    }

    /// Stops the source; bytes that were received already still move.
    pub(super) fn stop(&mut self, now: Instant, return_path: ReturnPath<'_>) {
        self.reset_at.get_or_insert(now + EARLY_END_TIMEOUT);
        if let Stage::Moving = self.stage {
            // later packets of the source are the VM's
            let held = self.source.as_ref().map(|end| {
                return_path
                    .flows
                    .hold(end.flow(), None, Some(return_path.hold_veth))
            });
            self.stage = match held {
                Some(Ok(())) => Stage::Emptying,
                // without a hold the connection cannot be returned either; the extraction reports the error
                Some(Err(_)) | None => DRAINING,
            };
        }
    }

    /// Whether packets of the source are held for the VM.
    pub(super) fn holds_packets(&self) -> bool {
        self.source.is_some() && !matches!(self.stage, Stage::Moving)
    }

    /// A progress reply, when one is due.
    pub(super) fn progress(&mut self, now: Instant) -> Option<PipeReply> {
        if now < self.progress_sent + PROGRESS_INTERVAL {
            return None;
        }
        self.progress_sent = now;
        Some(PipeReply::Progress {
            pipe: self.id,
            sent: self.moved(),
        })
    }

    /// Moves bytes as far as possible without waiting.
    pub(super) fn step(
        mut self,
        now: Instant,
        return_path: ReturnPath<'_>,
        rate_limit: &RateLimit,
    ) -> (Option<Self>, Next) {
        if self.is_late(now) {
            return (None, self.reset(libc::ETIMEDOUT));
        }
        let stage = match self.stage {
            Stage::Draining { .. } => self.stage,
            Stage::Moving | Stage::Emptying => {
                let emptying = matches!(self.stage, Stage::Emptying);
                let budget = match rate_limit.available(now, STEP_BYTES) {
                    Ok(budget) => budget,
                    // an early end does not wait for the rate limit
                    Err(_) if emptying => STEP_BYTES,
                    Err(pause) => return (Some(self), Next::Again(Wait::Time(pause))),
                };
                let before = self.moved();
                let outcome = self.transfer(budget);
                rate_limit.consume(self.moved() - before);
                match outcome {
                    Ok(StepOutcome::BudgetUsed) => return (Some(self), Next::Again(Wait::Nothing)),
                    Ok(StepOutcome::SinkFull) => return (Some(self), Next::Again(Wait::Sink)),
                    Ok(StepOutcome::SourceEmpty) if !emptying => {
                        return (Some(self), Next::Again(Wait::Source));
                    }
                    Ok(StepOutcome::SourceEmpty | StepOutcome::Done | StepOutcome::SourceEnded) => {
                        DRAINING
                    }
                    Err(fault) => match self.drop_failed_end(&fault) {
                        Some(stage) => stage,
                        None => return (None, self.reset(libc::ECONNRESET)),
                    },
                }
            }
        };
        let Stage::Draining { errno, poll } = stage else {
            return (Some(self), Next::Again(Wait::Nothing));
        };
        match self
            .sink
            .as_ref()
            .map_or(Ok(0), HostConnection::unacknowledged_bytes)
        {
            Ok(0) => (None, self.return_connections(return_path, errno)),
            Ok(left) => {
                let look = DrainPoll::after(poll, Instant::now(), left);
                let poll = Some(look);
                self.stage = Stage::Draining { errno, poll };
                (Some(self), Next::Again(Wait::Time(look.pause)))
            }
            Err(_) => (None, self.reset(libc::ECONNRESET)),
        }
    }

    fn transfer(&mut self, budget: u64) -> Result<StepOutcome, TransferError> {
        let peer_finished = self
            .source
            .as_ref()
            .is_some_and(HostConnection::peer_finished);
        let not_connected = || std::io::Error::from(std::io::ErrorKind::NotConnected);
        let left = self.transfer.left();
        if let Some(source) = &mut self.source {
            source.limit_window_near_end(left);
        }
        let source = self.source.as_ref().map(HostConnection::socket);
        let sink = self.sink.as_ref().map(HostConnection::socket);
        let turn = match &mut self.transfer {
            Transfer::Send(sending) => {
                let sink = sink.ok_or_else(|| TransferError::Sink(not_connected()))?;
                let turn = sending.step(sink, budget).map(|(_, turn)| turn);
                turn.map_err(|e| match is_connection_error(&e) {
                    true => TransferError::Sink(e),
                    false => TransferError::Image(e),
                })
            }
            Transfer::Receive(receiving) => {
                let source = source.ok_or_else(|| TransferError::Source(not_connected()))?;
                receiving.step(source, budget)
            }
            Transfer::Relay(relaying) => {
                let source = source.ok_or_else(|| TransferError::Source(not_connected()))?;
                let sink = sink.ok_or_else(|| TransferError::Sink(not_connected()))?;
                relaying.step(source, sink, budget)
            }
        }?;
        Ok(match turn {
            // the host's socket does not know that the peer has sent a FIN
            StepOutcome::SourceEmpty if peer_finished => StepOutcome::SourceEnded,
            turn => turn,
        })
    }

    /// Drops the failed end. Returns the next stage if the other end can go back to the VM.
    fn drop_failed_end(&mut self, fault: &TransferError) -> Option<Stage> {
        let errno = match fault {
            TransferError::Source(_) => {
                self.source = None;
                libc::ECONNRESET
            }
            TransferError::Sink(_) => {
                self.sink = None;
                // bytes that were taken from the source and not sent leave a gap in its stream
                if matches!(&self.transfer, Transfer::Relay(relaying) if relaying.has_buffered()) {
                    self.source = None;
                }
                libc::ECONNRESET
            }
            TransferError::Image(_) => {
                // bytes that were received and not written are lost
                self.source = None;
                libc::EIO
            }
        };
        let poll = None;
        (self.ends().next().is_some()).then_some(Stage::Draining { errno, poll })
    }

    /// One end was reset by its peer, or timed out.
    pub(super) fn end_failed(mut self, source: bool) -> (Option<Self>, Next) {
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let fault = match source {
            true => TransferError::Source(reset),
            false => TransferError::Sink(reset),
        };
        match self.drop_failed_end(&fault) {
            Some(stage) => {
                self.stage = stage;
                (Some(self), Next::Again(Wait::Nothing))
            }
            None => (None, self.reset(libc::ECONNRESET)),
        }
    }

    /// Ends the pipe with a reset of its connections.
    pub(super) fn reset(self, errno: i32) -> Next {
        Next::Ended(vec![PipeReply::Finished {
            pipe: self.id,
            source: None,
            sink: None,
            sent: self.moved(),
            errno,
            host_us: 0,
        }])
    }

    fn return_connections(mut self, return_path: ReturnPath<'_>, errno: i32) -> Next {
        let count = self.ends().count();
        if errno != 0
            && self
                .source
                .as_ref()
                .is_some_and(|end| end.unread_bytes() > MAX_UNREAD_RETURN_BYTES)
        {
            self.source = None;
        }
        let (pipe, sent, on_host) = (self.id, self.moved(), self.started.elapsed());
        let mut replies = Vec::new();
        let mut one = |end: Option<HostConnection>, source: bool| {
            let (connection, before) = extract_connection(end?, return_path)?;
            replies.extend(before.into_iter().map(|bytes| PipeReply::Unread {
                pipe,
                source,
                bytes,
            }));
            Some(connection)
        };
        let (source, sink) = (one(self.source, true), one(self.sink, false));
        let returned = source.iter().chain(&sink).count();
        let errno = match (errno, returned < count) {
            (0, true) => libc::ECONNRESET,
            _ => errno,
        };
        replies.push(PipeReply::Finished {
            pipe,
            source,
            sink,
            sent,
            errno,
            host_us: u64::try_from(on_host.as_micros()).unwrap_or(0),
        });
        Next::Ended(replies)
    }
}

const DRAINING: Stage = Stage::Draining {
    errno: 0,
    poll: None,
};

/// Extracts a connection, and the parts of its receive queue that its message does not hold. `None` when the peer has
/// reset the connection, or when the queues are too long for a message: the socket is reset.
fn extract_connection(
    end: HostConnection,
    return_path: ReturnPath<'_>,
) -> Option<(Box<Connection>, Vec<Bytes>)> {
    let mut state = end
        .extract(return_path.flows, Some(return_path.hold_veth))
        .ok()??;
    // the VM's socket keeps its own congestion control and pacing limit
    (state.congestion, state.pacing) = (String::new(), None);
    let rest = state.unread.len().saturating_sub(UNREAD_PART_BYTES);
    let rest = state.unread.split_off(rest);
    let before = std::mem::replace(&mut state.unread, rest);
    let before = before
        .chunks(UNREAD_PART_BYTES)
        .map(|part| Bytes(part.to_vec()));
    let connection = viola_handover::to_wire(state).ok()?;
    Some((Box::new(connection), before.collect()))
}

impl Transfer {
    fn left(&self) -> u64 {
        match self {
            Self::Send(sending) => sending.left(),
            Self::Receive(receiving) => receiving.left(),
            Self::Relay(relaying) => relaying.left(),
        }
    }
}

/// Whether an error is the connection's, not the image's.
fn is_connection_error(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    matches!(
        error.kind(),
        ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe
            | ErrorKind::TimedOut
            | ErrorKind::NotConnected
            | ErrorKind::ConnectionAborted
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
    )
}
