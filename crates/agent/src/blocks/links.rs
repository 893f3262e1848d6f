// SPDX-License-Identifier: Apache-2.0
//! The agent's directory on a file system with blocks: hard links, and the file that proves which disk it is.
//!
//! `MOUNT/.viola/links-RUN/` holds the links of one run of the agent. The host may still read through the links of an
//! earlier run: the agent counts them, and removes them when the host has ended that session.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::scan;
use crate::blocks::block::Disposition;
use crate::blocks::types::{EntryId, FileId, Fingerprint, Location};
use crate::io::AGENT_DIR;

const RUN_DIR_PREFIX: &str = "links-";

/// The directory of one run on one file system.
#[derive(Debug, Clone)]
pub struct Links {
    root: PathBuf,
    run_dir: PathBuf,
}

/// Why a block was not linked.
#[derive(Debug, PartialEq, Eq)]
pub struct LinkError {
    /// What becomes of the block.
    pub then: Disposition,
    /// A link was made and could not be removed again.
    pub leftover: bool,
}

impl Links {
    /// Names the directories; `run` identifies this run of the agent.
    pub fn new(mount: &Path, run: u64) -> Self {
        let root = mount.join(AGENT_DIR);
        Self {
            run_dir: root.join(format!("{RUN_DIR_PREFIX}{run:016x}")),
            root,
        }
    }

    /// Creates the directories.
    ///
    /// # Errors
    /// The kernel's error, or when another file has the name of a directory.
    pub fn create_dirs(&self) -> Result<()> {
        for folder in [&self.root, &self.run_dir] {
            match DirBuilder::new().mode(0o700).create(folder) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                other => other?,
            }
            // the owner of the file system's root could have put a symbolic link there
            if !fs::symlink_metadata(folder)?.is_dir() {
                return Err(Error::other(format!(
                    "{} is not a directory",
                    folder.display()
                )));
            }
        }
        Ok(())
    }

    /// The link to a block's data file.
    pub fn data(&self, id: EntryId, location: &Location) -> PathBuf {
        self.run_dir
            .join(format!("{}-{id}", location.key.data_name()))
    }

    /// The link to its checksum file.
    pub fn meta(&self, id: EntryId, location: &Location) -> PathBuf {
        self.run_dir
            .join(format!("{}-{id}.meta", location.key.data_name()))
    }

    /// Links both files of a block, and checks that they stayed the same meanwhile.
    ///
    /// # Errors
    /// [`LinkError`], when a file is gone, changes or cannot be linked.
    pub fn link(
        &self,
        id: EntryId,
        location: &Location,
    ) -> std::result::Result<Fingerprint, LinkError> {
        let (data, meta) = block_files(location);
        let (to_data, to_meta) = (self.data(id, location), self.meta(id, location));
        let tried = (|| {
            if is_being_copied(location) {
                return Err(Disposition::Relink);
            }
            let before = fingerprint(&data, &meta).map_err(|e| disposition(&e))?;
            fs::hard_link(&data, &to_data).map_err(|e| disposition(&e))?;
            fs::hard_link(&meta, &to_meta).map_err(|e| disposition(&e))?;
            let there = fingerprint(&data, &meta).map_err(|e| disposition(&e))?;
            let ours = fingerprint(&to_data, &to_meta).map_err(|e| disposition(&e))?;
            let one = scan::generation_stamps(&location.folder, location.key.id())
                == [location.key.stamp()];
            if there != before || ours != before || !one || is_being_copied(location) {
                return Err(Disposition::Relink);
            }
            Ok(ours)
        })();
        tried.map_err(|then| LinkError {
            then,
            leftover: !self.unlink(id, location),
        })
    }

    /// Removes both links; `true` when neither is left.
    pub fn unlink(&self, id: EntryId, location: &Location) -> bool {
        [self.data(id, location), self.meta(id, location)]
            .iter()
            .all(|path| match fs::remove_file(path) {
                Ok(()) => true,
                Err(e) => e.kind() == ErrorKind::NotFound || is_missing(&self.run_dir),
            })
    }

    /// Bytes of deleted files that only links of earlier runs hold.
    pub fn earlier_bytes(&self) -> u64 {
        self.earlier()
            .iter()
            .flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten())
            .filter_map(|file| file.metadata().ok())
            .filter(|m| m.is_file() && m.nlink() == 1)
            .map(|m| m.len())
            .sum()
    }

    /// Removes the links of earlier runs. Call it only after the host has ended their sessions.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove_earlier(&self) -> Result<()> {
        for folder in self.earlier() {
            fs::remove_dir_all(&folder)?;
        }
        Ok(())
    }

    /// Removes the directory of this run, if it is empty.
    pub fn remove_dir(&self) {
        let _ = fs::remove_dir(&self.run_dir);
    }

    fn earlier(&self) -> Vec<PathBuf> {
        let name_fits = |path: &PathBuf| {
            path.file_name()
                .and_then(|name| name.to_str())
                .is_some_and(|name| name.starts_with(RUN_DIR_PREFIX))
        };
        fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()))
            .map(|entry| entry.path())
            .filter(|path| *path != self.run_dir && name_fits(path))
            .collect()
    }

    /// Writes a new proof file with this content and syncs it to the disk.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write_proof(&self, content: &[u8]) -> Result<File> {
        let path = self.root.join("proof");
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
        file.write_all(content)?;
        file.sync_all()?;
        Ok(file)
    }
}

/// Data file and checksum file of a block.
pub fn block_files(location: &Location) -> (PathBuf, PathBuf) {
    let key = &location.key;
    (
        location.folder.join(format!("blk_{}", key.id())),
        location.folder.join(key.meta_name()),
    )
}

/// The identity of two files. Fails unless both are regular files.
pub fn fingerprint(data: &Path, meta: &Path) -> Result<Fingerprint> {
    let of = |path: &Path| -> Result<FileId> {
        let m = fs::symlink_metadata(path)?;
        if !m.is_file() {
            return Err(ErrorKind::NotFound.into());
        }
        Ok(file_id(&m))
    };
    Ok(Fingerprint {
        data: of(data)?,
        meta: of(meta)?,
    })
}

/// The identity of a file.
pub fn file_id(m: &Metadata) -> FileId {
    FileId {
        inode: m.ino(),
        size: m.len(),
        mtime: i128::from(m.mtime()) * 1_000_000_000 + i128::from(m.mtime_nsec()),
    }
}

/// Whether the DataNode is copying the block's files in order to change them.
fn is_being_copied(location: &Location) -> bool {
    let (data, meta) = block_files(location);
    [data, meta].into_iter().any(|path| {
        let mut path = path.into_os_string();
        path.push(".unlinked");
        fs::symlink_metadata(path).is_ok()
    })
}

/// Whether a directory is missing, as after an unmount.
fn is_missing(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

fn disposition(e: &Error) -> Disposition {
    match e.raw_os_error() {
        _ if e.kind() == ErrorKind::NotFound => Disposition::Forget,
        Some(libc::EXDEV | libc::EMLINK | libc::EPERM) => Disposition::Refuse,
        _ => Disposition::Relink,
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
        location: Location,
    }

    fn bench() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let links = Links::new(folder.path(), 7);
        links.create_dirs().unwrap();
        let blocks = folder.path().join("blocks");
        fs::create_dir(&blocks).unwrap();
        fs::write(blocks.join("blk_7"), "data").unwrap();
        fs::write(blocks.join("blk_7_1001.meta"), "sums").unwrap();
        let location = Location {
            fs: 0,
            folder: Arc::from(blocks),
            key: BlockKey::new("BP-1", 7, 1001).unwrap(),
        };
        Bench {
            folder,
            links,
            location,
        }
    }

    fn names(path: &Path) -> usize {
        fs::read_dir(path).unwrap().count()
    }

    #[test]
    fn a_deleted_block_is_held_until_it_is_unlinked() {
        let b = bench();
        let print = b.links.link(1, &b.location).unwrap();
        assert_eq!((print.data.size, print.bytes()), (4, 8));
        let (data, meta) = block_files(&b.location);
        fs::remove_file(data).unwrap();
        fs::remove_file(meta).unwrap();
        let link = b.links.data(1, &b.location);
        assert_eq!(fs::read(&link).unwrap(), b"data");
        assert_eq!(fs::metadata(&link).unwrap().nlink(), 1);
        assert!(b.links.unlink(1, &b.location));
        assert!(b.links.unlink(1, &b.location), "twice is as good as once");
        assert_eq!(names(&b.links.run_dir), 0);
    }

    #[test]
    fn a_block_without_its_checksum_file_is_not_linked() {
        let b = bench();
        fs::remove_file(block_files(&b.location).1).unwrap();
        let failed = b.links.link(1, &b.location).unwrap_err();
        assert_eq!((failed.then, failed.leftover), (Disposition::Forget, false));
        assert_eq!(names(&b.links.run_dir), 0);
    }

    #[test]
    fn a_block_that_is_being_copied_is_not_linked() {
        let b = bench();
        fs::write(b.location.folder.join("blk_7.unlinked"), "da").unwrap();
        let failed = b.links.link(1, &b.location).unwrap_err();
        assert_eq!(failed.then, Disposition::Relink);
        assert_eq!(names(&b.links.run_dir), 0);
    }

    #[test]
    fn a_symbolic_link_is_not_linked() {
        let b = bench();
        let (data, _) = block_files(&b.location);
        fs::remove_file(&data).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &data).unwrap();
        assert!(b.links.link(1, &b.location).is_err());
        assert_eq!(names(&b.links.run_dir), 0);
    }

    #[test]
    fn links_of_an_earlier_run_are_counted_and_removed() {
        let b = bench();
        b.links.link(1, &b.location).unwrap();
        let next = Links::new(b.folder.path(), 8);
        next.create_dirs().unwrap();
        assert_eq!(next.earlier_bytes(), 0, "the DataNode has them still");
        let (data, _) = block_files(&b.location);
        fs::remove_file(data).unwrap();
        assert_eq!(next.earlier_bytes(), 4);
        next.link(1, &b.location).unwrap_err();
        next.remove_earlier().unwrap();
        assert_eq!(next.earlier_bytes(), 0);
        assert!(!b.links.run_dir.exists());
        assert!(next.run_dir.exists());
    }

    #[test]
    fn a_proof_is_new_each_time() {
        let b = bench();
        let one = b.links.write_proof(b"of one session").unwrap();
        let two = b.links.write_proof(b"of the next").unwrap();
        let path = b.folder.path().join(AGENT_DIR).join("proof");
        assert_eq!(fs::read(&path).unwrap(), b"of the next");
        let inode = |m: Metadata| m.ino();
        assert_eq!(
            inode(two.metadata().unwrap()),
            inode(fs::metadata(&path).unwrap())
        );
        assert_eq!(one.metadata().unwrap().nlink(), 0, "not the same file");
    }

    #[test]
    fn a_symbolic_link_in_place_of_the_agents_directory_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/tmp", folder.path().join(AGENT_DIR)).unwrap();
        assert!(Links::new(folder.path(), 1).create_dirs().is_err());
    }
}
