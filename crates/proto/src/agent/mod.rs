// SPDX-License-Identifier: Apache-2.0
//! Messages between a VM's agent and its worker on the host.
//!
//! They travel over one byte stream: a serial line, a virtio-serial port or vsock. A serial line has no connections
//! and can lose bytes. So each message is a frame that the reader can find in the middle of a stream:
//!
//! | bytes | content |
//! |---|---|
//! | 4 | [`MAGIC`] |
//! | 4 | length of the payload, little endian, at most [`MAX_PAYLOAD_BYTES`] |
//! | 4 | CRC32C of the payload, little endian |
//! | n | one message as JSON: [`FromAgent`] or [`ToAgent`] |
//!
//! # Course of a session
//!
//! 1. The agent sends [`FromAgent::Hello`] with a new session number, and repeats it with another new number until a
//!    [`ToAgent::Welcome`] has the number of the *last* one. Before the host sends the welcome it ends all reads
//!    under leases of older sessions.
//! 2. For each file system the agent proves which disk holds it. It writes a new file with the bytes that the welcome's
//!    [`Challenge`] demands, and tells the host where they are ([`FromAgent::Proof`]). The host looks for them there on
//!    each disk of the VM. The agent cannot know them before, so neither bytes that are on a disk anyway nor the file
//!    of an earlier session prove anything.
//! 3. The agent names blocks under leases ([`FromAgent::Name`]). It numbers the leases and never uses a number twice
//!    in a session. It withdraws leases with [`FromAgent::Withdraw`]. The extents of a block may be freed only after
//!    [`ToAgent::Withdrawn`], or after the welcome of a newer session.
//! 4. The host sends [`ToAgent::HelloRequest`] when it starts, and [`ToAgent::Ping`] every few seconds. An agent that
//!    receives a hello request, or a ping with another session than its own, starts again at 1.
//!
//! A guest's serial line hangs when more bytes arrive than it can hold. So the host sends at most the hello's
//! `window` of bytes until the agent has answered a ping behind them, and at most [`SERIAL_LINE_BYTES`] before the
//! first hello.
//!
//! Frames can be lost. The agent repeats a withdrawal until the host confirms it, and the host confirms unknown
//! leases too. The host drops all messages before the first hello.

mod crc;
mod key;
mod message;
mod proof;
mod reader;
mod writer;

pub use crc::crc32c;
pub use key::{BadKey, BlockKey, MAX_POOL_NAME_BYTES};
pub use message::{
    Bytes, DiskName, Extent, FileMap, FromAgent, FsId, Lease, Limits, MAX_EXTENTS, MAX_LEASES,
    MAX_TEXT_BYTES, Message, PROOF_BYTES, SERIAL_LINE_BYTES, Stats, ToAgent, WithdrawReason,
    truncate_text,
};
pub use proof::{CHALLENGE_BYTES, Challenge};
pub use reader::{BadMessage, FrameReader};
pub use writer::{FrameWriter, SendError, encode, frame_of};

/// Version of the messages. Agent and host must have the same.
pub const VERSION: u32 = 3;

/// First bytes of a frame.
pub const MAGIC: [u8; 4] = *b"VIO1";

/// Size of a frame's header, in bytes.
pub const HEADER_BYTES: usize = 12;

/// Longest payload, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;
