// SPDX-License-Identifier: Apache-2.0
//! Splits messages into datagrams and reassembles them.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send as send_datagram};

/// Maximum length of a question, bytes.
pub(super) const MAX_QUESTION_BYTES: usize = 1024;
/// Maximum length of an answer, bytes: two files of 16384 extents with three 20-digit numbers each.
pub(super) const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Bytes of a message in one datagram.
const MAX_PART_BYTES: usize = 32 << 10;
const HEADER_BYTES: usize = 9;

/// Sends a message without waiting.
pub(super) fn send(socket: impl AsFd, number: u64, text: &[u8]) -> io::Result<()> {
    let mut datagram = Vec::with_capacity(HEADER_BYTES + text.len().min(MAX_PART_BYTES));
    let mut parts = text.chunks(MAX_PART_BYTES).peekable();
    while let Some(part) = parts.next() {
        datagram.clear();
        datagram.extend_from_slice(&number.to_le_bytes());
        datagram.push(u8::from(parts.peek().is_none()));
        datagram.extend_from_slice(part);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| send_datagram(&socket, &datagram, flags))?;
    }
    Ok(())
}

/// Result of a receive.
#[derive(Debug)]
pub(super) enum Received {
    /// A whole message and its number.
    Message(u64, Vec<u8>),
    /// No whole message is pending.
    Nothing,
    /// The other side has closed the socket.
    End,
}

/// Reassembles the messages of one socket. An incomplete message is dropped when another one begins.
#[derive(Debug)]
pub(super) struct Reassembly {
    number: u64,
    text: Vec<u8>,
    limit: usize,
    datagram: Vec<u8>,
}

impl Reassembly {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            number: 0,
            text: Vec::new(),
            limit,
            datagram: vec![0; HEADER_BYTES + MAX_PART_BYTES.min(limit) + 1],
        }
    }

    /// Receives without waiting; an error means that the other side violated the protocol.
    pub(super) fn receive(&mut self, socket: impl AsFd) -> io::Result<Received> {
        loop {
            let length = match recv(&socket, &mut self.datagram[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(Received::End),
                Ok((length, _)) => length,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(e) => return Err(e.into()),
            };
            if let Some((number, text)) = self.take(length)? {
                return Ok(Received::Message(number, text));
            }
        }
    }

    /// Adds a datagram of `length` bytes; returns the message if it is complete.
    fn take(&mut self, length: usize) -> io::Result<Option<(u64, Vec<u8>)>> {
        let broken = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let datagram = &self.datagram[..length];
        let Some((number, rest)) = datagram.split_first_chunk() else {
            return broken("a datagram is too short");
        };
        let Some((last, part)) = rest.split_first() else {
            return broken("a datagram is too short");
        };
        let number = u64::from_le_bytes(*number);
        if number != self.number {
            self.text.clear();
            self.number = number;
        }
        if length == self.datagram.len() || self.text.len() + part.len() > self.limit {
            return broken("a message is too long");
        }
        self.text.extend_from_slice(part);
        Ok((*last != 0).then(|| (number, std::mem::take(&mut self.text))))
    }
}
