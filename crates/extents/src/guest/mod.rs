// SPDX-License-Identifier: Apache-2.0
//! The guest side: maps files to extents of the guest's disk.

mod disk;
mod fiemap;
mod filesystem;
mod refusal;

use std::fs::File;
use std::path::PathBuf;

use rustix::fs::{FileType, Stat};

use filesystem::Kind;
pub use refusal::Refusal;

use crate::extent::FileMap;

/// Maps files to extents.
#[derive(Clone, Debug)]
pub struct Mapper {
    sys: PathBuf,
    proc: PathBuf,
}

impl Default for Mapper {
    fn default() -> Self {
        Self::new()
    }
}

impl Mapper {
    /// Uses `/sys` and `/proc`.
    pub fn new() -> Self {
        Self::with_roots("/sys", "/proc")
    }

    /// Uses sysfs and procfs mounted elsewhere.
    pub fn with_roots(sys: impl Into<PathBuf>, proc: impl Into<PathBuf>) -> Self {
        Self {
            sys: sys.into(),
            proc: proc.into(),
        }
    }

    /// Maps a file that the host is going to read.
    ///
    /// Calls fsync first, which writes the file's bytes and the file system's journal to the disk and makes a VMM
    /// write its image tables. The call takes as long as the disk takes. The caller must keep the file from being
    /// changed during and after the call; the call fails if size or time stamps change meanwhile.
    ///
    /// # Errors
    /// A [`Refusal`] whose text is for the operator.
    pub fn file_extents(&self, file: &File) -> Result<FileMap, Refusal> {
        self.map(file, false, true)
    }

    /// As [`Mapper::file_extents`], but without fsync: the kernel only starts to write the file's bytes, which makes
    /// them visible to the host. Use it for images without tables of their own. After a crash of the guest the file
    /// may be shorter and these places free.
    ///
    /// # Errors
    /// A [`Refusal`] whose text is for the operator.
    pub fn file_extents_without_fsync(&self, file: &File) -> Result<FileMap, Refusal> {
        self.map(file, false, false)
    }

    /// As [`Mapper::file_extents`], for a host that is going to write into the file. Holes, unwritten and shared
    /// extents are refused, because such bytes have no place of their own.
    ///
    /// # Errors
    /// A [`Refusal`] whose text is for the operator.
    pub fn file_extents_for_writing(&self, file: &File) -> Result<FileMap, Refusal> {
        self.map(file, true, true)
    }

    fn map(&self, file: &File, writing: bool, flush: bool) -> Result<FileMap, Refusal> {
        let before = stat(file)?;
        if !FileType::from_raw_mode(before.st_mode).is_file() {
            return Err(Refusal::NotAFile);
        }
        let kind = filesystem::kind(file)?;
        let device = self.device(&before)?;
        if kind == Kind::Ext4 {
            filesystem::refuse_data_journal(&self.proc, &device.name)?;
        }
        filesystem::refuse_attributes(file, kind)?;

        if flush {
            file.sync_all().map_err(|source| Refusal::Io {
                call: "fsync",
                source,
            })?;
        }
        let size = before.st_size as u64;
        let raw = fiemap::raw_extents(file, size)?;
        let extents = fiemap::to_extents(&raw, size, &device.partition, writing)?;
        // During a write FIEMAP may report half of a change.
        if version(&stat(file)?) != version(&before) {
            return Err(Refusal::Changed);
        }
        Ok(FileMap {
            size,
            extents,
            disk: device.disk,
        })
    }

    fn device(&self, stat: &Stat) -> Result<disk::Device, Refusal> {
        let device = stat.st_dev;
        disk::device(
            &self.sys,
            rustix::fs::major(device),
            rustix::fs::minor(device),
        )
    }
}

fn stat(file: &File) -> Result<Stat, Refusal> {
    rustix::fs::fstat(file).map_err(|error| filesystem::failed("fstat", error))
}

/// The fields of a file's status that change with a write or a truncation.
fn version(stat: &Stat) -> impl PartialEq + use<> {
    (
        stat.st_size,
        (stat.st_mtime, stat.st_mtime_nsec),
        (stat.st_ctime, stat.st_ctime_nsec),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &str) -> String {
        let file = File::open(path).unwrap();
        Mapper::new().file_extents(&file).unwrap_err().to_string()
    }

    #[test]
    fn other_things_than_files_on_disks_are_refused() {
        assert_eq!(refusal("/"), "it is not a regular file");
        assert_eq!(refusal("/dev/null"), "it is not a regular file");
        assert!(refusal("/proc/version").starts_with("its file system is of unknown type 0x9fa0;"));
    }
}
