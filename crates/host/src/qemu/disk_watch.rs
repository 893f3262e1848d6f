// SPDX-License-Identifier: Apache-2.0
//! A QMP connection that stays open, to learn at once when a VM's disks change or its guest restarts.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::message::list;
use super::qmp::{ANSWER_TIMEOUT, Connection, QmpFailure, SESSION_TIMEOUT};
use crate::monitor::{Request, Session};
use crate::thread::Tid;
use crate::vm::printable;

/// Most images of one backing chain.
const MAX_IMAGES: usize = 64;

/// One disk with its backing chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingChain {
    /// Name of the device, as the command line or libvirt gave it.
    pub device: String,
    /// Files and formats, the live image first, each backed by the next.
    pub layers: Vec<(PathBuf, String)>,
}

/// A connection to one VM.
pub struct DiskWatch {
    session: Session,
}

impl std::fmt::Debug for DiskWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskWatch").finish_non_exhaustive()
    }
}

impl DiskWatch {
    /// Connects to a QMP socket and holds it. `owner` is the process that has to listen there; `None` for a socket that the
    /// operator has named.
    ///
    /// # Errors
    /// [`QmpFailure`], after at most three seconds.
    pub fn connect(reach: &Path, owner: Option<Tid>) -> Result<Self, QmpFailure> {
        let session = Session::open(reach, owner, ANSWER_TIMEOUT)?;
        Ok(Self { session })
    }

    /// Names of the events since the last call that may have changed the disks. Does not wait.
    ///
    /// # Errors
    /// When the connection is lost: events may have been missed.
    pub fn changes(&mut self) -> Result<Vec<String>, QmpFailure> {
        let mut events = self.session.events()?;
        events.retain(|name| invalidates_disks(name));
        Ok(events)
    }

    /// The disks with their backing chains.
    ///
    /// # Errors
    /// [`QmpFailure`].
    pub fn chains(&mut self) -> Result<Vec<BackingChain>, QmpFailure> {
        self.session.ask(&Request::Chains, SESSION_TIMEOUT)
    }
}

/// Asks for the disks with their backing chains.
pub(crate) fn chains(connection: &mut Connection) -> Result<Vec<BackingChain>, QmpFailure> {
    let blocks = connection.command("query-block")?;
    Ok(list("query-block", &blocks)?
        .iter()
        .filter_map(chain)
        .collect())
}

/// Whether this event tells that the guest may have restarted, that its memory or disks may have
/// gone back to an earlier state, or that another file may be behind a disk.
pub(crate) fn invalidates_disks(event: &str) -> bool {
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

/// One item of `query-block`; `None` without a medium and for a malformed item.
fn chain(block: &Value) -> Option<BackingChain> {
    let inserted = &block["inserted"];
    inserted["file"].as_str()?;
    let named = |key: &str| block[key].as_str().filter(|d| !d.is_empty());
    let device = named("device").or(named("qdev"))?;
    let mut layers = Vec::new();
    let mut image = &inserted["image"];
    while image.is_object() {
        if layers.len() == MAX_IMAGES {
            return None;
        }
        let format = image["format"].as_str()?;
        layers.push((
            PathBuf::from(image["filename"].as_str()?),
            printable(format),
        ));
        image = &image["backing-image"];
    }
    // The live image has the format that its driver was configured with, not the one that the file looks like.
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
    use std::time::{Duration, Instant};

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
    fn resets_jobs_and_migrations_invalidate_disks() {
        for yes in ["RESET", "BLOCK_JOB_COMPLETED", "MIGRATION", "RESUME"] {
            assert!(invalidates_disks(yes), "{yes}");
        }
        for no in ["RTC_CHANGE", "NIC_RX_FILTER_CHANGED", "BALLOON_CHANGE"] {
            assert!(!invalidates_disks(no), "{no}");
        }
    }

    #[test]
    fn events_between_answers_are_kept() {
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
        let mut watch = DiskWatch::connect(&path, Some(std::process::id())).unwrap();
        assert!(watch.chains().unwrap().is_empty());
        let seen = watch.changes();
        qemu.join().unwrap();
        // The read may have seen the end of the connection together with the events. Otherwise another process reads the end,
        // some time later.
        if let Ok(seen) = seen {
            assert_eq!(seen, ["RESET", "STOP"]);
        }
        let begin = Instant::now();
        while watch.changes().is_ok() {
            assert!(begin.elapsed() < Duration::from_secs(10), "no end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    proptest! {
        #[test]
        fn any_block_is_read_without_a_panic(depth in 0usize..80, text in ".{0,8}") {
            let mut image = json!({"filename": text, "format": text});
            for _ in 0..depth {
                image = json!({"filename": text, "format": "raw", "backing-image": image});
            }
            let block = json!({"device": text, "inserted": {"file": text, "image": image}});
            let found = chain(&block);
            prop_assert!(found.is_none_or(|c| c.layers.len() <= MAX_IMAGES));
        }
    }
}
