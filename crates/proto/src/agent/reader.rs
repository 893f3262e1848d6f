// SPDX-License-Identifier: Apache-2.0
//! Reads messages from a byte stream that can lose bytes and whose sender is not trusted.

use std::io::{ErrorKind, Read};

use super::crc::crc32c;
use super::message::Message;
use super::{HEADER_BYTES, MAGIC, MAX_PAYLOAD_BYTES};

/// A complete frame without a valid message.
#[derive(Debug, thiserror::Error)]
pub enum BadMessage {
    /// The payload is not JSON, or an unknown message.
    #[error("a frame holds an unknown message")]
    Unknown(#[source] serde_json::Error),
    /// The message exceeds a limit of [`Message::check`].
    #[error("a message exceeds a limit: {0}")]
    Limit(&'static str),
}

/// Finds frames in a stream of bytes.
///
/// It holds at most one frame and one read. It skips bytes between frames and truncated frames. JSON has no bytes
/// below 0x20 and every header has one, so the reader finds a header inside a payload as soon as it arrives, and
/// drops the broken frame before it.
#[derive(Debug, Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
    /// Start of the bytes that are not consumed yet.
    start: usize,
    /// Payload bytes of the current frame that were checked already.
    clean: usize,
    skipped: u64,
}

/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;

impl FrameReader {
    /// An empty reader.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that belonged to no complete frame, since the reader was made.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Drops a partial frame: the stream was replaced.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
        self.clean = 0;
    }

    /// Appends bytes that the caller read. Call [`FrameReader::next`] until it returns `None` before the next call,
    /// otherwise the bytes pile up.
    pub fn push(&mut self, bytes: &[u8]) {
        self.compact();
        self.bytes.extend_from_slice(bytes);
    }

    /// Reads once from the stream. Returns the number of bytes, 0 at the end of the stream, `None` when a
    /// non-blocking stream has nothing now.
    ///
    /// # Errors
    /// Those of `read`, except `EINTR` and `EWOULDBLOCK`.
    pub fn fill(&mut self, stream: &mut impl Read) -> std::io::Result<Option<usize>> {
        self.compact();
        let old = self.bytes.len();
        self.bytes.resize(old + READ_BYTES, 0);
        let read = loop {
            match stream.read(&mut self.bytes[old..]) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        self.bytes
            .truncate(old + read.as_ref().copied().unwrap_or(0));
        match read {
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(None),
            other => other.map(Some),
        }
    }

    /// The next complete message, or [`BadMessage`] for a frame without a valid one; `None` when
    /// the reader has no complete frame.
    #[allow(
        clippy::should_implement_trait,
        reason = "the caller names the message's type and may call `fill` in between"
    )]
    pub fn next<M: Message>(&mut self) -> Option<Result<M, BadMessage>> {
        let (from, to) = self.frame()?;
        let message = serde_json::from_slice::<M>(&self.bytes[from..to])
            .map_err(BadMessage::Unknown)
            .and_then(|m| m.check().map_err(BadMessage::Limit).map(|()| m));
        self.start = to;
        self.clean = 0;
        Some(message)
    }

    /// Reads from a blocking stream until a message is complete. Returns `None` at the end of the stream.
    ///
    /// # Errors
    /// Those of [`FrameReader::fill`].
    pub fn wait<M: Message>(
        &mut self,
        stream: &mut impl Read,
    ) -> std::io::Result<Option<Result<M, BadMessage>>> {
        loop {
            if let Some(message) = self.next() {
                return Ok(Some(message));
            }
            match self.fill(stream)? {
                Some(0) => return Ok(None),
                Some(_) => {}
                None => return Err(ErrorKind::WouldBlock.into()),
            }
        }
    }

    /// Bounds of the next complete payload.
    fn frame(&mut self) -> Option<(usize, usize)> {
        loop {
            self.seek();
            let rest = &self.bytes[self.start..];
            let header = rest.first_chunk::<HEADER_BYTES>()?;
            let length = u32_at(header, 4) as usize;
            if length > MAX_PAYLOAD_BYTES {
                self.skip(1);
                continue;
            }
            let here = &rest[HEADER_BYTES..rest.len().min(HEADER_BYTES + length)];
            if here[self.clean..].iter().any(|b| *b < 0x20) {
                self.skip(1);
                continue;
            }
            self.clean = here.len();
            if here.len() < length {
                return None;
            }
            if crc32c(here) != u32_at(header, 8) {
                self.skip(1);
                continue;
            }
            let from = self.start + HEADER_BYTES;
            return Some((from, from + length));
        }
    }

    /// Skips to the next magic, or to the beginning of one at the end of the buffer.
    fn seek(&mut self) {
        let rest = &self.bytes[self.start..];
        let at = (0..rest.len())
            .find(|i| {
                let here = &rest[*i..rest.len().min(i + MAGIC.len())];
                MAGIC.starts_with(here)
            })
            .unwrap_or(rest.len());
        if at > 0 {
            self.skip(at);
        }
    }

    fn skip(&mut self, n: usize) {
        self.start += n;
        self.clean = 0;
        self.skipped += n as u64;
    }

    fn compact(&mut self) {
        self.bytes.drain(..self.start);
        self.start = 0;
        // release the memory of a long frame
        if self.bytes.capacity() > 4 * READ_BYTES && self.bytes.len() < READ_BYTES {
            self.bytes.shrink_to(2 * READ_BYTES);
        }
    }
}

fn u32_at(header: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{ToAgent, encode};
    use proptest::prelude::*;

    fn ping(n: u64) -> ToAgent {
        ToAgent::Ping { n, session: 1 }
    }

    fn frame(n: u64) -> Vec<u8> {
        encode(&ping(n)).unwrap()
    }

    /// A frame around any payload.
    fn raw(payload: &[u8]) -> Vec<u8> {
        let mut all = MAGIC.to_vec();
        all.extend((payload.len() as u32).to_le_bytes());
        all.extend(crc32c(payload).to_le_bytes());
        all.extend(payload);
        all
    }

    fn drain(reader: &mut FrameReader) -> Vec<u64> {
        std::iter::from_fn(|| reader.next::<ToAgent>())
            .filter_map(|m| match m {
                Ok(ToAgent::Ping { n, .. }) => Some(n),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn a_truncated_frame_ends_at_the_next_header() {
        let mut reader = FrameReader::new();
        let mut cut = raw(&vec![b' '; MAX_PAYLOAD_BYTES]);
        cut.truncate(5000);
        reader.push(&cut);
        assert!(reader.next::<ToAgent>().is_none());
        reader.push(&frame(7));
        assert_eq!(drain(&mut reader), [7]);
        assert_eq!(reader.skipped(), 5000);
    }

    #[test]
    fn a_length_above_the_limit_is_skipped() {
        let mut reader = FrameReader::new();
        let mut long = MAGIC.to_vec();
        long.extend((MAX_PAYLOAD_BYTES as u32 + 1).to_le_bytes());
        long.extend([0; 4]);
        reader.push(&long);
        reader.push(&frame(1));
        assert_eq!(drain(&mut reader), [1]);
    }

    #[test]
    fn a_flipped_bit_loses_one_frame() {
        let mut reader = FrameReader::new();
        let mut broken = frame(1);
        *broken.last_mut().unwrap() ^= 1;
        reader.push(&broken);
        reader.push(&frame(2));
        assert_eq!(drain(&mut reader), [2]);
    }

    #[test]
    fn a_frame_without_a_message_is_reported_and_skipped() {
        let mut reader = FrameReader::new();
        for payload in [&b"[1]"[..], b"{\"ping\":", b"", b"\"\xff\""] {
            reader.push(&raw(payload));
            reader.push(&frame(3));
            assert!(matches!(
                reader.next::<ToAgent>(),
                Some(Err(BadMessage::Unknown(_)))
            ));
            assert_eq!(drain(&mut reader), [3]);
        }
    }

    #[test]
    fn memory_is_bounded_by_a_frame_and_a_read() {
        let mut reader = FrameReader::new();
        let mut endless = raw(&vec![b'['; MAX_PAYLOAD_BYTES]);
        endless.extend(raw(&vec![b'['; MAX_PAYLOAD_BYTES]));
        let mut stream = endless.as_slice();
        while reader.fill(&mut stream).unwrap() != Some(0) {
            while reader.next::<ToAgent>().is_some() {}
            assert!(reader.bytes.len() <= HEADER_BYTES + MAX_PAYLOAD_BYTES + READ_BYTES);
        }
        reader.push(&frame(1));
        assert_eq!(drain(&mut reader), [1]);
        reader.push(b"");
        assert!(reader.bytes.capacity() <= 4 * READ_BYTES);
    }

    #[test]
    fn the_end_of_a_stream_is_reported() {
        let mut reader = FrameReader::new();
        let bytes = frame(4);
        let mut stream = bytes.as_slice();
        assert_eq!(
            reader
                .wait::<ToAgent>(&mut stream)
                .unwrap()
                .unwrap()
                .unwrap(),
            ping(4)
        );
        assert!(reader.wait::<ToAgent>(&mut stream).unwrap().is_none());
    }

    proptest! {
        #[test]
        fn garbage_never_hides_the_frames_after_it(
            garbage in proptest::collection::vec(any::<u8>(), 0..300),
            step in 1usize..50,
        ) {
            // two frames: garbage that ends in a header's beginning may swallow the first
            let mut all = garbage;
            all.extend(frame(1));
            all.extend(frame(2));
            all.extend(frame(3));
            let mut reader = FrameReader::new();
            let mut seen = Vec::new();
            for piece in all.chunks(step) {
                reader.push(piece);
                seen.extend(drain(&mut reader));
            }
            prop_assert!(seen.ends_with(&[2, 3]), "{:?}", seen);
        }

        #[test]
        fn frames_survive_truncation_of_others(
            cuts in proptest::collection::vec((any::<bool>(), 0usize..60), 1..20),
            step in 1usize..80,
        ) {
            let mut all = Vec::new();
            let mut whole = Vec::new();
            for (n, (cut, at)) in cuts.iter().enumerate() {
                let frame = frame(n as u64);
                if *cut {
                    all.extend(&frame[..*at.min(&(frame.len() - 1))]);
                } else {
                    whole.push(n as u64);
                    all.extend(frame);
                }
            }
            let mut reader = FrameReader::new();
            let mut seen = Vec::new();
            for piece in all.chunks(step) {
                reader.push(piece);
                seen.extend(drain(&mut reader));
            }
            // a frame right behind one that lost part of its header can be taken for its payload's bytes only until
            // the CRC: none is invented, and none without a cut before it is lost
            prop_assert!(seen.iter().all(|n| whole.contains(n)));
            prop_assert_eq!(seen, whole);
        }

        #[test]
        fn any_bytes_are_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let mut reader = FrameReader::new();
            reader.push(&bytes);
            while reader.next::<ToAgent>().is_some() {}
            prop_assert!(reader.skipped() <= bytes.len() as u64);
        }
    }
}
