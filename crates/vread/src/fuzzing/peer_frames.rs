// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the frames of another host inside TLS, and the datagrams of a reader worker to the peer worker.
//!
//! Input: a byte that selects the parser, a byte for the length of the parts, and the stream.

use std::os::fd::OwnedFd;
use std::sync::LazyLock;

use crate::peer::frames::{FrameParser, FrameSink};
use crate::peer::shared_memory::SharedMemory;
use crate::peer::wire::{MAX_NAME, MAX_READ, Message, ProtocolError};
use crate::peer::{connection, datagram, new_memory};

/// Checks each request against its limits.
#[derive(Default)]
struct Requests {
    awaited: usize,
}

impl FrameSink for Requests {
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
        assert_eq!(self.awaited, 0, "a frame in the middle of another one");
        match &message {
            Message::Read { offset, length, .. } => {
                assert!((1..=MAX_READ).contains(length));
                assert!(offset.checked_add((*length).into()).is_some());
            }
            Message::Hello { reader, .. } => assert!(reader.len() <= MAX_NAME),
            Message::Data { length } => {
                assert!(*length <= MAX_READ);
                self.awaited = *length as usize;
                return Ok(());
            }
            _ => {}
        }
        // A parsed message encodes and parses to the same message.
        let mut bytes = Vec::new();
        message.encode(id, &mut bytes);
        let mut again = FrameParser::default();
        again.feed(&bytes, &mut Same(id, message))
    }

    fn data(&mut self, _: u64, _: usize, bytes: &[u8]) -> Result<(), ProtocolError> {
        assert!(bytes.len() <= self.awaited);
        self.awaited -= bytes.len();
        Ok(())
    }
}

struct Same(u64, Message);

impl FrameSink for Same {
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
        assert_eq!((self.0, &self.1), (id, &message));
        Ok(())
    }

    fn data(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), ProtocolError> {
        unreachable!("a message without bytes of a block")
    }
}

/// Runs one input; panics when an invariant is violated.
pub fn peer_frames(input: &[u8]) {
    let [who, cut, stream @ ..] = input else {
        return;
    };
    let cut = 1 + usize::from(*cut);
    match who % 3 {
        0 => {
            let (mut frames, mut requests) = (FrameParser::default(), Requests::default());
            for part in stream.chunks(cut) {
                if frames.feed(part, &mut requests).is_err() {
                    return;
                }
            }
        }
        1 => {
            static MEMORY: LazyLock<(OwnedFd, SharedMemory)> = LazyLock::new(|| {
                let file = new_memory().expect("memory");
                let map = SharedMemory::map(&file, true).expect("a mapping");
                (file, map)
            });
            assert!(connection::take_answers(stream, cut, &MEMORY.1) <= 8);
        }
        _ => drop(datagram::parse(stream)),
    }
}
