// SPDX-License-Identifier: Apache-2.0
//! Disks, messages and sessions that the tests share.

mod arbitrary;
mod session;
mod worker;

use std::cell::Cell;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use viola_proto::agent::{
    self, BlockKey, Challenge, DiskName, Extent, FileMap, FrameReader, FromAgent, PROOF_BYTES,
    WithdrawReason, encode,
};

use super::*;
use crate::control::{AgentStat, Control, Format, ImageSpec, Session, socket_pair};
use crate::{hazard, lookup, table};

const DISK: u64 = 1 << 20;
/// Offset of the first file system's proof on the disk.
const PROOF_AT: u64 = 64 << 10;

/// An empty disk.
fn disk() -> std::fs::File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(DISK).unwrap();
    file
}

/// Offset of a file system's proof on the disk.
fn proof_at(fs: u32) -> u64 {
    PROOF_AT + u64::from(fs) * PROOF_BYTES as u64
}

/// Writes the proof file of a file system to a disk, as the guest does.
fn write_proof(disk: &std::fs::File, fs: u32, challenge: Challenge) {
    let content = challenge.proof_content(fs);
    disk.write_all_at(&content, proof_at(fs)).unwrap();
}

fn spec(id: u32) -> ImageSpec {
    ImageSpec {
        id,
        device: "ubdb".into(),
        serial: None,
        layers: vec![Format::Raw],
        path: "/images/dn1".into(),
        file: (1, u64::from(id)),
    }
}

fn file(size: u64, extents: &[(u64, u64, u64, bool)]) -> FileMap {
    FileMap {
        size,
        extents: extents.iter().map(|e| Extent::from(*e)).collect(),
    }
}

fn hello(session: u64) -> FromAgent {
    FromAgent::Hello {
        version: agent::VERSION,
        agent_version: "0.1".into(),
        boot_id: "b".into(),
        session,
        window: 0,
    }
}

/// Names the place where [`write_proof`] writes.
fn proof(fs: u32) -> FromAgent {
    let length = PROOF_BYTES as u64;
    proof_with(fs, file(length, &[(0, proof_at(fs), length, false)]))
}

fn proof_with(fs: u32, map: FileMap) -> FromAgent {
    FromAgent::Proof {
        fs,
        mount: "/data".into(),
        kind: "ext4".into(),
        disk: DiskName {
            name: "ubdb".into(),
            serial: None,
            size: DISK,
        },
        map,
    }
}

fn key(id: i64) -> BlockKey {
    BlockKey::new("BP-1", id, 1001).unwrap()
}

fn name(lease: u64, id: i64) -> FromAgent {
    FromAgent::Name {
        lease,
        fs: 0,
        key: key(id),
        data: file(4096, &[(0, 8192, 4096, false)]),
        meta: file(39, &[(0, 12288, 39, false)]),
    }
}

/// A reader that reads the slot set by the test.
#[derive(Default)]
struct ScriptedReader(Cell<Option<u32>>);

impl Readers for ScriptedReader {
    fn reader_of_slot(&self, _: u32, slot: u32) -> Option<&str> {
        (self.0.get() == Some(slot)).then_some("vm1")
    }

    fn reader_of_table(&self, _: u32) -> Option<&str> {
        self.0.get().map(|_| "vm1")
    }
}

struct TestSession {
    session: AgentSession,
    reader: ScriptedReader,
    now: Instant,
    lines: Arc<Mutex<Vec<String>>>,
    table: std::fs::File,
    disk: std::fs::File,
    /// Challenge of the last welcome.
    challenge: Option<Challenge>,
}

impl TestSession {
    /// A session with a channel and disks, before hello.
    fn new(limits: Limits) -> Self {
        let table_file = tempfile::tempfile().unwrap();
        table::create(&table_file, 3, 64).unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = lines.clone();
        let sink: LogSink = Box::new(move |_, line| to.lock().unwrap().push(line.to_owned()));
        let now = Instant::now();
        let table = Table::map(&table_file).unwrap();
        let mut session = AgentSession::new(table, limits, Journal::new(sink), now);
        let disk = disk();
        let image = disk.try_clone().unwrap().into();
        let disks = open_images(vec![spec(1)], vec![image]).unwrap();
        session.replace_disks(now, disks, "start", &mut Vec::new());
        session.open(now, &mut Vec::new());
        let mut test = Self {
            session,
            reader: ScriptedReader::default(),
            now,
            lines,
            table: table_file,
            disk,
            challenge: None,
        };
        test.complete_pending();
        test
    }

    /// A session with a welcomed agent and a proved file system.
    fn proved(limits: Limits) -> Self {
        let mut test = Self::new(limits);
        test.handle(hello(1));
        assert!(matches!(
            test.complete_pending()[..],
            [ToAgent::Welcome { session: 1, .. }]
        ));
        assert_eq!(test.prove(0), [ToAgent::ProofOk { fs: 0 }]);
        test
    }

    /// Writes a proof file and sends the proof.
    fn prove(&mut self, fs: u32) -> Vec<ToAgent> {
        write_proof(&self.disk, fs, self.challenge.unwrap());
        self.handle(proof(fs))
    }

    fn handle(&mut self, message: FromAgent) -> Vec<ToAgent> {
        let mut out = Vec::new();
        self.session.handle(self.now, message, &mut out);
        out
    }

    fn complete_pending(&mut self) -> Vec<ToAgent> {
        let mut out = Vec::new();
        self.session
            .complete_pending(self.now, &self.reader, &mut out);
        for message in &out {
            if let ToAgent::Welcome { challenge, .. } = message {
                self.challenge = Some(*challenge);
            }
        }
        out
    }

    fn after(&mut self, seconds: u64) -> Vec<ToAgent> {
        self.now += Duration::from_secs(seconds);
        let mut out = Vec::new();
        self.session.tick(self.now, &mut out);
        out
    }

    fn stat(&self) -> AgentStat {
        self.session.stat(self.now, &self.reader)
    }

    fn refused(&mut self, message: FromAgent) -> String {
        match &self.handle(message)[..] {
            [ToAgent::Refused { why, .. } | ToAgent::ProofBad { why, .. }] => why.clone(),
            other => panic!("{other:?}"),
        }
    }
}
