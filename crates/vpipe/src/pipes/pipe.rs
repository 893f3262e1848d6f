// SPDX-License-Identifier: Apache-2.0
//! Pipe pipe, from the moment at which the host has its connections until the VM has them again.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use viola_proto::agent::{Bytes, SERIAL_LINE_BYTES};
use viola_proto::pipe::status::{Transfer as TransferStatus, TransferKind};
use viola_proto::pipe::{Connection, PipeId, PipeReply};

use super::rate_limit::RateLimit;
use crate::transfer::{FileToSocket, SocketToFile, SocketToSocket, StepOutcome, TransferError};
use crate::{Flow, FlowTable, HostConnection};

/// Bytes that one pipe moves before the next one's turn.
const STEP_BYTES: u64 = 1 << 20;
/// The agent hears so often how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// What is to end early is reset after so long: a peer that does not read keeps the VM from its own file no longer. (A lease in the
/// VM is broken by its kernel after 45 s: `/proc/sys/fs/lease-break-time`.)
const EARLY_END_TIMEOUT: Duration = Duration::from_secs(20);
/// Of what was sent beyond an early end the VM gets as much, in bytes. More is what a sender had under way that goes on and on: a
/// serial line would take seconds for it, with everything else behind it, so that connection is reset.
const MAX_UNREAD_RETURN_BYTES: u64 = 256 << 10;
/// Of what nobody has read, bytes in one message: as many as a serial line holds with all that is around them ([`SERIAL_LINE_BYTES`]). A longer
/// one may hang the line of a guest that is not there to read it.
const UNREAD_PART_BYTES: usize = SERIAL_LINE_BYTES as usize / 3;
/// Pauses between two looks whether the peer has all: the shortest one, and the longest.
const MIN_DRAIN_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What is moved.
#[derive(Debug)]
pub(super) enum Transfer {
    Send(FileToSocket),
    Receive(SocketToFile),
    Relay(SocketToSocket),
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Moving,
    /// No more comes in; what has come is still to be moved.
    Emptying,
    /// All is moved; the sink's peer has to acknowledge it.
    Draining {
        errno: i32,
        poll: Option<DrainPoll>,
    },
}

/// A look at what the peer has not acknowledged.
#[derive(Debug, Clone, Copy)]
struct DrainPoll {
    /// The first one, and this one.
    first: Instant,
    at: Instant,
    left: usize,
    pause: Duration,
}

impl DrainPoll {
    /// So much is left now: at the pace since the last look the next one finds nothing left. While nothing is acknowledged they
    /// become rare, but none comes later than it has taken so far and a quarter of that: a peer that stood still for a moment is not
    /// paid for by a long wait.
    fn after(last: Option<Self>, at: Instant, left: usize) -> Self {
        let pause = match last {
            None => MIN_DRAIN_POLL_INTERVAL,
            Some(last) if left < last.left => {
                let time = at.saturating_duration_since(last.at);
                time.mul_f64(left as f64 / (last.left - left) as f64)
            }
            Some(last) => last.pause * 2,
        };
        let first = last.map_or(at, |last| last.first);
        let most = (at.saturating_duration_since(first) / 4)
            .clamp(MIN_DRAIN_POLL_INTERVAL, MAX_DRAIN_POLL_INTERVAL);
        Self {
            first,
            at,
            left,
            pause: pause.clamp(MIN_DRAIN_POLL_INTERVAL, most),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pipe {
    id: PipeId,
    transfer: Transfer,
    source: Option<HostConnection>,
    sink: Option<HostConnection>,
    /// Bytes in all.
    length: u64,
    stage: Stage,
    started: Instant,
    progress_sent: Instant,
    /// When it is reset at the latest.
    reset_at: Option<Instant>,
}

/// What has become of it.
#[derive(Debug)]
pub(super) enum Next {
    /// It is to be asked again.
    Again(Wait),
    /// It is over, with this to be said, [`PipeReply::Finished`] last; the VM has to take back the connections that are in that.
    Over(Vec<PipeReply>),
}

/// What it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Nothing,
    /// The source has something.
    Source,
    /// The sink takes more.
    Sink,
    Time(Duration),
}

/// Where connections go back to.
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

    /// Its connections that the host has.
    pub(super) fn ends(&self) -> impl Iterator<Item = &HostConnection> {
        self.source.iter().chain(&self.sink)
    }

    /// Their sockets, and whether each is the source's.
    pub(super) fn sockets(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool)> {
        let source = self.source.iter().map(|end| (end.socket(), true));
        source.chain(self.sink.iter().map(|end| (end.socket(), false)))
    }

    pub(super) fn flows(&self) -> Vec<Flow> {
        self.ends().map(|end| *end.flow()).collect()
    }

    /// For people.
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

    /// Whether it is to be reset now.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.reset_at.is_some_and(|at| now >= at)
    }

    /// The VM has stood still for so long, and goes on: so do the peers.
    pub(super) fn resume(&mut self, time: Duration) {
        self.reset_at = self.reset_at.map(|at| at + time);
        for end in self.ends() {
            end.send_window_probe();
        }
    }

    /// Moves no more than what has come already.
    pub(super) fn stop(&mut self, now: Instant, return_path: ReturnPath<'_>) {
        self.reset_at.get_or_insert(now + EARLY_END_TIMEOUT);
        if let Stage::Moving = self.stage {
            // what the source says from now on is the VM's
            let held = self.source.as_ref().map(|end| {
                return_path
                    .flows
                    .hold(end.flow(), None, Some(return_path.hold_veth))
            });
            self.stage = match held {
                Some(Ok(())) => Stage::Emptying,
                // it cannot be held: then it cannot be given back either, which is found out there
                Some(Err(_)) | None => DRAINING,
            };
        }
    }

    /// Whether packets of its source are kept for the VM.
    pub(super) fn holds_packets(&self) -> bool {
        self.source.is_some() && !matches!(self.stage, Stage::Moving)
    }

    /// How far it is, when that is due.
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

    /// Goes on as far as it can without waiting.
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
                    // a pipe that is to end does not wait for its share
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
        let finished = self
            .source
            .as_ref()
            .is_some_and(HostConnection::peer_finished);
        let lost = || std::io::Error::from(std::io::ErrorKind::NotConnected);
        let left = self.transfer.left();
        if let Some(source) = &mut self.source {
            source.limit_window_near_end(left);
        }
        let source = self.source.as_ref().map(HostConnection::socket);
        let sink = self.sink.as_ref().map(HostConnection::socket);
        let turn = match &mut self.transfer {
            Transfer::Send(sending) => {
                let sink = sink.ok_or_else(|| TransferError::Sink(lost()))?;
                let turn = sending.step(sink, budget).map(|(_, turn)| turn);
                turn.map_err(|e| match is_connection_error(&e) {
                    true => TransferError::Sink(e),
                    false => TransferError::Image(e),
                })
            }
            Transfer::Receive(receiving) => {
                let source = source.ok_or_else(|| TransferError::Source(lost()))?;
                receiving.step(source, budget)
            }
            Transfer::Relay(relaying) => {
                let source = source.ok_or_else(|| TransferError::Source(lost()))?;
                let sink = sink.ok_or_else(|| TransferError::Sink(lost()))?;
                relaying.step(source, sink, budget)
            }
        }?;
        Ok(match turn {
            // the socket does not know that nothing will come
            StepOutcome::SourceEmpty if finished => StepOutcome::SourceEnded,
            turn => turn,
        })
    }

    /// Pipe end has failed: the other one goes back if it can.
    fn drop_failed_end(&mut self, fault: &TransferError) -> Option<Stage> {
        let errno = match fault {
            TransferError::Source(_) => {
                self.source = None;
                libc::ECONNRESET
            }
            TransferError::Sink(_) => {
                self.sink = None;
                // taken from the source and on no way any more: its stream has a gap, and cannot go on
                if matches!(&self.transfer, Transfer::Relay(relaying) if relaying.has_buffered()) {
                    self.source = None;
                }
                libc::ECONNRESET
            }
            TransferError::Image(_) => {
                // received and not written: nobody can have these bytes again
                self.source = None;
                libc::EIO
            }
        };
        let poll = None;
        (self.ends().next().is_some()).then_some(Stage::Draining { errno, poll })
    }

    /// The peer of one end has reset it, or it is found to be dead.
    pub(super) fn end_failed(mut self, source: bool) -> (Option<Self>, Next) {
        let gone = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let fault = match source {
            true => TransferError::Source(gone),
            false => TransferError::Sink(gone),
        };
        match self.drop_failed_end(&fault) {
            Some(stage) => {
                self.stage = stage;
                (Some(self), Next::Again(Wait::Nothing))
            }
            None => (None, self.reset(libc::ECONNRESET)),
        }
    }

    /// Ends it with a reset.
    pub(super) fn reset(self, errno: i32) -> Next {
        Next::Over(vec![PipeReply::Finished {
            pipe: self.id,
            source: None,
            sink: None,
            sent: self.moved(),
            errno,
            host_us: 0,
        }])
    }

    fn return_connections(mut self, return_path: ReturnPath<'_>, errno: i32) -> Next {
        let had = self.ends().count();
        if errno != 0
            && self
                .source
                .as_ref()
                .is_some_and(|end| end.unread_bytes() > MAX_UNREAD_RETURN_BYTES)
        {
            self.source = None;
        }
        let (pipe, sent, on_host) = (self.id, self.moved(), self.started.elapsed());
        let mut words = Vec::new();
        let mut one = |end: Option<HostConnection>, source: bool| {
            let (connection, before) = extract_connection(end?, return_path)?;
            words.extend(before.into_iter().map(|bytes| PipeReply::Unread {
                pipe,
                source,
                bytes,
            }));
            Some(connection)
        };
        let (source, sink) = (one(self.source, true), one(self.sink, false));
        let come = source.iter().chain(&sink).count();
        let errno = match (errno, come < had) {
            (0, true) => libc::ECONNRESET,
            _ => errno,
        };
        words.push(PipeReply::Finished {
            pipe,
            source,
            sink,
            sent,
            errno,
            host_us: u64::try_from(on_host.as_micros()).unwrap_or(0),
        });
        Next::Over(words)
    }
}

const DRAINING: Stage = Stage::Draining {
    errno: 0,
    poll: None,
};

/// With what nobody has read and its message does not hold, in parts. Nothing when the peer has ended it, or much was not sent yet:
/// its socket is reset.
fn extract_connection(
    end: HostConnection,
    return_path: ReturnPath<'_>,
) -> Option<(Box<Connection>, Vec<Bytes>)> {
    let mut state = end
        .extract(return_path.flows, Some(return_path.hold_veth))
        .ok()??;
    // the VM's socket has kept its own
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

/// Whether an error is the connection's, and not the image's.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_look_is_when_all_should_be_acknowledged() {
        let started = Instant::now();
        let at = |us| started + Duration::from_micros(us);
        let pause = |look: DrainPoll| look.pause.as_micros();
        let first = DrainPoll::after(None, at(0), 3_000_000);
        assert_eq!(pause(first), 50);
        // half in 2 ms, then at twice the pace
        let second = DrainPoll::after(Some(first), at(2000), 1_500_000);
        assert_eq!(pause(second), 500, "a quarter of the time so far");
        let third = DrainPoll::after(Some(second), at(2500), 500_000);
        assert_eq!(pause(third), 250);
        // nearly there, and not looked at all the time
        let fourth = DrainPoll::after(Some(third), at(2750), 1000);
        assert_eq!(pause(fourth), 50);
        let mut look = fourth;
        let mut now = 2750;
        let mut pauses = Vec::new();
        while now < 60_000 {
            now += look.pause.as_micros() as u64;
            look = DrainPoll::after(Some(look), at(now), 1000);
            pauses.push(pause(look));
        }
        assert_eq!(pauses[..4], [100, 200, 400, 800]);
        // a quarter more each time, and never more than 5 ms
        let quarter = |pair: &[u128]| pair[1] == 5000 || pair[1].abs_diff(pair[0] * 5 / 4) < 2;
        assert!(pauses[4..].windows(2).all(quarter), "{pauses:?}");
        assert_eq!(pauses.last(), Some(&5000));
        let slow = DrainPoll::after(Some(look), at(now + 5000), 999);
        assert_eq!(pause(slow), 5000);
    }
}
