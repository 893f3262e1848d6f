// SPDX-License-Identifier: Apache-2.0
//! FUSE over a byte stream, between `viola-agent` in a reading VM and that VM's reader worker.
//!
//! A frame is a header of [`HEADER_BYTES`] bytes, a payload and a trailer of [`TRAILER_BYTES`] bytes, all numbers
//! little endian:
//!
//! | bytes | what |
//! |---|---|
//! | 4 | [`MAGIC`] |
//! | 1 | [`FrameKind`] |
//! | 3 | zero |
//! | 4 | length of the payload, at most [`FrameKind::max_payload_bytes`] |
//! | 8 | session |
//! | n | payload |
//! | 8 | the session's bits, all turned over |
//!
//! A virtio-serial port has no connections: whichever side starts anew finds the rest of somebody else's
//! frame in it. So a session is a random number; what is of another one is not heard, and a frame that
//! was cut short by the end of its writer never gets that writer's trailer, whatever comes after it.
//!
//! | who | says | which means |
//! |---|---|---|
//! | agent | [`FrameKind::Probe`] | is there somebody; repeated until there is |
//! | worker | [`FrameKind::Challenge`], with a nonce as session | nothing that was before holds any more |
//! | agent | [`FrameKind::Hello`], with that nonce as session, and [`Hello`] | a new session, for this mount |
//! | worker | [`FrameKind::Welcome`] in the new session | one byte: 1 if it still knows what the mount's kernel was told |
//! | | or [`FrameKind::Refused`], with that nonce | one sentence; nothing comes of it |
//! | agent | [`FrameKind::Request`] | a FUSE message as the kernel gave it |
//! | worker | [`FrameKind::Reply`] | a FUSE message for the kernel; in any order |
//! | agent, worker | [`FrameKind::Ping`], [`FrameKind::Pong`] | the worker hears |

mod frames;

pub use frames::{Frame, FrameError, FrameReader};

/// Changes when a side that knows only the older ones would not understand.
pub const VERSION: u32 = 1;
/// First bytes of a frame.
pub const MAGIC: [u8; 4] = *b"VfS\x01";
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 20;
/// Bytes behind the payload.
pub const TRAILER_BYTES: usize = 8;
/// Longest FUSE request, bytes. A mount that is read only has no long ones but lists of what the kernel
/// has forgotten, and these can be cut.
pub const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Longest FUSE reply, bytes: 1 MiB read, and what goes before it.
pub const MAX_REPLY_BYTES: usize = (1 << 20) + 4096;
/// Longest sentence of a refusal, bytes.
pub const MAX_TEXT_BYTES: usize = 256;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// See the module, as for all of them.
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

    /// Longest payload, bytes.
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

    /// Whether it belongs to the hand-shake; the others are heard only within a session.
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

/// The end of a frame.
#[must_use]
pub fn trailer(session: u64) -> [u8; TRAILER_BYTES] {
    (!session).to_le_bytes()
}

/// A whole frame behind what is in `out` already.
pub fn push_frame(out: &mut Vec<u8>, kind: FrameKind, session: u64, payload: &[u8]) {
    out.extend_from_slice(&header(kind, session, payload.len()));
    out.extend_from_slice(payload);
    out.extend_from_slice(&trailer(session));
}

/// What an agent says to begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// [`VERSION`] of the agent.
    pub version: u32,
    /// The session that it begins, random.
    pub session: u64,
    /// The mount that it is for, random; another one for every mount.
    pub mount: u64,
}

impl Hello {
    /// Bytes that it takes.
    pub const BYTES: usize = 24;

    /// As a payload.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..].copy_from_slice(&self.mount.to_le_bytes());
        bytes
    }

    /// From a payload.
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

/// The first fields of a FUSE request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHeader {
    /// Which request; a reply names it.
    pub unique: u64,
    /// What it wants, as in `linux/fuse.h`.
    pub opcode: u32,
}

/// Bytes of `fuse_in_header`.
pub const FUSE_IN_HEADER_BYTES: usize = 40;
/// Bytes of `fuse_out_header`.
pub const FUSE_OUT_HEADER_BYTES: usize = 16;
/// `FUSE_INIT`
pub const FUSE_INIT: u32 = 26;
/// `FUSE_FORGET`: has no reply.
pub const FUSE_FORGET: u32 = 2;
/// `FUSE_BATCH_FORGET`: has no reply.
pub const FUSE_BATCH_FORGET: u32 = 42;
/// `FUSE_INTERRUPT`: has a reply only when it is refused.
pub const FUSE_INTERRUPT: u32 = 36;

impl RequestHeader {
    /// Reads a request's header; `None` when its length is another one than the header says.
    #[must_use]
    pub fn decode(request: &[u8]) -> Option<Self> {
        let header = request.first_chunk::<FUSE_IN_HEADER_BYTES>()?;
        let (length, rest) = header.split_first_chunk()?;
        let (opcode, rest) = rest.split_first_chunk()?;
        let asked = Self {
            unique: u64::from_le_bytes(*rest.first_chunk()?),
            opcode: u32::from_le_bytes(*opcode),
        };
        (u32::from_le_bytes(*length) as usize == request.len()).then_some(asked)
    }

    /// Whether somebody waits for a reply.
    #[must_use]
    pub fn expects_reply(&self) -> bool {
        !matches!(
            self.opcode,
            FUSE_FORGET | FUSE_BATCH_FORGET | FUSE_INTERRUPT
        )
    }

    /// A reply that says no; `error` is a number of errno.h, above 0.
    #[must_use]
    pub fn error_reply(&self, error: i32) -> [u8; FUSE_OUT_HEADER_BYTES] {
        let mut bytes = [0; FUSE_OUT_HEADER_BYTES];
        bytes[..4].copy_from_slice(&(FUSE_OUT_HEADER_BYTES as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&(-error).to_le_bytes());
        bytes[8..].copy_from_slice(&self.unique.to_le_bytes());
        bytes
    }
}

/// The request that a reply answers; `None` when its length is another one than its header says.
#[must_use]
pub fn reply_unique(reply: &[u8]) -> Option<u64> {
    let header = reply.first_chunk::<FUSE_OUT_HEADER_BYTES>()?;
    let (length, rest) = header.split_first_chunk()?;
    let unique = u64::from_le_bytes(*rest.last_chunk()?);
    (u32::from_le_bytes(*length) as usize == reply.len()).then_some(unique)
}

#[cfg(test)]
mod tests;
