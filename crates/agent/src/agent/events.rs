// SPDX-License-Identifier: Apache-2.0
//! From what the kernel says about files to what happened to blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use viola_proto::agent::{BlockKey, FsId, Why};

use super::{Agent, CHECKS, Millis};
use crate::core::block::After;
use crate::core::layout::{Name, finalized_pool};
use crate::core::place::{EntryId, Place};
use crate::io::links::{self, FOLDER};
use crate::io::scan::metas;
use crate::io::watch::{End, Event, Spot};
use crate::io::worker::now;

/// Folders are read again so long after one of them was renamed: an upgrade renames several.
const SETTLE: Millis = 1000;

/// Most copies that are remembered until their second event.
const COPIES: usize = 1000;

/// Open mounts, for one round of events: an open folder would keep its file system from being
/// unmounted.
type Mounts = HashMap<FsId, File>;

impl Agent {
    /// Takes everything that has happened until now.
    pub(super) fn take_events(&mut self) -> std::io::Result<()> {
        let mut mounts = Mounts::new();
        loop {
            let events = self.watch.read()?;
            if events.is_empty() {
                return Ok(());
            }
            let me = std::process::id().cast_signed();
            for event in events {
                if event.what.overflow() {
                    self.overflow();
                } else if event.pid != me {
                    self.event(&event, &mut mounts);
                }
            }
        }
    }

    /// Events are lost: everything is read and compared again.
    fn overflow(&mut self) {
        let time = now();
        self.ledger.count_overflow();
        for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
            let all = self.ledger.of_fs(fs);
            for id in &all {
                self.ledger.recheck(time, *id);
            }
            if let Some(volume) = self.volumes.get_mut(&fs) {
                volume.check = all.into();
                volume.scan_at = time;
            }
        }
    }

    fn event(&mut self, event: &Event, mounts: &mut Mounts) {
        let time = now();
        let from_copy = event
            .spots
            .iter()
            .any(|s| s.end == End::Old && matches!(Name::of(&s.name), Name::Copy(_)));
        for spot in &event.spots {
            let Some(fs) = self
                .volumes
                .values()
                .find(|v| v.identity.fsid == spot.fsid && !v.retiring)
                .map(|v| v.fs)
            else {
                continue;
            };
            if event.what.folder() {
                if event.what.renamed() || event.what.created() && spot.name == ".fsr" {
                    self.folder_event(time, fs, event, spot, mounts);
                }
                continue;
            }
            let name = Name::of(&spot.name);
            match name {
                Name::Data(id) | Name::Meta(id, _) => {
                    self.file_event(time, fs, event, spot, name, id, from_copy, mounts);
                }
                // HDFS copies a linked file in order to change it: what is named is about to be replaced
                Name::Copy(id) => {
                    for entry in self.ledger.of_block(fs, id) {
                        self.ledger
                            .touched(time, entry, After::Forget, Why::Changed);
                    }
                    if event.what.renamed() && spot.end == End::Here {
                        let to = spot.name.trim_end_matches(".unlinked");
                        if self.copies.len() >= COPIES {
                            self.copies.clear();
                        }
                        self.copies.insert((fs, to.to_owned()));
                    }
                }
                Name::Defrag(id) => {
                    for entry in self.ledger.of_block(fs, id) {
                        self.ledger
                            .touched(time, entry, After::Again, Why::Relocated);
                    }
                }
                Name::Reorganise => self.reorganise(time, fs, spot, mounts),
                Name::Other => {
                    // xfs_fsr over a whole file system works with /.fsr/agN/tmpPID
                    let digits = spot.name.strip_prefix("tmp").unwrap_or_default();
                    if !digits.is_empty()
                        && digits.bytes().all(|b| b.is_ascii_digit())
                        && self
                            .folder(fs, spot, mounts)
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
        spot: &Spot,
        name: Name,
        id: i64,
        from_copy: bool,
        mounts: &mut Mounts,
    ) {
        let what = event.what;
        let why = if what.deleted() {
            Why::Deleted
        } else {
            Why::Moved
        };
        for entry in self.ledger.of_block(fs, id) {
            self.check_one(time, entry, why, After::Forget);
        }
        let copied = from_copy
            || what.renamed()
                && spot.end == End::Here
                && self.copies.remove(&(fs, spot.name.clone()));
        let came = (what.created() || what.renamed()) && spot.end != End::Old;
        if copied || !(came || what.written()) {
            return;
        }
        let Some(folder) = self.folder(fs, spot, mounts) else {
            return;
        };
        if what.written() {
            for entry in self.ledger.of_block(fs, id) {
                if self
                    .ledger
                    .entry(entry)
                    .is_some_and(|e| *e.place.folder == *folder)
                {
                    self.ledger
                        .touched(time, entry, After::Again, Why::Relocated);
                }
            }
        }
        if came && let Some(pool) = self.pool(fs, &folder) {
            self.appeared(time, fs, &folder, &pool, name);
        }
    }

    /// A data or checksum file has come into a folder of finished blocks.
    fn appeared(&mut self, time: Millis, fs: FsId, folder: &Path, pool: &str, name: Name) {
        let (id, stamps) = match name {
            Name::Meta(id, stamp) => (id, vec![stamp]),
            Name::Data(id) => {
                let known: Vec<u64> = self
                    .ledger
                    .of_block(fs, id)
                    .into_iter()
                    .filter_map(|e| self.ledger.entry(e))
                    .filter(|e| *e.place.folder == *folder)
                    .map(|e| e.place.key.stamp())
                    .collect();
                let stamps = match known.is_empty() {
                    true => metas(folder, id),
                    false => known,
                };
                (id, stamps)
            }
            _ => return,
        };
        for stamp in stamps {
            if let Ok(key) = BlockKey::new(pool, id, stamp) {
                let place = Place {
                    fs,
                    folder: Arc::from(folder),
                    key,
                };
                // a checksum file that is gone already is no block
                if std::fs::symlink_metadata(links::paths(&place).1).is_ok() {
                    self.ledger.appeared(time, place);
                }
            }
        }
    }

    /// A folder was renamed: blocks may have come or gone with it.
    fn folder_event(
        &mut self,
        time: Millis,
        fs: FsId,
        event: &Event,
        spot: &Spot,
        mounts: &mut Mounts,
    ) {
        if spot.name == ".fsr" && event.what.created() {
            return self.relocate(time, fs, None);
        }
        let path = self.folder(fs, spot, mounts).map(|f| f.join(&spot.name));
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
            volume.scan_at = volume.scan_at.min(time + SETTLE);
            let all = self.ledger.of_fs(fs);
            if let Some(volume) = self.volumes.get_mut(&fs) {
                volume.check = all.into();
            }
        }
    }

    /// xfs_fsr is at work: on the files of one folder, or of all.
    fn reorganise(&mut self, time: Millis, fs: FsId, spot: &Spot, mounts: &mut Mounts) {
        let folder = self.folder(fs, spot, mounts);
        let folder = folder.filter(|f| self.pool(fs, f).is_some());
        self.relocate(time, fs, folder.as_deref());
    }

    fn relocate(&mut self, time: Millis, fs: FsId, folder: Option<&Path>) {
        // a run over a whole file system makes a helper for each file: once in a while is enough to keep
        // all blocks from being quiet
        if let (None, Some(volume)) = (folder, self.volumes.get_mut(&fs)) {
            if volume.relocated + self.config.quiet_ms / 4 > time {
                return;
            }
            volume.relocated = time;
        }
        for id in self.ledger.of_fs(fs) {
            let here = |e: &crate::core::ledger::Entry| {
                e.pin.is_some() && folder.is_none_or(|f| *e.place.folder == *f)
            };
            if self.ledger.entry(id).is_some_and(here) {
                self.ledger.touched(time, id, After::Again, Why::Relocated);
            }
        }
    }

    /// Path of an event's folder; none for the agent's own, and for those that are gone.
    fn folder(&self, fs: FsId, spot: &Spot, mounts: &mut Mounts) -> Option<PathBuf> {
        let point = &self.volumes.get(&fs)?.mount.point;
        let mount = match mounts.entry(fs) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(new) => new.insert(File::open(point).ok()?),
        };
        let folder = spot.folder(mount.as_fd()).ok()?;
        (!folder.starts_with(point.join(FOLDER))).then_some(folder)
    }

    /// The block pool whose finished blocks are in a folder.
    fn pool(&self, fs: FsId, folder: &Path) -> Option<String> {
        let data = &self.volumes.get(&fs)?.data;
        data.iter()
            .find_map(|d| finalized_pool(d, folder))
            .map(str::to_owned)
    }

    /// Looks at some of the blocks that are to be looked at again.
    pub(super) fn check(&mut self, time: Millis) {
        for fs in self.volumes.keys().copied().collect::<Vec<_>>() {
            let Some(volume) = self.volumes.get_mut(&fs) else {
                continue;
            };
            let some = volume.check.len().min(CHECKS);
            for id in volume.check.drain(..some).collect::<Vec<_>>() {
                self.check_one(time, id, Why::Moved, After::Fresh);
            }
        }
    }

    /// Is a block still what was linked? `replaced` is what becomes of it when its place holds other
    /// files now.
    fn check_one(&mut self, time: Millis, id: EntryId, gone: Why, replaced: After) {
        let Some(entry) = self.ledger.entry(id) else {
            return;
        };
        let (data, meta) = links::paths(&entry.place);
        let (after, why) = match (links::pin(&data, &meta), entry.pin) {
            (Err(_), _) => (After::Forget, gone),
            (Ok(is), Some(was)) if is == was => return,
            (Ok(is), Some(was)) => {
                let same = is.data.inode == was.data.inode && is.meta.inode == was.meta.inode;
                // changed in place although it was linked: nothing that is known of it holds
                (if same { After::Fresh } else { replaced }, Why::Changed)
            }
            (Ok(_), None) => return,
        };
        self.ledger.touched(time, id, after, why);
    }
}
