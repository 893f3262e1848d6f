// SPDX-License-Identifier: Apache-2.0
//! Asking an agent worker where a block is.
//!
//! A reader and an agent worker share a `SOCK_SEQPACKET` pair that the daemon made. The reader sends
//! one datagram per question, the agent worker answers with as many as the block's extents take:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | number of the question, little endian, chosen by the reader |
//! | 1 | 1 in the last datagram of a message, else 0 |
//! | n | a part of the message, JSON: [`Question`] or an optional [`Found`] |
//!
//! Neither side ever waits for the other to read. An answer that does not fit into the socket is lost,
//! and the reader's question ends by its deadline as if the block were not known.

mod client;
mod datagrams;

pub use client::{Client, ask_all};

use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};
use viola_proto::agent::{BlockKey, FileMap};

use crate::table::Lease;
use datagrams::{MAX_QUESTION_BYTES, Reassembly, Received, send};

/// What a reader asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// The block that is looked for.
    pub key: BlockKey,
}

/// Where a named block is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Found {
    /// The right to read it, in the table of the agent worker that answers.
    pub lease: Lease,
    /// Number of the disk image that holds both files, as the daemon told both workers.
    pub image: u32,
    /// The block's bytes.
    pub data: FileMap,
    /// Its checksums.
    pub meta: FileMap,
}

/// An agent worker's end of the socket to one reader.
#[derive(Debug)]
pub struct Server<S> {
    socket: S,
    reassembly: Reassembly,
}

/// What came of [`Server::receive`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Incoming {
    /// A question; answer it with [`Server::answer`].
    Question(u64, Question),
    /// Nothing is there now.
    Empty,
    /// The reader is gone, or does not keep to the protocol: drop it.
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

    /// The next question, without waiting.
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

    /// Answers a question; `None` when the block is not named. A reader that does not read its answers
    /// loses them.
    ///
    /// # Errors
    /// When the reader is gone.
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
