// SPDX-License-Identifier: Apache-2.0
//! A file system with blocks or files for pipes, from its mount to its unmount.

use std::collections::VecDeque;
use std::path::PathBuf;

use viola_proto::agent::{Challenge, FsId};

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
    /// The mapper writes the proof file for the session with this challenge.
    Writing(Challenge),
    /// The proof was sent at this time.
    Sent(Millis),
    /// The host has recognised the disk.
    Accepted,
    /// The proof failed for this reason; it is tried again at this time.
    Failed(String, Millis),
}

/// What to do with a proof that the mapper has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrittenProof {
    /// Send it.
    Send,
    /// It is of no use any more: prove again, when a session is open.
    Repeat,
    /// Ignore it: a newer one is being written.
    Ignore,
}

impl ProofState {
    /// What to do with a proof of the session with challenge `written`, while `current` is that of the open session.
    pub fn written(&self, written: Challenge, current: Option<Challenge>) -> WrittenProof {
        match self {
            Self::Writing(newer) if *newer != written => WrittenProof::Ignore,
            Self::Writing(_) if current == Some(written) => WrittenProof::Send,
            _ => WrittenProof::Repeat,
        }
    }
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

    /// Starts to write a new proof for the session with this challenge, unless a proof is being written.
    pub fn prove(&mut self, challenge: Challenge) {
        if !matches!(self.proof, ProofState::Writing(_)) && !self.retiring {
            self.proof = ProofState::Writing(challenge);
            self.workers.send(Job::Prove(challenge));
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
            ProofState::Writing(_) | ProofState::Sent(_) => {
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

#[cfg(test)]
mod tests {
    use super::*;
    use viola_proto::agent::CHALLENGE_BYTES;

    #[test]
    fn only_a_proof_of_the_open_session_is_sent() {
        let [old, new] = [1, 2].map(|byte| Challenge([byte; CHALLENGE_BYTES]));
        let writing = ProofState::Writing(old);
        assert_eq!(writing.written(old, Some(old)), WrittenProof::Send);
        assert_eq!(writing.written(old, None), WrittenProof::Repeat);
        // a session opened while the file was written for the one before
        assert_eq!(writing.written(old, Some(new)), WrittenProof::Repeat);
        // the blocks were withdrawn meanwhile, and the next session has its own job
        let writing = ProofState::Writing(new);
        assert_eq!(writing.written(old, Some(new)), WrittenProof::Ignore);
        assert_eq!(
            ProofState::Unproven.written(new, Some(new)),
            WrittenProof::Repeat
        );
    }
}
