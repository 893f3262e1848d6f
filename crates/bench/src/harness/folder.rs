// SPDX-License-Identifier: Apache-2.0
//! A folder for as long as something is measured.

use std::fs;
use std::path::PathBuf;

use viola_cli::error::{Failure, Outcome};

/// A folder, gone with this value.
pub struct Folder(pub PathBuf);

impl Folder {
    /// An empty one at this path.
    pub fn new(path: PathBuf) -> Outcome<Self> {
        let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", path.display()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(failed)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
