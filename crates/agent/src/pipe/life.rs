// SPDX-License-Identifier: Apache-2.0
//! The life of one pipe, a state machine: a program's request to have the host move bytes from a file or connection
//! to another one.
//!
//! | state | the connections are in | the host may touch the files |
//! |---|---|---|
//! | requested: the ends are prepared | the program's sockets | no |
//! | holding: the host is asked to hold the source | the program's sockets | no |
//! | held: the agent drains what has arrived | the program's sockets | no |
//! | handed over | the host | yes |
//! | orphaned: handed over, and the program is gone | the host | yes |
//! | restoring: the returned connections are restored | in between | no |
//! | lost: the session has ended | nowhere | until the next session opens |
//! | settling: the sink file is returned to the program | their final place | no |
//!
//! The host ends everything of a session before it opens the next one. So a lost pipe keeps its files until then, and
//! a program whose file the host writes gets its answer only then. [`Kind::Receive`] and [`Kind::Relay`] are held
//! first, since their peers send all the time.

mod event;

use viola_proto::pipe::library::{LibraryReply, LostConnections};

pub use event::{Action, Event, HostCommand, Kind, Sides};

/// The last answer to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Refused(i32),
    Finished {
        sent: u64,
        errno: i32,
        lost: Sides,
    },
    /// The program is gone.
    NoProgram,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Requested,
    Holding,
    Held {
        moved: u64,
    },
    HandedOver {
        stopping: bool,
        moved: u64,
        sent: u64,
    },
    Restoring {
        total: u64,
        errno: i32,
        lost: Sides,
    },
    Orphaned {
        moved: u64,
        sent: u64,
    },
    Lost {
        total: u64,
        end: Ending,
    },
    Settling {
        end: Ending,
    },
    Over,
}

/// The life of one pipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    id: u64,
    kind: Kind,
    state: State,
}

impl Life {
    /// A new pipe under the program's number `id`. A source file is under lease already.
    pub fn new(id: u64, kind: Kind) -> Self {
        Self {
            id,
            kind,
            state: State::Requested,
        }
    }

    /// The program's number of the pipe.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What the pipe connects.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether the pipe has ended.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Whether the host does not know the pipe yet.
    pub fn is_requested(&self) -> bool {
        self.state == State::Requested
    }

    /// Whether the host holds the source, so that the agent drains what has arrived.
    pub fn is_held(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// Whether the pipe may be handed over now.
    pub fn can_hand_over(&self) -> bool {
        match self.kind.is_held_first() {
            true => self.is_held(),
            false => self.is_requested(),
        }
    }

    /// Whether the program waits for an answer.
    pub fn is_awaited(&self) -> bool {
        match self.state {
            State::Orphaned { .. } | State::Over => false,
            State::Lost { end, .. } | State::Settling { end } => end != Ending::NoProgram,
            _ => true,
        }
    }

    /// Whether the sink file is being settled.
    pub fn is_settling(&self) -> bool {
        matches!(self.state, State::Settling { .. })
    }

    /// Whether the host may touch the files, or the agent is not done with them.
    pub fn uses_files(&self) -> bool {
        matches!(
            self.state,
            State::HandedOver { .. }
                | State::Orphaned { .. }
                | State::Lost { .. }
                | State::Settling { .. }
        )
    }

    /// Applies an event. The returned actions are to be carried out in this order.
    pub fn apply(&mut self, event: Event) -> Vec<Action> {
        let (state, actions) = self.next(event);
        self.state = state;
        actions
    }

    fn final_answer(&self, end: Ending) -> Option<Action> {
        let id = self.id;
        let answer = match end {
            Ending::Refused(errno) => LibraryReply::Refused { id, errno },
            Ending::Finished { sent, errno, lost } => {
                let Sides { source, sink } = lost;
                let errno = match lost.any() {
                    true => libc::ECONNRESET,
                    false => errno,
                };
                let lost = LostConnections { source, sink };
                LibraryReply::Finished {
                    id,
                    sent,
                    errno,
                    lost,
                    host_us: 0,
                }
            }
            Ending::NoProgram => return None,
        };
        Some(Action::Answer(answer))
    }

    /// Settles the sink with `total` bytes after these actions.
    fn end(mut actions: Vec<Action>, total: u64, end: Ending) -> (State, Vec<Action>) {
        actions.push(Action::Settle(total));
        (State::Settling { end }, actions)
    }

    /// Ends a pipe whose sockets are as before, except for what the agent has moved.
    fn untouched(actions: Vec<Action>, moved: u64, errno: i32) -> (State, Vec<Action>) {
        let end = match moved {
            0 => Ending::Refused(errno),
            sent => over(sent, 0, Sides::NONE),
        };
        Self::end(actions, moved, end)
    }

    fn next(&self, event: Event) -> (State, Vec<Action>) {
        let before = self.state;
        match before {
            State::Requested => self.requested(event),
            State::Holding => self.holding(event),
            State::Held { moved } => Self::held(moved, event),
            State::HandedOver {
                stopping,
                moved,
                sent,
            } => self.handed_over(stopping, moved, sent, event),
            State::Restoring { total, errno, lost } => match event {
                Event::Restored(failed) => self.restored((total, errno, lost), failed),
                _ => (before, vec![]),
            },
            State::Orphaned { moved, sent } => self.orphan(moved, sent, event),
            State::Lost { total, end } => match event {
                Event::SessionOpened => Self::end(vec![Action::ReleaseFile], total, end),
                Event::ProgramGone => {
                    let end = Ending::NoProgram;
                    (State::Lost { total, end }, vec![])
                }
                _ => (before, vec![]),
            },
            State::Settling { end } => match event {
                Event::Settled(errno) => {
                    let end = match end {
                        Ending::Finished { lost, .. } if errno != 0 => over(0, errno, lost),
                        end => end,
                    };
                    (State::Over, self.final_answer(end).into_iter().collect())
                }
                Event::ProgramGone => (
                    State::Settling {
                        end: Ending::NoProgram,
                    },
                    vec![],
                ),
                _ => (before, vec![]),
            },
            State::Over => (before, vec![]),
        }
    }

    fn requested(&self, event: Event) -> (State, Vec<Action>) {
        let release = vec![Action::ReleaseFile];
        match event {
            Event::Ready if self.kind.is_held_first() => {
                (State::Holding, vec![Action::Tell(HostCommand::Hold)])
            }
            Event::HandedOver if !self.kind.is_held_first() => (given(0), vec![]),
            Event::Failed(errno) => Self::untouched(release, 0, errno),
            Event::Halt | Event::SessionClosed => Self::untouched(release, 0, libc::EAGAIN),
            // nothing was moved
            Event::Stop => Self::end(release, 0, over(0, 0, Sides::NONE)),
            Event::ProgramGone => Self::end(release, 0, Ending::NoProgram),
            _ => (State::Requested, vec![]),
        }
    }

    fn holding(&self, event: Event) -> (State, Vec<Action>) {
        match event {
            Event::Held => (State::Held { moved: 0 }, vec![]),
            // nothing is moved before the host has confirmed the hold
            Event::Moved(_) | Event::SourceEnded(_) | Event::HandedOver => (State::Holding, vec![]),
            event => match Self::held(0, event) {
                (State::Held { .. }, actions) => (State::Holding, actions),
                ended => ended,
            },
        }
    }

    fn held(moved: u64, event: Event) -> (State, Vec<Action>) {
        let release = vec![Action::ReleaseFile];
        let stop = vec![Action::Tell(HostCommand::Stop), Action::ReleaseFile];
        match event {
            Event::Moved(moved) => (State::Held { moved }, vec![]),
            Event::HandedOver => (given(moved), vec![]),
            Event::SourceEnded(lost) => Self::end(stop, moved, over(moved, 0, lost)),
            Event::Failed(errno) => Self::untouched(stop, moved, errno),
            Event::Halt => Self::untouched(stop, moved, libc::EAGAIN),
            // the host has released the source by itself
            Event::Refused | Event::SessionClosed => Self::untouched(release, moved, libc::EAGAIN),
            Event::Stop => Self::end(stop, moved, over(moved, 0, Sides::NONE)),
            Event::ProgramGone => Self::end(stop, moved, Ending::NoProgram),
            _ => (State::Held { moved }, vec![]),
        }
    }

    fn handed_over(
        &self,
        stopping: bool,
        moved: u64,
        sent: u64,
        event: Event,
    ) -> (State, Vec<Action>) {
        use Action::{Answer, Drop, ReleaseFile, Reset, Restore, Resume, Tell};
        let connections = self.kind.connections();
        let total = moved.saturating_add(sent);
        match event {
            Event::Refused => Self::untouched(vec![ReleaseFile, Resume], moved, libc::EAGAIN),
            Event::Progress(sent) => {
                let (id, total) = (self.id, moved.saturating_add(sent));
                let answer = Answer(LibraryReply::Progress { id, sent: total });
                let state = State::HandedOver {
                    stopping,
                    moved,
                    sent,
                };
                (state, vec![answer])
            }
            Event::Returned {
                returned,
                sent,
                errno,
            } => {
                let total = moved.saturating_add(sent);
                let lost = connections.without(returned);
                let mut actions = vec![ReleaseFile];
                actions.extend(lost.any().then_some(Drop(lost)));
                match connections.without(lost).any() {
                    true => {
                        actions.push(Restore);
                        (State::Restoring { total, errno, lost }, actions)
                    }
                    false => Self::end(actions, total, over(total, errno, lost)),
                }
            }
            Event::Stop | Event::Halt => {
                let command = (!stopping).then_some(Tell(HostCommand::Stop));
                let state = State::HandedOver {
                    stopping: true,
                    moved,
                    sent,
                };
                (state, command.into_iter().collect())
            }
            // the sockets stay silent until the host says what has become of the connections
            Event::ProgramGone => {
                let command = match connections.any() {
                    true => Some(Tell(HostCommand::Reset)),
                    false => (!stopping).then_some(Tell(HostCommand::Stop)),
                };
                (
                    State::Orphaned { moved, sent },
                    command.into_iter().collect(),
                )
            }
            Event::SessionClosed => {
                let end = over(total, 0, connections);
                let mut actions = Vec::from_iter(connections.any().then_some(Reset));
                // the host may still write the sink file, so the program does not get it yet
                let end = match self.kind.is_into_file() {
                    true => end,
                    false => {
                        actions.extend(self.final_answer(end));
                        Ending::NoProgram
                    }
                };
                (State::Lost { total, end }, actions)
            }
            _ => {
                let state = State::HandedOver {
                    stopping,
                    moved,
                    sent,
                };
                (state, vec![])
            }
        }
    }

    fn restored(
        &self,
        (total, errno, lost): (u64, i32, Sides),
        failed: Sides,
    ) -> (State, Vec<Action>) {
        let connections = self.kind.connections();
        let failed = connections
            .without(lost)
            .without(connections.without(failed));
        let lost = lost.and(failed);
        // for a connection that was not restored, this VM's kernel sends the reset itself when the host lets
        // its packets through
        let command = match connections.without(lost).any() {
            true => HostCommand::Restored,
            false => HostCommand::Reset,
        };
        let mut actions = vec![Action::Tell(command)];
        actions.extend(failed.any().then_some(Action::Drop(failed)));
        Self::end(actions, total, over(total, errno, lost))
    }

    fn orphan(&self, moved: u64, sent: u64, event: Event) -> (State, Vec<Action>) {
        let connections = self.kind.connections();
        let end = Ending::NoProgram;
        match event {
            Event::Refused => Self::end(vec![Action::ReleaseFile, Action::Resume], moved, end),
            Event::Returned { sent, .. } => {
                let kill = connections.any().then_some(Action::Drop(connections));
                let actions = [Action::ReleaseFile].into_iter().chain(kill).collect();
                Self::end(actions, moved.saturating_add(sent), end)
            }
            Event::SessionClosed => {
                let total = moved.saturating_add(sent);
                let reset = connections.any().then_some(Action::Reset);
                (State::Lost { total, end }, reset.into_iter().collect())
            }
            Event::Progress(sent) => (State::Orphaned { moved, sent }, vec![]),
            _ => (State::Orphaned { moved, sent }, vec![]),
        }
    }
}

fn given(moved: u64) -> State {
    State::HandedOver {
        stopping: false,
        moved,
        sent: 0,
    }
}

fn over(sent: u64, errno: i32, lost: Sides) -> Ending {
    Ending::Finished { sent, errno, lost }
}

#[cfg(test)]
mod tests;
