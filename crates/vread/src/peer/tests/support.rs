// SPDX-License-Identifier: Apache-2.0
//! Peer workers of several hosts, as threads or processes.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use super::super::fingerprint;
use super::super::versions::{VERSIONS, Versions};
use super::super::worker::{Params, work};
use crate::control::{
    Control, Grant, Inbox, Order, PeerSpec, PeerStat, Report, Secret, WorkerSetup, socket_pair,
};
use crate::hazard;
use crate::journal::LogSink;

pub const TEST_TIMEOUT: Duration = Duration::from_secs(30);

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
        Self::with(name, VERSIONS, Box::new(|_, _| {}))
    }

    /// A worker that speaks these versions of the protocol.
    pub fn speaking(name: &str, lowest: u8, highest: u8) -> Self {
        Self::with(name, Versions { lowest, highest }, Box::new(|_, _| {}))
    }

    /// A worker on a thread, with its log lines.
    pub fn with(name: &str, versions: Versions, sink: LogSink) -> Self {
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
        std::thread::spawn(move || {
            work(
                params,
                versions,
                sink,
                Inbox::single(Control::from_fd(theirs)),
            )
            .unwrap();
        });
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
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

pub fn counts(stat: &PeerStat, of: &str) -> crate::control::PeerCounts {
    stat.peers.get(of).cloned().unwrap_or_default()
}

pub fn total(bytes: &BTreeMap<String, u64>) -> u64 {
    bytes.values().sum()
}
