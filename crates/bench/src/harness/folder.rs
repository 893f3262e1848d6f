// SPDX-License-Identifier: Apache-2.0
//! A temporary folder.

use std::fs;
use std::path::PathBuf;

use viola_cli::error::{Failure, Outcome};

/// A folder that is removed on drop.
pub struct Folder(pub PathBuf);

impl Folder {
    /// Creates an empty folder at this path. Removes what is there.
    ///
    /// # Errors
    /// The folder cannot be created; the error names it.
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
