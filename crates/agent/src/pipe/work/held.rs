// SPDX-License-Identifier: Apache-2.0
//! A source that the host holds: nothing new comes, and what has come is moved here before the connection is taken.
//!
//! A connection goes to the host with next to nothing in its queues, so this goes on until the source is empty and the sink's
//! peer has nearly everything. Nobody waits for that: it is looked at again and again, for a while.

use std::time::{Duration, Instant};

use viola_proto::pipe::{MAX_QUEUE, PipeId};

use super::{Sink, Source, Work};
use crate::core::pipe::{Event, Sides};
use crate::pipe::passing::{Then, keep, pass};
use crate::pipe::reason::Reason;

/// How long it is tried.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks: at first, and at last.
const SOON: Duration = Duration::from_millis(1);
const LATE: Duration = Duration::from_millis(10);
/// Most bytes of a pipe that are kept in memory, and of all pipes.
const KEPT: u64 = 8 << 20;
const ALL_KEPT: u64 = 64 << 20;

/// When a held connection is looked at.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    until: Instant,
    next: Instant,
    wait: Duration,
    /// Nothing was there at the last look.
    quiet: bool,
}

impl Look {
    fn again(&mut self, now: Instant, moved: bool) {
        self.wait = match moved {
            true => SOON,
            false => (self.wait * 2).min(LATE),
        };
        self.next = now + self.wait;
    }
}

impl Work {
    /// The host holds a connection from now on.
    pub(super) fn begin_to_look(&mut self, pipe: PipeId) {
        let now = Instant::now();
        let Some(pipe) = self.pipes.get_mut(&pipe).filter(|p| p.life.is_held()) else {
            return;
        };
        pipe.look.get_or_insert(Look {
            until: now + PATIENCE,
            next: now,
            wait: SOON,
            quiet: false,
        });
    }

    /// Time until the next look.
    pub(super) fn next_look(&self) -> Option<Duration> {
        let held = self.pipes.values().filter(|p| p.life.is_held());
        let next = held.filter_map(|p| p.look.map(|look| look.next)).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Looks at those whose time has come.
    pub(super) fn look(&mut self) {
        // in a guest the clock may be a system call
        if !self.pipes.values().any(|p| p.life.is_held()) {
            return;
        }
        let now = Instant::now();
        let due = |look: &Look| look.next <= now;
        let held = self.pipes.iter().filter(|(_, p)| p.life.is_held());
        let held = held.filter(|(_, p)| p.look.as_ref().is_some_and(due));
        for pipe in held.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.look_at(pipe, now);
        }
    }

    fn look_at(&mut self, id: PipeId, now: Instant) {
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
            Sink::Socket(to) => pass(from.stream.fd(), to.stream.fd(), rest, &mut self.buffer),
            Sink::File { target, .. } => {
                let room = KEPT.saturating_sub(pipe.moved);
                let room = room.min(ALL_KEPT.saturating_sub(all)).min(rest);
                is_full = room == 0;
                keep(from.stream.fd(), &mut target.kept, room, &mut self.buffer)
            }
        };
        pipe.moved += step.moved;
        let (moved, length) = (pipe.moved, pipe.length);
        // what the sink has not sent yet, too
        let is_through = match &pipe.sink {
            Sink::Socket(to) => to.stream.written().is_ok_and(|bytes| bytes <= MAX_QUEUE),
            Sink::File { .. } => true,
        };
        let mut is_ready = false;
        if let Some(look) = &mut pipe.look {
            // what the host let through before it held the rest may still be on its way: twice is sure
            let quiet = step.then == Then::Empty && is_through;
            is_ready = quiet && look.quiet && step.moved == 0;
            look.quiet = quiet;
            look.again(now, step.moved > 0 || quiet);
        }
        let is_late = pipe.look.is_some_and(|look| now >= look.until);
        if step.moved > 0 {
            self.on(id, Event::Moved(moved), Reason::Refused);
        }
        let event = match step.then {
            Then::End(_) if is_full && moved < length => {
                return self.on(id, Event::Unfit(libc::EAGAIN), Reason::Slow);
            }
            Then::End(lost) => Some(Event::Ended(lost)),
            // all of it has gone
            _ if moved == length => Some(Event::Ended(Sides::NONE)),
            _ if is_ready => match self.taken(id) {
                Ok(Some(message)) => {
                    self.on(id, Event::Given, Reason::Refused);
                    return self.tell(message);
                }
                Ok(None) => None,
                // it will be shorter
                Err(Reason::Queue) if !is_late => None,
                Err(reason) => return self.on(id, Event::Unfit(reason.errno()), reason),
            },
            _ => None,
        };
        match event {
            Some(event) => self.on(id, event, Reason::Refused),
            None if is_late => self.on(id, Event::Unfit(libc::EAGAIN), Reason::Slow),
            None => {}
        }
    }
}
