// SPDX-License-Identifier: Apache-2.0
//! The life of one pipe: a program's wish to have bytes moved by the host, from a file or a connection to another one.
//!
//! | state | the connections are in | the host may touch the files |
//! |---|---|---|
//! | asked: the files are made ready | the program's sockets | no |
//! | holding: the host is asked to keep what the source's peer sends | the program's sockets | no |
//! | held: what the source has already is moved here | the program's sockets | no |
//! | given | the host | yes |
//! | orphaned: the program is gone | the host | yes |
//! | lost: the session is over | nothing | until the next session begins |
//! | settling: the file that was written to is made the program's again | as they will stay | no |
//!
//! The host ends all that it does for a session before it begins another one, so a lost pipe keeps its files until then, and
//! a program whose file is written to hears the end only then. [`Kind::Receive`] and [`Kind::Relay`] are held first: their
//! peers send all the time.

use viola_proto::pipe::library::{Answer, Lost};

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

    fn and(self, those: Self) -> Self {
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
    Ended(Sides),
    /// The connections were taken out of their sockets, and what is to be done is on its way to the host.
    Given,
    /// It cannot be given, for this errno; sockets and files are as they were.
    Unfit(i32),
    /// The host does not take it, or was never asked.
    Refused,
    /// The host has moved so many bytes.
    Progress(u64),
    /// The host does not touch the files any more.
    Back {
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
    Closed,
    /// A session has begun.
    Opened,
    /// The program wants it to end.
    Stop,
    /// The agent wants it to end: somebody wants to change the file, or nothing may be touched now.
    Halt,
    /// The program has closed a socket of it, or is dead.
    Gone,
}

/// What the host is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
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
    Tell(Word),
    /// Let the sockets go on with the connections that were taken from them.
    Resume,
    /// End these sockets' connections without a word.
    Kill(Sides),
    /// End all its connections with a reset: nobody knows whether the host has said one.
    Reset,
    /// Put the connections that came back into their sockets; [`Event::Restored`] follows.
    Restore,
    /// The source's file may change, as far as this pipe goes.
    LetFile,
    /// Give the sink's file, to which so many bytes have come, back to the program; [`Event::Settled`] follows. Where the
    /// sink is a connection nothing is to be done for it.
    Settle(u64),
}

/// What the program hears last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Refused(i32),
    Over {
        sent: u64,
        errno: i32,
        lost: Sides,
    },
    /// It is not there to hear it.
    Unheard,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asked,
    Holding,
    Held {
        moved: u64,
    },
    Given {
        stopping: bool,
        moved: u64,
        sent: u64,
    },
    Restoring {
        total: u64,
        errno: i32,
        lost: Sides,
    },
    Orphan {
        moved: u64,
        sent: u64,
    },
    Lost {
        total: u64,
        end: End,
    },
    Settling {
        end: End,
    },
    Over,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    id: u64,
    kind: Kind,
    state: State,
}

impl Life {
    /// A program asks, by this number of its own. A file that is read is kept from changes already.
    pub fn new(id: u64, kind: Kind) -> Self {
        Self {
            id,
            kind,
            state: State::Asked,
        }
    }

    /// The program's number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What it is for.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Nothing will happen to it any more.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// The host has not heard of it.
    pub fn is_asked(&self) -> bool {
        self.state == State::Asked
    }

    /// The host keeps what the source's peer sends; what is there already is to be moved.
    pub fn is_held(&self) -> bool {
        matches!(self.state, State::Held { .. })
    }

    /// It may be given now.
    pub fn is_fit(&self) -> bool {
        match self.kind.is_held_first() {
            true => self.is_held(),
            false => self.is_asked(),
        }
    }

    /// The program waits for an answer.
    pub fn is_awaited(&self) -> bool {
        match self.state {
            State::Orphan { .. } | State::Over => false,
            State::Lost { end, .. } | State::Settling { end } => end != End::Unheard,
            _ => true,
        }
    }

    /// The file that was written to is being given back.
    pub fn is_settling(&self) -> bool {
        matches!(self.state, State::Settling { .. })
    }

    /// The host may touch its files, or the agent is not done with them.
    pub fn is_read(&self) -> bool {
        matches!(
            self.state,
            State::Given { .. }
                | State::Orphan { .. }
                | State::Lost { .. }
                | State::Settling { .. }
        )
    }

    /// Something has happened; what follows is to be done in this order.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let (state, actions) = self.next(event);
        self.state = state;
        actions
    }

    fn say(&self, end: End) -> Option<Action> {
        let id = self.id;
        let answer = match end {
            End::Refused(errno) => Answer::Refused { id, errno },
            End::Over { sent, errno, lost } => {
                let Sides { source, sink } = lost;
                let errno = match lost.any() {
                    true => libc::ECONNRESET,
                    false => errno,
                };
                let lost = Lost { source, sink };
                Answer::Over {
                    id,
                    sent,
                    errno,
                    lost,
                    spent: 0,
                }
            }
            End::Unheard => return None,
        };
        Some(Action::Answer(answer))
    }

    /// The end, after these actions: the file has got so many bytes.
    fn end(mut actions: Vec<Action>, total: u64, end: End) -> (State, Vec<Action>) {
        actions.push(Action::Settle(total));
        (State::Settling { end }, actions)
    }

    /// The end of one whose sockets are as they were but for what the agent has moved.
    fn untouched(actions: Vec<Action>, moved: u64, errno: i32) -> (State, Vec<Action>) {
        let end = match moved {
            0 => End::Refused(errno),
            sent => over(sent, 0, Sides::NONE),
        };
        Self::end(actions, moved, end)
    }

    fn next(&self, event: Event) -> (State, Vec<Action>) {
        let before = self.state;
        match before {
            State::Asked => self.asked(event),
            State::Holding => self.holding(event),
            State::Held { moved } => Self::held(moved, event),
            State::Given {
                stopping,
                moved,
                sent,
            } => self.given(stopping, moved, sent, event),
            State::Restoring { total, errno, lost } => match event {
                Event::Restored(failed) => self.restored((total, errno, lost), failed),
                _ => (before, vec![]),
            },
            State::Orphan { moved, sent } => self.orphan(moved, sent, event),
            State::Lost { total, end } => match event {
                Event::Opened => Self::end(vec![Action::LetFile], total, end),
                Event::Gone => {
                    let end = End::Unheard;
                    (State::Lost { total, end }, vec![])
                }
                _ => (before, vec![]),
            },
            State::Settling { end } => match event {
                Event::Settled(errno) => {
                    let end = match end {
                        End::Over { lost, .. } if errno != 0 => over(0, errno, lost),
                        end => end,
                    };
                    (State::Over, self.say(end).into_iter().collect())
                }
                Event::Gone => (State::Settling { end: End::Unheard }, vec![]),
                _ => (before, vec![]),
            },
            State::Over => (before, vec![]),
        }
    }

    fn asked(&self, event: Event) -> (State, Vec<Action>) {
        let let_go = vec![Action::LetFile];
        match event {
            Event::Ready if self.kind.is_held_first() => {
                (State::Holding, vec![Action::Tell(Word::Hold)])
            }
            Event::Given if !self.kind.is_held_first() => (given(0), vec![]),
            Event::Unfit(errno) => Self::untouched(let_go, 0, errno),
            Event::Halt | Event::Closed => Self::untouched(let_go, 0, libc::EAGAIN),
            // nothing was moved, and all is as it was
            Event::Stop => Self::end(let_go, 0, over(0, 0, Sides::NONE)),
            Event::Gone => Self::end(let_go, 0, End::Unheard),
            _ => (State::Asked, vec![]),
        }
    }

    fn holding(&self, event: Event) -> (State, Vec<Action>) {
        match event {
            Event::Held => (State::Held { moved: 0 }, vec![]),
            // before it was known that it is held nothing has been moved
            Event::Moved(_) | Event::Ended(_) | Event::Given => (State::Holding, vec![]),
            event => match Self::held(0, event) {
                (State::Held { .. }, actions) => (State::Holding, actions),
                ended => ended,
            },
        }
    }

    fn held(moved: u64, event: Event) -> (State, Vec<Action>) {
        let let_go = vec![Action::LetFile];
        let stop = vec![Action::Tell(Word::Stop), Action::LetFile];
        match event {
            Event::Moved(moved) => (State::Held { moved }, vec![]),
            Event::Given => (given(moved), vec![]),
            Event::Ended(lost) => Self::end(stop, moved, over(moved, 0, lost)),
            Event::Unfit(errno) => Self::untouched(stop, moved, errno),
            Event::Halt => Self::untouched(stop, moved, libc::EAGAIN),
            // the host has let it go by itself
            Event::Refused | Event::Closed => Self::untouched(let_go, moved, libc::EAGAIN),
            Event::Stop => Self::end(stop, moved, over(moved, 0, Sides::NONE)),
            Event::Gone => Self::end(stop, moved, End::Unheard),
            _ => (State::Held { moved }, vec![]),
        }
    }

    fn given(&self, stopping: bool, moved: u64, sent: u64, event: Event) -> (State, Vec<Action>) {
        use Action::{Answer as Say, Kill, LetFile, Reset, Restore, Resume, Tell};
        let connections = self.kind.connections();
        let total = moved.saturating_add(sent);
        match event {
            Event::Refused => Self::untouched(vec![LetFile, Resume], moved, libc::EAGAIN),
            Event::Progress(sent) => {
                let (id, total) = (self.id, moved.saturating_add(sent));
                let said = Say(Answer::Progress { id, sent: total });
                let state = State::Given {
                    stopping,
                    moved,
                    sent,
                };
                (state, vec![said])
            }
            Event::Back { came, sent, errno } => {
                let total = moved.saturating_add(sent);
                let lost = connections.without(came);
                let mut actions = vec![LetFile];
                actions.extend(lost.any().then_some(Kill(lost)));
                match connections.without(lost).any() {
                    true => {
                        actions.push(Restore);
                        (State::Restoring { total, errno, lost }, actions)
                    }
                    false => Self::end(actions, total, over(total, errno, lost)),
                }
            }
            Event::Stop | Event::Halt => {
                let word = (!stopping).then_some(Tell(Word::Stop));
                let state = State::Given {
                    stopping: true,
                    moved,
                    sent,
                };
                (state, word.into_iter().collect())
            }
            // the sockets stay silent until it is known what has become of the connections
            Event::Gone => {
                let word = match connections.any() {
                    true => Some(Tell(Word::Reset)),
                    false => (!stopping).then_some(Tell(Word::Stop)),
                };
                (State::Orphan { moved, sent }, word.into_iter().collect())
            }
            Event::Closed => {
                let end = over(total, 0, connections);
                let mut actions = Vec::from_iter(connections.any().then_some(Reset));
                // what is in a file that the host may still write to is not the program's yet
                let end = match self.kind.is_into_file() {
                    true => end,
                    false => {
                        actions.extend(self.say(end));
                        End::Unheard
                    }
                };
                (State::Lost { total, end }, actions)
            }
            _ => {
                let state = State::Given {
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
        // of one that was not put back the kernel of this VM says so itself, when the host lets its packets go
        let word = match connections.without(lost).any() {
            true => Word::Taken,
            false => Word::Reset,
        };
        let mut actions = vec![Action::Tell(word)];
        actions.extend(failed.any().then_some(Action::Kill(failed)));
        Self::end(actions, total, over(total, errno, lost))
    }

    fn orphan(&self, moved: u64, sent: u64, event: Event) -> (State, Vec<Action>) {
        let connections = self.kind.connections();
        let end = End::Unheard;
        match event {
            Event::Refused => Self::end(vec![Action::LetFile, Action::Resume], moved, end),
            Event::Back { sent, .. } => {
                let kill = connections.any().then_some(Action::Kill(connections));
                let actions = [Action::LetFile].into_iter().chain(kill).collect();
                Self::end(actions, moved.saturating_add(sent), end)
            }
            Event::Closed => {
                let total = moved.saturating_add(sent);
                let reset = connections.any().then_some(Action::Reset);
                (State::Lost { total, end }, reset.into_iter().collect())
            }
            Event::Progress(sent) => (State::Orphan { moved, sent }, vec![]),
            _ => (State::Orphan { moved, sent }, vec![]),
        }
    }
}

fn given(moved: u64) -> State {
    State::Given {
        stopping: false,
        moved,
        sent: 0,
    }
}

fn over(sent: u64, errno: i32, lost: Sides) -> End {
    End::Over { sent, errno, lost }
}

#[cfg(test)]
#[path = "pipe_tests.rs"]
mod tests;
