// SPDX-License-Identifier: Apache-2.0
//! The kernel and initramfs of QEMU VMs, and the QEMU that runs them.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Kernel and initramfs of QEMU VMs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image(PathBuf);

impl Image {
    /// Finds the folder `VIOLA_QEMU_IMAGE`, else `build/qemu/cloud` in the working folder, the
    /// program's folder or a parent of either.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] if there is none.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().ok();
        let folders = [std::env::current_dir().ok(), program];
        Self::find_from(folders.iter().flatten().map(PathBuf::as_path), "cloud")
    }

    /// As [`Image::find`], for the image of this kind (`cloud`, `rdma`, `new` or `lanes`),
    /// searching these folders and their parents.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] if there is none.
    pub fn find_from<'a>(starts: impl IntoIterator<Item = &'a Path>, kind: &str) -> Result<Self> {
        let named = std::env::var_os("VIOLA_QEMU_IMAGE").map(PathBuf::from);
        let below = Path::new("build/qemu").join(kind);
        let above = starts.into_iter().flat_map(Path::ancestors);
        let all = named.into_iter().chain(above.map(|f| f.join(&below)));
        let mut first = None;
        for folder in all {
            if folder.join("vmlinuz").is_file() && folder.join("initrd.img").is_file() {
                return Ok(Self(std::path::absolute(&folder).unwrap_or(folder)));
            }
            first = first.or(Some(folder));
        }
        Err(Error::NoQemuImage(first.unwrap_or(below)))
    }

    #[cfg(test)]
    pub(super) fn at(folder: PathBuf) -> Self {
        Self(folder)
    }

    /// Its kernel.
    pub fn kernel(&self) -> PathBuf {
        self.0.join("vmlinuz")
    }

    /// The disk with the lab's root file system, for guests of a lab.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] if it is missing.
    pub(super) fn root(&self) -> Result<PathBuf> {
        let root = self.0.join("root.img");
        match root.is_file() {
            true => Ok(root),
            false => Err(Error::NoQemuImage(root)),
        }
    }

    /// The QEMU to run: `VIOLA_QEMU`, else the one that was fetched with the image, else the host's
    /// own.
    pub fn program(&self) -> PathBuf {
        let own = self
            .0
            .with_file_name("program/root/usr/bin/qemu-system-x86_64");
        match std::env::var_os("VIOLA_QEMU") {
            Some(path) => path.into(),
            None if own.is_file() => own,
            None => "qemu-system-x86_64".into(),
        }
    }

    /// Folders with the firmware of a fetched QEMU, which searches only where its package would be
    /// installed.
    pub(super) fn firmware(&self) -> Vec<PathBuf> {
        let program = self.program();
        let usr = program.parent().and_then(Path::parent);
        let folders = ["share/seabios", "share/qemu", "lib/ipxe/qemu"];
        let found = usr.into_iter().flat_map(|usr| folders.map(|f| usr.join(f)));
        found.filter(|folder| folder.is_dir()).collect()
    }

    /// A file or folder beside the image's folder.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.0.with_file_name(name)
    }

    /// Its initramfs.
    pub fn initrd(&self) -> PathBuf {
        self.0.join("initrd.img")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_image_names_the_script_that_makes_it() {
        let top = tempfile::tempdir().unwrap();
        let error = Image::find_from([top.path()], "cloudy").unwrap_err();
        assert!(error.to_string().contains("qemu-image.sh"), "{error}");
    }
}
