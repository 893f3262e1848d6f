// SPDX-License-Identifier: Apache-2.0
//! Messages between a guest's agent and its worker on the host.
//!
//! They travel over one byte stream: a serial line, a virtio-serial port or vsock. A serial line knows
//! no connections and can lose bytes, so the stream is cut into frames that can be found again:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | [`MAGIC`] |
//! | 4 | length of the payload, little endian, at most [`MAX_PAYLOAD_BYTES`] |
//! | 4 | CRC32C of the payload, little endian |
//! | n | one message as JSON: [`FromAgent`] or [`ToAgent`] |
//!
//! # Course of a conversation
//!
//! 1. The agent says [`FromAgent::Hello`] with a session number of its own, and says it again with a
//!    new number until a [`ToAgent::Welcome`] repeats the number of the *last* one. Before the host
//!    sends it, it has ended everything that was named before: no read uses an older lease any more.
//! 2. For each file system the agent proves which disk holds it ([`FromAgent::Proof`]).
//! 3. Then it names blocks under leases ([`FromAgent::Name`]), numbered by it and never used twice in
//!    a session, and withdraws them ([`FromAgent::Withdraw`]). Only after [`ToAgent::Withdrawn`], or
//!    the welcome of a newer session, may the blocks' extents be freed.
//! 4. The host sends [`ToAgent::HelloRequest`] when it starts anew, and [`ToAgent::Ping`] every few seconds:
//!    an agent that is hailed, or reads a session in a ping that is not its own, begins at 1.
//!
//! A guest's serial line hangs when more arrives than it holds, so the host sends no more than the window of
//! the hello until a ping behind it was answered, and before the first hello no more than [`SERIAL_LINE_BYTES`].
//!
//! Frames can get lost: the agent repeats a withdrawal until it is confirmed, and the host confirms
//! leases that it does not know. Whatever the host reads before the first hello, it drops.

mod crc;
mod key;
mod message;
mod reader;
mod writer;

pub use crc::crc32c;
pub use key::{BadKey, BlockKey, MAX_POOL_NAME_BYTES};
pub use message::{
    Bytes, DiskName, Extent, FileMap, FromAgent, FsId, Lease, Limits, MAX_EXTENTS, MAX_LEASES,
    MAX_TEXT_BYTES, Message, PROOF_BYTES, SERIAL_LINE_BYTES, Stats, ToAgent, WithdrawReason,
    truncate_text,
};
pub use reader::{BadMessage, FrameReader};
pub use writer::{FrameWriter, SendError, encode};

/// Version of the messages; an agent and a host that do not agree do not talk.
pub const VERSION: u32 = 1;

/// Start of a frame.
pub const MAGIC: [u8; 4] = *b"VIO1";

/// Bytes before the payload.
pub const HEADER_BYTES: usize = 12;

/// Longest payload, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;
