// SPDX-License-Identifier: Apache-2.0
//! Disk images with a file system for a DataNode.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result};

/// File system of a DataNode's disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4 with its defaults.
    Ext4,
    /// XFS with its defaults.
    Xfs,
}

impl FileSystem {
    /// Its name for mount(8).
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }
}

/// Creates a sparse image of `size` bytes with an empty file system. Replaces an older file.
///
/// # Errors
/// [`Error::Io`], also if mkfs fails.
pub fn make(image: &Path, file_system: FileSystem, size: u64) -> Result<()> {
    if let Some(folder) = image.parent() {
        std::fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
    }
    File::create(image)
        .and_then(|file| file.set_len(size))
        .map_err(Error::io("make", image))?;
    let mut command = match file_system {
        FileSystem::Ext4 => Command::new("mkfs.ext4"),
        FileSystem::Xfs => Command::new("mkfs.xfs"),
    };
    let output = command
        .arg("-q")
        .arg(image)
        .output()
        .map_err(Error::io("run", command.get_program()))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::io("format", image)(std::io::Error::other(words)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_formatted_and_sparse() {
        use std::os::unix::fs::{FileExt, MetadataExt};
        let folder = tempfile::tempdir().unwrap();
        for (file_system, at, magic) in [
            (FileSystem::Ext4, 0x438, &[0x53, 0xef][..]),
            (FileSystem::Xfs, 0, b"XFSB"),
        ] {
            let image = folder.path().join(file_system.name());
            make(&image, file_system, 512 << 20).unwrap();
            let file = File::open(&image).unwrap();
            let mut found = vec![0; magic.len()];
            file.read_exact_at(&mut found, at).unwrap();
            assert_eq!(found, magic);
            assert!(file.metadata().unwrap().blocks() * 512 < 100 << 20);
        }
        let error = make(&folder.path().join("small"), FileSystem::Xfs, 1 << 20).unwrap_err();
        assert!(error.full().contains("format"), "{}", error.full());
    }
}
