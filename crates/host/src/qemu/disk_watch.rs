// SPDX-License-Identifier: Apache-2.0
//! A QMP connection that stays, to hear at once when a VM's disks or its past become others.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::qmp::{Connection, QmpFailure, list};
use crate::vm::printable;

/// Images that may lie on each other.
const MAX_CHAIN: usize = 64;

/// What QEMU tells of one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingChain {
    /// Name of the device, as the command line or libvirt gave it.
    pub device: String,
    /// Files and formats, the live one first, each lying on the next.
    pub layers: Vec<(PathBuf, String)>,
}

/// A connection to one VM.
pub struct DiskWatch {
    connection: Connection,
}

impl std::fmt::Debug for DiskWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskWatch").finish_non_exhaustive()
    }
}

impl DiskWatch {
    /// Connects to a QMP socket and holds it.
    ///
    /// # Errors
    /// [`QmpFailure`], after at most two seconds.
    pub fn connect(reach: &Path) -> Result<Self, QmpFailure> {
        Connection::open(reach).map(Self::over)
    }

    pub(super) fn over(connection: Connection) -> Self {
        Self { connection }
    }

    /// What has happened since the last call that makes what was known of the disks untrue: QEMU's names of the
    /// events. Never waits.
    ///
    /// # Errors
    /// When the connection is lost: what has happened meanwhile is not known.
    pub fn changes(&mut self) -> Result<Vec<String>, QmpFailure> {
        let mut events = self.connection.events()?;
        events.retain(|name| invalidates_disks(name));
        Ok(events)
    }

    /// The disks and what they lie on.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn chains(&mut self) -> Result<Vec<BackingChain>, QmpFailure> {
        self.connection.go_on();
        let blocks = self.connection.command("query-block")?;
        Ok(list("query-block", &blocks)?
            .iter()
            .filter_map(chain)
            .collect())
    }
}

/// A guest that starts anew, memory or disks from another time, another file behind a disk.
fn invalidates_disks(event: &str) -> bool {
    matches!(
        event,
        "RESET"
            | "SHUTDOWN"
            | "POWERDOWN"
            | "STOP"
            | "RESUME"
            | "SUSPEND_DISK"
            | "MIGRATION"
            | "MIGRATION_PASS"
            | "JOB_STATUS_CHANGE"
            | "DEVICE_DELETED"
            | "DEVICE_TRAY_MOVED"
            | "BLOCK_IMAGE_CORRUPTED"
            | "GUEST_PANICKED"
    ) || event.starts_with("BLOCK_JOB_")
}

/// One item of `query-block`; `None` without a medium, and for what makes no sense.
fn chain(block: &Value) -> Option<BackingChain> {
    let inserted = &block["inserted"];
    inserted["file"].as_str()?;
    let named = |key: &str| block[key].as_str().filter(|d| !d.is_empty());
    let device = named("device").or(named("qdev"))?;
    let mut layers = Vec::new();
    let mut image = &inserted["image"];
    while image.is_object() {
        if layers.len() == MAX_CHAIN {
            return None;
        }
        let format = image["format"].as_str()?;
        layers.push((
            PathBuf::from(image["filename"].as_str()?),
            printable(format),
        ));
        image = &image["backing-image"];
    }
    // The format of the live one is what its driver was told, not what the file looks like.
    if let (Some(first), Some(driver)) = (layers.first_mut(), inserted["drv"].as_str()) {
        first.1 = printable(driver);
    }
    Some(BackingChain {
        device: printable(device),
        layers,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_chain_is_read_from_the_live_image_down() {
        let block = json!({"device": "", "qdev": "/machine/peripheral/d0", "inserted": {
            "file": "/snap.qcow2", "drv": "qcow2",
            "image": {"filename": "/snap.qcow2", "format": "qcow2",
                "backing-image": {"filename": "/base.img", "format": "raw"}}}});
        let chain = chain(&block).unwrap();
        assert_eq!(chain.device, "/machine/peripheral/d0");
        assert_eq!(
            chain.layers,
            [
                ("/snap.qcow2".into(), "qcow2".into()),
                ("/base.img".into(), "raw".into())
            ]
        );
    }

    #[test]
    fn resets_jobs_and_migrations_are_upheavals() {
        for yes in ["RESET", "BLOCK_JOB_COMPLETED", "MIGRATION", "RESUME"] {
            assert!(invalidates_disks(yes), "{yes}");
        }
        for no in ["RTC_CHANGE", "NIC_RX_FILTER_CHANGED", "BALLOON_CHANGE"] {
            assert!(!invalidates_disks(no), "{no}");
        }
    }

    #[test]
    fn events_come_between_answers_and_none_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("q");
        let listener = UnixListener::bind(&path).unwrap();
        let qemu = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut out = stream.try_clone().unwrap();
            let mut lines = BufReader::new(stream).lines();
            writeln!(out, "{{\"QMP\": {{}}}}").unwrap();
            lines.next().unwrap().unwrap();
            writeln!(out, "{{\"return\": {{}}, \"id\": 1}}").unwrap();
            writeln!(out, "{{\"event\": \"RESET\"}}").unwrap();
            let asked = lines.next().unwrap().unwrap();
            assert!(asked.contains("query-block"), "{asked}");
            writeln!(
                out,
                "{{\"event\": \"RTC_CHANGE\"}}\n{{\"event\": \"STOP\"}}"
            )
            .unwrap();
            writeln!(out, "{{\"return\": [], \"id\": 2}}").unwrap();
        });
        let mut watch = DiskWatch::connect(&path).unwrap();
        assert!(watch.chains().unwrap().is_empty());
        let seen = watch.changes();
        qemu.join().unwrap();
        // The end of the connection may be seen together with them.
        if let Ok(seen) = seen {
            assert_eq!(seen, ["RESET", "STOP"]);
        }
        assert!(watch.changes().is_err());
    }

    proptest! {
        #[test]
        fn no_block_makes_the_reader_panic(depth in 0usize..80, text in ".{0,8}") {
            let mut image = json!({"filename": text, "format": text});
            for _ in 0..depth {
                image = json!({"filename": text, "format": "raw", "backing-image": image});
            }
            let block = json!({"device": text, "inserted": {"file": text, "image": image}});
            let found = chain(&block);
            prop_assert!(found.is_none_or(|c| c.layers.len() <= MAX_CHAIN));
        }
    }
}
