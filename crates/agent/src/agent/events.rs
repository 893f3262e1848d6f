// SPDX-License-Identifier: Apache-2.0
//! Turns fanotify events into events of blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use viola_proto::agent::{BlockKey, FsId, WithdrawReason};

use super::{Agent, MAX_CHECKS_PER_ROUND, Millis};
use crate::blocks::block::Disposition;
use crate::blocks::layout::{FileKind, finalized_pool};
use crate::blocks::links;
use crate::blocks::scan::generation_stamps;
use crate::blocks::types::{EntryId, Location};
use crate::blocks::watch::{DirEntry, Event, RenameEnd};
use crate::clock::now;
use crate::io::AGENT_DIR;

/// Delay of a scan after the rename of a directory: an upgrade renames several.
const RESCAN_DELAY: Millis = 1000;

/// Maximum number of copies that wait for their second event.
const MAX_COPIES: usize = 1000;

/// Open mounts, for one round of events only: an open directory would keep its file system from being unmounted.
type Mounts = HashMap<FsId, File>;

impl Agent {
    /// Handles all events in the queue.
    ///
    /// # Errors
    /// The kernel's error, when the queue cannot be read.
    pub(super) fn read_events(&mut self) -> std::io::Result<()> {
        let mut mounts = Mounts::new();
        loop {
            let events = self.watch.read()?;
            if events.is_empty() {
                return Ok(());
            }
            let me = std::process::id().cast_signed();
            for event in events {
                if event.mask.is_overflow() {
                    self.overflow();
                } else if event.pid != me {
                    self.handle_event(&event, &mut mounts);
                }
            }
        }
    }

    /// Events were lost: scans and compares everything.
    fn overflow(&mut self) {
        let time = now();
        self.ledger.count_overflow();
        for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
            let all = self.ledger.entries_of_fs(fs);
            for id in &all {
                self.ledger.recheck(time, *id);
            }
            if let Some(volume) = self.volumes.get_mut(&fs) {
                volume.recheck = all.into();
                volume.next_scan = time;
            }
        }
    }

    fn handle_event(&mut self, event: &Event, mounts: &mut Mounts) {
        let time = now();
        let from_copy = event
            .entries
            .iter()
            .any(|s| s.end == RenameEnd::Old && matches!(FileKind::of(&s.name), FileKind::Copy(_)));
        for entry in &event.entries {
            let Some(fs) = self
                .volumes
                .values()
                .find(|v| v.identity.fsid == entry.fsid && !v.retiring)
                .map(|v| v.fs)
            else {
                continue;
            };
            if event.mask.is_directory() {
                if event.mask.is_renamed() || event.mask.is_created() && entry.name == ".fsr" {
                    self.directory_event(time, fs, event, entry, mounts);
                }
                continue;
            }
            let name = FileKind::of(&entry.name);
            match name {
                FileKind::Data(id) | FileKind::Meta(id, _) => {
                    self.file_event(time, fs, event, entry, name, id, from_copy, mounts);
                }
                // HDFS copies a linked file in order to change it: the named file is about to be
                // replaced
                FileKind::Copy(id) => {
                    for entry in self.ledger.entries_of_block(fs, id) {
                        self.ledger.touched(
                            time,
                            entry,
                            Disposition::Forget,
                            WithdrawReason::Changed,
                        );
                    }
                    if event.mask.is_renamed() && entry.end == RenameEnd::Here {
                        let to = entry.name.trim_end_matches(".unlinked");
                        if self.copies.len() >= MAX_COPIES {
                            self.copies.clear();
                        }
                        self.copies.insert((fs, to.to_owned()));
                    }
                }
                FileKind::Defrag(id) => {
                    for entry in self.ledger.entries_of_block(fs, id) {
                        self.ledger.touched(
                            time,
                            entry,
                            Disposition::Remap,
                            WithdrawReason::Relocated,
                        );
                    }
                }
                FileKind::XfsFsr => self.files_defragmented(time, fs, entry, mounts),
                FileKind::Other => {
                    // xfs_fsr on a whole file system works with /.fsr/agN/tmpPID
                    let digits = entry.name.strip_prefix("tmp").unwrap_or_default();
                    if !digits.is_empty()
                        && digits.bytes().all(|b| b.is_ascii_digit())
                        && self
                            .event_directory(fs, entry, mounts)
                            .is_some_and(|f| f.components().any(|c| c.as_os_str() == ".fsr"))
                    {
                        self.relocate(time, fs, None);
                    }
                }
            }
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one event")]
    fn file_event(
        &mut self,
        time: Millis,
        fs: FsId,
        event: &Event,
        entry: &DirEntry,
        name: FileKind,
        id: i64,
        from_copy: bool,
        mounts: &mut Mounts,
    ) {
        let mask = event.mask;
        let why = if mask.is_deleted() {
            WithdrawReason::Deleted
        } else {
            WithdrawReason::Moved
        };
        for entry in self.ledger.entries_of_block(fs, id) {
            self.recheck_block(time, entry, why, Disposition::Forget);
        }
        let copied = from_copy
            || mask.is_renamed()
                && entry.end == RenameEnd::Here
                && self.copies.remove(&(fs, entry.name.clone()));
        let came = (mask.is_created() || mask.is_renamed()) && entry.end != RenameEnd::Old;
        if copied || !(came || mask.is_written()) {
            return;
        }
        let Some(folder) = self.event_directory(fs, entry, mounts) else {
            return;
        };
        if mask.is_written() {
            for entry in self.ledger.entries_of_block(fs, id) {
                if self
                    .ledger
                    .entry(entry)
                    .is_some_and(|e| *e.location.folder == *folder)
                {
                    self.ledger
                        .touched(time, entry, Disposition::Remap, WithdrawReason::Relocated);
                }
            }
        }
        if came && let Some(pool) = self.pool(fs, &folder) {
            self.block_appeared(time, fs, &folder, &pool, name);
        }
    }

    /// A data or checksum file has appeared in a directory of finished blocks.
    fn block_appeared(
        &mut self,
        time: Millis,
        fs: FsId,
        folder: &Path,
        pool: &str,
        name: FileKind,
    ) {
        let (id, stamps) = match name {
            FileKind::Meta(id, stamp) => (id, vec![stamp]),
            FileKind::Data(id) => {
                let known: Vec<u64> = self
                    .ledger
                    .entries_of_block(fs, id)
                    .into_iter()
                    .filter_map(|e| self.ledger.entry(e))
                    .filter(|e| *e.location.folder == *folder)
                    .map(|e| e.location.key.stamp())
                    .collect();
                let stamps = match known.is_empty() {
                    true => generation_stamps(folder, id),
                    false => known,
                };
                (id, stamps)
            }
            _ => return,
        };
        for stamp in stamps {
            if let Ok(key) = BlockKey::new(pool, id, stamp) {
                let place = Location {
                    fs,
                    folder: Arc::from(folder),
                    key,
                };
                // without its checksum file it is no finished block
                if std::fs::symlink_metadata(links::block_files(&place).1).is_ok() {
                    self.ledger.appeared(time, place);
                }
            }
        }
    }

    /// A directory was renamed: blocks may have come or gone with it.
    fn directory_event(
        &mut self,
        time: Millis,
        fs: FsId,
        event: &Event,
        entry: &DirEntry,
        mounts: &mut Mounts,
    ) {
        if entry.name == ".fsr" && event.mask.is_created() {
            return self.relocate(time, fs, None);
        }
        let path = self
            .event_directory(fs, entry, mounts)
            .map(|f| f.join(&entry.name));
        let Some(volume) = self.volumes.get_mut(&fs) else {
            return;
        };
        let ours = |path: &PathBuf| {
            volume
                .data
                .iter()
                .any(|d| path.starts_with(d) || d.starts_with(path))
        };
        if path.as_ref().is_none_or(ours) {
            volume.next_scan = volume.next_scan.min(time + RESCAN_DELAY);
            let all = self.ledger.entries_of_fs(fs);
            if let Some(volume) = self.volumes.get_mut(&fs) {
                volume.recheck = all.into();
            }
        }
    }

    /// xfs_fsr works on the files of one directory, or of the whole file system.
    fn files_defragmented(
        &mut self,
        time: Millis,
        fs: FsId,
        entry: &DirEntry,
        mounts: &mut Mounts,
    ) {
        let folder = self.event_directory(fs, entry, mounts);
        let folder = folder.filter(|f| self.pool(fs, f).is_some());
        self.relocate(time, fs, folder.as_deref());
    }

    fn relocate(&mut self, time: Millis, fs: FsId, folder: Option<&Path>) {
        // xfs_fsr makes a temporary file for each file: acting on a fraction of them is enough to keep blocks
        // from being named
        if let (None, Some(volume)) = (folder, self.volumes.get_mut(&fs)) {
            if volume.relocated_at + self.config.quiet_ms / 4 > time {
                return;
            }
            volume.relocated_at = time;
        }
        for id in self.ledger.entries_of_fs(fs) {
            let here = |e: &crate::blocks::ledger::Entry| {
                e.fingerprint.is_some() && folder.is_none_or(|f| *e.location.folder == *f)
            };
            if self.ledger.entry(id).is_some_and(here) {
                self.ledger
                    .touched(time, id, Disposition::Remap, WithdrawReason::Relocated);
            }
        }
    }

    /// Path of an event's directory; `None` for the agent's own directory, and for one that is gone.
    fn event_directory(&self, fs: FsId, entry: &DirEntry, mounts: &mut Mounts) -> Option<PathBuf> {
        let point = &self.volumes.get(&fs)?.mount.point;
        let mount = match mounts.entry(fs) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(new) => new.insert(File::open(point).ok()?),
        };
        let folder = entry.directory(mount.as_fd()).ok()?;
        (!folder.starts_with(point.join(AGENT_DIR))).then_some(folder)
    }

    /// The pool whose finished blocks lie in a directory.
    fn pool(&self, fs: FsId, folder: &Path) -> Option<String> {
        let data = &self.volumes.get(&fs)?.data;
        data.iter()
            .find_map(|d| finalized_pool(d, folder))
            .map(str::to_owned)
    }

    /// Checks the files of some of the blocks that wait for it.
    pub(super) fn recheck_blocks(&mut self, time: Millis) {
        for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
            let Some(volume) = self.volumes.get_mut(&fs) else {
                continue;
            };
            let some = volume.recheck.len().min(MAX_CHECKS_PER_ROUND);
            for id in volume.recheck.drain(..some).collect::<Vec<_>>() {
                self.recheck_block(time, id, WithdrawReason::Moved, Disposition::Relink);
            }
        }
    }

    /// Checks whether a block's files are still those that were linked. `replaced` is what becomes of the block
    /// when other files have its names.
    fn recheck_block(
        &mut self,
        time: Millis,
        id: EntryId,
        gone: WithdrawReason,
        replaced: Disposition,
    ) {
        let Some(entry) = self.ledger.entry(id) else {
            return;
        };
        let (data, meta) = links::block_files(&entry.location);
        let (after, why) = match (links::fingerprint(&data, &meta), entry.fingerprint) {
            (Err(_), _) => (Disposition::Forget, gone),
            (Ok(is), Some(was)) if is == was => return,
            (Ok(is), Some(was)) => {
                let same = is.data.inode == was.data.inode && is.meta.inode == was.meta.inode;
                // same inodes: the file was changed in place although it was linked
                (
                    if same { Disposition::Relink } else { replaced },
                    WithdrawReason::Changed,
                )
            }
            (Ok(_), None) => return,
        };
        self.ledger.touched(time, id, after, why);
    }
}
