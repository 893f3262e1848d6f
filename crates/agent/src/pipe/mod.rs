// SPDX-License-Identifier: Apache-2.0
//! Bytes that the host moves for this VM's programs between files and connections: see [`viola_proto::pipe`].
//!
//! | module | room for |
//! |---|---|
//! | [`settings`] | `[pipe]` in the configuration |
//! | [`programs`] | the socket at which programs ask |
//! | [`lease`] | read leases: a file stays unchanged while the host reads it |
//! | `sink` | prepares a file for the host's writes, and returns it to the program |
//! | [`socket`] | extracts a connection from a program's socket, and restores it |
//! | `forward` | moves what a held connection has received |
//! | [`next_hop`] | the MAC address that a connection's packets go to |
//! | `life` | the life of one pipe, a state machine |
//! | `mapper` | the thread that finds extents |
//! | `engine` | joins all of them |
//! | [`report`], `counters`, `reason` | what `viola-agent status` shows |
//!
//! The main loop runs the engine: it has the channel to the host, and a thread of its own would add a wake-up to each
//! step that a program waits for. The engine never waits for a disk: other threads find extents and write, and send
//! completions.
//!
//! When the session ends, the host resets the connections that it has, so their programs lose them. When the agent is
//! killed, the sockets of extracted connections stay silent: the program sees the agent's socket closed and must
//! close those sockets too.

mod counters;
mod engine;
mod forward;
pub mod lease;
mod life;
mod mapper;
pub mod next_hop;
pub mod programs;
mod reason;
pub mod report;
pub mod settings;
mod sink;
pub mod socket;

use std::collections::BTreeMap;
use std::path::PathBuf;

use viola_proto::agent::{FileMap, FsId};
use viola_proto::pipe::{PipeId, PipeRequest};

pub use engine::{Pipes, Wakeups};
pub use reason::Reason;

/// What the pipes know of the host and the disks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostState {
    /// Epoch of the session, if one is open.
    pub epoch: Option<u64>,
    /// File systems by device number (`MAJOR:MINOR`).
    pub volumes: BTreeMap<String, PipeVolume>,
    /// No pipe may start, and running pipes must end.
    pub halt: bool,
}

/// A file system that pipes may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PipeVolume {
    /// Number of the file system in the protocol.
    pub fs: FsId,
    /// Mount point.
    pub point: PathBuf,
    /// Whether the host knows its disk now.
    pub is_proven: bool,
    /// What the configuration allows on it.
    pub access: PipeAccess,
}

/// What the configuration lets pipes do on a file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PipeAccess {
    /// Pipes may read its files.
    pub read: bool,
    /// Pipes may write its files.
    pub write: bool,
}

/// What another thread has finished.
#[derive(Debug)]
enum Completion {
    /// The mapper has found the extents of a source file.
    Mapped(PipeId, Result<FileMap, Reason>),
    /// A sink file is prepared: its extents.
    Prepared(PipeId, Result<FileMap, Reason>),
    /// A sink file is the program's again; an errno when bytes that the agent has received are not in it.
    Settled(PipeId, i32),
}

/// A message for the host.
#[derive(Debug)]
pub struct Outgoing {
    /// The session that it belongs to.
    pub epoch: u64,
    /// The message.
    pub message: PipeRequest,
}
