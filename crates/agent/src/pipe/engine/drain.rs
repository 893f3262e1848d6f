// SPDX-License-Identifier: Apache-2.0
//! Drains a source that the host holds: the host keeps new segments, and the agent moves what has already arrived,
//! before the connection is extracted.
//!
//! A connection is handed over with nearly empty queues. So the agent polls until the source is empty and the sink's
//! peer has acknowledged nearly everything, or until [`DRAIN_TIMEOUT`](super::drain_poll).

use std::time::{Duration, Instant};

use viola_proto::pipe::{MAX_QUEUE_BYTES, PipeId};

use super::Pipes;
use super::drain_poll::DrainPoll;
use super::entry::{Sink, Source};
use crate::pipe::forward::{Outcome, forward, store};
use crate::pipe::life::{Event, Sides};
use crate::pipe::reason::Reason;

/// Maximum bytes that the agent keeps in memory for one pipe.
const MAX_KEPT_BYTES_PER_PIPE: u64 = 8 << 20;
/// The same for all pipes together.
const MAX_KEPT_BYTES: u64 = 64 << 20;

impl Pipes {
    /// The host holds a connection: starts to drain it.
    pub(super) fn start_drain(&mut self, pipe: PipeId) {
        let now = Instant::now();
        let Some(pipe) = self.pipes.get_mut(&pipe).filter(|p| p.life.is_held()) else {
            return;
        };
        pipe.drain.get_or_insert(DrainPoll::new(now));
    }

    /// Time until the next poll.
    pub(super) fn time_to_next_drain(&self) -> Option<Duration> {
        let held = self.pipes.values().filter(|p| p.life.is_held());
        let next = held.filter_map(|p| p.drain.map(|poll| poll.next)).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Polls the held connections that are due.
    pub(super) fn drain_held(&mut self) {
        // in some guests reading the clock is a system call
        if !self.pipes.values().any(|p| p.life.is_held()) {
            return;
        }
        let now = Instant::now();
        let due = |poll: &DrainPoll| poll.next <= now;
        let held = self.pipes.iter().filter(|(_, p)| p.life.is_held());
        let held = held.filter(|(_, p)| p.drain.as_ref().is_some_and(due));
        for pipe in held.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.drain_one(pipe, now);
        }
    }

    fn drain_one(&mut self, id: PipeId, now: Instant) {
        let kept = |sink: &Sink| match sink {
            Sink::File { target, .. } => target.kept.len() as u64,
            Sink::Socket(_) => 0,
        };
        let all: u64 = self.pipes.values().map(|p| kept(&p.sink)).sum();
        let Some(pipe) = self.pipes.get_mut(&id) else {
            return;
        };
        let Source::Socket(from) = &pipe.source else {
            return;
        };
        let rest = pipe.length - pipe.moved;
        let mut is_full = false;
        let step = match &mut pipe.sink {
            Sink::Socket(to) => forward(from.stream.fd(), to.stream.fd(), rest, &mut self.buffer),
            Sink::File { target, .. } => {
                let room = MAX_KEPT_BYTES_PER_PIPE.saturating_sub(pipe.moved);
                let room = room.min(MAX_KEPT_BYTES.saturating_sub(all)).min(rest);
                is_full = room == 0;
                store(from.stream.fd(), &mut target.kept, room, &mut self.buffer)
            }
        };
        pipe.moved += step.moved;
        let (moved, length) = (pipe.moved, pipe.length);
        // the sink's unacknowledged bytes count too
        let is_through = match &pipe.sink {
            Sink::Socket(to) => to
                .stream
                .unacked_bytes()
                .is_ok_and(|bytes| bytes <= MAX_QUEUE_BYTES),
            Sink::File { .. } => true,
        };
        let mut is_ready = false;
        if let Some(poll) = &mut pipe.drain {
            // segments that the host let through before it held the rest may still arrive: only two
            // empty polls in a row end the drain
            let quiet = step.outcome == Outcome::Empty && is_through;
            is_ready = quiet && poll.quiet && step.moved == 0;
            poll.quiet = quiet;
            poll.again(now, step.moved > 0 || quiet);
        }
        let is_late = pipe.drain.is_some_and(|poll| now >= poll.until);
        if step.moved > 0 {
            self.apply(id, Event::Moved(moved), Reason::RefusedByHost);
        }
        let event = match step.outcome {
            Outcome::End(_) if is_full && moved < length => {
                return self.apply(id, Event::Failed(libc::EAGAIN), Reason::DrainTimeout);
            }
            Outcome::End(lost) => Some(Event::SourceEnded(lost)),
            // everything has been moved
            _ if moved == length => Some(Event::SourceEnded(Sides::NONE)),
            _ if is_ready => match self.extract(id) {
                Ok(Some(message)) => {
                    self.apply(id, Event::HandedOver, Reason::RefusedByHost);
                    return self.send(message);
                }
                Ok(None) => None,
                // the queue will get shorter
                Err(Reason::QueueTooLong) if !is_late => None,
                Err(reason) => return self.apply(id, Event::Failed(reason.errno()), reason),
            },
            _ => None,
        };
        match event {
            Some(event) => self.apply(id, event, Reason::RefusedByHost),
            None if is_late => self.apply(id, Event::Failed(libc::EAGAIN), Reason::DrainTimeout),
            None => {}
        }
    }
}
