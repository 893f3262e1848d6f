// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the requests that a hostile VM puts into the queue of its virtio-fs device.
//!
//! Input: a sequence of requests. Each begins with four bytes: how the request is made, the room for its answer (in
//! units of 64 bytes), the descriptor length (in units of 16 bytes), and its length. If the first byte is odd, the
//! rest is the raw request. Otherwise it is an operation and a node, a byte each, and the body, and this target adds
//! a valid header.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use viola_extents::host::{Image, Layer};
use viola_proto::agent::{BlockKey, Extent, FileMap};

use crate::control::socket_pair;
use crate::lookup::{Found, Server};
use crate::reader::test_queue::TestQueue;
use crate::reader::{BlockFs, Service};
use crate::{hazard, table};

const TABLE: u32 = 1;
/// Content of the disk outside the blocks; no answer may contain it.
pub(super) const SECRET: u8 = 0xd7;
/// Content of the blocks.
const BLOCK: u8 = 0x11;

pub(super) struct TestBed {
    pub(super) service: Arc<Service>,
    hazards: hazard::View,
}

fn found(table: &table::Table, key: &BlockKey) -> Option<Found> {
    let slot = u32::try_from(key.id()).ok().filter(|slot| *slot < 4)?;
    let file = |size, physical| FileMap {
        size,
        extents: vec![Extent {
            logical: 0,
            physical,
            length: size.min(8192),
            zero: false,
        }],
    };
    Some(Found {
        lease: table.lease(slot)?,
        image: 1,
        data: file(20_000, 65_536),
        meta: file(100, 131_072),
    })
}

pub(super) fn bed() -> &'static TestBed {
    static BENCH: OnceLock<TestBed> = OnceLock::new();
    BENCH.get_or_init(|| {
        let shared = super::memory_file();
        let cells = super::memory_file();
        table::create(&shared, TABLE, 4).expect("a table");
        hazard::create(&cells, 2).expect("cells");
        let disk = super::memory_file();
        disk.write_all_at(&[SECRET; 1 << 18], 0).expect("a disk");
        disk.write_all_at(&[BLOCK; 8192], 65_536).expect("a block");
        disk.write_all_at(&[BLOCK; 100], 131_072).expect("a block");
        let (here, there) = socket_pair().expect("sockets");
        let table = table::Table::map(&shared).expect("the table");
        std::thread::spawn(move || Server::new(there).run(|key| found(&table, key)));
        let service = Arc::new(Service::new(hazard::Cells::map(&cells).expect("cells")));
        service.add("dn1", here, shared.into()).expect("a table");
        let image = Image::open(vec![Layer::raw(disk)]).expect("an image");
        assert!(service.set_images("dn1", HashMap::from([(1, Arc::new(image))])));
        TestBed {
            service,
            hazards: hazard::View::map(&cells).expect("cells"),
        }
    })
}

/// Runs one input; panics when an invariant is violated.
pub fn fuse_requests(input: &[u8]) {
    let bed = bed();
    let requests = TestQueue::new(BlockFs::new(bed.service.clone(), 0));
    let mut rest = input;
    let mut sent = 0;
    while let Some(([how, room, cut, length], after)) = rest.split_first_chunk::<4>() {
        let (body, after) = after.split_at(after.len().min(usize::from(*length)));
        rest = after;
        let request = match (how % 2, body) {
            (0, [operation, node, body @ ..]) => {
                let mut bytes = Vec::with_capacity(40 + body.len());
                bytes.extend_from_slice(&(40 + body.len() as u32).to_le_bytes());
                bytes.extend_from_slice(&u32::from(*operation).to_le_bytes());
                bytes.extend_from_slice(&[9; 8]);
                bytes.extend_from_slice(&u64::from(*node).to_le_bytes());
                bytes.extend_from_slice(&[0; 16]);
                bytes.extend_from_slice(body);
                bytes
            }
            _ => body.to_vec(),
        };
        let room = usize::from(*room) * 64;
        let answer = requests.send(&request, room, 1 + usize::from(*cut) * 16);
        if let Some(answer) = answer {
            assert!(answer.len() <= room);
            // These bytes come from the disk unless the request contained them.
            let secret = answer.windows(16).any(|bytes| bytes == [SECRET; 16]);
            assert!(!secret || request.windows(8).any(|bytes| bytes == [SECRET; 8]));
        }
        sent += 1;
        assert!(!bed.hazards.is_reading_any(TABLE));
    }
    assert!(requests.kept() <= sent + 1);
    drop(requests);
    assert_eq!(bed.service.stat().open, 0);
}
