// SPDX-License-Identifier: Apache-2.0
//! Registers the lab's guests as VMs with viola, as any launcher that is root may: by a file of one line, `START_TIME NAME`,
//! called like the process, in a folder of root's (docs/src/safety.md).

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::process::ProcessId;

const FOLDER: &str = "/run/viola/vms";

/// A registration; dropping it removes the file.
#[derive(Debug)]
pub(crate) struct Registration(PathBuf);

impl Registration {
    /// Registers a process under the name of its VM.
    pub(crate) fn new(process: ProcessId, name: &str) -> Result<Self> {
        Self::in_folder(Path::new(FOLDER), process, name)
    }

    fn in_folder(folder: &Path, process: ProcessId, name: &str) -> Result<Self> {
        fs::create_dir_all(folder).map_err(Error::io("make", folder))?;
        let file = folder.join(process.pid.to_string());
        let new = folder.join(format!(".{}", process.pid));
        fs::write(&new, format!("{} {name}\n", process.start)).map_err(Error::io("write", &new))?;
        fs::rename(&new, &file).map_err(Error::io("write", &file))?;
        Ok(Self(file))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_is_one_line_and_goes_with_its_guest() {
        let folder = tempfile::tempdir().unwrap();
        let me = ProcessId::of(std::process::id()).unwrap();
        let folder = folder.path().join("viola/vms");
        let registration = Registration::in_folder(&folder, me, "dn 1").unwrap();
        let file = folder.join(me.pid.to_string());
        let line = fs::read_to_string(&file).unwrap();
        assert_eq!(line, format!("{} dn 1\n", me.start));
        drop(registration);
        assert!(!file.exists());
    }
}
