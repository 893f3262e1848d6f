// SPDX-License-Identifier: Apache-2.0
//! The kernel and initramfs of QEMU VMs, and the QEMU that runs them.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Kernel and initramfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image(PathBuf);

impl Image {
    /// The folder named by `VIOLA_QEMU_IMAGE`, else `build/qemu/cloud` in the working folder, the program's folder or
    /// one above either.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] when there is none.
    pub fn find() -> Result<Self> {
        let program = std::env::current_exe().ok();
        let folders = [std::env::current_dir().ok(), program];
        Self::find_from(folders.iter().flatten().map(PathBuf::as_path), "cloud")
    }

    /// As [`Image::find`], the image of this kind (`cloud` or `rdma`), looking upwards from these folders.
    ///
    /// # Errors
    /// [`Error::NoQemuImage`] when there is none.
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

    /// Kernel of it.
    pub fn kernel(&self) -> PathBuf {
        self.0.join("vmlinuz")
    }

    /// QEMU: that of `VIOLA_QEMU`, else the one that was fetched with the image, else the machine's own.
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

    /// Folders with the firmware of a QEMU that was fetched: it looks for them where its package would have put them.
    pub(super) fn firmware(&self) -> Vec<PathBuf> {
        let program = self.program();
        let usr = program.parent().and_then(Path::parent);
        let folders = ["share/seabios", "share/qemu", "lib/ipxe/qemu"];
        let found = usr.into_iter().flat_map(|usr| folders.map(|f| usr.join(f)));
        found.filter(|folder| folder.is_dir()).collect()
    }

    /// What was made for it and is beside its folder.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.0.with_file_name(name)
    }

    /// Initramfs of it.
    pub fn initrd(&self) -> PathBuf {
        self.0.join("initrd.img")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_image_is_said_with_the_script_that_makes_it() {
        let top = tempfile::tempdir().unwrap();
        let error = Image::find_from([top.path()], "cloudy").unwrap_err();
        assert!(error.to_string().contains("qemu-image.sh"), "{error}");
    }
}
