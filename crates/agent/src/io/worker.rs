// SPDX-License-Identifier: Apache-2.0
//! Threads that do what can take long: a frozen or slow file system must not keep the agent from
//! listening.
//!
//! Each file system has two: the hands make and remove links, in the order in which they are told; the
//! mapper finds extents, which brings a file's bytes to the disk first and so takes as long as the disk.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use viola_extents::guest::{Mapper, Refusal};
use viola_proto::agent::{DiskName, Extent, FileMap, FsId};

use super::links::{Links, NotLinked, file_id};
use super::scan::scan;
use crate::core::block::{After, Millis};
use crate::core::door::Answer;
use crate::core::place::{EntryId, FileId, Maps, Pin, Place};

/// Milliseconds since the program's start.
pub fn now() -> Millis {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// What a worker is told.
#[derive(Debug)]
pub enum Job {
    /// Make the links.
    Link(EntryId, Place),
    /// Remove them.
    Drop(EntryId, Place),
    /// Find the extents of the linked files.
    Map(EntryId, u64, Place, Pin),
    /// Count what links of earlier runs hold back; with `true` remove them.
    Earlier(bool),
    /// Write a proof.
    Prove,
}

/// What a worker has done.
#[derive(Debug)]
pub enum Outcome {
    /// Links were made, or not.
    Linked(EntryId, Result<Pin, NotLinked>),
    /// Links were removed, or not.
    Dropped(EntryId, bool),
    /// Extents were found, or not; with a sentence that says why.
    Mapped(EntryId, u64, Result<Maps, (After, String)>),
    /// So many bytes are held back by links of earlier runs.
    Earlier(FsId, u64),
    /// A proof was written.
    Proof(FsId, Result<Proof, String>),
    /// A scan has found these.
    Found(Vec<Place>),
    /// A scan has ended.
    Scanned(FsId),
    /// What the DataNode has answered to a read without a token.
    Door(Answer),
}

/// A file that shows which disk holds a file system.
#[derive(Debug)]
pub struct Proof {
    /// The disk.
    pub disk: DiskName,
    /// What is in it.
    pub content: Vec<u8>,
    /// Where it is.
    pub map: FileMap,
}

/// Where outcomes go; wakes the one who takes them.
#[derive(Debug, Clone)]
pub struct Report {
    outcomes: Sender<Outcome>,
    wake: Arc<OwnedFd>,
}

impl Report {
    /// A way for outcomes, and its other end: a queue, and a descriptor that is readable when there is
    /// something in it.
    pub fn new() -> std::io::Result<(Self, Receiver<Outcome>, Arc<OwnedFd>)> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let (outcomes, queue) = channel();
        let report = Self {
            outcomes,
            wake: Arc::clone(&wake),
        };
        Ok((report, queue, wake))
    }

    /// Reports; `false` when nobody listens any more.
    pub fn say(&self, outcome: Outcome) -> bool {
        let said = self.outcomes.send(outcome).is_ok();
        // full: then it is readable anyway
        let _ = rustix::io::write(&*self.wake, &1_u64.to_ne_bytes());
        said
    }
}

/// The workers of one file system; they end when this is dropped.
#[derive(Debug)]
pub struct Workers {
    hands: Sender<Job>,
    mapper: Sender<Job>,
    /// When the hands began what they do now; 0 when they rest.
    since: Arc<AtomicU64>,
    fs: FsId,
    report: Report,
}

impl Workers {
    /// Starts them.
    pub fn start(fs: FsId, links: &Links, report: &Report) -> std::io::Result<Self> {
        let since = Arc::new(AtomicU64::new(0));
        let (hands, jobs) = channel();
        let (links_there, report_there, at) = (links.clone(), report.clone(), Arc::clone(&since));
        spawn("viola-hands", move || {
            for job in jobs {
                at.store(now().max(1), Ordering::Relaxed);
                let outcome = hand(fs, &links_there, job);
                at.store(0, Ordering::Relaxed);
                if outcome.is_some_and(|o| !report_there.say(o)) {
                    break;
                }
            }
            links_there.close();
        })?;
        let (mapper, jobs) = channel();
        let (links, report_there) = (links.clone(), report.clone());
        spawn("viola-mapper", move || {
            let mapper = Mapper::new();
            for job in jobs {
                let outcome = map(fs, &links, &mapper, job);
                if outcome.is_some_and(|o| !report_there.say(o)) {
                    break;
                }
            }
        })?;
        Ok(Self {
            hands,
            mapper,
            since,
            fs,
            report: report.clone(),
        })
    }

    /// Gives a job to the one who does such.
    pub fn give(&self, job: Job) {
        let to = match job {
            Job::Map(..) | Job::Prove => &self.mapper,
            Job::Link(..) | Job::Drop(..) | Job::Earlier(_) => &self.hands,
        };
        // a worker ends only with this
        let _ = to.send(job);
    }

    /// How long the hands have been at one job.
    pub fn stuck(&self, now: Millis) -> Millis {
        match self.since.load(Ordering::Relaxed) {
            0 => 0,
            since => now.saturating_sub(since),
        }
    }

    /// Reads all folders in a thread of its own.
    pub fn scan(&self, data: Vec<PathBuf>) -> std::io::Result<()> {
        let (fs, report) = (self.fs, self.report.clone());
        spawn("viola-scan", move || {
            for folder in &data {
                scan(fs, folder, &mut |piece| report.say(Outcome::Found(piece)));
            }
            report.say(Outcome::Scanned(fs));
        })
    }
}

fn spawn(name: &str, task: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(task)
        .map(drop)
}

fn hand(fs: FsId, links: &Links, job: Job) -> Option<Outcome> {
    match job {
        Job::Link(id, place) => Some(Outcome::Linked(id, links.link(id, &place))),
        Job::Drop(id, place) => Some(Outcome::Dropped(id, links.unlink(id, &place))),
        Job::Earlier(remove) => {
            if remove && let Err(e) = links.sweep() {
                eprintln!("viola-agent: removing links of an earlier run: {e}");
            }
            Some(Outcome::Earlier(fs, links.foreign()))
        }
        Job::Map(..) | Job::Prove => None,
    }
}

fn map(fs: FsId, links: &Links, mapper: &Mapper, job: Job) -> Option<Outcome> {
    match job {
        Job::Map(id, turn, place, pin) => {
            let both = (|| {
                Ok(Maps {
                    data: file_map(mapper, &links.data(id, &place), pin.data)?.0,
                    meta: file_map(mapper, &links.meta(id, &place), pin.meta)?.0,
                })
            })();
            Some(Outcome::Mapped(id, turn, both))
        }
        Job::Prove => {
            let proof = links
                .make()
                .and_then(|()| links.proof())
                .map_err(|e| format!("its proof cannot be written: {e}"))
                .and_then(|(file, content)| {
                    let map = mapper.file_extents(&file).map_err(|e| e.to_string())?;
                    let (map, disk) = on_wire(map);
                    Ok(Proof { disk, content, map })
                });
            Some(Outcome::Proof(fs, proof))
        }
        Job::Link(..) | Job::Drop(..) | Job::Earlier(_) => None,
    }
}

/// Extents of a linked file, if it is still the one that was linked.
fn file_map(
    mapper: &Mapper,
    path: &Path,
    is: FileId,
) -> Result<(FileMap, DiskName), (After, String)> {
    let odd = |e: std::io::Error| (After::Fresh, e.to_string());
    let same = |file: &File| match file.metadata() {
        Ok(m) if file_id(&m) == is => Ok(()),
        Ok(_) => Err((
            After::Fresh,
            "it has changed since it was linked".to_owned(),
        )),
        Err(e) => Err(odd(e)),
    };
    let file = File::open(path).map_err(odd)?;
    same(&file)?;
    let map = mapper.file_extents(&file).map_err(|refusal| {
        let after = match refusal {
            Refusal::Io { .. } | Refusal::Changed => After::Again,
            _ => After::Refuse,
        };
        (after, refusal.to_string())
    })?;
    same(&file)?;
    if map.size != is.size {
        return Err((After::Fresh, "it has another length".into()));
    }
    Ok(on_wire(map))
}

/// What is told to the host.
pub(crate) fn on_wire(map: viola_extents::FileMap) -> (FileMap, DiskName) {
    let extents = map
        .extents
        .iter()
        .map(|e| Extent {
            logical: e.logical,
            physical: e.physical,
            length: e.length,
            zero: e.zero,
        })
        .collect();
    let disk = DiskName {
        name: map.disk.name,
        serial: map.disk.serial,
        size: map.disk.size,
    };
    let size = map.size;
    (FileMap { size, extents }, disk)
}
