// SPDX-License-Identifier: Apache-2.0
//! Bytes to frames, from a sender that is not trusted.

use std::io::{self, ErrorKind, Read};

use super::{FrameKind, HEADER_BYTES, MAGIC, TRAILER_BYTES};

/// Bytes beyond the longest frame that are read ahead.
const AHEAD: usize = 64 << 10;
/// Longest frame of the hand-shake is far below this.
const LEAST: usize = 1024;

/// Bytes that are no frame, or none that is allowed now. The stream is of use again after [`FrameReader::skip`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not the begin of a frame.
    #[error("bytes that begin no frame")]
    Header,
    /// A frame that has no place here.
    #[error("a frame of kind {0:?} that has no place here")]
    Place(FrameKind),
    /// Longer than such a frame may be.
    #[error("a frame of {0} bytes, which is too long")]
    Long(usize),
    /// Cut short.
    #[error("a frame that was cut short")]
    Cut,
}

/// A whole frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What it is.
    pub kind: FrameKind,
    /// Its session.
    pub session: u64,
    /// Its payload.
    pub payload: &'a [u8],
}

/// Finds frames. Holds at most one longest frame and some bytes.
#[derive(Debug)]
pub struct FrameReader {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    /// Kinds that this side hears.
    hears: &'static [FrameKind],
    /// The length of the frame that [`FrameReader::next`] gave, to be dropped before the next one.
    given: usize,
}

impl FrameReader {
    /// What an agent hears.
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

    /// What a worker hears.
    #[must_use]
    pub fn from_agent() -> Self {
        Self::new(&[
            FrameKind::Probe,
            FrameKind::Hello,
            FrameKind::Request,
            FrameKind::Ping,
        ])
    }

    fn new(hears: &'static [FrameKind]) -> Self {
        let most = hears
            .iter()
            .map(|k| k.max_payload_bytes())
            .max()
            .unwrap_or(0);
        Self {
            bytes: vec![0; most.max(LEAST) + HEADER_BYTES + TRAILER_BYTES + AHEAD],
            start: 0,
            end: 0,
            hears,
            given: 0,
        }
    }

    /// Takes what a stream has, by one call of `read`: how many bytes, 0 at its end, `None` when there is
    /// nothing now. Call [`FrameReader::next`] until it has none before the next one.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn fill(&mut self, from: &mut impl Read) -> io::Result<Option<usize>> {
        self.settle();
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < AHEAD {
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

    /// Whether a frame has begun and not ended.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        self.start + self.given < self.end
    }

    /// The next whole frame, if it has arrived. Outside of a session (`greeting`) only frames of the
    /// hand-shake are heard, so that no bytes make this side wait for a long one.
    ///
    /// # Errors
    /// [`FrameError`], and again until [`FrameReader::skip`] is called.
    pub fn next(&mut self, greeting: bool) -> Result<Option<Frame<'_>>, FrameError> {
        self.settle();
        let bytes = &self.bytes[self.start..self.end];
        // What cannot become a frame is told as soon as it shows.
        let shown = bytes.len().min(MAGIC.len());
        if bytes[..shown] != MAGIC[..shown] {
            return Err(FrameError::Header);
        }
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let kind = FrameKind::of(header[4]).ok_or(FrameError::Header)?;
        if header[5..8] != [0; 3] {
            return Err(FrameError::Header);
        }
        if !self.hears.contains(&kind) || (greeting && !kind.is_handshake()) {
            return Err(FrameError::Place(kind));
        }
        let number = |at: usize| -> u64 {
            let field = header[at..].iter().take(8);
            field.rev().fold(0, |n, b| n << 8 | u64::from(*b))
        };
        let length = (number(8) & 0xffff_ffff) as usize;
        let session = number(12);
        if length > kind.max_payload_bytes() {
            return Err(FrameError::Long(length));
        }
        let whole = HEADER_BYTES + length + TRAILER_BYTES;
        if bytes.len() < whole {
            return Ok(None);
        }
        if bytes[HEADER_BYTES + length..whole] != super::trailer(session) {
            return Err(FrameError::Cut);
        }
        self.given = whole;
        Ok(Some(Frame {
            kind,
            session,
            payload: &self.bytes[self.start + HEADER_BYTES..self.start + HEADER_BYTES + length],
        }))
    }

    /// Goes on to the next bytes that may begin a frame.
    pub fn skip(&mut self) {
        self.settle();
        self.start = (self.start + 1).min(self.end);
        let bytes = &self.bytes[self.start..self.end];
        let begins = |at: &usize| {
            let shown = (bytes.len() - at).min(MAGIC.len());
            bytes[*at..at + shown] == MAGIC[..shown]
        };
        let next = (0..bytes.len()).find(begins).unwrap_or(bytes.len());
        self.start += next;
    }

    /// Forgets everything: the stream was replaced.
    pub fn clear(&mut self) {
        (self.start, self.end, self.given) = (0, 0, 0);
    }

    fn settle(&mut self) {
        self.start += self.given;
        self.given = 0;
    }
}
