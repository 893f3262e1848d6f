// SPDX-License-Identifier: Apache-2.0
//! Two hosts in one process: a DataNode's image and a scripted agent worker on one, a reader on the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::Child;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use viola_proto::agent::{BlockKey, Extent, FileMap};

use super::super::worker::{Params, work};
use super::super::{fingerprint, new_memory};
use crate::control::{
    Control, Format, Grant, ImageSpec, Inbox, Order, PeerSpec, PeerStat, Report, Secret, Source,
    WorkerSetup,
};
use crate::lookup::{Found, Incoming, Server};
use crate::reader::test_queue::TestQueue;
use crate::reader::{BlockFs, MountOptions, Service};
use crate::table::Table;
use crate::{hazard, table};

pub const POOL: &str = "BP-1-10.0.0.1-1";
/// Bytes of a block, odd on purpose.
pub const LENGTH: usize = 9_000_001;
const META: u64 = 70_000;
const RUN: u64 = 1 << 20;
const DISK: u64 = 32 << 20;
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

pub fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

fn shared_file() -> File {
    tempfile::tempfile().unwrap()
}

/// A peer worker, on a thread or as a process.
pub struct Host {
    control: Control,
    pub address: SocketAddr,
    pub id: KeyPair,
    hazards: File,
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
        let (ours, theirs) = pair();
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
        let (ours, theirs) = pair();
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
        let (ours, theirs) = pair();
        let (answering, naming) = (table.clone(), named.clone());
        std::thread::spawn(move || {
            let mut server = Server::new(theirs);
            loop {
                match server.receive() {
                    Incoming::Question(number, question) => {
                        let named = naming.lock().unwrap();
                        let known = question.key.pool() == POOL
                            && (1..=8).contains(&question.key.id())
                            && *named;
                        let found = known.then(|| found(&answering, &question.key));
                        drop(named);
                        server.answer(number, found.as_ref()).unwrap();
                    }
                    Incoming::Empty => drop(poll(
                        &mut [PollFd::new(server.socket(), PollFlags::IN)],
                        None,
                    )),
                    Incoming::Closed => return,
                }
            }
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

/// A relay between two hosts that can be told to misbehave.
pub struct Relay {
    pub address: SocketAddr,
    mode: Arc<AtomicU8>,
}

const PASS: u8 = 0;
const CUT: u8 = 1;
const SWALLOW: u8 = 2;

impl Relay {
    pub fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mode = Arc::new(AtomicU8::new(PASS));
        let told = mode.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                if told.load(Ordering::SeqCst) == CUT {
                    continue;
                }
                let server = TcpStream::connect(target).unwrap();
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let told = told.clone();
                    std::thread::spawn(move || carry(from, to, &told));
                }
            }
        });
        Self { address, mode }
    }

    /// Ends all connections, and those that are made from now on.
    pub fn cut(&self) {
        self.mode.store(CUT, Ordering::SeqCst);
    }

    /// Keeps all connections, and carries nothing any more.
    pub fn swallow(&self) {
        self.mode.store(SWALLOW, Ordering::SeqCst);
    }

    pub fn pass(&self) {
        self.mode.store(PASS, Ordering::SeqCst);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, mode: &AtomicU8) {
    let tick = Duration::from_millis(5);
    from.set_read_timeout(Some(tick)).unwrap();
    let mut bytes = vec![0; 64 << 10];
    loop {
        match mode.load(Ordering::SeqCst) {
            CUT => break,
            SWALLOW => std::thread::sleep(tick),
            _ => match from.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => {
                    // What was under way when it began to swallow is lost, too.
                    if mode.load(Ordering::SeqCst) == PASS && to.write_all(&bytes[..n]).is_err() {
                        break;
                    }
                }
                Err(e)
                    if matches!(
                        e.kind(),
                        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                    ) => {}
                Err(_) => break,
            },
        }
    }
    let _ = from.shutdown(std::net::Shutdown::Both);
    let _ = to.shutdown(std::net::Shutdown::Both);
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
        let (ours, theirs) = pair();
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
