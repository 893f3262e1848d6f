// SPDX-License-Identifier: Apache-2.0
//! Packets between a program in a VM and the VM's agent, over a unix socket of type SEQPACKET.
//!
//! Each packet is [`PACKET_BYTES`] bytes, little endian:
//!
//! | bytes | of an [`LibraryRequest`] | of an [`LibraryReply`] |
//! |---|---|---|
//! | 4 | what | what |
//! | 4 | zero | errno |
//! | 8 | number | number |
//! | 8 | offset, else zero | bytes moved, else zero |
//! | 8 | length, else zero | what is lost, else zero |
//! | 8 | second offset, else zero | microseconds of the host's, else zero |
//!
//! With each wish go two descriptors (`SCM_RIGHTS`): source, then sink. The program must not touch
//! sockets nor a file that is written to until [`LibraryReply::Finished`] or [`LibraryReply::Refused`]. The agent answers each wish with any number of
//! [`LibraryReply::Progress`] and one of those two, and sees a closed socket to the program as [`LibraryRequest::Reset`] for all its numbers.

/// Bytes of a packet.
pub const PACKET_BYTES: usize = 40;
/// Where the agent listens, unless its configuration says otherwise.
pub const SOCKET: &str = "/run/viola/pipe.sock";

/// What a program wants. Numbers are its own, and never used twice on a connection to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryRequest {
    /// Send a part of the file down the socket.
    Send {
        /// A new number.
        id: u64,
        /// First byte.
        offset: u64,
        /// How many; not more than the file has.
        length: u64,
    },
    /// Write what a socket receives into a file.
    Receive {
        /// A new number.
        id: u64,
        /// First byte in the file, which grows where needed.
        offset: u64,
        /// How many; fewer when the peer ends before.
        length: u64,
    },
    /// Copy a part of a file into another one.
    Copy {
        /// A new number.
        id: u64,
        /// First byte in the source.
        offset: u64,
        /// How many; not more than the source has.
        length: u64,
        /// First byte in the sink, which grows where needed.
        to: u64,
    },
    /// Send what a socket receives down another one.
    Relay {
        /// A new number.
        id: u64,
        /// How many; fewer when the peer ends before.
        length: u64,
    },
    /// End it early; [`LibraryReply::Finished`] follows.
    Stop {
        /// Which.
        id: u64,
    },
    /// The program has closed a socket of it: end it, nothing is to be heard of it any more.
    Reset {
        /// Which.
        id: u64,
    },
}

/// Connections of a pipe that are gone for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LostConnections {
    /// The source's.
    pub source: bool,
    /// The sink's.
    pub sink: bool,
}

impl LostConnections {
    /// Neither.
    pub const NONE: Self = Self {
        source: false,
        sink: false,
    };

    fn word(self) -> u64 {
        u64::from(self.source) | u64::from(self.sink) << 1
    }

    fn of(word: u64) -> Option<Self> {
        (word < 4).then_some(Self {
            source: word & 1 != 0,
            sink: word & 2 != 0,
        })
    }
}

/// What comes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryReply {
    /// The host is at it.
    Progress {
        /// Which.
        id: u64,
        /// Bytes that were moved so far.
        sent: u64,
    },
    /// The connections are in their sockets again but for those that are lost.
    Finished {
        /// Which.
        id: u64,
        /// Bytes that were moved.
        sent: u64,
        /// 0 when all was moved, it was stopped, or the source had no more; `ECONNRESET` when a connection is gone for good.
        errno: i32,
        /// Connections that are gone for good.
        lost: LostConnections,
        /// For so long the host had the connections, in microseconds; 0 when it is not known.
        host_us: u64,
    },
    /// Nothing was done, and the socket is as it was: the program sends by itself.
    Refused {
        /// Which.
        id: u64,
        /// A reason: `EPERM`, `EAGAIN` (not now), `EOPNOTSUPP` (never for this file or socket).
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

fn parts(bytes: &[u8]) -> Option<(u32, i32, [u64; 4])> {
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
    /// As it goes over the socket.
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

    /// Reads a packet; `None` when it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        match parts(bytes)? {
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
    /// As it goes over the socket.
    pub fn encode(&self) -> [u8; PACKET_BYTES] {
        match *self {
            Self::Progress { id, sent } => packet(1, 0, [id, sent, 0, 0]),
            Self::Finished {
                id,
                sent,
                errno,
                lost,
                host_us,
            } => packet(2, errno, [id, sent, lost.word(), host_us]),
            Self::Refused { id, errno } => packet(3, errno, [id, 0, 0, 0]),
        }
    }

    /// Reads a packet; `None` when it is none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        match parts(bytes)? {
            (1, 0, [id, sent, 0, 0]) => Some(Self::Progress { id, sent }),
            (2, errno, [id, sent, lost, host_us]) => Some(Self::Finished {
                id,
                sent,
                errno,
                lost: LostConnections::of(lost)?,
                host_us,
            }),
            (3, errno, [id, 0, 0, 0]) => Some(Self::Refused { id, errno }),
            _ => None,
        }
    }

    /// Its number.
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
                LibraryReply::Finished { id, sent: a, errno, lost: LostConnections::of(lost).unwrap(), host_us: b },
                LibraryReply::Refused { id, errno },
            ];
            for answer in answers {
                prop_assert_eq!(LibraryReply::decode(&answer.encode()), Some(answer));
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..48)) {
            if let Some(ask) = LibraryRequest::decode(&bytes) {
                prop_assert_eq!(ask.encode().to_vec(), bytes.clone());
            }
            if let Some(answer) = LibraryReply::decode(&bytes) {
                prop_assert_eq!(answer.encode().to_vec(), bytes);
            }
        }
    }
}
