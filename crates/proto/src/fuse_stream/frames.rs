// SPDX-License-Identifier: Apache-2.0
//! Finds frames in a byte stream whose sender is not trusted.

use std::io::{self, ErrorKind, Read};

use super::{FrameKind, HEADER_BYTES, MAGIC, TRAILER_BYTES};

/// Bytes of read-ahead beyond the longest frame.
const READ_AHEAD_BYTES: usize = 64 << 10;
/// Smallest payload buffer; frames of the handshake are far shorter.
const MIN_PAYLOAD_BUFFER_BYTES: usize = 1024;

/// Invalid bytes. The stream is usable again after [`FrameReader::skip`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Bytes that do not begin a frame.
    #[error("bytes that do not begin a frame")]
    BadHeader,
    /// A frame that is not valid now.
    #[error("a frame of type {0:?}, which is not valid now")]
    Unexpected(FrameKind),
    /// A frame above the limit of its type.
    #[error("a frame with a payload of {0} bytes, which is above the limit of its type")]
    TooLong(usize),
    /// A truncated frame.
    #[error("a truncated frame")]
    Truncated,
}

/// A complete frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its type.
    pub kind: FrameKind,
    /// Its session.
    pub session: u64,
    /// Its payload.
    pub payload: &'a [u8],
}

/// Finds frames. It holds at most one frame of the largest size and some read-ahead.
#[derive(Debug)]
pub struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Frame types that this side accepts.
    accepted: &'static [FrameKind],
    /// Length of the frame that [`FrameReader::next`] returned last. The next call drops it.
    returned: usize,
}

impl FrameReader {
    /// A reader of a worker's stream, for the agent.
    #[must_use]
    pub fn from_worker() -> Self {
        Self::new(&[
            FrameKind::Challenge,
            FrameKind::Welcome,
            FrameKind::Refused,
            FrameKind::Reply,
            FrameKind::Pong,
        ])
    }

    /// A reader of an agent's stream, for the worker.
    #[must_use]
    pub fn from_agent() -> Self {
        Self::new(&[
            FrameKind::Probe,
            FrameKind::Hello,
            FrameKind::Request,
            FrameKind::Ping,
        ])
    }

    fn new(accepted: &'static [FrameKind]) -> Self {
        let max_payload = accepted
            .iter()
            .map(|k| k.max_payload_bytes())
            .max()
            .unwrap_or(0);
        Self {
            bytes: vec![
                0;
                max_payload.max(MIN_PAYLOAD_BUFFER_BYTES)
                    + HEADER_BYTES
                    + TRAILER_BYTES
                    + READ_AHEAD_BYTES
            ],
            start: 0,
            end: 0,
            accepted,
            returned: 0,
        }
    }

    /// Reads once from a stream. Returns the number of bytes, 0 at the end of the stream, `None` when a non-blocking
    /// stream has nothing now. Call [`FrameReader::next`] until it returns `None` before the next call.
    ///
    /// # Errors
    /// Those of `read`, except `EINTR` and `EWOULDBLOCK`.
    pub fn fill(&mut self, from: &mut impl Read) -> io::Result<Option<usize>> {
        self.drop_returned();
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < READ_AHEAD_BYTES {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        loop {
            match from.read(&mut self.bytes[self.end..]) {
                Ok(count) => {
                    self.end += count;
                    return Ok(Some(count));
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
        }
    }

    /// Whether the reader holds a partial frame.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.start + self.returned < self.end
    }

    /// The next complete frame. During the handshake (`handshake`) only its frames are valid, so that no sender makes
    /// this side wait for a long frame.
    ///
    /// # Errors
    /// [`FrameError`], and again until [`FrameReader::skip`] is called.
    pub fn next(&mut self, handshake: bool) -> Result<Option<Frame<'_>>, FrameError> {
        self.drop_returned();
        let bytes = &self.bytes[self.start..self.end];
        // report invalid bytes as soon as they arrive
        let shown = bytes.len().min(MAGIC.len());
        if bytes[..shown] != MAGIC[..shown] {
            return Err(FrameError::BadHeader);
        }
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let kind = FrameKind::of(header[4]).ok_or(FrameError::BadHeader)?;
        if header[5..8] != [0; 3] {
            return Err(FrameError::BadHeader);
        }
        if !self.accepted.contains(&kind) || (handshake && !kind.is_handshake()) {
            return Err(FrameError::Unexpected(kind));
        }
        let number = |at: usize| -> u64 {
            let field = header[at..].iter().take(8);
            field.rev().fold(0, |n, b| n << 8 | u64::from(*b))
        };
        let length = (number(8) & 0xffff_ffff) as usize;
        let session = number(12);
        if length > kind.max_payload_bytes() {
            return Err(FrameError::TooLong(length));
        }
        let whole = HEADER_BYTES + length + TRAILER_BYTES;
        if bytes.len() < whole {
            return Ok(None);
        }
        if bytes[HEADER_BYTES + length..whole] != super::trailer(session) {
            return Err(FrameError::Truncated);
        }
        self.returned = whole;
        Ok(Some(Frame {
            kind,
            session,
            payload: &self.bytes[self.start + HEADER_BYTES..self.start + HEADER_BYTES + length],
        }))
    }

    /// Skips to the next bytes that may begin a frame.
    pub fn skip(&mut self) {
        self.drop_returned();
        self.start = (self.start + 1).min(self.end);
        let bytes = &self.bytes[self.start..self.end];
        let begins = |at: &usize| {
            let shown = (bytes.len() - at).min(MAGIC.len());
            bytes[*at..at + shown] == MAGIC[..shown]
        };
        let next = (0..bytes.len()).find(begins).unwrap_or(bytes.len());
        self.start += next;
    }

    /// Drops all bytes: the stream was replaced.
    pub fn clear(&mut self) {
        (self.start, self.end, self.returned) = (0, 0, 0);
    }

    fn drop_returned(&mut self) {
        self.start += self.returned;
        self.returned = 0;
    }
}
