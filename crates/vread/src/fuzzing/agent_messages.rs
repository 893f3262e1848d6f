// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the messages that the agent of a hostile guest sends to its worker.
//!
//! Input: a first byte, then the messages. If bit 0 of the first byte is set, the rest is the raw byte stream.
//! Otherwise the rest is lines of JSON, each of which gets a valid frame, so that the fuzzer passes the frame parser.
//! If bit 1 is set, the agent has already said hello and proved file system 0. `"@"` in a line stands for the version
//! of the protocol.
//!
//! The guest writes its proof files after each welcome: those of file systems 0 to 3 are at [`PROOF_AT`], one behind the
//! other.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use viola_proto::agent::{
    Challenge, FrameReader, FromAgent, MAX_PAYLOAD_BYTES, PROOF_BYTES, ToAgent, VERSION, frame_of,
};

use crate::agent_worker::{AgentSession, Readers, open_images};
use crate::control::{Format, ImageSpec, Limits, Session};
use crate::journal::Journal;
use crate::table::{self, Table};

const DISK: u64 = 1 << 20;
/// Offset of the first proof file on the disk.
const PROOF_AT: u64 = 64 << 10;

/// A reader that reads slot 0 at every second check.
#[derive(Default)]
struct ScriptedReader(std::cell::Cell<bool>);

impl Readers for ScriptedReader {
    fn reader_of_slot(&self, _: u32, slot: u32) -> Option<&str> {
        self.0.set(!self.0.get());
        (slot == 0 && self.0.get()).then_some("vm1")
    }

    fn reader_of_table(&self, _: u32) -> Option<&str> {
        self.0.set(!self.0.get());
        self.0.get().then_some("vm1")
    }
}

fn files() -> &'static (File, File) {
    static FILES: OnceLock<(File, File)> = OnceLock::new();
    FILES.get_or_init(|| {
        let disk = super::memory_file();
        disk.set_len(DISK).expect("a disk");
        let shared = super::memory_file();
        table::create(&shared, 1, 16).expect("a table");
        (disk, shared)
    })
}

/// Messages that say hello and prove file system 0. The scripted reader ends its reads of the old epoch with the second
/// message at the latest, and the agent is welcomed.
const BEGIN: [&str; 3] = [
    r#"{"hello":{"version":"@","agent_version":"0","boot_id":"b","session":1}}"#,
    r#"{"pong":{"n":0}}"#,
    r#"{"proof":{"fs":0,"mount":"/d","kind":"ext4","disk":{"name":"ubda","size":1048576},"map":{"size":4096,"extents":[[0,65536,4096,false]]}}}"#,
];

/// Writes the proof files of a session.
fn write_proofs(disk: &File, challenge: &Challenge) {
    for fs in 0..4 {
        let at = PROOF_AT + u64::from(fs) * PROOF_BYTES as u64;
        let content = challenge.proof_content(fs);
        disk.write_all_at(&content, at).expect("room for a proof");
    }
}

/// Makes a frame of a line, without bytes that JSON does not allow.
fn frame(line: &[u8]) -> Vec<u8> {
    let line = String::from_utf8_lossy(line).replace("\"@\"", &VERSION.to_string());
    let line: Vec<u8> = line
        .bytes()
        .filter(|b| *b >= 0x20)
        .take(MAX_PAYLOAD_BYTES)
        .collect();
    frame_of(&line)
}

/// Runs one input; panics when an invariant is violated.
pub fn agent_messages(input: &[u8]) {
    let Some((mode, rest)) = input.split_first() else {
        return;
    };
    let (disk, shared) = files();
    let limits = Limits {
        blocks: 16,
        extents: 64,
        names_per_s: 1_000_000,
    };
    let mut now = Instant::now();
    let sink = Box::new(|_, line: &str| assert!(!line.contains(['\n', '\x1b'])));
    let table = Table::map(shared).expect("the table");
    let mut session = AgentSession::new(table, limits, Journal::new(sink), now);
    let spec = ImageSpec {
        id: 1,
        device: "ubda".into(),
        serial: None,
        layers: vec![Format::Raw],
        path: "/d.img".into(),
        file: (1, 1),
    };
    let image = disk.try_clone().expect("the disk").into();
    let disks = open_images(vec![spec], vec![image]).expect("an image");
    let mut out = Vec::new();
    session.replace_disks(now, disks, "start", &mut out);
    session.open(now, &mut out);
    let readers = ScriptedReader::default();
    let mut frames = FrameReader::new();
    // Returns the session's state after the last message.
    let mut work = |frames: &mut FrameReader| {
        let mut state = None;
        while let Some(message) = frames.next::<FromAgent>() {
            now += Duration::from_millis(100);
            let mut out = Vec::new();
            match message {
                Ok(message) => session.handle(now, message, &mut out),
                Err(e) => session.handle_malformed(now, &e),
            }
            session.complete_pending(now, &readers, &mut out);
            session.tick(now, &mut out);
            // Each message causes few answers, and each answer can be encoded.
            assert!(out.len() < 16);
            for answer in &out {
                if let ToAgent::Welcome { challenge, .. } = answer {
                    write_proofs(disk, challenge);
                }
                viola_proto::agent::encode::<ToAgent>(answer).expect("an answer that can be sent");
            }
            // Another reader: this question must not change what the session sees at its next check.
            let stat = session.stat(now, &ScriptedReader::default());
            assert!(stat.blocks <= 16 && stat.extents <= 64);
            state = Some(stat.session);
        }
        state
    };
    if mode & 2 != 0 {
        let mut state = None;
        for line in BEGIN {
            frames.push(&frame(line.as_bytes()));
            state = work(&mut frames);
        }
        assert_eq!(state, Some(Session::Proved), "the beginning is refused");
    }
    if mode & 1 != 0 {
        for piece in rest.chunks(1 + usize::from(*mode)) {
            frames.push(piece);
            work(&mut frames);
        }
    } else {
        for line in rest.split(|b| *b == b'\n') {
            frames.push(&frame(line));
            work(&mut frames);
        }
    }
}
