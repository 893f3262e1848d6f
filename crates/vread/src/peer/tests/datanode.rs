// SPDX-License-Identifier: Apache-2.0
//! A DataNode VM for tests: a disk with known content, and a scripted agent worker.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock, Mutex};

use viola_proto::agent::{BlockKey, Extent, FileMap};

use super::support::{Host, shared_file};
use crate::control::{Format, ImageSpec, Order, socket_pair};
use crate::lookup::{Found, Server};
use crate::table::Table;
use crate::{hazard, table};

pub const POOL: &str = "BP-1-10.0.0.1-1";
/// Bytes of a block, odd on purpose.
pub const LENGTH: usize = 9_000_001;
const META: u64 = 70_000;
const RUN: u64 = 1 << 20;
const DISK: u64 = 32 << 20;
pub static DISK_BYTES: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = Vec::with_capacity(DISK as usize);
    while bytes.len() < DISK as usize {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes
});

/// Runs of a block lie backwards on the disk, shifted by its number; the third is a hole.
fn data_map(id: i64) -> FileMap {
    let runs = (LENGTH as u64).div_ceil(RUN);
    let extent = |run: u64| Extent {
        logical: run * RUN,
        physical: (runs - run) * RUN + id as u64 * 4096,
        length: RUN.min(LENGTH as u64 - run * RUN),
        zero: false,
    };
    FileMap {
        size: LENGTH as u64,
        extents: (0..runs).filter(|run| *run != 2).map(extent).collect(),
    }
}

fn meta_map(id: i64) -> FileMap {
    FileMap {
        size: META,
        extents: vec![Extent {
            logical: 0,
            physical: 20 * RUN + id as u64 * 512,
            length: META,
            zero: false,
        }],
    }
}

/// What a file of a block holds.
pub fn expected(id: i64, meta: bool) -> Vec<u8> {
    let map = if meta { meta_map(id) } else { data_map(id) };
    let mut bytes = vec![0; map.size as usize];
    for e in &map.extents {
        let from = &DISK_BYTES[e.physical as usize..][..e.length as usize];
        bytes[e.logical as usize..][..e.length as usize].copy_from_slice(from);
    }
    bytes
}

/// A DataNode VM: its disk, and an agent worker that names blocks 1 to 8 of the pool while `named` is set.
pub struct Datanode {
    pub image: File,
    pub table: Arc<Table>,
    pub hazards: hazard::View,
    pub named: Arc<Mutex<bool>>,
}

pub const TABLE: u32 = 9;

impl Datanode {
    /// Serves its blocks to a peer worker.
    pub fn on(host: &Host) -> Self {
        let (table_file, image) = (shared_file(), shared_file());
        table::create(&table_file, TABLE, 16).unwrap();
        image.write_all_at(&DISK_BYTES, 0).unwrap();
        let table = Arc::new(Table::map(&table_file).unwrap());
        let named = Arc::new(Mutex::new(true));
        let (ours, theirs) = socket_pair().unwrap();
        let (answering, naming) = (table.clone(), named.clone());
        std::thread::spawn(move || {
            Server::new(theirs).run(|key| {
                let named = naming.lock().unwrap();
                let known = key.pool() == POOL && (1..=8).contains(&key.id()) && *named;
                known.then(|| found(&answering, key))
            });
        });
        let name = "uml:dn1".to_owned();
        let order = Order::Datanode { name: name.clone() };
        host.order(&order, &[ours.as_fd(), table_file.as_fd()]);
        let images = Order::Images {
            datanode: name,
            images: vec![ImageSpec {
                id: 1,
                device: "vda".into(),
                serial: None,
                layers: vec![Format::Raw],
                path: "/image".into(),
                file: (1, 1),
            }],
            why: String::new(),
        };
        host.order(&images, &[image.as_fd()]);
        Self {
            image,
            table,
            hazards: hazard::View::map(&host.hazards).unwrap(),
            named,
        }
    }

    /// Withdraws a block as an agent worker does, and returns when nobody reads it any more.
    pub fn withdraw(&self, id: u32) {
        self.table.withdraw(id);
        while self.hazards.is_reading(TABLE, id) {
            std::thread::yield_now();
        }
    }
}

fn found(table: &Table, key: &BlockKey) -> Found {
    Found {
        lease: table.lease(key.id() as u32).unwrap(),
        image: 1,
        data: data_map(key.id()),
        meta: meta_map(key.id()),
    }
}
