// SPDX-License-Identifier: Apache-2.0
//! Which file systems hold the configured directories, and whether they are still the same.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use viola_proto::agent::{FsId, WithdrawReason};

use super::volume::{Identity, ProofState, Volume};
use super::{Agent, FROZEN_TIMEOUT, Millis};
use crate::blocks::block::Disposition;
use crate::blocks::worker::Job;
use crate::io::mounts::{self, Mount};
use crate::io::random::random;
use crate::pipe::PipeAccess;

/// Between two reads of the mount table.
const MOUNT_CHECK_INTERVAL: Millis = 1000;

/// A mount that holds configured directories.
#[derive(Debug)]
struct UsedMount {
    mount: Mount,
    /// Data directories on it.
    data: Vec<PathBuf>,
    /// What pipes may do on it.
    pipe_access: PipeAccess,
}

/// What a configured directory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Blocks,
    PipeSource,
    PipeSink,
}

impl Agent {
    /// Reads the mount table, starts and retires volumes, and starts scans.
    pub(super) fn check_mounts(&mut self, now: Millis) {
        if self.next_mount_check <= now {
            self.next_mount_check = now + MOUNT_CHECK_INTERVAL;
            let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            let mounts = mounts::parse(&text);
            self.unusable.clear();
            let used_mounts = self.find_mounts(&mounts);
            for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
                self.check_volume(now, fs, &used_mounts);
            }
            if self.end_by.is_none() {
                self.start_volumes(now, used_mounts);
            }
            let ledger = &self.ledger;
            self.volumes
                .retain(|fs, v| !v.retiring || !ledger.entries_of_fs(*fs).is_empty());
        }
        for volume in self.volumes.values_mut() {
            if !volume.scanning && !volume.retiring && volume.next_scan <= now {
                volume.next_scan = now + self.config.rescan_s * 1000;
                volume.scanning = volume.workers.scan(volume.data.clone()).is_ok();
            }
        }
    }

    /// Finds the mounts that hold configured directories.
    fn find_mounts(&mut self, mounts: &[Mount]) -> BTreeMap<u64, UsedMount> {
        let mut used_mounts = BTreeMap::<u64, UsedMount>::new();
        let none: &[PathBuf] = &[];
        let (from, into) = match self.config.pipes() {
            Some(pipe) => (pipe.files.as_slice(), pipe.into.as_slice()),
            None => (none, none),
        };
        let data = self.config.data.iter().map(|path| (path, Purpose::Blocks));
        // pipes need the disk of the file system only
        let piped = from.iter().map(|path| (path, Purpose::PipeSource));
        let piped = piped.chain(into.iter().map(|path| (path, Purpose::PipeSink)));
        for (path, purpose) in data.chain(piped) {
            let found = mount_of(mounts, path).and_then(|(mount, path)| {
                if purpose == Purpose::PipeSink && mount.kind != "ext4" {
                    return Err(format!("it is on {}; pipes write only to ext4", mount.kind));
                }
                // the volume of the other mount has the links directory and the events
                let other = used_mounts
                    .values()
                    .map(|other| &other.mount)
                    .find(|other| other.device == mount.device && other.id != mount.id);
                match other {
                    None => Ok((mount, path)),
                    Some(other) => Err(format!(
                        "its file system is mounted at {} too; name both directories by one mount",
                        other.point.display()
                    )),
                }
            });
            match found {
                Ok((mount, path)) => {
                    let used = used_mounts.entry(mount.id).or_insert_with(|| UsedMount {
                        mount: mount.clone(),
                        data: Vec::new(),
                        pipe_access: PipeAccess::default(),
                    });
                    match purpose {
                        Purpose::Blocks => used.data.push(path),
                        Purpose::PipeSource => used.pipe_access.read = true,
                        Purpose::PipeSink => used.pipe_access.write = true,
                    }
                }
                Err(why) => self.unusable.push(format!("{}: {why}", path.display())),
            }
        }
        used_mounts
    }

    /// Checks whether a volume is still the same file system.
    fn check_volume(&mut self, now: Millis, fs: FsId, used_mounts: &BTreeMap<u64, UsedMount>) {
        let Some(volume) = self.volumes.get_mut(&fs).filter(|v| !v.retiring) else {
            return;
        };
        let stuck = volume.workers.busy_for(now) >= FROZEN_TIMEOUT;
        let thawed = volume.frozen && !stuck;
        volume.frozen = stuck;
        let is = used_mounts.get(&volume.mount.id);
        volume.pipe_access = is.map_or(PipeAccess::default(), |used| used.pipe_access);
        let (mount, data) = match is {
            Some(used) if used.mount.point == volume.mount.point => (&used.mount, &used.data),
            _ => {
                volume.retiring = true;
                eprintln!(
                    "viola-agent: {}: unmounted: all blocks withdrawn",
                    volume.mount.point.display()
                );
                return self.withdraw_all(now, fs, Disposition::Forget, WithdrawReason::Filesystem);
            }
        };
        if *data != volume.data {
            if volume.data.is_empty()
                && let Err(e) = self.watch.add(&mount.point)
            {
                let path = mount.point.display();
                return self
                    .unusable
                    .push(format!("{path}: cannot be watched: {e}"));
            }
            volume.data.clone_from(data);
            volume.next_scan = now;
        }
        let identity = Identity::of(&mount.point).unwrap_or(volume.identity);
        let why = if mount.options != volume.mount.options {
            "mounted with other options"
        } else if identity != volume.identity {
            "resized"
        } else if stuck && !thawed && volume.proof != ProofState::Unproven {
            "frozen, or too slow"
        } else {
            return;
        };
        eprintln!(
            "viola-agent: {}: {why}: all blocks withdrawn until the host has checked a new proof",
            mount.point.display()
        );
        volume.mount = mount.clone();
        volume.identity = identity;
        self.withdraw_all(now, fs, Disposition::Remap, WithdrawReason::Filesystem);
    }

    /// Starts volumes for new mounts. A mount whose directories or device an old volume still has must wait until
    /// the host has released that volume.
    fn start_volumes(&mut self, now: Millis, used_mounts: BTreeMap<u64, UsedMount>) {
        for (
            id,
            UsedMount {
                mount,
                data,
                pipe_access,
            },
        ) in used_mounts
        {
            let taken = |v: &Volume| {
                v.mount.id == id
                    || v.mount.device == mount.device
                    || v.data.iter().any(|d| data.contains(d))
            };
            if self.volumes.values().any(taken) {
                continue;
            }
            let point = mount.point.clone();
            let started = Identity::of(&point).and_then(|identity| {
                // without data directories no events are needed: pipes watch their files by leases
                if !data.is_empty() {
                    self.watch.add(&point)?;
                }
                let fs = self.next_fs;
                let volume = Volume::start(
                    fs,
                    mount,
                    identity,
                    (data, pipe_access),
                    &self.outcome_sender,
                    random(),
                    now,
                )?;
                self.next_fs += 1;
                if self.session.is_open() {
                    // no lease of an earlier session or mount is left, see above
                    volume.workers.send(Job::EarlierLinks(true));
                }
                self.volumes.insert(fs, volume);
                Ok(fs)
            });
            match started {
                Ok(_) => eprintln!("viola-agent: {}: watched", point.display()),
                Err(e) => self
                    .unusable
                    .push(format!("{}: cannot be watched: {e}", point.display())),
            }
        }
    }
}

/// The mount that holds a directory, and the directory's canonical path.
fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Result<(&'a Mount, PathBuf), String> {
    let real = path.canonicalize().map_err(|e| e.to_string())?;
    let mount = mounts::holding(mounts, &real).ok_or("no mount holds it")?;
    if !matches!(mount.kind.as_str(), "ext4" | "xfs") {
        return Err(format!(
            "it is on {}; only ext4 and XFS are supported",
            mount.kind
        ));
    }
    Ok((mount, real))
}
