// SPDX-License-Identifier: Apache-2.0
//! What holds at this moment: which guest has which VF, and what is being done. A file under the run directory, written
//! before each step, so that a daemon that comes after one that was killed knows where that one was.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use viola_netdev::Mac;

use crate::error::LaneError;
use crate::guest::Guest;

/// What is being done with a VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// It is being given.
    Granting,
    /// The guest has it.
    Held,
    /// It is being taken.
    Revoking,
}

/// One VF that is with a guest, or on its way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Interface of the PF.
    pub pf: String,
    /// Number of the VF.
    pub vf: u32,
    /// Its address on the bus.
    pub address: String,
    /// Identity of the guest.
    pub guest: String,
    /// How it is reached.
    pub how: Guest,
    /// The guest's address.
    pub mac: Mac,
    /// What is being done.
    pub stage: Stage,
}

/// The file.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    entries: Vec<Entry>,
}

impl Journal {
    /// Reads it; none is an empty one. One that makes no sense is set aside, with a sentence about it.
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
        match serde_json::from_slice(&bytes) {
            Ok(entries) => {
                journal.entries = entries;
                (journal, None)
            }
            Err(e) => {
                let aside = path.with_extension("damaged");
                let _ = fs::rename(path, &aside);
                let what = format!(
                    "{} makes no sense ({e}); it is now {}",
                    path.display(),
                    aside.display()
                );
                (journal, Some(what))
            }
        }
    }

    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Notes what is being done with a VF, in place of what was noted of it.
    ///
    /// # Errors
    /// [`LaneError::Journal`]; nothing may be done then.
    pub fn note(&mut self, entry: Entry) -> Result<(), LaneError> {
        let is_it = |e: &Entry| e.pf == entry.pf && e.vf == entry.vf;
        self.entries.retain(|e| !is_it(e));
        self.entries.push(entry);
        self.write()
    }

    /// Nobody has this VF.
    ///
    /// # Errors
    /// [`LaneError::Journal`].
    pub fn forget(&mut self, pf: &str, vf: u32) -> Result<(), LaneError> {
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
        let new = self.path.with_extension("new");
        let write = || -> io::Result<()> {
            let mut file = fs::File::create(&new)?;
            file.write_all(&serde_json::to_vec(&self.entries)?)?;
            fs::rename(&new, &self.path)
        };
        write().map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(vf: u32, stage: Stage) -> Entry {
        Entry {
            pf: "p0".into(),
            vf,
            address: format!("0000:01:10.{vf}"),
            guest: "netns:n1".into(),
            how: Guest::Netns(crate::netns::NetnsGuest {
                netns: "/run/netns/n1".into(),
                bond: "bond0".into(),
                port: "eth0".into(),
            }),
            mac: [2, 0, 0, 0, 0, 1],
            stage,
        }
    }

    #[test]
    fn what_was_noted_last_of_a_vf_is_what_the_next_one_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lanes.json");
        let (mut journal, said) = Journal::read(&path);
        assert!(said.is_none() && journal.entries().is_empty());
        journal.note(entry(0, Stage::Granting)).unwrap();
        journal.note(entry(1, Stage::Held)).unwrap();
        journal.note(entry(0, Stage::Revoking)).unwrap();
        let (read, _) = Journal::read(&path);
        assert_eq!(
            read.entries(),
            [entry(1, Stage::Held), entry(0, Stage::Revoking)]
        );
        journal.forget("p0", 0).unwrap();
        journal.forget("p1", 1).unwrap();
        let (read, _) = Journal::read(&path);
        assert_eq!(read.entries(), [entry(1, Stage::Held)]);
    }

    #[test]
    fn a_damaged_one_is_set_aside_and_said() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lanes.json");
        fs::write(&path, "[{").unwrap();
        let (journal, said) = Journal::read(&path);
        assert!(journal.entries().is_empty());
        assert!(said.unwrap().contains("lanes.damaged"));
        assert!(!path.exists());
    }
}
