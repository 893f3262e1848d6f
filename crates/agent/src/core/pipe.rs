// SPDX-License-Identifier: Apache-2.0
//! The life of one pipe: a program's wish to have a part of a file sent down its connection by the host.
//!
//! | state | the connection is in | the host may read the file |
//! |---|---|---|
//! | asked | the program's socket | no |
//! | given | the host | yes |
//! | orphaned: the program is gone | the host | yes |
//! | lost: the session is over | nothing | until the next session begins |
//!
//! The host ends all reads of a session before it begins another one, so a lost pipe keeps its file until then.

use viola_proto::pipe::library::Answer;

/// What happens to a pipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The connection was taken out of the socket, and what is to be done is on its way to the host.
    Given,
    /// It cannot be given, for this errno; the socket is as it was.
    Unfit(i32),
    /// The host does not take it, or was never asked.
    Refused,
    /// The host has sent so many bytes.
    Progress(u64),
    /// The host does not read the file any more.
    Back {
        /// The connection came with it.
        alive: bool,
        /// Bytes of the file that were sent.
        sent: u64,
        /// Why it ended early; 0 when it did not.
        errno: i32,
    },
    /// The connection was put into the socket, or not.
    Restored(bool),
    /// The session is over.
    Closed,
    /// A session has begun.
    Opened,
    /// The program wants it to end.
    Stop,
    /// The agent wants it to end: somebody wants to change the file, or nothing may be read now.
    Halt,
    /// The program has closed its socket, or is dead.
    Gone,
}

/// What the host is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Send no more, and give it back.
    Stop,
    /// Reset it.
    Reset,
    /// The connection is in the program's socket.
    Taken,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Answer the program.
    Answer(Answer),
    /// Tell the host.
    Tell(Word),
    /// Let the socket go on with the connection that was taken from it.
    Resume,
    /// End the socket's connection without a word.
    Kill,
    /// End it with a reset: nobody knows whether the host has said one.
    Reset,
    /// Put the connection that came back into the socket; [`Event::Restored`] follows.
    Restore,
    /// The file may change, as far as this pipe goes.
    LetFile,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Asked,
    Given { stopping: bool, sent: u64 },
    Restoring { sent: u64, errno: i32 },
    Orphan,
    Lost,
    Over,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    id: u64,
    state: State,
}

impl Life {
    /// A program asks, by this number of its own. The file is kept from changes already.
    pub fn new(id: u64) -> Self {
        Self {
            id,
            state: State::Asked,
        }
    }

    /// The program's number.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Nothing will happen to it any more.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Nothing was given yet.
    pub fn is_asked(&self) -> bool {
        self.state == State::Asked
    }

    /// The program waits for an answer.
    pub fn is_awaited(&self) -> bool {
        !matches!(self.state, State::Orphan | State::Lost | State::Over)
    }

    /// The host may read the file.
    pub fn is_read(&self) -> bool {
        matches!(
            self.state,
            State::Given { .. } | State::Orphan | State::Lost
        )
    }

    /// Something has happened; what follows is to be done in this order.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let (state, actions) = self.next(event);
        self.state = state;
        actions
    }

    fn over(&self, sent: u64, errno: i32) -> Action {
        let id = self.id;
        Action::Answer(Answer::Over { id, sent, errno })
    }

    fn refused(&self, errno: i32) -> Action {
        Action::Answer(Answer::Refused { id: self.id, errno })
    }

    fn next(&self, event: Event) -> (State, Vec<Action>) {
        use Action::{Answer as Say, Kill, LetFile, Reset, Restore, Resume, Tell};
        let not_now = libc::EAGAIN;
        let lost = libc::ECONNRESET;
        match (self.state, event) {
            (State::Asked, Event::Given) => {
                let (stopping, sent) = (false, 0);
                (State::Given { stopping, sent }, vec![])
            }
            (State::Asked, Event::Unfit(errno)) => {
                (State::Over, vec![LetFile, self.refused(errno)])
            }
            (State::Asked, Event::Halt | Event::Closed) => {
                (State::Over, vec![LetFile, self.refused(not_now)])
            }
            // nothing was sent, and the connection is where it was
            (State::Asked, Event::Stop) => (State::Over, vec![LetFile, self.over(0, 0)]),
            (State::Asked, Event::Gone) => (State::Over, vec![LetFile]),

            (State::Given { .. }, Event::Refused) => {
                (State::Over, vec![LetFile, Resume, self.refused(not_now)])
            }
            (State::Given { stopping, .. }, Event::Progress(sent)) => {
                let id = self.id;
                let said = Say(Answer::Progress { id, sent });
                (State::Given { stopping, sent }, vec![said])
            }
            (State::Given { .. }, Event::Back { alive, sent, errno }) => match alive {
                true => (State::Restoring { sent, errno }, vec![LetFile, Restore]),
                false => (State::Over, vec![LetFile, Kill, self.over(sent, lost)]),
            },
            (State::Given { stopping, sent }, Event::Stop | Event::Halt) => {
                let word = (!stopping).then_some(Tell(Word::Stop));
                let stopping = true;
                (State::Given { stopping, sent }, word.into_iter().collect())
            }
            // the socket stays silent until it is known what has become of the connection
            (State::Given { .. }, Event::Gone) => (State::Orphan, vec![Tell(Word::Reset)]),
            (State::Given { sent, .. }, Event::Closed) => {
                (State::Lost, vec![Reset, self.over(sent, lost)])
            }

            (State::Restoring { sent, errno }, Event::Restored(true)) => {
                let said = vec![Tell(Word::Taken), self.over(sent, errno)];
                (State::Over, said)
            }
            (State::Restoring { sent, .. }, Event::Restored(false)) => (
                State::Over,
                vec![Tell(Word::Reset), Kill, self.over(sent, lost)],
            ),

            (State::Orphan, Event::Refused) => (State::Over, vec![LetFile, Resume]),
            (State::Orphan, Event::Back { .. }) => (State::Over, vec![LetFile, Kill]),
            (State::Orphan, Event::Closed) => (State::Lost, vec![Reset]),

            (State::Lost, Event::Opened) => (State::Over, vec![LetFile]),
            (state, _) => (state, vec![]),
        }
    }
}

#[cfg(test)]
#[path = "pipe_tests.rs"]
mod tests;
