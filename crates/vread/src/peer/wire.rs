// SPDX-License-Identifier: Apache-2.0
//! The protocol between two hosts, inside TLS.
//!
//! The asking host opens one connection for each of its readers. All messages are frames; numbers are little endian:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | bytes after these 16 |
//! | 1 | kind |
//! | 1 | code of an answer ([`ErrorCode`]), else 0 |
//! | 2 | 0 |
//! | 8 | number of the request, chosen by the asking host, the same in its answer |
//!
//! | kind | after the 16 bytes |
//! |---|---|
//! | 1 hello | lowest version (1), highest version (1; 0 for the lowest one), name of the reader |
//! | 2 find | block |
//! | 3 read | offset (8), length (4), 0 data or 1 checksums (1), block |
//! | 4 ping | |
//! | 129 welcome | version of the connection (2) |
//! | 130 found | length of the data (8), of the checksums (8), identity and plain name of the DataNode VM |
//! | 131 data | the bytes |
//! | 132 pong | |
//!
//! A block consists of its number (8), its generation stamp (8) and the name of its pool. A name consists of its
//! length (1) and its bytes. Answers come in any order. Hello comes first and once; an answer with a code has no
//! body. A host closes a connection that violates the protocol.
//!
//! The connection has the highest version that both hosts speak; the host that answers chooses it, or refuses when there is
//! none. The first release compares the two bytes of hello with (1, 0). So a host whose hello with several versions is
//! refused says hello again with its lowest version alone.

use viola_proto::agent::BlockKey;

use super::versions::Versions;

/// Maximum length of a read, bytes.
pub const MAX_READ: u32 = 1 << 20;
/// Maximum unanswered requests of a connection.
pub const MAX_OUTSTANDING: usize = 64;
/// Maximum length of a name, bytes.
pub const MAX_NAME: usize = 200;
/// Length of the header, bytes.
pub const HEADER: usize = 16;
/// Maximum length of a frame without its header and without bytes of blocks, bytes.
const MAX_BODY: usize = 512;

const HELLO: u8 = 1;
const FIND: u8 = 2;
const READ: u8 = 3;
const PING: u8 = 4;
const WELCOME: u8 = 129;
const FOUND: u8 = 130;
const DATA: u8 = 131;
const PONG: u8 = 132;

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ErrorCode {
    /// The block is unknown there, or not allowed for this reader.
    Unknown = 1,
    /// The block was withdrawn during the read.
    Withdrawn = 2,
    /// The disk cannot be read.
    Io = 3,
    /// The other host refuses: another version, or too many requests.
    Refused = 4,
    /// There is no connection, or it has just ended. Used only within a host.
    Gone = 5,
}

impl ErrorCode {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Unknown,
            2 => Self::Withdrawn,
            3 => Self::Io,
            4 => Self::Refused,
            5 => Self::Gone,
            _ => return None,
        })
    }
}

impl std::fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown there",
            Self::Withdrawn => "withdrawn",
            Self::Io => "the disk there cannot be read",
            Self::Refused => "refused",
            Self::Gone => "not connected",
        })
    }
}

/// A violation of the protocol by the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("protocol violation: {0}")]
pub struct ProtocolError(pub &'static str);

/// The lengths of a named block, and its DataNode VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// Length of the data, bytes.
    pub data: u64,
    /// Length of the checksum file, bytes.
    pub meta: u64,
    /// Identity of the DataNode VM on its host.
    pub datanode: String,
    /// The VM's plain name there.
    pub name: String,
}

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// The first frame of a connection.
    Hello {
        /// What the asking host speaks.
        versions: Versions,
        /// The reader on whose behalf the host asks.
        reader: String,
    },
    /// Asks whether a block is there.
    Find {
        /// The block.
        key: BlockKey,
    },
    /// Asks for bytes of a block, all of which must be within the file.
    Read {
        /// The block.
        key: BlockKey,
        /// Whether the checksum file is meant.
        meta: bool,
        /// Offset, bytes.
        offset: u64,
        /// Length, 1 to [`MAX_READ`] bytes.
        length: u32,
    },
    /// Asks for a pong.
    Ping,
    /// The answer to hello.
    Welcome {
        /// The connection's version.
        version: u16,
    },
    /// The answer to find.
    Found(Located),
    /// The header of an answer to read; its bytes follow through [`super::frames::FrameSink::data`].
    Data {
        /// Length, bytes.
        length: u32,
    },
    /// The answer to ping.
    Pong,
    /// The request failed.
    Failed(ErrorCode),
}

fn encode_name(out: &mut Vec<u8>, name: &str) {
    let name = cut(name);
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
}

/// Cuts a name to at most [`MAX_NAME`] bytes.
fn cut(name: &str) -> &str {
    let mut end = name.len().min(MAX_NAME);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

pub(super) fn encode_key(out: &mut Vec<u8>, key: &BlockKey) {
    out.extend_from_slice(&key.id().to_le_bytes());
    out.extend_from_slice(&key.stamp().to_le_bytes());
    encode_name(out, key.pool());
}

/// Encodes a frame's header.
pub fn header(id: u64, kind: u8, code: u8, length: u32) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes[4] = kind;
    bytes[5] = code;
    bytes[8..].copy_from_slice(&id.to_le_bytes());
    bytes
}

/// Encodes the header of `length` bytes of a block.
pub fn data_header(id: u64, length: u32) -> [u8; HEADER] {
    header(id, DATA, 0, length)
}

impl Message {
    /// Appends the frame to `out`; for [`Message::Data`] only the header. Names are cut to [`MAX_NAME`] bytes.
    pub fn encode(&self, id: u64, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER]);
        let (kind, code) = match self {
            Self::Hello { versions, reader } => {
                out.extend_from_slice(&versions.encode());
                encode_name(out, reader);
                (HELLO, 0)
            }
            Self::Find { key } => {
                encode_key(out, key);
                (FIND, 0)
            }
            Self::Read {
                key,
                meta,
                offset,
                length,
            } => {
                out.extend_from_slice(&offset.to_le_bytes());
                out.extend_from_slice(&length.to_le_bytes());
                out.push(u8::from(*meta));
                encode_key(out, key);
                (READ, 0)
            }
            Self::Ping => (PING, 0),
            Self::Welcome { version } => {
                out.extend_from_slice(&version.to_le_bytes());
                (WELCOME, 0)
            }
            Self::Found(located) => {
                out.extend_from_slice(&located.data.to_le_bytes());
                out.extend_from_slice(&located.meta.to_le_bytes());
                encode_name(out, &located.datanode);
                encode_name(out, &located.name);
                (FOUND, 0)
            }
            Self::Data { .. } => (DATA, 0),
            Self::Pong => (PONG, 0),
            Self::Failed(code) => (DATA, *code as u8),
        };
        let length = match self {
            Self::Data { length } => *length,
            _ => (out.len() - start - HEADER) as u32,
        };
        out[start..start + HEADER].copy_from_slice(&header(id, kind, code, length));
    }
}

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) length: usize,
    kind: u8,
    code: u8,
    pub(super) id: u64,
}

impl Header {
    /// Parses a header.
    ///
    /// # Errors
    /// When a reserved byte is not 0, the frame is too long, or a code is not allowed.
    pub(super) fn parse(bytes: &[u8; HEADER]) -> Result<Self, ProtocolError> {
        let [a, b, c, d, kind, code, zero, zeros, id @ ..] = *bytes;
        let head = Self {
            length: u32::from_le_bytes([a, b, c, d]) as usize,
            kind,
            code,
            id: u64::from_le_bytes(id),
        };
        let max_length = if kind == DATA {
            MAX_READ as usize
        } else {
            MAX_BODY
        };
        match () {
            () if zero != 0 || zeros != 0 => {
                Err(ProtocolError("a header with nonzero reserved bytes"))
            }
            () if head.length > max_length => Err(ProtocolError("a frame that is too long")),
            () if code != 0 && (kind != DATA || head.length > 0) => {
                Err(ProtocolError("an unexpected code"))
            }
            () => Ok(head),
        }
    }

    /// Whether bytes of a block follow.
    pub(super) fn is_data(&self) -> bool {
        self.kind == DATA && self.code == 0
    }

    /// Parses the message with this header and body.
    ///
    /// # Errors
    /// When the body is invalid.
    pub(super) fn message(&self, body: &[u8]) -> Result<Message, ProtocolError> {
        let mut rest = Cursor(body);
        let message = match self.kind {
            HELLO => Message::Hello {
                versions: Versions::decode(rest.take()?),
                reader: rest.name()?,
            },
            FIND => Message::Find { key: rest.key()? },
            READ => {
                let (offset, length) = (rest.u64()?, rest.u32()?);
                let meta = match rest.take::<1>()? {
                    [0] => false,
                    [1] => true,
                    _ => return Err(ProtocolError("a read of an unknown file")),
                };
                if length == 0 || length > MAX_READ || offset.checked_add(length.into()).is_none() {
                    return Err(ProtocolError("a read with an invalid range"));
                }
                Message::Read {
                    key: rest.key()?,
                    meta,
                    offset,
                    length,
                }
            }
            PING => Message::Ping,
            WELCOME => Message::Welcome {
                version: rest.u16()?,
            },
            FOUND => Message::Found(Located {
                data: rest.u64()?,
                meta: rest.u64()?,
                datanode: rest.name()?,
                name: rest.name()?,
            }),
            DATA if self.code == 0 => Message::Data {
                length: self.length as u32,
            },
            DATA => Message::Failed(
                ErrorCode::from_byte(self.code).ok_or(ProtocolError("an unknown code"))?,
            ),
            PONG => Message::Pong,
            _ => return Err(ProtocolError("an unknown kind of frame")),
        };
        match rest.0 {
            [] => Ok(message),
            _ => Err(ProtocolError("a frame with extra bytes")),
        }
    }
}

/// The unparsed rest of a body.
pub(super) struct Cursor<'a>(pub(super) &'a [u8]);

impl Cursor<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let (first, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or(ProtocolError("a frame that is too short"))?;
        self.0 = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, ProtocolError> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.take().map(u64::from_le_bytes)
    }

    pub(super) fn name(&mut self) -> Result<String, ProtocolError> {
        let [length] = self.take::<1>()?;
        let length = usize::from(length);
        if length > MAX_NAME {
            return Err(ProtocolError("a name that is too long"));
        }
        let (name, rest) = self
            .0
            .split_at_checked(length)
            .ok_or(ProtocolError("a frame that is too short"))?;
        self.0 = rest;
        let name =
            std::str::from_utf8(name).map_err(|_| ProtocolError("a name that is not UTF-8"))?;
        Ok(name.to_owned())
    }

    pub(super) fn key(&mut self) -> Result<BlockKey, ProtocolError> {
        let id = self.u64()?.cast_signed();
        let stamp = self.u64()?;
        BlockKey::new(&self.name()?, id, stamp)
            .map_err(|_| ProtocolError("an invalid block pool name"))
    }
}
