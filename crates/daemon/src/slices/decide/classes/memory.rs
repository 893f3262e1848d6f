// SPDX-License-Identifier: Apache-2.0
//! What trials found, kept in a file, so that a new daemon neither forgets nor repeats them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_host::VmId;
use viola_policy::slices::Nanos;

use crate::host::files::replace_json;
use viola_cli::log::{self, Level};

/// Name of the file in `state_dir`.
const FILE_NAME: &str = "trials.json";
/// Most VMs whose findings are kept.
const MAX_VMS: usize = 1024;

/// What the last trial of a VM found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Remembered {
    /// Whether class ls stays.
    pub(super) stays: bool,
    /// What was found, in words.
    pub(super) found: String,
    /// Whether packet delays were compared; otherwise residual waits.
    pub(super) by_packets: bool,
    /// The p99 of the VM's figure without class ls, ns.
    pub(super) without_ns: Nanos,
}

/// The findings of all VMs, by identity.
#[derive(Debug, Default)]
pub(super) struct Memory {
    file: Option<PathBuf>,
    vms: BTreeMap<String, Remembered>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryFile {
    vms: BTreeMap<String, Remembered>,
}

impl Memory {
    /// Reads the findings of an earlier daemon. A damaged file is reported and counts as empty.
    pub(super) fn read(state_dir: &Path) -> Self {
        let file = state_dir.join(FILE_NAME);
        let vms = match std::fs::read(&file) {
            Ok(bytes) => serde_json::from_slice::<MemoryFile>(&bytes).unwrap_or_else(|e| {
                let what = format!(
                    "{} holds no findings of trials ({e}); classes are tried anew",
                    file.display()
                );
                log::line(Level::Warning, what);
                MemoryFile::default()
            }),
            Err(_) => MemoryFile::default(),
        };
        Self {
            file: Some(file),
            vms: vms.vms,
        }
    }

    pub(super) fn get(&self, id: &VmId) -> Option<&Remembered> {
        self.vms.get(id.as_str())
    }

    /// Keeps a finding. The file is written at once.
    pub(super) fn set(&mut self, id: &VmId, found: Remembered) {
        while self.vms.len() >= MAX_VMS && !self.vms.contains_key(id.as_str()) {
            self.vms.pop_first();
        }
        self.vms.insert(id.to_string(), found);
        self.write();
    }

    /// Forgets a VM's finding: its load is another now.
    pub(super) fn forget(&mut self, id: &VmId) {
        if self.vms.remove(id.as_str()).is_some() {
            self.write();
        }
    }

    fn write(&self) {
        let Some(file) = &self.file else { return };
        let content = MemoryFile {
            vms: self.vms.clone(),
        };
        if let Err(e) = replace_json(file, &content) {
            let what = format!(
                "{} cannot be written ({e}); a new daemon will try classes anew",
                file.display()
            );
            log::line(Level::Warning, what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vm;

    fn found(stays: bool) -> Remembered {
        Remembered {
            stays,
            found: "its packet delay is 0.20x".into(),
            by_packets: true,
            without_ns: 9_000_000,
        }
    }

    #[test]
    fn findings_survive_a_restart_until_they_are_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (vm("a", 10, &[&[1]]).id, vm("b", 20, &[&[1]]).id);
        let mut memory = Memory::read(&dir.path().join("state"));
        memory.set(&a, found(true));
        memory.set(&b, found(false));
        let mut again = Memory::read(&dir.path().join("state"));
        assert_eq!(
            (again.get(&a), again.get(&b)),
            (Some(&found(true)), Some(&found(false)))
        );
        again.forget(&a);
        let last = Memory::read(&dir.path().join("state"));
        assert_eq!((last.get(&a), last.get(&b)), (None, Some(&found(false))));
    }

    #[test]
    fn a_damaged_file_counts_as_empty_and_there_is_room_for_so_many_vms() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE_NAME), "{\"vms\": 7").unwrap();
        let mut memory = Memory::read(dir.path());
        assert_eq!(memory.vms.len(), 0);
        memory.file = None;
        for i in 0..=MAX_VMS {
            memory.set(&vm(&format!("vm{i:05}"), 10, &[&[1]]).id, found(true));
        }
        assert_eq!(memory.vms.len(), MAX_VMS);
    }
}
