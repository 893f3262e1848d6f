// SPDX-License-Identifier: Apache-2.0
//! Writes messages as frames.

use std::io::{ErrorKind, Write};

use super::crc::crc32c;
use super::message::Message;
use super::{HEADER_BYTES, MAGIC, MAX_PAYLOAD_BYTES};

/// Why a message was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The message does not fit into a frame, or exceeds a limit of [`Message::check`].
    #[error("a message does not fit into a frame: {0}")]
    TooLong(&'static str),
    /// The peer does not read.
    #[error("{0} bytes of earlier messages wait to be sent")]
    QueueFull(usize),
}

/// Makes the frame of a message.
///
/// # Errors
/// [`SendError::TooLong`] if the message exceeds a limit of [`Message::check`] or the frame's size.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, SendError> {
    let mut frame = Vec::new();
    append(&mut frame, message)?;
    Ok(frame)
}

/// The frame of any bytes, also of those that are no message: fuzz targets and tests send such. At most [`MAX_PAYLOAD_BYTES`]
/// are valid.
#[must_use]
pub fn frame_of(payload: &[u8]) -> Vec<u8> {
    [&header(payload)[..], payload].concat()
}

/// The header of a frame: magic, length, checksum.
fn header(payload: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&MAGIC);
    header[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    header[8..].copy_from_slice(&crc32c(payload).to_le_bytes());
    header
}

/// Appends the frame of a message to `bytes`, completely or not at all.
fn append<M: Message>(bytes: &mut Vec<u8>, message: &M) -> Result<(), SendError> {
    message.check().map_err(SendError::TooLong)?;
    let begin = bytes.len();
    bytes.resize(begin + HEADER_BYTES, 0);
    let written = serde_json::to_writer(&mut *bytes, message);
    let length = bytes.len() - begin - HEADER_BYTES;
    let error = match written {
        Err(_) => Some("it cannot be written as JSON"),
        Ok(()) if length > MAX_PAYLOAD_BYTES => Some("more than a MiB"),
        Ok(()) => None,
    };
    if let Some(error) = error {
        bytes.truncate(begin);
        return Err(SendError::TooLong(error));
    }
    let (head, payload) = bytes[begin..].split_at_mut(HEADER_BYTES);
    head.copy_from_slice(&header(payload));
    Ok(())
}

/// Queue of frames for a non-blocking stream.
#[derive(Debug)]
pub struct FrameWriter {
    waiting: Vec<u8>,
    sent: usize,
    limit: usize,
}

impl FrameWriter {
    /// A writer that queues at most `limit` bytes. One frame always fits into an empty queue.
    pub fn new(limit: usize) -> Self {
        Self {
            waiting: Vec::new(),
            sent: 0,
            limit,
        }
    }

    /// Queues a message, completely or not at all.
    ///
    /// # Errors
    /// [`SendError::QueueFull`] above the limit; [`SendError::TooLong`] as of [`encode`].
    pub fn push<M: Message>(&mut self, message: &M) -> Result<(), SendError> {
        let waiting = self.waiting();
        self.waiting.drain(..self.sent);
        self.sent = 0;
        // write in place: allocating memory for each message costs system calls
        append(&mut self.waiting, message)?;
        if waiting > 0 && self.waiting.len() > self.limit {
            self.waiting.truncate(waiting);
            return Err(SendError::QueueFull(waiting));
        }
        Ok(())
    }

    /// Bytes in the queue.
    pub fn waiting(&self) -> usize {
        self.waiting.len() - self.sent
    }

    /// Drops the queue: the stream was replaced.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.sent = 0;
    }

    /// Writes as much as the stream accepts. Returns true when the queue is empty.
    ///
    /// # Errors
    /// Those of `write`, except `EINTR` and `EWOULDBLOCK`.
    pub fn flush(&mut self, stream: &mut impl Write) -> std::io::Result<bool> {
        while self.sent < self.waiting.len() {
            match stream.write(&self.waiting[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        self.clear();
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::{BlockKey, FileMap, FrameReader, FromAgent, MAX_EXTENTS, ToAgent};

    /// Accepts a few bytes at a time and then blocks.
    struct Slow(Vec<u8>, usize);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.1 == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let n = bytes.len().min(3).min(self.1);
            self.1 -= n;
            self.0.extend_from_slice(&bytes[..n]);
            Ok(n)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_slow_stream_gets_every_byte_once() {
        let mut writer = FrameWriter::new(1000);
        let mut stream = Slow(Vec::new(), 0);
        let all: Vec<_> = (0..5).map(|n| ToAgent::Ping { n, session: 9 }).collect();
        for message in &all {
            writer.push(message).unwrap();
            stream.1 = 7;
            assert!(!writer.flush(&mut stream).unwrap());
        }
        stream.1 = usize::MAX;
        assert!(writer.flush(&mut stream).unwrap());
        assert_eq!(writer.waiting(), 0);
        let mut reader = FrameReader::new();
        reader.push(&stream.0);
        for message in &all {
            assert_eq!(reader.next::<ToAgent>().unwrap().unwrap(), *message);
        }
        assert!(reader.next::<ToAgent>().is_none());
    }

    #[test]
    fn the_queue_is_bounded() {
        let mut writer = FrameWriter::new(50);
        let ping = ToAgent::Ping { n: 1, session: 0 };
        writer.push(&ping).unwrap();
        let before = writer.waiting();
        assert_eq!(writer.push(&ping), Err(SendError::QueueFull(before)));
        assert_eq!(writer.waiting(), before);
        writer.clear();
        writer.push(&ping).unwrap();
    }

    #[test]
    fn a_file_with_too_many_extents_does_not_fit() {
        let far = FileMap {
            size: u64::MAX,
            extents: vec![(u64::MAX, u64::MAX, u64::MAX, false).into(); MAX_EXTENTS],
        };
        let name = FromAgent::Name {
            lease: 1,
            fs: 1,
            key: BlockKey::new("BP-1", 1, 1).unwrap(),
            data: far,
            meta: FileMap::default(),
        };
        assert_eq!(encode(&name), Err(SendError::TooLong("more than a MiB")));
    }

    #[test]
    fn a_block_with_many_extents_fits() {
        let extents = (0..MAX_EXTENTS as u64)
            .map(|i| (i * 4096, (16 << 40) + i * 8192, 4096, false).into())
            .collect();
        let name = FromAgent::Name {
            lease: u64::MAX,
            fs: 1,
            key: BlockKey::new("BP-1", 1, 1).unwrap(),
            data: FileMap {
                size: 1 << 27,
                extents,
            },
            meta: FileMap::default(),
        };
        assert!(encode(&name).is_ok());
    }
}
