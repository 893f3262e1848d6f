// SPDX-License-Identifier: Apache-2.0
//! The DataNode's disk: an image file, or a block device over one.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use viola_cli::error::{Failure, Outcome};

/// A loop device that goes with its last user, however that ends.
pub struct LoopDevice {
    path: PathBuf,
    _held: File,
}

impl LoopDevice {
    /// Over an image.
    pub fn over(image: &Path) -> Outcome<Self> {
        let image = image.display().to_string();
        let found = losetup(&["--find", "--show", &image])?;
        let path = PathBuf::from(found.trim());
        let held = File::open(&path);
        // the kernel waits with this until nobody has the device open
        losetup(&["--detach", found.trim()])?;
        let held = held.map_err(|e| Failure::run(format!("{}: {e}", path.display())))?;
        Ok(Self { path, _held: held })
    }

    /// The device.
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
