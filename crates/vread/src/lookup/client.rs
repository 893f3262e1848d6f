// SPDX-License-Identifier: Apache-2.0
//! The reader's end of look-ups.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use viola_proto::agent::{BlockKey, MAX_EXTENTS};

use super::datagrams::{MAX_ANSWER_BYTES, Reassembly, Received, send};
use super::{Found, Question};
use crate::poll;

use crate::lock::lock;

/// Time for which the reader does not ask an agent worker again that missed a deadline. So a dead
/// worker delays each reading thread once, and not at every block.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A reader's end of the socket to one agent worker.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    number: u64,
    reassembly: Reassembly,
    /// Time before which the worker is not asked.
    retry_at: Option<Instant>,
    gone: bool,
}

impl Client {
    /// Uses this socket.
    pub fn new(socket: OwnedFd) -> Self {
        let state = State {
            number: 0,
            reassembly: Reassembly::new(MAX_ANSWER_BYTES),
            retry_at: None,
            gone: false,
        };
        Self {
            socket,
            state: Mutex::new(state),
        }
    }

    /// Whether the agent worker has closed the socket or violated the protocol.
    pub fn gone(&self) -> bool {
        self.state().gone
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    fn ask(&mut self, socket: BorrowedFd<'_>, text: &[u8], now: Instant) -> bool {
        if self.gone || self.retry_at.is_some_and(|until| now < until) {
            return false;
        }
        self.retry_at = None;
        self.number += 1;
        match send(socket, self.number, text) {
            Ok(()) => true,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.retry_at = Some(now + RETRY_INTERVAL);
                false
            }
            Err(_) => {
                self.gone = true;
                false
            }
        }
    }

    /// Returns a received answer: `Some(None)` if the block is unknown, `None` if no answer has come yet.
    fn answer(&mut self, socket: BorrowedFd<'_>) -> Option<Option<Found>> {
        loop {
            match self.reassembly.receive(socket) {
                // The answer is late: its question has timed out.
                Ok(Received::Message(number, _)) if number != self.number => {}
                Ok(Received::Message(_, text)) => {
                    if let Ok(found) = serde_json::from_slice::<Option<Found>>(&text)
                        && found.as_ref().is_none_or(has_valid_counts)
                    {
                        return Some(found);
                    }
                    self.gone = true;
                }
                Ok(Received::Nothing) if !self.gone => return None,
                _ => self.gone = true,
            }
            if self.gone {
                return Some(None);
            }
        }
    }
}

fn has_valid_counts(found: &Found) -> bool {
    found.data.extents.len() <= MAX_EXTENTS && found.meta.extents.len() <= MAX_EXTENTS
}

/// Asks several agent workers at once, and returns the index of the first that knows the block, with its place.
/// Returns when all have answered, at the latest after `limit`.
pub fn ask_all(clients: &[&Client], key: &BlockKey, limit: Duration) -> Option<(usize, Found)> {
    let question = Question { key: key.clone() };
    let text = serde_json::to_vec(&question).ok()?;
    // All threads of a reader lock in the same order.
    let mut states: Vec<_> = clients.iter().map(|client| client.state()).collect();
    let begin = Instant::now();
    let mut waiting: Vec<usize> = (0..clients.len())
        .filter(|i| states[*i].ask(clients[*i].socket.as_fd(), &text, begin))
        .collect();
    loop {
        let mut found = None;
        waiting.retain(|i| match states[*i].answer(clients[*i].socket.as_fd()) {
            None => true,
            Some(None) => false,
            Some(Some(at)) => {
                found = found.take().or(Some((*i, at)));
                false
            }
        });
        if found.is_some() || waiting.is_empty() {
            return found;
        }
        let left = limit.saturating_sub(begin.elapsed());
        if left.is_zero() {
            for i in waiting {
                states[i].retry_at = Some(Instant::now() + RETRY_INTERVAL);
            }
            return None;
        }
        let mut sockets: Vec<PollFd<'_>> = waiting
            .iter()
            .map(|i| PollFd::new(&clients[*i].socket, PollFlags::IN))
            .collect();
        // If the wait fails, the loop checks again.
        let _ = poll::wait(&mut sockets, Some(left));
    }
}
