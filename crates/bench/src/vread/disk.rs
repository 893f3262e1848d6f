// SPDX-License-Identifier: Apache-2.0
//! Disk of the DataNode's guest: an image file, or a block device over one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use viola_cli::error::{Failure, Outcome};

/// A loop device that the kernel removes with its last user.
pub struct LoopDevice {
    path: PathBuf,
    _held: File,
}

impl LoopDevice {
    /// Creates a loop device over an image.
    ///
    /// # Errors
    /// losetup is missing or fails.
    pub fn over(image: &Path) -> Outcome<Self> {
        let image = image.display().to_string();
        let found = losetup(&["--find", "--show", &image])?;
        let path = PathBuf::from(found.trim());
        let held = File::open(&path);
        // The kernel delays the removal until the device is closed.
        losetup(&["--detach", found.trim()])?;
        let held = held.map_err(|e| Failure::run(format!("{}: {e}", path.display())))?;
        Ok(Self { path, _held: held })
    }

    /// Path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn losetup(arguments: &[&str]) -> Outcome<String> {
    let output = Command::new("losetup").args(arguments).output();
    let output = output.map_err(|e| Failure::run(format!("losetup: {e}")))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Failure::run(format!("losetup {}: {words}", arguments[0])));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
