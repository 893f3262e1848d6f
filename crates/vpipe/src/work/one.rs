// SPDX-License-Identifier: Apache-2.0
//! One pipe, from the moment at which the host has its connections until the VM has them again.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use viola_proto::agent::{Bytes, LINE};
use viola_proto::pipe::shown::{Kind, Transfer};
use viola_proto::pipe::{Connection, PipeId, ToGuest};

use super::allowance::Allowance;
use crate::moving::{Fault, Receiving, Relaying, Sending, Turn};
use crate::{Flow, Flows, HostEnd};

/// Bytes that one pipe moves before the next one's turn.
const BUDGET: u64 = 1 << 20;
/// The agent hears so often how far it is.
const PROGRESS: Duration = Duration::from_secs(2);
/// What is to end early is reset after so long: a peer that does not read keeps the VM from its own file no longer. (A lease in the
/// VM is broken by its kernel after 45 s: `/proc/sys/fs/lease-break-time`.)
const PATIENCE: Duration = Duration::from_secs(20);
/// Of what was sent beyond an early end the VM gets as much, in bytes. More is what a sender had under way that goes on and on: a
/// serial line would take seconds for it, with everything else behind it, so that connection is reset.
const MOST_LEFT: u64 = 256 << 10;
/// Of what nobody has read, bytes in one message: as many as a serial line holds with all that is around them ([`LINE`]). A longer
/// one may hang the line of a guest that is not there to read it.
const PART: usize = LINE as usize / 3;
/// Pauses between two looks whether the peer has all: the shortest one, and the longest.
const LOOK: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));

/// What is moved.
#[derive(Debug)]
pub(super) enum Job {
    Send(Sending),
    Receive(Receiving),
    Relay(Relaying),
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Moving,
    /// No more comes in; what has come is still to be moved.
    Emptying,
    /// All is moved; the sink's peer has to acknowledge it.
    Draining {
        errno: i32,
        looked: Option<Looked>,
    },
}

/// A look at what the peer has not acknowledged.
#[derive(Debug, Clone, Copy)]
struct Looked {
    /// The first one, and this one.
    first: Instant,
    at: Instant,
    left: usize,
    pause: Duration,
}

impl Looked {
    /// So much is left now: at the pace since the last look the next one finds nothing left. While nothing is acknowledged they
    /// become rare, but none comes later than it has taken so far and a quarter of that: a peer that stood still for a moment is not
    /// paid for by a long wait.
    fn after(last: Option<Self>, at: Instant, left: usize) -> Self {
        let pause = match last {
            None => LOOK.0,
            Some(last) if left < last.left => {
                let time = at.saturating_duration_since(last.at);
                time.mul_f64(left as f64 / (last.left - left) as f64)
            }
            Some(last) => last.pause * 2,
        };
        let first = last.map_or(at, |last| last.first);
        let most = (at.saturating_duration_since(first) / 4).clamp(LOOK.0, LOOK.1);
        Self {
            first,
            at,
            left,
            pause: pause.clamp(LOOK.0, most),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct One {
    id: PipeId,
    job: Job,
    source: Option<HostEnd>,
    sink: Option<HostEnd>,
    /// Bytes in all.
    length: u64,
    stage: Stage,
    begun: Instant,
    told: Instant,
    /// When it is reset at the latest.
    ends: Option<Instant>,
}

/// What has become of it.
#[derive(Debug)]
pub(super) enum Next {
    /// It is to be asked again.
    Again(Wait),
    /// It is over, with this to be said, [`ToGuest::Back`] last; the VM has to take back the connections that are in that.
    Over(Vec<ToGuest>),
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
pub(super) struct Home<'a> {
    pub(super) flows: &'a Flows,
    pub(super) parked: u32,
}

impl One {
    pub(super) fn new(
        id: PipeId,
        job: Job,
        (source, sink): (Option<HostEnd>, Option<HostEnd>),
        now: Instant,
    ) -> Self {
        Self {
            id,
            length: job.left(),
            job,
            source,
            sink,
            stage: Stage::Moving,
            begun: now,
            told: now,
            ends: None,
        }
    }

    /// Its connections that the host has.
    pub(super) fn ends(&self) -> impl Iterator<Item = &HostEnd> {
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
    pub(super) fn shown(&self, now: Instant) -> Transfer {
        let age = now.saturating_duration_since(self.begun);
        let end = self.sink.as_ref().or(self.source.as_ref());
        Transfer {
            kind: match self.job {
                Job::Send(_) => Kind::Send,
                Job::Receive(_) => Kind::Receive,
                Job::Relay(_) => Kind::Relay,
            },
            local: end.map(|end| end.flow().guest),
            peer: end.map(|end| end.flow().peer),
            length: self.length,
            sent: self.moved(),
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        }
    }

    fn moved(&self) -> u64 {
        match &self.job {
            Job::Send(sending) => self.length - sending.left(),
            Job::Receive(receiving) => receiving.moved(),
            Job::Relay(relaying) => relaying.moved(),
        }
    }

    /// Whether it is to be reset now.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.ends.is_some_and(|ends| now >= ends)
    }

    /// The VM has stood still for so long, and goes on: so do the peers.
    pub(super) fn resume(&mut self, time: Duration) {
        self.ends = self.ends.map(|ends| ends + time);
        for end in self.ends() {
            end.nudge();
        }
    }

    /// Moves no more than what has come already.
    pub(super) fn stop(&mut self, now: Instant, home: Home<'_>) {
        self.ends.get_or_insert(now + PATIENCE);
        if let Stage::Moving = self.stage {
            // what the source says from now on is the VM's
            let held = self
                .source
                .as_ref()
                .map(|end| home.flows.hold(end.flow(), None, Some(home.parked)));
            self.stage = match held {
                Some(Ok(())) => Stage::Emptying,
                // it cannot be held: then it cannot be given back either, which is found out there
                Some(Err(_)) | None => DRAINING,
            };
        }
    }

    /// Whether packets of its source are kept for the VM.
    pub(super) fn is_parked(&self) -> bool {
        self.source.is_some() && !matches!(self.stage, Stage::Moving)
    }

    /// How far it is, when that is due.
    pub(super) fn progress(&mut self, now: Instant) -> Option<ToGuest> {
        if now < self.told + PROGRESS {
            return None;
        }
        self.told = now;
        Some(ToGuest::Progress {
            pipe: self.id,
            sent: self.moved(),
        })
    }

    /// Goes on as far as it can without waiting.
    pub(super) fn step(
        mut self,
        now: Instant,
        home: Home<'_>,
        allowance: &Allowance,
    ) -> (Option<Self>, Next) {
        if self.is_late(now) {
            return (None, self.broken(libc::ETIMEDOUT));
        }
        let stage = match self.stage {
            Stage::Draining { .. } => self.stage,
            Stage::Moving | Stage::Emptying => {
                let emptying = matches!(self.stage, Stage::Emptying);
                let budget = match allowance.ready(now, BUDGET) {
                    Ok(budget) => budget,
                    // a pipe that is to end does not wait for its share
                    Err(_) if emptying => BUDGET,
                    Err(pause) => return (Some(self), Next::Again(Wait::Time(pause))),
                };
                let before = self.moved();
                let turn = self.turn(budget);
                allowance.spent(self.moved() - before);
                match turn {
                    Ok(Turn::More) => return (Some(self), Next::Again(Wait::Nothing)),
                    Ok(Turn::Full) => return (Some(self), Next::Again(Wait::Sink)),
                    Ok(Turn::Empty) if !emptying => {
                        return (Some(self), Next::Again(Wait::Source));
                    }
                    Ok(Turn::Empty | Turn::Done | Turn::Ended) => DRAINING,
                    Err(fault) => match self.fault(&fault) {
                        Some(stage) => stage,
                        None => return (None, self.broken(libc::ECONNRESET)),
                    },
                }
            }
        };
        let Stage::Draining { errno, looked } = stage else {
            return (Some(self), Next::Again(Wait::Nothing));
        };
        match self.sink.as_ref().map_or(Ok(0), HostEnd::outstanding) {
            Ok(0) => (None, self.give_back(home, errno)),
            Ok(left) => {
                let look = Looked::after(looked, Instant::now(), left);
                let looked = Some(look);
                self.stage = Stage::Draining { errno, looked };
                (Some(self), Next::Again(Wait::Time(look.pause)))
            }
            Err(_) => (None, self.broken(libc::ECONNRESET)),
        }
    }

    fn turn(&mut self, budget: u64) -> Result<Turn, Fault> {
        let finished = self.source.as_ref().is_some_and(HostEnd::peer_finished);
        let lost = || std::io::Error::from(std::io::ErrorKind::NotConnected);
        let left = self.job.left();
        if let Some(source) = &mut self.source {
            source.approach(left);
        }
        let source = self.source.as_ref().map(HostEnd::socket);
        let sink = self.sink.as_ref().map(HostEnd::socket);
        let turn = match &mut self.job {
            Job::Send(sending) => {
                let sink = sink.ok_or_else(|| Fault::Sink(lost()))?;
                let turn = sending.turn(sink, budget).map(|(_, turn)| turn);
                turn.map_err(|e| match is_connections(&e) {
                    true => Fault::Sink(e),
                    false => Fault::Image(e),
                })
            }
            Job::Receive(receiving) => {
                let source = source.ok_or_else(|| Fault::Source(lost()))?;
                receiving.turn(source, budget)
            }
            Job::Relay(relaying) => {
                let source = source.ok_or_else(|| Fault::Source(lost()))?;
                let sink = sink.ok_or_else(|| Fault::Sink(lost()))?;
                relaying.turn(source, sink, budget)
            }
        }?;
        Ok(match turn {
            // the socket does not know that nothing will come
            Turn::Empty if finished => Turn::Ended,
            turn => turn,
        })
    }

    /// One end has failed: the other one goes back if it can.
    fn fault(&mut self, fault: &Fault) -> Option<Stage> {
        let errno = match fault {
            Fault::Source(_) => {
                self.source = None;
                libc::ECONNRESET
            }
            Fault::Sink(_) => {
                self.sink = None;
                // taken from the source and on no way any more: its stream has a gap, and cannot go on
                if matches!(&self.job, Job::Relay(relaying) if relaying.holds()) {
                    self.source = None;
                }
                libc::ECONNRESET
            }
            Fault::Image(_) => {
                // received and not written: nobody can have these bytes again
                self.source = None;
                libc::EIO
            }
        };
        let looked = None;
        (self.ends().next().is_some()).then_some(Stage::Draining { errno, looked })
    }

    /// The peer of one end has reset it, or it is found to be dead.
    pub(super) fn lose(mut self, source: bool) -> (Option<Self>, Next) {
        let gone = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let fault = match source {
            true => Fault::Source(gone),
            false => Fault::Sink(gone),
        };
        match self.fault(&fault) {
            Some(stage) => {
                self.stage = stage;
                (Some(self), Next::Again(Wait::Nothing))
            }
            None => (None, self.broken(libc::ECONNRESET)),
        }
    }

    /// Ends it with a reset.
    pub(super) fn broken(self, errno: i32) -> Next {
        Next::Over(vec![ToGuest::Back {
            pipe: self.id,
            source: None,
            sink: None,
            sent: self.moved(),
            errno,
            spent: 0,
        }])
    }

    fn give_back(mut self, home: Home<'_>, errno: i32) -> Next {
        let had = self.ends().count();
        if errno != 0
            && self
                .source
                .as_ref()
                .is_some_and(|end| end.unread() > MOST_LEFT)
        {
            self.source = None;
        }
        let (pipe, sent, spent) = (self.id, self.moved(), self.begun.elapsed());
        let mut words = Vec::new();
        let mut one = |end: Option<HostEnd>, source: bool| {
            let (connection, before) = back(end?, home)?;
            words.extend(before.into_iter().map(|bytes| ToGuest::Unread {
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
        words.push(ToGuest::Back {
            pipe,
            source,
            sink,
            sent,
            errno,
            spent: u64::try_from(spent.as_micros()).unwrap_or(0),
        });
        Next::Over(words)
    }
}

const DRAINING: Stage = Stage::Draining {
    errno: 0,
    looked: None,
};

/// With what nobody has read and its message does not hold, in parts. Nothing when the peer has ended it, or much was not sent yet:
/// its socket is reset.
fn back(end: HostEnd, home: Home<'_>) -> Option<(Box<Connection>, Vec<Bytes>)> {
    let mut state = end.give_back(home.flows, Some(home.parked)).ok()??;
    // the VM's socket has kept its own
    (state.congestion, state.pacing) = (String::new(), None);
    let rest = state.unread.len().saturating_sub(PART);
    let rest = state.unread.split_off(rest);
    let before = std::mem::replace(&mut state.unread, rest);
    let before = before.chunks(PART).map(|part| Bytes(part.to_vec()));
    let connection = viola_handover::to_wire(state).ok()?;
    Some((Box::new(connection), before.collect()))
}

impl Job {
    fn left(&self) -> u64 {
        match self {
            Self::Send(sending) => sending.left(),
            Self::Receive(receiving) => receiving.left(),
            Self::Relay(relaying) => relaying.left(),
        }
    }
}

/// Whether an error is the connection's, and not the image's.
fn is_connections(error: &std::io::Error) -> bool {
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
        let begun = Instant::now();
        let at = |us| begun + Duration::from_micros(us);
        let pause = |look: Looked| look.pause.as_micros();
        let first = Looked::after(None, at(0), 3_000_000);
        assert_eq!(pause(first), 50);
        // half in 2 ms, then at twice the pace
        let second = Looked::after(Some(first), at(2000), 1_500_000);
        assert_eq!(pause(second), 500, "a quarter of the time so far");
        let third = Looked::after(Some(second), at(2500), 500_000);
        assert_eq!(pause(third), 250);
        // nearly there, and not looked at all the time
        let fourth = Looked::after(Some(third), at(2750), 1000);
        assert_eq!(pause(fourth), 50);
        let mut look = fourth;
        let mut now = 2750;
        let mut pauses = Vec::new();
        while now < 60_000 {
            now += look.pause.as_micros() as u64;
            look = Looked::after(Some(look), at(now), 1000);
            pauses.push(pause(look));
        }
        assert_eq!(pauses[..4], [100, 200, 400, 800]);
        // a quarter more each time, and never more than 5 ms
        let quarter = |pair: &[u128]| pair[1] == 5000 || pair[1].abs_diff(pair[0] * 5 / 4) < 2;
        assert!(pauses[4..].windows(2).all(quarter), "{pauses:?}");
        assert_eq!(pauses.last(), Some(&5000));
        let slow = Looked::after(Some(look), at(now + 5000), 999);
        assert_eq!(pause(slow), 5000);
    }
}
