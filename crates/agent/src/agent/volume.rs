// SPDX-License-Identifier: Apache-2.0
//! A file system with blocks on it, as long as it stays mounted.

use std::collections::VecDeque;
use std::path::PathBuf;

use viola_proto::agent::FsId;

use crate::core::block::Millis;
use crate::core::place::EntryId;
use crate::io::links::Links;
use crate::io::mounts::Mount;
use crate::io::status::VolumeReport;
use crate::io::worker::{Job, Report, Workers};
use crate::pipe::Uses;

/// Whether the host knows the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Proof {
    /// Not in this session.
    None,
    /// The mapper writes it.
    Writing,
    /// The host has it since then.
    Sent(Millis),
    /// The host has found the disk.
    Good,
    /// Not possible, for this reason; tried again later.
    Bad(String, Millis),
}

/// What a file system is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// As in the kernel's events.
    pub fsid: [u8; 8],
    /// Its size in bytes.
    pub size: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Volume {
    /// Its number.
    pub fs: FsId,
    /// Its mount.
    pub mount: Mount,
    /// What it is.
    pub identity: Identity,
    /// The data directories on it.
    pub data: Vec<PathBuf>,
    /// What pipes may do with it.
    pub uses: Uses,
    /// Its workers.
    pub workers: Workers,
    /// Whether the host knows its disk.
    pub proof: Proof,
    /// How often a proof was not accepted in a row.
    pub failures: u32,
    /// It is not mounted any more; it goes when no lease of it is left.
    pub retiring: bool,
    /// Its folders are being read.
    pub scanning: bool,
    /// When they are read next.
    pub scan_at: Millis,
    /// Blocks to be looked at again.
    pub check: VecDeque<EntryId>,
    /// When all blocks were last taken for moved by a defragmentation.
    pub relocated: Millis,
    /// It is taken for frozen.
    pub frozen: bool,
    /// Why the last block that was not named was not.
    pub refusal: Option<String>,
}

impl Volume {
    /// Starts its workers.
    pub fn start(
        fs: FsId,
        mount: Mount,
        identity: Identity,
        (data, uses): (Vec<PathBuf>, Uses),
        report: &Report,
        run: u64,
        now: Millis,
    ) -> std::io::Result<Self> {
        let links = Links::new(&mount.point, run);
        let workers = Workers::start(fs, &links, report)?;
        workers.give(Job::Earlier(false));
        Ok(Self {
            fs,
            mount,
            identity,
            data,
            uses,
            workers,
            proof: Proof::None,
            failures: 0,
            retiring: false,
            scanning: false,
            scan_at: now,
            check: VecDeque::new(),
            relocated: 0,
            frozen: false,
            refusal: None,
        })
    }

    /// Writes a new proof, unless one is just being written.
    pub fn prove(&mut self) {
        if self.proof != Proof::Writing && !self.retiring {
            self.proof = Proof::Writing;
            self.workers.give(Job::Prove);
        }
    }

    /// The proof was not written or not accepted.
    pub fn not_proven(&mut self, why: String, now: Millis) {
        // 5, 10, 20 s... to five minutes
        let wait = 5000 << self.failures.min(6);
        self.failures += 1;
        self.proof = Proof::Bad(why, now + wait.min(300_000));
    }

    /// For people.
    pub fn report(&self) -> VolumeReport {
        let state = match &self.proof {
            _ if self.retiring => "not mounted any more; waiting for the host to let go".into(),
            _ if self.frozen => "frozen, or too slow: nothing is named".into(),
            Proof::None => "waiting for the host".into(),
            Proof::Writing | Proof::Sent(_) => "showing the host which disk it is on".into(),
            Proof::Good => "the host reads its disk".into(),
            Proof::Bad(why, _) => format!("not named: {why}"),
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
    /// Of the file system that holds a path.
    pub fn of(path: &std::path::Path) -> std::io::Result<Self> {
        use std::os::unix::ffi::OsStrExt;
        let path = std::ffi::CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: all zeros is a valid statfs.
        let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the path ends in NUL, and the structure is ours to be written.
        if unsafe { libc::statfs(path.as_ptr(), &raw mut stat) } < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: fsid_t is two 32-bit numbers, as long and as plain as eight bytes.
        let fsid = unsafe { std::mem::transmute::<libc::fsid_t, [u8; 8]>(stat.f_fsid) };
        let size = (stat.f_blocks as u64).saturating_mul(stat.f_bsize as u64);
        Ok(Self { fsid, size })
    }
}
