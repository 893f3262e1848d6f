// SPDX-License-Identifier: Apache-2.0
//! A file system with blocks or files for pipes, from its mount to its unmount.

use std::collections::VecDeque;
use std::path::PathBuf;

use viola_proto::agent::FsId;

use crate::blocks::links::Links;
use crate::blocks::types::EntryId;
use crate::blocks::worker::{Job, Outcome, Workers};
use crate::clock::Millis;
use crate::io::mounts::Mount;
use crate::io::queue;
use crate::pipe::PipeAccess;
use crate::status::VolumeReport;

/// Whether the host knows the file system's disk in this session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProofState {
    /// No proof was sent in this session.
    Unproven,
    /// The mapper writes the proof file.
    Writing,
    /// The proof was sent at this time.
    Sent(Millis),
    /// The host has recognised the disk.
    Accepted,
    /// The proof failed for this reason; it is tried again at this time.
    Failed(String, Millis),
}

/// The identity of a mounted file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// `f_fsid`, as in fanotify events.
    pub fsid: [u8; 8],
    /// Size in bytes.
    pub size: u64,
}

/// One file system.
#[derive(Debug)]
pub struct Volume {
    /// Number of the file system in the protocol.
    pub fs: FsId,
    /// The mount.
    pub mount: Mount,
    /// Identity when it was last checked.
    pub identity: Identity,
    /// The data directories on it.
    pub data: Vec<PathBuf>,
    /// What pipes may do on it.
    pub pipe_access: PipeAccess,
    /// Its worker threads.
    pub workers: Workers,
    /// Whether the host knows its disk.
    pub proof: ProofState,
    /// Number of proofs that failed in a row.
    pub failures: u32,
    /// Unmounted: the volume goes when the host has released its last lease.
    pub retiring: bool,
    /// A scan is running.
    pub scanning: bool,
    /// Time of the next scan.
    pub next_scan: Millis,
    /// Blocks whose files are to be checked.
    pub recheck: VecDeque<EntryId>,
    /// When a defragmentation of the whole file system was last noticed.
    pub relocated_at: Millis,
    /// The linker is stuck: the file system is frozen, or too slow.
    pub frozen: bool,
    /// Why the last refused block was refused.
    pub refusal: Option<String>,
}

impl Volume {
    /// Starts the workers of a file system.
    ///
    /// # Errors
    /// The kernel's error, when a thread cannot be started.
    pub fn start(
        fs: FsId,
        mount: Mount,
        identity: Identity,
        (data, pipe_access): (Vec<PathBuf>, PipeAccess),
        outcomes: &queue::Sender<Outcome>,
        run: u64,
        now: Millis,
    ) -> std::io::Result<Self> {
        let links = Links::new(&mount.point, run);
        let workers = Workers::start(fs, &links, outcomes)?;
        workers.send(Job::EarlierLinks(false));
        Ok(Self {
            fs,
            mount,
            identity,
            data,
            pipe_access,
            workers,
            proof: ProofState::Unproven,
            failures: 0,
            retiring: false,
            scanning: false,
            next_scan: now,
            recheck: VecDeque::new(),
            relocated_at: 0,
            frozen: false,
            refusal: None,
        })
    }

    /// Starts to write a new proof, unless one is being written.
    pub fn prove(&mut self) {
        if self.proof != ProofState::Writing && !self.retiring {
            self.proof = ProofState::Writing;
            self.workers.send(Job::Prove);
        }
    }

    /// The proof was not written, or the host did not accept it.
    pub fn proof_failed(&mut self, why: String, now: Millis) {
        // back off: 5, 10, 20 s, up to five minutes
        let wait = 5000 << self.failures.min(6);
        self.failures += 1;
        self.proof = ProofState::Failed(why, now + wait.min(300_000));
    }

    /// The report for `viola-agent status`.
    pub fn report(&self) -> VolumeReport {
        let state = match &self.proof {
            _ if self.retiring => "unmounted; waiting for the host to release it".into(),
            _ if self.frozen => "frozen, or too slow: nothing is named".into(),
            ProofState::Unproven => "waiting for the host".into(),
            ProofState::Writing | ProofState::Sent(_) => {
                "showing the host which disk it is on".into()
            }
            ProofState::Accepted => "the host reads its disk".into(),
            ProofState::Failed(why, _) => format!("not named: {why}"),
        };
        VolumeReport {
            mount: self.mount.point.display().to_string(),
            kind: self.mount.kind.clone(),
            state,
            refusal: self.refusal.clone(),
        }
    }
}

impl Identity {
    /// The identity of the file system that holds `path`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn of(path: &std::path::Path) -> std::io::Result<Self> {
        let stat = rustix::fs::statfs(path)?;
        // SAFETY: both are eight bytes of plain integers.
        let fsid = unsafe { std::mem::transmute::<rustix::fs::Fsid, [u8; 8]>(stat.f_fsid) };
        let size = (stat.f_blocks as u64).saturating_mul(stat.f_bsize as u64);
        Ok(Self { fsid, size })
    }
}
