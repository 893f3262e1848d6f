// SPDX-License-Identifier: Apache-2.0
//! Tests with requests of hostile and of correct VMs, without a VM.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use viola_extents::host::{Image, Layer};
use viola_proto::agent::{BlockKey, Extent, FileMap};

use super::nodes::MAX_NODES;
use super::test_queue::TestQueue;
use super::{BlockFs, Service};
use crate::control::socket_pair;
use crate::lookup::{Found, Server};
use crate::table::Table;
use crate::{hazard, table};

pub(super) const POOL: &str = "BP-1-10.0.0.1-1";
pub(super) const TABLE: u32 = 9;
pub(super) const LENGTH: u64 = 300_000;

pub(super) const LOOKUP: u32 = 1;
pub(super) const FORGET: u32 = 2;
const GETATTR: u32 = 3;
pub(super) const OPEN: u32 = 14;
pub(super) const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;

/// An agent worker that names every block of the pool, and a disk with known content.
pub(super) struct TestBed {
    pub(super) service: Arc<Service>,
    requests: TestQueue,
    pub(super) table: Arc<Table>,
    pub(super) hazards: hazard::View,
    pub(super) disk: Vec<u8>,
    image: File,
    /// Whether the agent worker names blocks. It holds the lock while it answers or withdraws.
    pub(super) named: Arc<Mutex<bool>>,
}

fn found(table: &Table, key: &BlockKey) -> Option<Found> {
    let slot = u32::try_from(key.id()).ok()?;
    Some(Found {
        lease: table.lease(slot)?,
        image: 1,
        data: FileMap {
            size: LENGTH,
            // a hole in the middle, the two halves the other way round on the disk
            extents: vec![
                Extent {
                    logical: 0,
                    physical: 262_144,
                    length: 131_072,
                    zero: false,
                },
                Extent {
                    logical: 200_000,
                    physical: 4096,
                    length: 100_000,
                    zero: false,
                },
            ],
        },
        meta: FileMap {
            size: 7,
            extents: vec![Extent {
                logical: 0,
                physical: 0,
                length: 7,
                zero: false,
            }],
        },
    })
}

pub(super) fn bed() -> TestBed {
    let (table_file, cells) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    table::create(&table_file, TABLE, 100_000).unwrap();
    hazard::create(&cells, 4).unwrap();
    let table = Arc::new(Table::map(&table_file).unwrap());
    let image = tempfile::tempfile().unwrap();
    let disk: Vec<u8> = (0..1u32 << 20)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    image.write_all_at(&disk, 0).unwrap();
    let (here, there) = socket_pair().unwrap();
    let named = Arc::new(Mutex::new(true));
    let (answering, naming) = (table.clone(), named.clone());
    std::thread::spawn(move || {
        Server::new(there).run(|key| {
            let named = naming.lock().unwrap();
            let known = key.pool() == POOL && *named;
            known.then(|| found(&answering, key)).flatten()
        });
    });
    let service = Arc::new(Service::new(hazard::Cells::map(&cells).unwrap()));
    service.add("dn1", here, table_file.into()).unwrap();
    let opened = Image::open(vec![Layer::raw(image.try_clone().unwrap())]).unwrap();
    assert!(service.set_images("dn1", HashMap::from([(1, Arc::new(opened))])));
    TestBed {
        requests: TestQueue::new(BlockFs::new(service.clone(), 1000)),
        hazards: hazard::View::map(&cells).unwrap(),
        service,
        table,
        disk,
        image,
        named,
    }
}

/// Content of the block's data file.
pub(super) fn expected(disk: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; LENGTH as usize];
    bytes[..131_072].copy_from_slice(&disk[262_144..][..131_072]);
    bytes[200_000..].copy_from_slice(&disk[4096..][..100_000]);
    bytes
}

pub(super) fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&(40 + body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&opcode.to_le_bytes());
    bytes.extend_from_slice(&77u64.to_le_bytes());
    bytes.extend_from_slice(&node.to_le_bytes());
    bytes.extend_from_slice(&[0; 16]);
    bytes.extend_from_slice(body);
    bytes
}

/// Error and body of an answer.
pub(super) fn answer(bytes: &[u8]) -> (i32, &[u8]) {
    let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    assert_eq!(bytes[8..16], 77u64.to_le_bytes());
    (
        -i32::from_le_bytes(bytes[4..8].try_into().unwrap()),
        &bytes[16..length],
    )
}

impl TestBed {
    fn ask(&self, opcode: u32, node: u64, body: &[u8], room: usize) -> (i32, Vec<u8>) {
        let bytes = self
            .requests
            .send(&request(opcode, node, body), 16 + room, 4096);
        let bytes = bytes.unwrap();
        let (error, body) = answer(&bytes);
        (error, body.to_vec())
    }

    fn look_up(&self, parent: u64, name: &str) -> Result<u64, i32> {
        let name = [name.as_bytes(), b"\0"].concat();
        match self.ask(LOOKUP, parent, &name, 128) {
            (0, body) => Ok(u64::from_le_bytes(body[..8].try_into().unwrap())),
            (error, _) => Err(error),
        }
    }

    fn open(&self, node: u64) -> i32 {
        self.ask(OPEN, node, &[0; 8], 16).0
    }

    fn read(&self, node: u64, offset: u64, size: u32) -> (i32, Vec<u8>) {
        let mut body = [0; 40];
        body[8..16].copy_from_slice(&offset.to_le_bytes());
        body[16..20].copy_from_slice(&size.to_le_bytes());
        self.ask(READ, node, &body, size as usize)
    }

    fn block(&self, id: u64) -> u64 {
        let pool = self.look_up(1, POOL).unwrap();
        self.look_up(pool, &format!("blk_{id}_5")).unwrap()
    }
}

#[test]
fn a_block_is_looked_up_opened_and_read_byte_for_byte() {
    let bed = bed();
    let mut init = [7u32.to_le_bytes(), 38u32.to_le_bytes()].concat();
    init.extend_from_slice(&[0xff; 8]);
    init.extend_from_slice(&[0; 48]);
    let (error, body) = bed.ask(INIT, 0, &init, 64);
    assert_eq!(
        (error, body[..4].to_vec()),
        (0, 7u32.to_le_bytes().to_vec())
    );
    let node = bed.block(3);
    assert_eq!(bed.open(node), 0);
    let expected = expected(&bed.disk);
    for (offset, size) in [
        (0, 4096),
        (0, 1 << 20),
        (131_000, 100_000),
        (299_999, 10),
        (150_000, 1),
    ] {
        let (error, bytes) = bed.read(node, offset, size);
        let end = (offset as usize + size as usize).min(LENGTH as usize);
        assert_eq!(error, 0);
        assert!(bytes == expected[offset as usize..end], "{offset} {size}");
    }
    assert_eq!(bed.read(node, LENGTH, 4096), (0, vec![]));
    assert_eq!(bed.read(node, u64::MAX, u32::MAX >> 12), (0, vec![]));
    let pool = bed.look_up(1, POOL).unwrap();
    let meta = bed.look_up(pool, "blk_3_5.meta").unwrap();
    assert_eq!(bed.read(meta, 0, 100).1, &bed.disk[..7]);
    let listed = bed
        .ask(
            READDIR,
            pool,
            &[&[0; 16][..], &4096u32.to_le_bytes(), &[0; 20]].concat(),
            4096,
        )
        .1;
    let listed = String::from_utf8_lossy(&listed);
    assert!(
        listed.contains("blk_3_5.meta") && listed.contains(".."),
        "{listed}"
    );
    let stat = bed.service.stat();
    assert_eq!((stat.open, stat.reads > 5), (1, true));
    assert_eq!(bed.ask(RELEASE, node, &[0; 24], 0).0, 0);
    assert_eq!(bed.service.stat().open, 0);
}

#[test]
fn a_withdrawn_block_is_not_read_and_named_again_it_is() {
    let bed = bed();
    let node = bed.block(3);
    assert_eq!(bed.open(node), 0);
    *bed.named.lock().unwrap() = false;
    bed.table.withdraw(3);
    assert!(!bed.hazards.is_reading(TABLE, 3));
    assert_eq!(bed.read(node, 0, 4096).0, libc::ESTALE);
    assert_eq!(bed.open(node), libc::ESTALE);
    let pool = bed.look_up(1, POOL).unwrap();
    assert_eq!(bed.look_up(pool, "blk_3_5"), Err(libc::ENOENT));
    *bed.named.lock().unwrap() = true;
    assert_eq!(bed.read(node, 0, 4096).1, expected(&bed.disk)[..4096]);
    // and not after the operator has taken the DataNode away
    bed.service.remove("dn1");
    assert_eq!(bed.read(node, 0, 4096).0, libc::ESTALE);
}

#[test]
fn a_disk_that_the_daemon_takes_away_is_closed_and_its_blocks_are_not_read() {
    let bed = bed();
    let image = || Image::open(vec![Layer::raw(bed.image.try_clone().unwrap())]).unwrap();
    let first = Arc::new(image());
    let is_open = Arc::downgrade(&first);
    assert!((bed.service).set_images("dn1", HashMap::from([(1, first), (2, Arc::new(image()))])));
    let node = bed.block(3);
    assert_eq!(bed.open(node), 0);
    assert_eq!(bed.read(node, 0, 4096).0, 0);
    assert!((bed.service).set_images("dn1", HashMap::from([(2, Arc::new(image()))])));
    // The lease still holds, and the block was looked up before.
    assert!(is_open.upgrade().is_none());
    assert_eq!(bed.read(node, 0, 4096).0, libc::ESTALE);
    let pool = bed.look_up(1, POOL).unwrap();
    assert_eq!(bed.look_up(pool, "blk_4_5"), Err(libc::ENOENT));
    let refusals = bed.service.stat().refusals;
    assert_eq!(refusals.get("disk not here"), Some(&2), "{refusals:?}");
    assert_eq!(refusals.get("bad answer"), None);
    let first = Arc::new(image());
    let is_open = Arc::downgrade(&first);
    assert!((bed.service).set_images("dn1", HashMap::from([(1, first)])));
    assert_eq!(
        bed.read(node, 0, 4096).1,
        expected(&bed.disk)[..4096],
        "the daemon has handed the disk over again"
    );
    bed.service.remove("dn1");
    assert!(is_open.upgrade().is_none());
}

/// A VM reads while blocks are withdrawn and their places reused: every successful read returns the block's bytes.
#[test]
fn no_byte_of_another_file_is_ever_answered() {
    let bed = bed();
    let expected = expected(&bed.disk);
    let node = bed.block(3);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let other = vec![0xff; bed.disk.len()];
            for _ in 0..300 {
                let mut named = bed.named.lock().unwrap();
                *named = false;
                bed.table.withdraw(3);
                drop(named);
                while bed.hazards.is_reading(TABLE, 3) {
                    std::thread::yield_now();
                }
                bed.image.write_all_at(&other, 0).unwrap();
                std::thread::yield_now();
                bed.image.write_all_at(&bed.disk, 0).unwrap();
                *bed.named.lock().unwrap() = true;
                std::thread::sleep(Duration::from_micros(200));
            }
            end.store(true, Ordering::SeqCst);
        });
        let (mut whole, mut refused) = (0, 0);
        while !end.load(Ordering::SeqCst) {
            match bed.read(node, 0, LENGTH as u32) {
                (0, bytes) => {
                    assert!(bytes == expected, "other bytes");
                    whole += 1;
                }
                (error, _) => {
                    assert_eq!(error, libc::ESTALE);
                    refused += 1;
                }
            }
        }
        assert!(whole > 0 && refused > 0, "{whole} {refused}");
    });
}

#[test]
fn missing_names_and_writes_give_the_right_errno() {
    let bed = bed();
    assert_eq!(bed.look_up(1, "etc"), Err(libc::ENOENT));
    assert_eq!(bed.look_up(1, ".."), Err(libc::ENOENT));
    let pool = bed.look_up(1, POOL).unwrap();
    let other = bed.look_up(1, "BP-2-x-1").unwrap();
    assert_eq!(bed.look_up(other, "blk_3_5"), Err(libc::ENOENT));
    for name in ["blk_3", "blk_03_5", "blk_3_5.meta2", "../x", "blk_200000_5"] {
        assert_eq!(bed.look_up(pool, name), Err(libc::ENOENT), "{name}");
    }
    let node = bed.block(3);
    assert_eq!(bed.look_up(node, "x"), Err(libc::ENOTDIR));
    assert_eq!(bed.open(pool), libc::EISDIR);
    assert_eq!(bed.ask(OPENDIR, node, &[0; 8], 16).0, libc::ENOTDIR);
    assert_eq!(bed.read(pool, 0, 1).0, libc::EISDIR);
    assert_eq!(bed.read(999, 0, 1).0, libc::ESTALE);
    let write = [&1u32.to_le_bytes()[..], &[0; 4]].concat();
    assert_eq!(bed.ask(OPEN, node, &write, 16).0, libc::EROFS);
    assert_eq!(bed.ask(STATFS, 1, &[], 80).0, 0);
    // create, unlink, rename, write
    for opcode in [9, 10, 11, 12, 13, 16, 35] {
        let body = [&[0; 40][..], b"a\0b\0"].concat();
        let answer = bed.requests.send(&request(opcode, pool, &body), 200, 4096);
        let error = answer.map_or(libc::EROFS, |bytes| super::tests::answer(&bytes).0);
        assert!(error == libc::EROFS, "{opcode}: {error}");
    }
    // extended attributes and what else a kernel asks for once
    for opcode in [22, 20, 25, 34, 46, 48, 49] {
        let answer = bed
            .requests
            .send(&request(opcode, node, &[0; 64]), 200, 4096);
        let error = answer.map_or(libc::ENOSYS, |bytes| super::tests::answer(&bytes).0);
        assert!(
            [libc::ENOSYS, libc::EINVAL].contains(&error),
            "{opcode}: {error}"
        );
    }
}

#[test]
fn a_vm_that_forgets_nothing_costs_bounded_memory_and_can_go_on() {
    let bed = bed();
    let first = bed.block(0);
    assert_eq!(bed.open(first), 0);
    let mut last = 0;
    for id in 1..2 * MAX_NODES as u64 {
        last = bed.block(id);
    }
    assert!(bed.requests.kept() <= MAX_NODES, "{}", bed.requests.kept());
    assert!(
        bed.service.cached_blocks() <= 16_384,
        "{}",
        bed.service.cached_blocks()
    );
    assert_eq!(bed.ask(GETATTR, last, &[0; 16], 104).0, 0);
    // what is open stays
    assert_eq!(bed.read(first, 0, 10).0, 0);
    let forget = (u64::MAX).to_le_bytes();
    assert!(
        bed.requests
            .send(&request(FORGET, last, &forget), 0, 4096)
            .is_none()
    );
    assert_eq!(bed.ask(GETATTR, last, &[0; 16], 104).0, libc::ESTALE);
}

#[derive(Debug, Clone)]
enum Step {
    Raw(Vec<u8>),
    Shaped(u32, u64, Vec<u8>),
    Name(u64, String),
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop::collection::vec(any::<u8>(), 0..200);
    let name = prop_oneof![
        Just(POOL.to_owned()),
        (0u32..20, 4u32..6, any::<bool>()).prop_map(|(id, stamp, meta)| format!(
            "blk_{id}_{stamp}{}",
            if meta { ".meta" } else { "" }
        )),
        "[ -~]{0,300}",
    ];
    prop_oneof![
        1 => bytes.clone().prop_map(Step::Raw),
        4 => (0u32..60, 0u64..30, bytes).prop_map(|(o, n, b)| Step::Shaped(o, n, b)),
        4 => (0u64..6, name).prop_map(|(n, name)| Step::Name(n, name)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_requests_panic_or_cost_memory(steps in prop::collection::vec((step(), 0usize..9000, 1usize..5000), 1..60)) {
        let bed = bed();
        for (step, room, cut) in steps {
            let bytes = match step {
                Step::Raw(bytes) => bytes,
                Step::Shaped(opcode, node, body) => request(opcode, node, &body),
                Step::Name(node, name) => request(LOOKUP, node, &[name.as_bytes(), b"\0"].concat()),
            };
            if let Some(answer) = bed.requests.send(&bytes, room, cut) {
                prop_assert!(answer.len() <= room);
            }
        }
        prop_assert!(bed.requests.kept() <= 61);
        prop_assert!(!bed.hazards.is_reading_any(TABLE));
        // it still works
        prop_assert_eq!(bed.read(bed.block(3), 0, 10).0, 0);
    }
}
