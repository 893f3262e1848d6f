// SPDX-License-Identifier: Apache-2.0
//! What the pipes are told by the main loop and by other threads, and what they send to the host.

use std::collections::BTreeMap;
use std::path::PathBuf;

use viola_proto::agent::{FileMap, FsId};
use viola_proto::pipe::{PipeId, PipeRequest};

use super::reason::Reason;

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
pub enum Completion {
    /// The mapper has found the extents of a source file.
    Mapped(PipeId, Result<FileMap, Reason>),
    /// A sink file is prepared: its extents.
    Prepared(PipeId, Result<FileMap, Reason>),
    /// A sink file is the program's again. 0, or the errno when bytes that the agent has received
    /// are not in it.
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
