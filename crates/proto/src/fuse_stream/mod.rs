// SPDX-License-Identifier: Apache-2.0
//! FUSE over a byte stream, between `viola-agent` in a reading VM and that VM's reader worker.
//!
//! A frame has a header of [`HEADER_BYTES`], a payload and a trailer of [`TRAILER_BYTES`]. All numbers are little
//! endian:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | [`MAGIC`] |
//! | 1 | [`FrameKind`] |
//! | 3 | zero |
//! | 4 | length of the payload, at most [`FrameKind::max_payload_bytes`] |
//! | 8 | session |
//! | n | payload |
//! | 8 | bitwise complement of the session |
//!
//! A virtio-serial port has no connections: a side that starts finds the rest of a former writer's frame in the port.
//! Therefore sessions have random numbers and each side drops frames of other sessions. A frame that its writer did
//! not finish never gets that writer's trailer, whatever bytes follow.
//!
//! | sender | frame | meaning |
//! |---|---|---|
//! | agent | [`FrameKind::Probe`] | asks whether a worker is there; repeated until one answers |
//! | worker | [`FrameKind::Challenge`], with a nonce as session | voids all earlier frames |
//! | agent | [`FrameKind::Hello`], with that nonce as session, and [`Hello`] | asks for a new session, for this mount |
//! | worker | [`FrameKind::Welcome`] in the new session | opens it; one byte: 1 if the worker still has the state of the mount's kernel |
//! | worker | or [`FrameKind::Refused`], with that nonce | refuses it; one sentence |
//! | agent | [`FrameKind::Request`] | a FUSE request of the kernel |
//! | worker | [`FrameKind::Reply`] | a FUSE reply for the kernel; replies come in any order |
//! | agent, worker | [`FrameKind::Ping`], [`FrameKind::Pong`] | the worker is alive |

mod frames;

pub use frames::{Frame, FrameError, FrameReader};

/// Version of the protocol. It changes when older versions do not understand the new one.
pub const VERSION: u32 = 1;
/// First bytes of a frame.
pub const MAGIC: [u8; 4] = *b"VfS\x01";
/// Size of a frame's header.
pub const HEADER_BYTES: usize = 20;
/// Size of a frame's trailer.
pub const TRAILER_BYTES: usize = 8;
/// Longest FUSE request. A read-only mount has no long requests except lists of inodes that the kernel forgot, and
/// these can be split.
pub const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Longest FUSE reply: 1 MiB of data and its header.
pub const MAX_REPLY_BYTES: usize = (1 << 20) + 4096;
/// Longest text of a refusal, in bytes.
pub const MAX_TEXT_BYTES: usize = 256;

/// Type of a frame. The module's table says what each one means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// From the agent.
    Probe,
    /// From the worker.
    Challenge,
    /// From the agent.
    Hello,
    /// From the worker.
    Welcome,
    /// From the worker.
    Refused,
    /// From the agent.
    Request,
    /// From the worker.
    Reply,
    /// From the agent.
    Ping,
    /// From the worker.
    Pong,
}

impl FrameKind {
    const ALL: [Self; 9] = [
        Self::Probe,
        Self::Challenge,
        Self::Hello,
        Self::Welcome,
        Self::Refused,
        Self::Request,
        Self::Reply,
        Self::Ping,
        Self::Pong,
    ];

    fn number(self) -> u8 {
        Self::ALL.iter().position(|k| *k == self).unwrap_or(0) as u8 + 1
    }

    fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }

    /// Longest payload of this type, in bytes.
    #[must_use]
    pub fn max_payload_bytes(self) -> usize {
        match self {
            Self::Request => MAX_REQUEST_BYTES,
            Self::Reply => MAX_REPLY_BYTES,
            Self::Refused => MAX_TEXT_BYTES,
            Self::Hello => Hello::BYTES,
            Self::Challenge | Self::Welcome | Self::Probe | Self::Ping | Self::Pong => 8,
        }
    }

    /// Whether frames of this type belong to the handshake. Other types are valid only within a session.
    #[must_use]
    pub fn is_handshake(self) -> bool {
        matches!(
            self,
            Self::Probe | Self::Challenge | Self::Hello | Self::Welcome | Self::Refused
        )
    }
}

/// The header of a frame. `length` must be at most [`FrameKind::max_payload_bytes`].
#[must_use]
pub fn header(kind: FrameKind, session: u64, length: usize) -> [u8; HEADER_BYTES] {
    debug_assert!(length <= kind.max_payload_bytes());
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = kind.number();
    bytes[8..12].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[12..].copy_from_slice(&session.to_le_bytes());
    bytes
}

/// The trailer of a frame.
#[must_use]
pub fn trailer(session: u64) -> [u8; TRAILER_BYTES] {
    (!session).to_le_bytes()
}

/// Appends a complete frame to `out`.
pub fn push_frame(out: &mut Vec<u8>, kind: FrameKind, session: u64, payload: &[u8]) {
    out.extend_from_slice(&header(kind, session, payload.len()));
    out.extend_from_slice(payload);
    out.extend_from_slice(&trailer(session));
}

/// Payload of [`FrameKind::Hello`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// [`VERSION`] of the agent.
    pub version: u32,
    /// The new session, random.
    pub session: u64,
    /// The mount, random and different for each mount.
    pub mount: u64,
}

impl Hello {
    /// Size of the payload.
    pub const BYTES: usize = 24;

    /// The payload.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..].copy_from_slice(&self.mount.to_le_bytes());
        bytes
    }

    /// Parses a payload; `None` when it is invalid.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (version, rest) = bytes.split_first_chunk()?;
        let (_, rest) = rest.split_first_chunk::<4>()?;
        let (session, rest) = rest.split_first_chunk()?;
        Some(Self {
            version: u32::from_le_bytes(*version),
            session: u64::from_le_bytes(*session),
            mount: u64::from_le_bytes(*rest.first_chunk()?),
        })
    }
}

/// The part of a FUSE request's header that a reply needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Number of the request, repeated in the reply.
    pub unique: u64,
    /// Operation, as in `linux/fuse.h`.
    pub opcode: u32,
}

/// Size of `struct fuse_in_header`.
pub const FUSE_IN_HEADER_BYTES: usize = 40;
/// Size of `struct fuse_out_header`.
pub const FUSE_OUT_HEADER_BYTES: usize = 16;
/// Opens the mount.
pub const FUSE_INIT: u32 = 26;
/// Has no reply.
pub const FUSE_FORGET: u32 = 2;
/// Has no reply.
pub const FUSE_BATCH_FORGET: u32 = 42;
/// Has a reply only when it is refused.
pub const FUSE_INTERRUPT: u32 = 36;

impl RequestHeader {
    /// Parses a request's header; `None` when the request's length differs from the length in its header.
    #[must_use]
    pub fn decode(request: &[u8]) -> Option<Self> {
        let header = request.first_chunk::<FUSE_IN_HEADER_BYTES>()?;
        let (length, rest) = header.split_first_chunk()?;
        let (opcode, rest) = rest.split_first_chunk()?;
        let header_fields = Self {
            unique: u64::from_le_bytes(*rest.first_chunk()?),
            opcode: u32::from_le_bytes(*opcode),
        };
        (u32::from_le_bytes(*length) as usize == request.len()).then_some(header_fields)
    }

    /// Whether the kernel waits for a reply.
    #[must_use]
    pub fn expects_reply(&self) -> bool {
        !matches!(
            self.opcode,
            FUSE_FORGET | FUSE_BATCH_FORGET | FUSE_INTERRUPT
        )
    }

    /// An error reply; `error` is a number of errno.h, above 0.
    #[must_use]
    pub fn error_reply(&self, error: i32) -> [u8; FUSE_OUT_HEADER_BYTES] {
        let mut bytes = [0; FUSE_OUT_HEADER_BYTES];
        bytes[..4].copy_from_slice(&(FUSE_OUT_HEADER_BYTES as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&(-error).to_le_bytes());
        bytes[8..].copy_from_slice(&self.unique.to_le_bytes());
        bytes
    }
}

/// The `unique` number of a reply; `None` when the reply's length differs from the length in its header.
#[must_use]
pub fn reply_unique(reply: &[u8]) -> Option<u64> {
    let header = reply.first_chunk::<FUSE_OUT_HEADER_BYTES>()?;
    let (length, rest) = header.split_first_chunk()?;
    let unique = u64::from_le_bytes(*rest.last_chunk()?);
    (u32::from_le_bytes(*length) as usize == reply.len()).then_some(unique)
}

#[cfg(test)]
mod tests;
