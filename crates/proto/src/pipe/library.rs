// SPDX-License-Identifier: Apache-2.0
//! Packets between a program in a VM and the VM's agent, over a unix socket of type SEQPACKET.
//!
//! Each packet has [`PACKET_BYTES`] bytes, little endian:
//!
//! | bytes | [`LibraryRequest`] | [`LibraryReply`] |
//! |---|---|---|
//! | 4 | type | type |
//! | 4 | zero | errno |
//! | 8 | number of the pipe | number of the pipe |
//! | 8 | offset, else zero | bytes moved, else zero |
//! | 8 | length, else zero | [`LostConnections`], else zero |
//! | 8 | second offset, else zero | microseconds on the host, else zero |
//!
//! A request for a new pipe carries two descriptors (`SCM_RIGHTS`): source, then sink. Until
//! [`LibraryReply::Finished`] or [`LibraryReply::Refused`] the program must not use the sockets, nor a file that is
//! the sink. The agent answers with any number of [`LibraryReply::Progress`] and one of these two. It treats a closed
//! program socket as [`LibraryRequest::Reset`] of all its pipes.

/// Size of a packet.
pub const PACKET_BYTES: usize = 40;
/// Default path of the agent's socket.
pub const SOCKET: &str = "/run/viola/pipe.sock";

/// A request of a program. The program numbers its pipes and never uses a number twice on a connection to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryRequest {
    /// Sends a part of a file over a socket.
    Send {
        /// A new number.
        id: u64,
        /// Offset of the first byte in the source.
        offset: u64,
        /// Number of bytes; at most up to the end of the file.
        length: u64,
    },
    /// Writes received bytes of a socket to a file.
    Receive {
        /// A new number.
        id: u64,
        /// Offset of the first byte in the file, which grows where needed.
        offset: u64,
        /// Number of bytes; fewer when the peer ends before.
        length: u64,
    },
    /// Copies a part of a file to another file.
    Copy {
        /// A new number.
        id: u64,
        /// Offset of the first byte in the source.
        offset: u64,
        /// Number of bytes; at most up to the end of the source.
        length: u64,
        /// Offset of the first byte in the sink, which grows where needed.
        to: u64,
    },
    /// Sends received bytes of a socket over another socket.
    Relay {
        /// A new number.
        id: u64,
        /// Number of bytes; fewer when the peer ends before.
        length: u64,
    },
    /// Ends a pipe early. [`LibraryReply::Finished`] follows.
    Stop {
        /// Number of the pipe.
        id: u64,
    },
    /// The program has closed a socket of the pipe: the agent ends the pipe and sends no reply.
    Reset {
        /// Number of the pipe.
        id: u64,
    },
}

/// Connections of a pipe that cannot be restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LostConnections {
    /// The source's connection.
    pub source: bool,
    /// The sink's connection.
    pub sink: bool,
}

impl LostConnections {
    /// No connection is lost.
    pub const NONE: Self = Self {
        source: false,
        sink: false,
    };

    fn to_bits(self) -> u64 {
        u64::from(self.source) | u64::from(self.sink) << 1
    }

    fn from_bits(word: u64) -> Option<Self> {
        (word < 4).then_some(Self {
            source: word & 1 != 0,
            sink: word & 2 != 0,
        })
    }
}

/// A reply of the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryReply {
    /// The host moves bytes.
    Progress {
        /// Number of the pipe.
        id: u64,
        /// Bytes moved so far.
        sent: u64,
    },
    /// The pipe has ended: the connections are in their sockets again, except the lost ones.
    Finished {
        /// Number of the pipe.
        id: u64,
        /// Bytes moved.
        sent: u64,
        /// 0 when all bytes were moved, after a stop, or when the source had no more; `ECONNRESET` when a connection
        /// is lost.
        errno: i32,
        /// Lost connections.
        lost: LostConnections,
        /// How long the host had the connections, in microseconds; 0 when unknown.
        host_us: u64,
    },
    /// The agent did nothing and the sockets are unchanged: the program moves the bytes itself.
    Refused {
        /// Number of the pipe.
        id: u64,
        /// The reason: `EPERM`, `EAGAIN` (not now), `EOPNOTSUPP` (never for this file or socket).
        errno: i32,
    },
}

fn packet(what: u32, errno: i32, words: [u64; 4]) -> [u8; PACKET_BYTES] {
    let mut bytes = [0; PACKET_BYTES];
    bytes[..4].copy_from_slice(&what.to_le_bytes());
    bytes[4..8].copy_from_slice(&errno.to_le_bytes());
    for (at, word) in words.iter().enumerate() {
        bytes[8 + 8 * at..16 + 8 * at].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn fields(bytes: &[u8]) -> Option<(u32, i32, [u64; 4])> {
    let bytes: &[u8; PACKET_BYTES] = bytes.try_into().ok()?;
    let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let word = |at: usize| {
        u64::from(u32::from_le_bytes(four(at))) | u64::from(u32::from_le_bytes(four(at + 4))) << 32
    };
    Some((
        u32::from_le_bytes(four(0)),
        i32::from_le_bytes(four(4)),
        [word(8), word(16), word(24), word(32)],
    ))
}

impl LibraryRequest {
    /// The packet.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        match *self {
            Self::Send { id, offset, length } => packet(1, 0, [id, offset, length, 0]),
            Self::Stop { id } => packet(2, 0, [id, 0, 0, 0]),
            Self::Reset { id } => packet(3, 0, [id, 0, 0, 0]),
            Self::Receive { id, offset, length } => packet(4, 0, [id, offset, length, 0]),
            Self::Copy {
                id,
                offset,
                length,
                to,
            } => packet(5, 0, [id, offset, length, to]),
            Self::Relay { id, length } => packet(6, 0, [id, 0, length, 0]),
        }
    }

    /// Parses a packet; `None` when it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        match fields(bytes)? {
            (1, 0, [id, offset, length, 0]) => Some(Self::Send { id, offset, length }),
            (2, 0, [id, 0, 0, 0]) => Some(Self::Stop { id }),
            (3, 0, [id, 0, 0, 0]) => Some(Self::Reset { id }),
            (4, 0, [id, offset, length, 0]) => Some(Self::Receive { id, offset, length }),
            (5, 0, [id, offset, length, to]) => Some(Self::Copy {
                id,
                offset,
                length,
                to,
            }),
            (6, 0, [id, 0, length, 0]) => Some(Self::Relay { id, length }),
            _ => None,
        }
    }
}

impl LibraryReply {
    /// The packet.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        match *self {
            Self::Progress { id, sent } => packet(1, 0, [id, sent, 0, 0]),
            Self::Finished {
                id,
                sent,
                errno,
                lost,
                host_us,
            } => packet(2, errno, [id, sent, lost.to_bits(), host_us]),
            Self::Refused { id, errno } => packet(3, errno, [id, 0, 0, 0]),
        }
    }

    /// Parses a packet; `None` when it is invalid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        match fields(bytes)? {
            (1, 0, [id, sent, 0, 0]) => Some(Self::Progress { id, sent }),
            (2, errno, [id, sent, lost, host_us]) => Some(Self::Finished {
                id,
                sent,
                errno,
                lost: LostConnections::from_bits(lost)?,
                host_us,
            }),
            (3, errno, [id, 0, 0, 0]) => Some(Self::Refused { id, errno }),
            _ => None,
        }
    }

    /// Number of the pipe.
    pub fn id(&self) -> u64 {
        match *self {
            Self::Progress { id, .. } | Self::Finished { id, .. } | Self::Refused { id, .. } => id,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packets_are_read_back(id: u64, a: u64, b: u64, c: u64, errno: i32, lost in 0..4_u64) {
            let asks = [
                LibraryRequest::Send { id, offset: a, length: b },
                LibraryRequest::Receive { id, offset: a, length: b },
                LibraryRequest::Copy { id, offset: a, length: b, to: c },
                LibraryRequest::Relay { id, length: b },
                LibraryRequest::Stop { id },
                LibraryRequest::Reset { id },
            ];
            for ask in asks {
                prop_assert_eq!(LibraryRequest::decode(&ask.encode()), Some(ask));
            }
            let answers = [
                LibraryReply::Progress { id, sent: a },
                LibraryReply::Finished { id, sent: a, errno, lost: LostConnections::from_bits(lost).unwrap(), host_us: b },
                LibraryReply::Refused { id, errno },
            ];
            for answer in answers {
                prop_assert_eq!(LibraryReply::decode(&answer.encode()), Some(answer));
            }
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..48)) {
            if let Some(ask) = LibraryRequest::decode(&bytes) {
                prop_assert_eq!(ask.encode().to_vec(), bytes.clone());
            }
            if let Some(answer) = LibraryReply::decode(&bytes) {
                prop_assert_eq!(answer.encode().to_vec(), bytes);
            }
        }
    }
}
