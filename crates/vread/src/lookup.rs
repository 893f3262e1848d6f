// SPDX-License-Identifier: Apache-2.0
//! Look-ups: a reader asks an agent worker for the place of a block.
//!
//! The two share a `SOCK_SEQPACKET` pair that the daemon created. The reader sends one datagram per question; the
//! agent worker answers with as many as the block's extents need:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | number of the question, chosen by the reader, little endian |
//! | 1 | 1 in the last datagram of a message, else 0 |
//! | n | part of the message, JSON: [`Question`] or an optional [`Found`] |
//!
//! Neither side waits for the other to read. An answer that does not fit into the socket is lost, and the question
//! then times out as if the block were unknown.

mod client;
mod datagrams;

pub use client::{Client, ask_all};

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};
use viola_proto::agent::{BlockKey, FileMap};

use crate::poll;
use crate::table::Lease;
use datagrams::{MAX_QUESTION_BYTES, Reassembly, Received, send};

/// A reader's question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// The wanted block.
    pub key: BlockKey,
}

/// The place of a named block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// The lease, in the table of the agent worker that answers.
    pub lease: Lease,
    /// Number of the disk image that holds both files, as in the daemon's order to both workers.
    pub image: u32,
    /// Map of the data file.
    pub data: FileMap,
    /// Map of the checksum file.
    pub meta: FileMap,
}

/// An agent worker's end of the socket to one reader.
#[derive(Debug)]
pub struct Server<S> {
    socket: S,
    reassembly: Reassembly,
}

/// Result of [`Server::receive`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    /// A question; answer it with [`Server::answer`].
    Question(u64, Question),
    /// No question is pending.
    Empty,
    /// The reader has closed the socket or violated the protocol: drop it.
    Closed,
}

impl<S: AsFd> Server<S> {
    /// Serves a reader on this socket.
    pub fn new(socket: S) -> Self {
        Self {
            socket,
            reassembly: Reassembly::new(MAX_QUESTION_BYTES),
        }
    }

    /// The socket, to wait for questions.
    pub fn socket(&self) -> &S {
        &self.socket
    }

    /// Returns the next question, without waiting.
    pub fn receive(&mut self) -> Incoming {
        match self.reassembly.receive(&self.socket) {
            Ok(Received::Message(number, text)) => match serde_json::from_slice(&text) {
                Ok(question) => Incoming::Question(number, question),
                Err(_) => Incoming::Closed,
            },
            Ok(Received::Nothing) => Incoming::Empty,
            Ok(Received::End) | Err(_) => Incoming::Closed,
        }
    }

    /// Answers questions with `find` until the reader closes the socket.
    pub fn run(mut self, mut find: impl FnMut(&BlockKey) -> Option<Found>) {
        loop {
            match self.receive() {
                Incoming::Question(number, question) => {
                    let found = find(&question.key);
                    if self.answer(number, found.as_ref()).is_err() {
                        return;
                    }
                }
                Incoming::Empty => {
                    let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
                    // If the wait fails, the loop checks again.
                    let _ = poll::wait(&mut socket, None);
                }
                Incoming::Closed => return,
            }
        }
    }

    /// Answers a question; `None` means that the block is unknown. The answer is lost if the reader's socket is full.
    ///
    /// # Errors
    /// When the reader has closed the socket.
    pub fn answer(&self, number: u64, found: Option<&Found>) -> std::io::Result<()> {
        let text = serde_json::to_vec(&found)?;
        match send(&self.socket, number, &text) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            sent => sent,
        }
    }
}

#[cfg(test)]
mod tests;
