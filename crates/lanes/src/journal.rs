// SPDX-License-Identifier: Apache-2.0
//! The journal of VFs: which guest has which VF, and the operation in progress. It is a file in the
//! run directory. Each entry is written before its step, so that a restarted daemon knows where a
//! killed one was.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_host::replace::{Survives, replace};
use viola_netdev::Mac;

use crate::error::LaneError;
use crate::guest::{GuestAccess, MAX_RELEASE_TIMEOUT};

/// The operation in progress on a VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// A grant is in progress.
    Granting,
    /// The guest has it.
    Held,
    /// A revocation is in progress.
    Revoking,
}

/// A VF that a guest has, or that is being granted or revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Interface of the PF.
    pub pf: String,
    /// Number of the VF.
    pub vf: u32,
    /// PCI address of the VF.
    pub address: String,
    /// Identity of the guest: `netns:NAME`, or the VM's.
    pub guest: String,
    /// How the daemon reaches the guest.
    pub access: GuestAccess,
    /// Ethernet address of the guest.
    pub mac: Mac,
    /// The operation in progress.
    pub stage: Stage,
}

/// The journal: a file and its entries.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    entries: Vec<Entry>,
}

impl Journal {
    /// Reads the journal; a missing file is an empty journal. A file that is not valid is renamed
    /// to `*.damaged`, and the second value says so.
    #[must_use]
    pub fn read(path: &Path) -> (Self, Option<String>) {
        let mut journal = Self {
            path: path.to_owned(),
            entries: Vec::new(),
        };
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return (journal, None),
            Err(e) => return (journal, Some(format!("{}: {e}", path.display()))),
        };
        match parse(&bytes) {
            Ok(entries) => {
                journal.entries = entries;
                (journal, None)
            }
            Err(e) => {
                let aside = path.with_extension("damaged");
                let _ = fs::rename(path, &aside);
                let warning = format!(
                    "{} is not valid ({e}); moved it to {}",
                    path.display(),
                    aside.display()
                );
                (journal, Some(warning))
            }
        }
    }

    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Records an entry in place of the earlier one of the same VF.
    ///
    /// # Errors
    /// [`LaneError::Journal`]; the caller must not go on then.
    pub fn record(&mut self, entry: Entry) -> Result<(), LaneError> {
        let is_it = |e: &Entry| e.pf == entry.pf && e.vf == entry.vf;
        self.entries.retain(|e| !is_it(e));
        self.entries.push(entry);
        self.write()
    }

    /// Removes the entry of a VF that no guest has any more.
    ///
    /// # Errors
    /// [`LaneError::Journal`].
    pub fn remove(&mut self, pf: &str, vf: u32) -> Result<(), LaneError> {
        let before = self.entries.len();
        self.entries.retain(|e| e.pf != pf || e.vf != vf);
        match self.entries.len() == before {
            true => Ok(()),
            false => self.write(),
        }
    }

    fn write(&self) -> Result<(), LaneError> {
        let failed = |source| LaneError::Journal {
            path: self.path.clone(),
            source,
        };
        let json = serde_json::to_vec(&self.entries).map_err(|e| failed(e.into()))?;
        replace(&self.path, &json, Survives::Process).map_err(failed)
    }
}

/// Parses the file's bytes; otherwise one clause that says what is wrong.
pub(crate) fn parse(bytes: &[u8]) -> Result<Vec<Entry>, String> {
    let entries: Vec<Entry> = serde_json::from_slice(bytes)
        .map_err(|e| e.to_string().replace(char::is_control, "\u{fffd}"))?;
    // They become parts of paths of sysfs.
    let is_name = |name: &str| !matches!(name, "" | "." | "..") && !name.contains(['/', '\0']);
    for e in &entries {
        let Entry {
            pf, vf, address, ..
        } = e;
        if !is_name(pf) || !is_name(address) {
            return Err(format!(
                "VF {vf} has interface {pf:?} and address {address:?}"
            ));
        }
        let timeout = e.access.release_timeout();
        if timeout > MAX_RELEASE_TIMEOUT {
            return Err(format!("VF {vf} of {pf:?} has {timeout:?} to be released"));
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_names_no_path_outside_of_sysfs() {
        for name in ["", ".", "..", "../../tmp", "p0\0"] {
            let [mut pf, mut address] = [entry(1, Stage::Held), entry(1, Stage::Held)];
            pf.pf = name.into();
            address.address = name.into();
            for entry in [pf, address] {
                let bytes = serde_json::to_vec(&[entry]).unwrap();
                assert!(parse(&bytes).is_err(), "{name:?}");
            }
        }
        let bytes = serde_json::to_vec(&[entry(1, Stage::Held)]).unwrap();
        assert_eq!(parse(&bytes).unwrap(), [entry(1, Stage::Held)]);
        let mut endless = entry(1, Stage::Held);
        endless.access = GuestAccess::Uml(crate::uml::UmlGuest {
            folder: "/u".into(),
            pid: 7,
            start_time: 8,
            mac: [2, 0, 0, 0, 0, 1],
            unit: 1,
            release_timeout: std::time::Duration::MAX,
        });
        let bytes = serde_json::to_vec(&[endless]).unwrap();
        assert!(parse(&bytes).is_err(), "the time of its end overflows");
        let said = parse(br#"[{"\u001b[2J\n":1}]"#).unwrap_err();
        assert!(!said.contains(char::is_control), "{said:?}");
    }

    fn entry(vf: u32, stage: Stage) -> Entry {
        Entry {
            pf: "p0".into(),
            vf,
            address: format!("0000:01:10.{vf}"),
            guest: "netns:n1".into(),
            access: GuestAccess::Netns(crate::netns::NetnsGuest {
                netns: "/run/netns/n1".into(),
                bond: "bond0".into(),
                port: "eth0".into(),
            }),
            mac: [2, 0, 0, 0, 0, 1],
            stage,
        }
    }

    #[test]
    fn the_last_entry_of_a_vf_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lanes.json");
        let (mut journal, warning) = Journal::read(&path);
        assert!(warning.is_none() && journal.entries().is_empty());
        journal.record(entry(0, Stage::Granting)).unwrap();
        journal.record(entry(1, Stage::Held)).unwrap();
        journal.record(entry(0, Stage::Revoking)).unwrap();
        let (read, _) = Journal::read(&path);
        assert_eq!(
            read.entries(),
            [entry(1, Stage::Held), entry(0, Stage::Revoking)]
        );
        journal.remove("p0", 0).unwrap();
        journal.remove("p1", 1).unwrap();
        let (read, _) = Journal::read(&path);
        assert_eq!(read.entries(), [entry(1, Stage::Held)]);
    }

    #[test]
    fn a_damaged_journal_is_set_aside_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lanes.json");
        fs::write(&path, "[{").unwrap();
        let (journal, warning) = Journal::read(&path);
        assert!(journal.entries().is_empty());
        assert!(warning.unwrap().contains("lanes.damaged"));
        assert!(!path.exists());
    }
}
