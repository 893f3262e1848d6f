// SPDX-License-Identifier: Apache-2.0
//! The agent's folder on a file system of blocks: hard links, and the file that proves the disk.
//!
//! `MOUNT/.viola/links-RUN/` holds the links of one run of the agent. Links of earlier runs may still be
//! read through: they are counted, and swept only when the host has ended those sessions.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use viola_proto::agent::PROOF_BYTES;

use super::scan;
use crate::core::block::After;
use crate::core::place::{EntryId, FileId, Pin, Place};

/// Name of the agent's folder.
pub const FOLDER: &str = ".viola";

const PREFIX: &str = "links-";

/// See the module.
#[derive(Debug, Clone)]
pub struct Links {
    top: PathBuf,
    own: PathBuf,
}

/// Why no links were made.
#[derive(Debug, PartialEq, Eq)]
pub struct NotLinked {
    /// What becomes of the block.
    pub after: After,
    /// Whether a link was made all the same and could not be removed.
    pub left: bool,
}

impl Links {
    /// Names the folders; `run` is a number that no other run has.
    pub fn new(mount: &Path, run: u64) -> Self {
        let top = mount.join(FOLDER);
        Self {
            own: top.join(format!("{PREFIX}{run:016x}")),
            top,
        }
    }

    /// Makes the folders.
    pub fn make(&self) -> Result<()> {
        for folder in [&self.top, &self.own] {
            match DirBuilder::new().mode(0o700).create(folder) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                other => other?,
            }
            // whoever owns the file system's top could have put a link there
            if !fs::symlink_metadata(folder)?.is_dir() {
                return Err(Error::other(format!("{} is no folder", folder.display())));
            }
        }
        Ok(())
    }

    /// The link to a block's data file.
    pub fn data(&self, id: EntryId, place: &Place) -> PathBuf {
        self.own.join(format!("{}-{id}", place.key.data_name()))
    }

    /// The link to its checksum file.
    pub fn meta(&self, id: EntryId, place: &Place) -> PathBuf {
        self.own
            .join(format!("{}-{id}.meta", place.key.data_name()))
    }

    /// Links both files of a block, if they are the same before and after.
    pub fn link(&self, id: EntryId, place: &Place) -> std::result::Result<Pin, NotLinked> {
        let (data, meta) = paths(place);
        let (to_data, to_meta) = (self.data(id, place), self.meta(id, place));
        let tried = (|| {
            if copying(place) {
                return Err(After::Fresh);
            }
            let before = pin(&data, &meta).map_err(|e| failure(&e))?;
            fs::hard_link(&data, &to_data).map_err(|e| failure(&e))?;
            fs::hard_link(&meta, &to_meta).map_err(|e| failure(&e))?;
            let there = pin(&data, &meta).map_err(|e| failure(&e))?;
            let ours = pin(&to_data, &to_meta).map_err(|e| failure(&e))?;
            let one = scan::metas(&place.folder, place.key.id()) == [place.key.stamp()];
            if there != before || ours != before || !one || copying(place) {
                return Err(After::Fresh);
            }
            Ok(ours)
        })();
        tried.map_err(|after| NotLinked {
            after,
            left: !self.unlink(id, place),
        })
    }

    /// Removes both links; whether none is left.
    pub fn unlink(&self, id: EntryId, place: &Place) -> bool {
        [self.data(id, place), self.meta(id, place)]
            .iter()
            .all(|path| match fs::remove_file(path) {
                Ok(()) => true,
                Err(e) => e.kind() == ErrorKind::NotFound || gone(&self.own),
            })
    }

    /// Bytes that links of earlier runs alone hold back.
    pub fn foreign(&self) -> u64 {
        self.earlier()
            .iter()
            .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten())
            .filter_map(|file| file.metadata().ok())
            .filter(|m| m.is_file() && m.nlink() == 1)
            .map(|m| m.len())
            .sum()
    }

    /// Removes the links of earlier runs: only after the host has ended their sessions.
    pub fn sweep(&self) -> Result<()> {
        for folder in self.earlier() {
            fs::remove_dir_all(&folder)?;
        }
        Ok(())
    }

    /// Removes the folder of this run, when nothing is in it any more.
    pub fn close(&self) {
        let _ = fs::remove_dir(&self.own);
    }

    fn earlier(&self) -> Vec<PathBuf> {
        let name_fits = |path: &PathBuf| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(PREFIX))
        };
        fs::read_dir(&self.top)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()))
            .map(|entry| entry.path())
            .filter(|path| *path != self.own && name_fits(path))
            .collect()
    }

    /// Writes a fresh file of random bytes for a proof, and brings it to the disk.
    pub fn proof(&self) -> Result<(File, Vec<u8>)> {
        let mut content = vec![0; PROOF_BYTES];
        let mut have = 0;
        while have < content.len() {
            have += rustix::rand::getrandom(
                &mut content[have..],
                rustix::rand::GetRandomFlags::empty(),
            )?;
        }
        let path = self.top.join("proof");
        match fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let mut file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        file.write_all(&content)?;
        file.sync_all()?;
        Ok((file, content))
    }
}

/// The two files of a block in its place.
pub fn paths(place: &Place) -> (PathBuf, PathBuf) {
    let key = &place.key;
    (
        place.folder.join(format!("blk_{}", key.id())),
        place.folder.join(key.meta_name()),
    )
}

/// What two files are now. They must be files, not links to some.
pub fn pin(data: &Path, meta: &Path) -> Result<Pin> {
    let of = |path: &Path| -> Result<FileId> {
        let m = fs::symlink_metadata(path)?;
        if !m.is_file() {
            return Err(ErrorKind::NotFound.into());
        }
        Ok(file_id(&m))
    };
    Ok(Pin {
        data: of(data)?,
        meta: of(meta)?,
    })
}

/// What a file is now.
pub fn file_id(m: &Metadata) -> FileId {
    FileId {
        inode: m.ino(),
        size: m.len(),
        mtime: i128::from(m.mtime()) * 1_000_000_000 + i128::from(m.mtime_nsec()),
    }
}

/// Whether the DataNode makes copies of the block's files, which it is about to change.
fn copying(place: &Place) -> bool {
    let (data, meta) = paths(place);
    [data, meta].into_iter().any(|path| {
        let mut path = path.into_os_string();
        path.push(".unlinked");
        fs::symlink_metadata(path).is_ok()
    })
}

/// Whether a folder is not there, as after an unmount.
fn gone(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

fn failure(e: &Error) -> After {
    match e.raw_os_error() {
        _ if e.kind() == ErrorKind::NotFound => After::Forget,
        Some(libc::EXDEV | libc::EMLINK | libc::EPERM) => After::Refuse,
        _ => After::Fresh,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use viola_proto::agent::BlockKey;

    struct Bench {
        folder: tempfile::TempDir,
        links: Links,
        place: Place,
    }

    fn bench() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let links = Links::new(folder.path(), 7);
        links.make().unwrap();
        let blocks = folder.path().join("blocks");
        fs::create_dir(&blocks).unwrap();
        fs::write(blocks.join("blk_7"), "data").unwrap();
        fs::write(blocks.join("blk_7_1001.meta"), "sums").unwrap();
        let place = Place {
            fs: 0,
            folder: Arc::from(blocks),
            key: BlockKey::new("BP-1", 7, 1001).unwrap(),
        };
        Bench {
            folder,
            links,
            place,
        }
    }

    fn names(path: &Path) -> usize {
        fs::read_dir(path).unwrap().count()
    }

    #[test]
    fn a_block_is_held_after_its_deletion_until_it_is_dropped() {
        let b = bench();
        let pin = b.links.link(1, &b.place).unwrap();
        assert_eq!((pin.data.size, pin.bytes()), (4, 8));
        let (data, meta) = paths(&b.place);
        fs::remove_file(data).unwrap();
        fs::remove_file(meta).unwrap();
        let link = b.links.data(1, &b.place);
        assert_eq!(fs::read(&link).unwrap(), b"data");
        assert_eq!(fs::metadata(&link).unwrap().nlink(), 1);
        assert!(b.links.unlink(1, &b.place));
        assert!(b.links.unlink(1, &b.place), "twice is as good as once");
        assert_eq!(names(&b.links.own), 0);
    }

    #[test]
    fn half_a_block_is_not_linked() {
        let b = bench();
        fs::remove_file(paths(&b.place).1).unwrap();
        let failed = b.links.link(1, &b.place).unwrap_err();
        assert_eq!((failed.after, failed.left), (After::Forget, false));
        assert_eq!(names(&b.links.own), 0);
    }

    #[test]
    fn a_block_that_is_being_copied_is_not_linked() {
        let b = bench();
        fs::write(b.place.folder.join("blk_7.unlinked"), "da").unwrap();
        let failed = b.links.link(1, &b.place).unwrap_err();
        assert_eq!(failed.after, After::Fresh);
        assert_eq!(names(&b.links.own), 0);
    }

    #[test]
    fn a_symbolic_link_is_no_block() {
        let b = bench();
        let (data, _) = paths(&b.place);
        fs::remove_file(&data).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &data).unwrap();
        assert!(b.links.link(1, &b.place).is_err());
        assert_eq!(names(&b.links.own), 0);
    }

    #[test]
    fn links_of_an_earlier_run_are_counted_and_swept() {
        let b = bench();
        b.links.link(1, &b.place).unwrap();
        let next = Links::new(b.folder.path(), 8);
        next.make().unwrap();
        assert_eq!(next.foreign(), 0, "the DataNode has them still");
        let (data, _) = paths(&b.place);
        fs::remove_file(data).unwrap();
        assert_eq!(next.foreign(), 4);
        next.link(1, &b.place).unwrap_err();
        next.sweep().unwrap();
        assert_eq!(next.foreign(), 0);
        assert!(!b.links.own.exists());
        assert!(next.own.exists());
    }

    #[test]
    fn a_proof_is_new_each_time() {
        let b = bench();
        let (_, one) = b.links.proof().unwrap();
        let (file, two) = b.links.proof().unwrap();
        assert_eq!(two.len(), PROOF_BYTES);
        assert_eq!(file.metadata().unwrap().len() as usize, PROOF_BYTES);
        assert_ne!(one, two);
    }

    #[test]
    fn a_link_in_the_place_of_the_folder_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/tmp", folder.path().join(FOLDER)).unwrap();
        assert!(Links::new(folder.path(), 1).make().is_err());
    }
}
