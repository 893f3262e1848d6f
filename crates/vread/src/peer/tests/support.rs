// SPDX-License-Identifier: Apache-2.0
//! Two hosts in one process: a DataNode VM on one, a reader on the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::worker::{Params, work};
use super::super::{fingerprint, new_memory};
use super::datanode::{Datanode, POOL};
use crate::control::{
    Control, Grant, Inbox, Order, PeerSpec, PeerStat, Report, Secret, Source, WorkerSetup,
    socket_pair,
};
use crate::hazard;
use crate::reader::test_queue::TestQueue;
use crate::reader::{BlockFs, MountOptions, Service};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A certificate and its key.
pub struct KeyPair {
    pub certificate: String,
    pub key: String,
}

impl KeyPair {
    pub fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(vec!["host".into()]).unwrap();
        Self {
            certificate: made.cert.pem(),
            key: made.signing_key.serialize_pem(),
        }
    }

    pub fn fingerprint(&self) -> String {
        fingerprint(&self.certificate).unwrap()
    }
}

pub fn shared_file() -> File {
    tempfile::tempfile().unwrap()
}

/// A peer worker, on a thread or as a process.
pub struct Host {
    control: Control,
    pub address: SocketAddr,
    pub id: KeyPair,
    pub hazards: File,
    pub process: Option<Child>,
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Host {
    pub fn new(name: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (id, hazards) = (KeyPair::new(), shared_file());
        hazard::create(&hazards, hazard::MAX_CELLS).unwrap();
        let params = Params {
            host: name.into(),
            certificate: id.certificate.clone(),
            key: id.key.clone(),
            listeners: vec![listener.into()],
            hazards: hazards.try_clone().unwrap(),
        };
        let (ours, theirs) = socket_pair().unwrap();
        std::thread::spawn(move || work(params, Inbox::single(Control::from_fd(theirs))).unwrap());
        Self {
            control: Control::from_fd(ours),
            address,
            id,
            hazards,
            process: None,
        }
    }

    /// A process as the daemon starts it, shut in, that may connect to `ports`. It runs one test of this program:
    /// [`super::process::worker`].
    pub fn process(name: &str, ports: Vec<u16>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control");
        let orders = crate::control::listen(&path).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (id, hazards) = (KeyPair::new(), shared_file());
        hazard::create(&hazards, hazard::MAX_CELLS).unwrap();
        let (ours, theirs) = socket_pair().unwrap();
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peer::tests::process::worker", "--ignored"])
            .stdin(theirs)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let setup = WorkerSetup::Peer {
            host: name.into(),
            certificate: id.certificate.clone(),
            key: Secret(id.key.clone()),
            listeners: 1,
            ports,
            user: rustix::process::geteuid()
                .is_root()
                .then_some((65_534, 65_534)),
        };
        let fds = [orders.as_fd(), hazards.as_fd(), listener.as_fd()];
        Control::from_fd(ours).send_setup(&setup, &fds).unwrap();
        Self {
            control: Control::connect(&path).unwrap(),
            address,
            id,
            hazards,
            process: Some(child),
        }
    }

    pub fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) {
        let report = self.control.order(order, fds, TEST_TIMEOUT).unwrap();
        assert_eq!(report, Report::Done, "{order:?}");
    }

    pub fn stat(&self) -> PeerStat {
        match self.control.order(&Order::Stat, &[], TEST_TIMEOUT).unwrap() {
            Report::Peer(stat) => stat,
            other => panic!("{other:?}"),
        }
    }

    pub fn set_peers(&self, peers: Vec<PeerSpec>) {
        self.order(&Order::Peers { peers }, &[]);
    }
}

/// Another host as a worker is told of it.
pub fn spec(
    name: &str,
    fingerprint: String,
    address: Option<SocketAddr>,
    grants: Vec<Grant>,
) -> PeerSpec {
    PeerSpec {
        name: name.into(),
        fingerprints: vec![fingerprint],
        addresses: address.iter().map(ToString::to_string).collect(),
        grants,
    }
}

pub fn grant(reader: &str, pool: &str) -> Grant {
    Grant {
        reader: reader.into(),
        datanode: "uml:dn1".into(),
        name: "dn1".into(),
        pools: vec![pool.into()],
    }
}

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
        let mount = MountOptions {
            uid: 1000,
            gid: 1000,
            keep_cache: false,
        };
        Queue {
            requests: TestQueue::new(BlockFs::new(self.service.clone(), mount)),
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

/// 0.65 s are what it takes on an idle machine; these tests run on busy ones.
pub const MAX_ERROR_DELAY: Duration = Duration::from_secs(5);

/// Waits until something is so.
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Numbers that look random.
pub struct Rng(pub u64);

impl Rng {
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % most
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

pub fn counts(stat: &PeerStat, of: &str) -> crate::control::PeerCounts {
    stat.peers.get(of).cloned().unwrap_or_default()
}

pub fn total(bytes: &BTreeMap<String, u64>) -> u64 {
    bytes.values().sum()
}
