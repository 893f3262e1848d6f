// SPDX-License-Identifier: Apache-2.0
//! Threads that wait for disks, so that a frozen or slow file system does not block the main loop.
//!
//! Each file system has two threads. The linker makes and removes links in the order of its jobs. The mapper finds
//! extents; it first syncs the file, which takes as long as the disk needs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

use viola_extents::guest::{Mapper, Refusal};
use viola_proto::agent::{Challenge, DiskName, FileMap, FsId};

use super::access::Probe;
use super::block::Disposition;
use super::links::{LinkError, Links, file_id};
use super::scan::scan;
use super::types::{BlockMaps, EntryId, FileId, Fingerprint, Location};
use crate::clock::{Millis, now};
use crate::io::extents::to_wire;
use crate::io::queue;

/// A job for a worker.
#[derive(Debug)]
pub enum Job {
    /// Link a block.
    Link(EntryId, Location),
    /// Remove a block's links.
    Unlink(EntryId, Location),
    /// Find the extents of the linked files.
    Map(EntryId, u64, Location, Fingerprint),
    /// Count the bytes that links of earlier runs hold; with `true` remove those links first.
    EarlierLinks(bool),
    /// Write a proof file for the session with this challenge.
    Prove(Challenge),
}

/// The result of a job.
#[derive(Debug)]
pub enum Outcome {
    /// Result of [`Job::Link`].
    Linked(EntryId, Result<Fingerprint, LinkError>),
    /// Result of [`Job::Unlink`]: whether no link is left.
    Unlinked(EntryId, bool),
    /// Result of [`Job::Map`], with the reason for people when it failed.
    Mapped(EntryId, u64, Result<BlockMaps, (Disposition, String)>),
    /// Bytes that links of earlier runs hold.
    EarlierLinks(FsId, u64),
    /// Result of [`Job::Prove`], with its challenge.
    Proof(FsId, Challenge, Result<Proof, String>),
    /// Blocks that a scan has found.
    ScanBatch(Vec<Location>),
    /// A scan has ended.
    ScanDone(FsId),
    /// Result of a probe of the DataNode.
    Probed(Probe),
}

/// Where a proof file is: the host looks for its content there.
#[derive(Debug)]
pub struct Proof {
    /// The disk that the guest's kernel names.
    pub disk: DiskName,
    /// Its extents.
    pub map: FileMap,
}

/// The workers of one file system. They end when this is dropped.
#[derive(Debug)]
pub struct Workers {
    linker: Sender<Job>,
    mapper: Sender<Job>,
    /// When the linker began its current job, in [`Millis`]; 0 while it is idle.
    since: Arc<AtomicU64>,
    fs: FsId,
    outcomes: queue::Sender<Outcome>,
}

impl Workers {
    /// Starts both threads.
    ///
    /// # Errors
    /// The kernel's error, when a thread cannot be started.
    pub fn start(
        fs: FsId,
        links: &Links,
        outcomes: &queue::Sender<Outcome>,
    ) -> std::io::Result<Self> {
        let since = Arc::new(AtomicU64::new(0));
        let (linker, jobs) = channel();
        let (links_there, outcomes_there, at) =
            (links.clone(), outcomes.clone(), Arc::clone(&since));
        spawn_thread("viola-linker", move || {
            for job in jobs {
                at.store(now().max(1), Ordering::Relaxed);
                let outcome = run_link_job(fs, &links_there, job);
                at.store(0, Ordering::Relaxed);
                if outcome.is_some_and(|o| !outcomes_there.send(o)) {
                    break;
                }
            }
            links_there.remove_dir();
        })?;
        let (mapper, jobs) = channel();
        let (links, outcomes_there) = (links.clone(), outcomes.clone());
        spawn_thread("viola-mapper", move || {
            let mapper = Mapper::new();
            for job in jobs {
                let outcome = run_map_job(fs, &links, &mapper, job);
                if outcome.is_some_and(|o| !outcomes_there.send(o)) {
                    break;
                }
            }
        })?;
        Ok(Self {
            linker,
            mapper,
            since,
            fs,
            outcomes: outcomes.clone(),
        })
    }

    /// Sends a job to the thread that does such jobs.
    pub fn send(&self, job: Job) {
        let to = match job {
            Job::Map(..) | Job::Prove(_) => &self.mapper,
            Job::Link(..) | Job::Unlink(..) | Job::EarlierLinks(_) => &self.linker,
        };
        // the worker lives as long as this sender
        let _ = to.send(job);
    }

    /// How long the linker has worked on its current job, in milliseconds.
    pub fn busy_for(&self, now: Millis) -> Millis {
        match self.since.load(Ordering::Relaxed) {
            0 => 0,
            since => now.saturating_sub(since),
        }
    }

    /// Scans the data directories in a thread of its own.
    ///
    /// # Errors
    /// The kernel's error, when the thread cannot be started.
    pub fn scan(&self, data: Vec<PathBuf>) -> std::io::Result<()> {
        let (fs, outcomes) = (self.fs, self.outcomes.clone());
        spawn_thread("viola-scan", move || {
            for folder in &data {
                scan(fs, folder, &mut |piece| {
                    outcomes.send(Outcome::ScanBatch(piece))
                });
            }
            outcomes.send(Outcome::ScanDone(fs));
        })
    }
}

fn spawn_thread(name: &str, task: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(task)
        .map(drop)
}

fn run_link_job(fs: FsId, links: &Links, job: Job) -> Option<Outcome> {
    match job {
        Job::Link(id, location) => Some(Outcome::Linked(id, links.link(id, &location))),
        Job::Unlink(id, location) => Some(Outcome::Unlinked(id, links.unlink(id, &location))),
        Job::EarlierLinks(remove) => {
            if remove && let Err(e) = links.remove_earlier() {
                eprintln!("viola-agent: cannot remove links of an earlier run: {e}");
            }
            Some(Outcome::EarlierLinks(fs, links.earlier_bytes()))
        }
        Job::Map(..) | Job::Prove(_) => None,
    }
}

fn run_map_job(fs: FsId, links: &Links, mapper: &Mapper, job: Job) -> Option<Outcome> {
    match job {
        Job::Map(id, attempt, location, print) => {
            let both = (|| {
                Ok(BlockMaps {
                    data: file_map(mapper, &links.data(id, &location), print.data)?.0,
                    meta: file_map(mapper, &links.meta(id, &location), print.meta)?.0,
                })
            })();
            Some(Outcome::Mapped(id, attempt, both))
        }
        Job::Prove(challenge) => {
            let content = challenge.proof_content(fs);
            let proof = links
                .create_dirs()
                .and_then(|()| links.write_proof(&content))
                .map_err(|e| format!("its proof cannot be written: {e}"))
                .and_then(|file| {
                    let map = mapper.file_extents(&file).map_err(|e| e.to_string())?;
                    let (map, disk) = to_wire(map);
                    Ok(Proof { disk, map })
                });
            Some(Outcome::Proof(fs, challenge, proof))
        }
        Job::Link(..) | Job::Unlink(..) | Job::EarlierLinks(_) => None,
    }
}

/// The extents of a linked file, if it still has the identity that it was linked with.
fn file_map(
    mapper: &Mapper,
    path: &Path,
    is: FileId,
) -> Result<(FileMap, DiskName), (Disposition, String)> {
    let odd = |e: std::io::Error| (Disposition::Relink, e.to_string());
    let same = |file: &File| match file.metadata() {
        Ok(m) if file_id(&m) == is => Ok(()),
        Ok(_) => Err((
            Disposition::Relink,
            "it has changed since it was linked".to_owned(),
        )),
        Err(e) => Err(odd(e)),
    };
    let file = File::open(path).map_err(odd)?;
    same(&file)?;
    let map = mapper.file_extents(&file).map_err(|refusal| {
        let after = match refusal {
            Refusal::Io { .. } | Refusal::Changed => Disposition::Remap,
            _ => Disposition::Refuse,
        };
        (after, refusal.to_string())
    })?;
    same(&file)?;
    if map.size != is.size {
        return Err((Disposition::Relink, "it has another length".into()));
    }
    Ok(to_wire(map))
}
