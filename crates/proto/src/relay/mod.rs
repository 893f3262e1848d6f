// SPDX-License-Identifier: Apache-2.0
//! FUSE over a byte stream, between `viola-agent` in a reading VM and that VM's reader worker.
//!
//! A frame is a header of [`HEADER`] bytes, a payload and a trailer of [`TRAILER`] bytes, all numbers
//! little endian:
//!
//! | bytes | what |
//! |---|---|
//! | 4 | [`MAGIC`] |
//! | 1 | [`Kind`] |
//! | 3 | zero |
//! | 4 | length of the payload, at most [`Kind::most`] |
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
//! | agent | [`Kind::Knock`] | is there somebody; repeated until there is |
//! | worker | [`Kind::Hail`], with a nonce as session | nothing that was before holds any more |
//! | agent | [`Kind::Hello`], with that nonce as session, and [`Hello`] | a new session, for this mount |
//! | worker | [`Kind::Welcome`] in the new session | one byte: 1 if it still knows what the mount's kernel was told |
//! | | or [`Kind::Refused`], with that nonce | one sentence; nothing comes of it |
//! | agent | [`Kind::Request`] | a FUSE message as the kernel gave it |
//! | worker | [`Kind::Reply`] | a FUSE message for the kernel; in any order |
//! | agent, worker | [`Kind::Ping`], [`Kind::Pong`] | the worker hears |

mod frames;

pub use frames::{Broken, Frame, Frames};

/// Changes when a side that knows only the older ones would not understand.
pub const VERSION: u32 = 1;
/// First bytes of a frame.
pub const MAGIC: [u8; 4] = *b"VfS\x01";
/// Bytes before the payload.
pub const HEADER: usize = 20;
/// Bytes behind the payload.
pub const TRAILER: usize = 8;
/// Longest FUSE request, bytes. A mount that is read only has no long ones but lists of what the kernel
/// has forgotten, and these can be cut.
pub const MAX_REQUEST: usize = 64 << 10;
/// Longest FUSE reply, bytes: 1 MiB read, and what goes before it.
pub const MAX_REPLY: usize = (1 << 20) + 4096;
/// Longest sentence of a refusal, bytes.
pub const MAX_TEXT: usize = 256;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// See the module, as for all of them.
    Knock,
    /// From the worker.
    Hail,
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

impl Kind {
    const ALL: [Self; 9] = [
        Self::Knock,
        Self::Hail,
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
    pub fn most(self) -> usize {
        match self {
            Self::Request => MAX_REQUEST,
            Self::Reply => MAX_REPLY,
            Self::Refused => MAX_TEXT,
            Self::Hello => Hello::LENGTH,
            Self::Hail | Self::Welcome | Self::Knock | Self::Ping | Self::Pong => 8,
        }
    }

    /// Whether it belongs to the hand-shake; the others are heard only within a session.
    #[must_use]
    pub fn greets(self) -> bool {
        matches!(
            self,
            Self::Knock | Self::Hail | Self::Hello | Self::Welcome | Self::Refused
        )
    }
}

/// The header of a frame. `length` must be at most [`Kind::most`].
#[must_use]
pub fn header(kind: Kind, session: u64, length: usize) -> [u8; HEADER] {
    debug_assert!(length <= kind.most());
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4] = kind.number();
    bytes[8..12].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[12..].copy_from_slice(&session.to_le_bytes());
    bytes
}

/// The end of a frame.
#[must_use]
pub fn trailer(session: u64) -> [u8; TRAILER] {
    (!session).to_le_bytes()
}

/// A whole frame behind what is in `out` already.
pub fn push(out: &mut Vec<u8>, kind: Kind, session: u64, payload: &[u8]) {
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
    pub const LENGTH: usize = 24;

    /// As a payload.
    #[must_use]
    pub fn bytes(&self) -> [u8; Self::LENGTH] {
        let mut bytes = [0; Self::LENGTH];
        bytes[..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..].copy_from_slice(&self.mount.to_le_bytes());
        bytes
    }

    /// From a payload.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LENGTH] = bytes.try_into().ok()?;
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
pub struct Asked {
    /// Which request; a reply names it.
    pub unique: u64,
    /// What it wants, as in `linux/fuse.h`.
    pub opcode: u32,
}

/// Bytes of `fuse_in_header`.
pub const IN_HEADER: usize = 40;
/// Bytes of `fuse_out_header`.
pub const OUT_HEADER: usize = 16;
/// `FUSE_INIT`
pub const INIT: u32 = 26;
/// `FUSE_FORGET`: has no reply.
pub const FORGET: u32 = 2;
/// `FUSE_BATCH_FORGET`: has no reply.
pub const BATCH_FORGET: u32 = 42;
/// `FUSE_INTERRUPT`: has a reply only when it is refused.
pub const INTERRUPT: u32 = 36;

impl Asked {
    /// Reads a request's header; `None` when its length is another one than the header says.
    #[must_use]
    pub fn read(request: &[u8]) -> Option<Self> {
        let header = request.first_chunk::<IN_HEADER>()?;
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
    pub fn is_answered(&self) -> bool {
        !matches!(self.opcode, FORGET | BATCH_FORGET | INTERRUPT)
    }

    /// A reply that says no; `error` is a number of errno.h, above 0.
    #[must_use]
    pub fn refusal(&self, error: i32) -> [u8; OUT_HEADER] {
        let mut bytes = [0; OUT_HEADER];
        bytes[..4].copy_from_slice(&(OUT_HEADER as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&(-error).to_le_bytes());
        bytes[8..].copy_from_slice(&self.unique.to_le_bytes());
        bytes
    }
}

/// The request that a reply answers; `None` when its length is another one than its header says.
#[must_use]
pub fn answered(reply: &[u8]) -> Option<u64> {
    let header = reply.first_chunk::<OUT_HEADER>()?;
    let (length, rest) = header.split_first_chunk()?;
    let unique = u64::from_le_bytes(*rest.last_chunk()?);
    (u32::from_le_bytes(*length) as usize == reply.len()).then_some(unique)
}

#[cfg(test)]
mod tests;
