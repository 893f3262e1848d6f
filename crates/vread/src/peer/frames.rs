// SPDX-License-Identifier: Apache-2.0
//! Splits a byte stream into frames. Bytes of blocks are passed on as they arrive and never kept.

use super::wire::{ErrorCode, HEADER, Header, Message, ProtocolError};

/// Receives the frames of a stream.
pub trait FrameSink {
    /// Handles a frame, without the bytes of a block.
    ///
    /// # Errors
    /// When the frame is not allowed here; parsing stops then.
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError>;

    /// Handles bytes of the block that request `id` has asked for, from offset `at` of the answer. They follow
    /// [`Message::Data`] in order, without bytes of another answer between them.
    ///
    /// # Errors
    /// As for [`FrameSink::message`].
    fn data(&mut self, id: u64, at: usize, bytes: &[u8]) -> Result<(), ProtocolError>;
}

/// Parser state of a stream.
#[derive(Debug, Default)]
pub struct FrameParser {
    head: [u8; HEADER],
    /// Bytes of the header that have arrived.
    have: usize,
    /// The header and the number of processed body bytes of the current frame.
    now: Option<(Header, usize)>,
    body: Vec<u8>,
}

impl FrameParser {
    /// Parses the next bytes of the stream.
    ///
    /// # Errors
    /// [`ProtocolError`] of the stream or the sink. The connection must be closed then.
    pub fn feed(
        &mut self,
        mut bytes: &[u8],
        sink: &mut impl FrameSink,
    ) -> Result<(), ProtocolError> {
        loop {
            let Some((head, done)) = &mut self.now else {
                if bytes.is_empty() {
                    return Ok(());
                }
                let (part, rest) = bytes.split_at(bytes.len().min(HEADER - self.have));
                self.head[self.have..][..part.len()].copy_from_slice(part);
                self.have += part.len();
                bytes = rest;
                if self.have < HEADER {
                    return Ok(());
                }
                self.have = 0;
                let head = Header::parse(&self.head)?;
                if head.is_data() {
                    sink.message(head.id, head.message(&[])?)?;
                }
                self.now = Some((head, 0));
                continue;
            };
            let (part, rest) = bytes.split_at(bytes.len().min(head.length - *done));
            if head.is_data() {
                if !part.is_empty() {
                    sink.data(head.id, *done, part)?;
                }
            } else {
                self.body.extend_from_slice(part);
            }
            *done += part.len();
            bytes = rest;
            if *done < head.length {
                return Ok(());
            }
            let head = *head;
            self.now = None;
            if !head.is_data() {
                let message = head.message(&self.body);
                self.body.clear();
                let message = message?;
                // The code `Gone` is only for use within a host.
                if message == Message::Failed(ErrorCode::Gone) {
                    return Err(ProtocolError("an unknown code"));
                }
                sink.message(head.id, message)?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use viola_proto::agent::BlockKey;

    use super::super::versions::{VERSIONS, Versions};
    use super::super::wire::*;
    use super::*;

    /// All frames, with the bytes of blocks joined.
    #[derive(Default, PartialEq, Debug)]
    struct Taken(Vec<(u64, Message)>, Vec<u8>);

    impl FrameSink for Taken {
        fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
            self.0.push((id, message));
            Ok(())
        }

        fn data(&mut self, _: u64, at: usize, bytes: &[u8]) -> Result<(), ProtocolError> {
            // The offset counts from the start of its own answer.
            assert!(at <= self.1.len());
            self.1.extend_from_slice(bytes);
            Ok(())
        }
    }

    fn key() -> impl Strategy<Value = BlockKey> {
        ("BP-[a-zA-Z0-9.-]{1,125}", any::<i64>(), any::<u64>())
            .prop_map(|(pool, id, stamp)| BlockKey::new(&pool, id, stamp).unwrap())
    }

    fn message() -> impl Strategy<Value = Message> {
        let name = "[a-z0-9@:é]{0,60}";
        prop_oneof![
            (1..=u8::MAX, any::<u8>(), name).prop_map(|(lowest, other, reader)| Message::Hello {
                versions: Versions {
                    lowest,
                    highest: lowest.max(other),
                },
                reader,
            }),
            key().prop_map(|key| Message::Find { key }),
            (key(), any::<bool>(), any::<u32>(), 1..=MAX_READ).prop_map(
                |(key, meta, offset, length)| Message::Read {
                    key,
                    meta,
                    offset: offset.into(),
                    length
                }
            ),
            Just(Message::Ping),
            any::<u16>().prop_map(|version| Message::Welcome { version }),
            (any::<u64>(), any::<u64>(), name, name).prop_map(|(data, meta, datanode, name)| {
                Message::Found(Located {
                    data,
                    meta,
                    datanode,
                    name,
                })
            }),
            (0u32..5000).prop_map(|length| Message::Data { length }),
            Just(Message::Pong),
            Just(Message::Failed(ErrorCode::Withdrawn)),
        ]
    }

    fn stream(messages: &[(u64, Message)]) -> (Vec<u8>, Vec<u8>) {
        let (mut stream, mut blocks) = (Vec::new(), Vec::new());
        for (id, message) in messages {
            message.encode(*id, &mut stream);
            if let Message::Data { length } = message {
                let bytes: Vec<u8> = (0..*length).map(|i| (i as u64 ^ id) as u8).collect();
                stream.extend_from_slice(&bytes);
                blocks.extend(bytes);
            }
        }
        (stream, blocks)
    }

    proptest! {
        #[test]
        fn what_was_sent_arrives_however_it_is_cut(
            messages in prop::collection::vec((any::<u64>(), message()), 0..12),
            cuts in prop::collection::vec(1usize..700, 1..40),
        ) {
            let (bytes, blocks) = stream(&messages);
            let (mut frames, mut taken) = (FrameParser::default(), Taken::default());
            let (mut rest, mut cut) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (part, more) = rest.split_at(rest.len().min(*cut.next().unwrap()));
                frames.feed(part, &mut taken).unwrap();
                rest = more;
            }
            prop_assert_eq!(taken, Taken(messages, blocks));
        }

        #[test]
        fn garbage_is_refused_or_taken_but_never_kept(bytes in prop::collection::vec(any::<u8>(), 0..4000)) {
            let (mut frames, mut taken) = (FrameParser::default(), Taken::default());
            let _ = frames.feed(&bytes, &mut taken);
            prop_assert!(frames.body.capacity() <= 1024);
        }

        #[test]
        fn a_flipped_bit_never_panics(
            messages in prop::collection::vec((any::<u64>(), message()), 1..6), at: usize, bit in 0u8..8,
        ) {
            let (mut bytes, _) = stream(&messages);
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let _ = FrameParser::default().feed(&bytes, &mut Taken::default());
        }
    }

    #[test]
    fn a_frame_may_not_be_longer_than_its_kind() {
        let refused =
            |header: [u8; HEADER]| FrameParser::default().feed(&header, &mut Taken::default());
        assert!(refused(header(1, 2, 0, 513)).is_err());
        assert!(refused(header(1, 131, 0, MAX_READ + 1)).is_err());
        assert!(refused(header(1, 131, 0, MAX_READ)).is_ok());
        assert!(refused(header(1, 131, 2, 1)).is_err());
        assert!(refused(header(1, 131, 9, 0)).is_err());
        assert!(refused(header(1, 131, 5, 0)).is_err());
        assert!(refused(header(1, 77, 0, 0)).is_err());
        assert!(refused(header(1, 4, 1, 0)).is_err());
        let mut strange = header(1, 4, 0, 0);
        strange[6] = 1;
        assert!(refused(strange).is_err());
    }

    #[test]
    fn a_read_beyond_all_bounds_is_refused() {
        let key = BlockKey::new("BP-1", 1, 1).unwrap();
        for (offset, length) in [(0, 0), (0, MAX_READ + 1), (u64::MAX - 3, 5)] {
            let mut bytes = Vec::new();
            let message = Message::Read {
                key: key.clone(),
                meta: false,
                offset,
                length,
            };
            message.encode(1, &mut bytes);
            let fed = FrameParser::default().feed(&bytes, &mut Taken::default());
            assert!(fed.is_err(), "{offset} {length}");
        }
    }

    #[test]
    fn a_long_name_is_cut_where_a_letter_ends() {
        let mut bytes = Vec::new();
        let reader = "é".repeat(150);
        let versions = VERSIONS;
        Message::Hello { versions, reader }.encode(1, &mut bytes);
        let mut taken = Taken::default();
        FrameParser::default().feed(&bytes, &mut taken).unwrap();
        assert!(matches!(&taken.0[0].1, Message::Hello { reader, .. } if reader.len() == 200));
    }
}
