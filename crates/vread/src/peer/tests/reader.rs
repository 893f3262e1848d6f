// SPDX-License-Identifier: Apache-2.0
//! A reading VM for tests, which sends FUSE requests, and two hosts with a DataNode VM on one of them.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::new_memory;
use super::datanode::{Datanode, POOL};
use super::support::{Host, TEST_TIMEOUT, grant, shared_file, spec, wait_until};
use crate::control::{Order, Source, socket_pair};
use crate::hazard;
use crate::reader::test_queue::TestQueue;
use crate::reader::{BlockFs, Service};

/// A reading VM of a host, by FUSE requests.
pub struct Reader {
    pub service: Arc<Service>,
}

/// One queue of it.
pub struct Queue {
    requests: TestQueue,
}

impl Reader {
    pub fn new(host: &Host, name: &str, peers: &[&str]) -> Self {
        let reader = Self::alone();
        let sources = peers.iter().map(|peer| Source {
            peer: (*peer).into(),
            datanodes: vec!["dn*".into()],
            pools: vec!["*".into()],
        });
        reader.ask(host, name, sources.collect());
        reader
    }

    pub fn alone() -> Self {
        let cells = shared_file();
        hazard::create(&cells, 4).unwrap();
        Self {
            service: Arc::new(Service::new(hazard::Cells::map(&cells).unwrap())),
        }
    }

    pub fn ask(&self, host: &Host, name: &str, sources: Vec<Source>) {
        let (ours, theirs) = socket_pair().unwrap();
        let memory = new_memory().unwrap();
        let order = Order::Asker {
            reader: name.into(),
            sources,
        };
        host.order(&order, &[theirs.as_fd(), memory.as_fd()]);
        self.service.set_remote(Some((ours, memory))).unwrap();
    }

    pub fn queue(&self) -> Queue {
        Queue {
            requests: TestQueue::new(BlockFs::new(self.service.clone(), 1000)),
        }
    }

    /// Waits until blocks are found.
    pub fn wait(&self) {
        let queue = self.queue();
        wait_until("a block is found", || queue.open(1, false).is_ok());
    }
}

impl Queue {
    fn send(&self, opcode: u32, node: u64, body: &[u8], room: usize) -> Result<Vec<u8>, i32> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&(40 + body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&opcode.to_le_bytes());
        bytes.extend_from_slice(&77u64.to_le_bytes());
        bytes.extend_from_slice(&node.to_le_bytes());
        bytes.extend_from_slice(&[0; 16]);
        bytes.extend_from_slice(body);
        let answer = self.requests.send(&bytes, 16 + room, 64 << 10).unwrap();
        let length = u32::from_le_bytes(answer[..4].try_into().unwrap()) as usize;
        match -i32::from_le_bytes(answer[4..8].try_into().unwrap()) {
            0 => Ok(answer[16..length].to_vec()),
            error => Err(error),
        }
    }

    fn look_up(&self, parent: u64, name: &str) -> Result<(u64, u64), i32> {
        let name = [name.as_bytes(), b"\0"].concat();
        let entry = self.send(1, parent, &name, 128)?;
        let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
        // The node, and the size among the attributes.
        Ok((word(0), word(40 + 8)))
    }

    /// Number and length of a block's file.
    pub fn open(&self, id: i64, meta: bool) -> Result<(u64, u64), i32> {
        let (pool, _) = self.look_up(1, POOL)?;
        let suffix = if meta { ".meta" } else { "" };
        let found = self.look_up(pool, &format!("blk_{id}_5{suffix}"))?;
        self.send(14, found.0, &[0; 8], 16)?;
        Ok(found)
    }

    pub fn read(&self, node: u64, offset: u64, size: usize) -> Result<Vec<u8>, i32> {
        let mut body = [0; 40];
        body[8..16].copy_from_slice(&offset.to_le_bytes());
        body[16..20].copy_from_slice(&(size as u32).to_le_bytes());
        self.send(15, node, &body, size)
    }
}

impl Queue {
    /// Reads, again if need be: on a busy machine a host that is late for a sign of life counts as gone.
    pub fn read_retrying(&self, node: u64, offset: u64, size: usize) -> Vec<u8> {
        let begun = Instant::now();
        loop {
            match self.read(node, offset, size) {
                Ok(bytes) => return bytes,
                Err(error) => assert!(begun.elapsed() < TEST_TIMEOUT, "error {error}"),
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Opens, again if need be.
    pub fn open_retrying(&self, id: i64, meta: bool) -> (u64, u64) {
        let found = std::cell::Cell::new(None);
        wait_until("it is found", || {
            found.set(self.open(id, meta).ok());
            found.get().is_some()
        });
        found.get().unwrap()
    }
}

/// Two hosts that know each other; host `b` has the DataNode.
pub fn two_hosts() -> (Host, Host, Datanode, Reader) {
    two_hosts_through(|address| address)
}

pub fn two_hosts_through(
    by: impl FnOnce(SocketAddr) -> SocketAddr,
) -> (Host, Host, Datanode, Reader) {
    connect_hosts(Host::new("a"), Host::new("b"), by)
}

/// Tells two hosts of each other; `b` has the DataNode.
pub fn connect_hosts(
    a: Host,
    b: Host,
    by: impl FnOnce(SocketAddr) -> SocketAddr,
) -> (Host, Host, Datanode, Reader) {
    let datanode = Datanode::on(&b);
    b.set_peers(vec![spec(
        "a",
        a.id.fingerprint(),
        None,
        vec![grant("client*", POOL)],
    )]);
    a.set_peers(vec![spec(
        "b",
        b.id.fingerprint(),
        Some(by(b.address)),
        vec![],
    )]);
    let reader = Reader::new(&a, "client1", &["b"]);
    (a, b, datanode, reader)
}
