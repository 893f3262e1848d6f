// SPDX-License-Identifier: Apache-2.0
//! The worker for other hosts: its key and sockets, which blocks other hosts may read here, and which readers may read blocks there.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viola_vread::control::{
    Grant, Order, PeerSpec, PeerStat, Role, Secret, Source, WorkerSetup, socket_pair,
};

use super::pairs::{Datanode, Failed, Pairs};
use super::reader::Reader;
use crate::retry::Retry;
use crate::vms::named;
use crate::vread::keys::{Identity, host_name};
use crate::vread::observe::addresses::Addresses;
use crate::workers::process::{Killed, Worker};
use crate::workers::run_dir;
use crate::workers::user::Users;
use viola_cli::error::chain;
use viola_cli::log::{self, Level};
use viola_config::Vread;

/// Its name for the agents' workers, where a reader's worker has the name of its VM.
pub const NAME: &str = "@peer";
/// The daemon reads the key and binds the address at most this often.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What a running worker cannot change. It is saved beside the worker's socket for the next daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Setup {
    host: String,
    listen: Option<SocketAddr>,
    ports: Vec<u16>,
    fingerprint: String,
}

/// What a reader's worker and this one were told of each other.
#[derive(Debug, PartialEq, Eq)]
struct Asker {
    /// Process of the reader's worker.
    reader: u32,
    sources: Vec<Source>,
}

/// State of the connections to other hosts.
#[derive(Debug, Default)]
pub struct Peers {
    pub(in crate::vread) worker: Option<Worker>,
    killed: Killed,
    /// Its counts, as of the last poll.
    pub stat: PeerStat,
    /// What it was started with.
    setup: Option<Setup>,
    pub(in crate::vread) identity: Option<Identity>,
    tried: Option<Instant>,
    /// What the worker knows of other hosts.
    specs: Option<Vec<PeerSpec>>,
    pub(in crate::vread) pairs: Pairs,
    askers: BTreeMap<String, Asker>,
    addresses: Addresses,
    /// Hosts of the configuration: name and address.
    pub(in crate::vread) listed: Vec<(String, Option<String>)>,
    retry: Retry,
    pub(in crate::vread) why: String,
}

impl Peers {
    /// Takes over the worker of an earlier daemon.
    pub fn adopt(&mut self, dir: &Path, worker: Worker) {
        let setup = std::fs::read(setup_file(dir)).ok();
        self.setup = setup.and_then(|text| serde_json::from_slice(&text).ok());
        self.stat = worker.peer_stat().unwrap_or_default();
        self.worker = Some(worker);
    }

    /// Forgets failures and reads the key again: the operator has changed something.
    pub fn reset_failures(&mut self) {
        self.retry.reset();
        self.identity = None;
        self.tried = None;
    }

    /// Starts, restarts or ends the worker as the configuration requires.
    pub fn reconcile(&mut self, now: Instant, dir: &Path, config: &Vread, users: Users) {
        self.listed = config
            .peers
            .iter()
            .map(|p| (p.name.clone(), p.address.clone()))
            .collect();
        if config.peers.is_empty() {
            self.end("the configuration names no other host any more");
            self.why.clear();
            return;
        }
        if self.worker.as_mut().is_some_and(|w| !w.is_running()) {
            self.fail(now, "it has ended");
        }
        let must_wait = self
            .tried
            .is_some_and(|at| now.saturating_duration_since(at) < RETRY_INTERVAL);
        if self.identity.is_none() && !must_wait {
            self.tried = Some(now);
            match Identity::read(&config.key, &config.certificate) {
                Ok(identity) => {
                    self.identity = Some(identity);
                    self.tried = None;
                }
                Err(why) => self.log_error(why),
            }
        }
        // While the file is missing, the worker keeps the key that it has.
        let Some(identity) = self.identity.clone() else {
            return;
        };
        let wanted = Setup {
            host: host_name(),
            listen: config.listen,
            ports: config.ports(),
            fingerprint: identity.fingerprint.clone(),
        };
        if self.worker.is_some() && self.setup.as_ref() != Some(&wanted) {
            self.end("its key, its address or the ports of other hosts changed");
        }
        let must_wait = self
            .tried
            .is_some_and(|at| now.saturating_duration_since(at) < RETRY_INTERVAL);
        let must_wait = must_wait || self.killed.is_left() || self.retry.must_wait(now);
        if self.worker.is_none() && !must_wait {
            self.start(now, dir, wanted, &identity, users);
        }
    }

    fn start(&mut self, now: Instant, dir: &Path, setup: Setup, identity: &Identity, users: Users) {
        let mut listeners = Vec::new();
        if let Some(address) = setup.listen {
            match TcpListener::bind(address) {
                Ok(listener) => listeners.push(listener),
                Err(e) => {
                    self.tried = Some(now);
                    return self.log_error(format!("it cannot listen on {address}: {e}"));
                }
            }
        }
        match try_start(dir, &setup, identity, &listeners, users) {
            Ok(worker) => {
                let place = match setup.listen {
                    Some(address) => format!(", listens on {address}"),
                    None => String::new(),
                };
                log::line(
                    Level::Info,
                    format!(
                        "vread: worker for other hosts runs, process {}{place}",
                        worker.pid
                    ),
                );
                self.worker = Some(worker);
                self.setup = Some(setup);
                self.retry.succeeded();
                self.forget_orders();
                self.why.clear();
            }
            Err(why) => self.fail(now, &why),
        }
    }

    /// Forgets what the worker was told, so that the next one is told everything.
    fn forget_orders(&mut self) {
        self.specs = None;
        self.pairs.clear();
        self.askers.clear();
        self.stat = PeerStat::default();
    }

    fn log_error(&mut self, why: String) {
        if self.why != why {
            log::line(Level::Error, format!("vread: other hosts: {why}"));
            self.why = why;
        }
    }

    /// Kills the worker after a failure. A new one starts when [`Retry`] allows.
    pub fn fail(&mut self, now: Instant, why: &str) {
        if let Some(worker) = self.worker.take() {
            self.killed.kill(worker);
        }
        self.forget_orders();
        let next = self.retry.failed(now, why.to_owned());
        let (state, then) = (self.killed.state(), next.worker_text("it stays off"));
        log::line(
            Level::Error,
            format!("vread: the worker for other hosts is {state} ({why}): {then}"),
        );
        self.why = format!("its worker is {state}: {why}");
    }

    /// Ends the worker, if it runs.
    pub fn end(&mut self, why: &str) {
        if let Some(worker) = self.worker.take() {
            log::line(
                Level::Info,
                format!("vread: the worker for other hosts ends: {why}"),
            );
            self.killed.end(worker, why);
        }
        self.forget_orders();
    }

    /// Tells the worker the other hosts, the DataNode VMs here that they may read, and the readers that may read there. Returns agents'
    /// workers that failed, by identity of their VM, and why.
    pub fn update(
        &mut self,
        now: Instant,
        dir: &Path,
        config: &Vread,
        datanodes: &BTreeMap<String, Datanode<'_>>,
        readers: &mut BTreeMap<String, Reader>,
    ) -> Vec<(String, String)> {
        let mut failed = Vec::new();
        let peers = self.peer_specs(now, config, datanodes);
        let Some(worker) = &self.worker else {
            return failed;
        };
        if self.specs.as_ref() != Some(&peers) {
            let order = Order::Peers {
                peers: peers.clone(),
            };
            if let Err(e) = worker.order(&order, &[]) {
                self.fail(now, &chain(&e));
                return failed;
            }
            self.specs = Some(peers.clone());
        }
        let mut served = Vec::new();
        for (id, datanode) in datanodes {
            let pools = pools(&peers, id);
            if pools.is_empty() {
                continue;
            }
            served.push(id.clone());
            match self.pairs.join(worker, NAME, dir, *datanode, pools) {
                Ok(()) => {}
                Err(Failed::Reader(why)) => {
                    self.fail(now, &why);
                    return failed;
                }
                Err(Failed::Agent(why)) => failed.push((id.clone(), why)),
            }
        }
        let known = &mut self.stat.datanodes;
        let retained = (self.pairs).retain(Some(worker), NAME, datanodes, &served, known);
        match retained {
            Ok(()) => self.introduce_readers(now, config, readers),
            Err(Failed::Reader(why) | Failed::Agent(why)) => self.fail(now, &why),
        }
        failed
    }

    fn peer_specs(
        &mut self,
        now: Instant,
        config: &Vread,
        datanodes: &BTreeMap<String, Datanode<'_>>,
    ) -> Vec<PeerSpec> {
        let mut specs = Vec::new();
        for peer in &config.peers {
            let addresses = match &peer.address {
                Some(text) => self.addresses.resolve(now, text),
                None => Vec::new(),
            };
            let mut grants = Vec::new();
            for (id, datanode) in datanodes {
                for (reader, pools) in config.grants(&peer.name, &named(datanode.vm)) {
                    grants.push(Grant {
                        reader,
                        datanode: id.clone(),
                        name: datanode.vm.name.clone(),
                        pools,
                    });
                }
            }
            specs.push(PeerSpec {
                name: peer.name.clone(),
                fingerprints: peer.fingerprints.clone(),
                addresses,
                grants,
            });
        }
        specs
    }

    fn introduce_readers(
        &mut self,
        now: Instant,
        config: &Vread,
        readers: &mut BTreeMap<String, Reader>,
    ) {
        let Some(worker) = &self.worker else {
            return;
        };
        let mut kept = Vec::new();
        for (name, reader) in readers.iter_mut() {
            let Some(theirs) = &reader.worker else {
                continue;
            };
            let sources: Vec<Source> = config
                .sources(name)
                .into_iter()
                .map(|(peer, datanodes, pools)| Source {
                    peer,
                    datanodes,
                    pools,
                })
                .collect();
            if sources.is_empty() {
                continue;
            }
            kept.push(name.clone());
            let wanted = Asker {
                reader: theirs.pid,
                sources,
            };
            if self.askers.get(name) == Some(&wanted) {
                continue;
            }
            match introduce(worker, theirs, name, &wanted.sources) {
                Ok(()) => drop(self.askers.insert(name.clone(), wanted)),
                Err((Role::Reader, why)) => reader.fail(now, &why),
                Err((_, why)) => return self.fail(now, &why),
            }
        }
        let known = self.askers.keys().chain(&self.stat.askers);
        let gone: Vec<String> = known.filter(|n| !kept.contains(n)).cloned().collect();
        for name in gone {
            self.askers.remove(&name);
            self.stat.askers.retain(|n| *n != name);
            let order = Order::NoAsker {
                reader: name.clone(),
            };
            if let Err(e) = worker.order(&order, &[]) {
                return self.fail(now, &chain(&e));
            }
        }
        for (name, reader) in readers.iter_mut().filter(|(n, _)| !kept.contains(n)) {
            self.askers.remove(name);
            reader.leave_other_hosts(now);
        }
    }

    /// Reads the counts of the worker.
    pub fn poll(&mut self, now: Instant) {
        match self.worker.as_ref().map(Worker::peer_stat) {
            Some(Ok(stat)) => {
                self.stat = stat;
                // A reader whose socket broke is introduced again.
                self.askers
                    .retain(|name, _| self.stat.askers.contains(name));
            }
            Some(Err(e)) => self.fail(now, &chain(&e)),
            None => {}
        }
    }
}

fn setup_file(dir: &Path) -> PathBuf {
    dir.join("peer.json")
}

fn try_start(
    dir: &Path,
    setup: &Setup,
    identity: &Identity,
    listeners: &[TcpListener],
    users: Users,
) -> Result<Worker, String> {
    let control = run_dir::socket(dir, Role::Peer, &setup.host);
    run_dir::check_socket_path(&control)?;
    let hazards = run_dir::new_hazards(dir, NAME)
        .map_err(|e| format!("its hazard cells cannot be created: {e}"))?;
    let text = serde_json::to_vec(setup).map_err(|e| e.to_string())?;
    let file = setup_file(dir);
    std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    let setup = WorkerSetup::Peer {
        host: setup.host.clone(),
        certificate: identity.certificate.clone(),
        key: Secret(identity.key.clone()),
        listeners: listeners.len(),
        ports: setup.ports.clone(),
        user: users.of_new_worker()?,
    };
    let mut fds = vec![hazards.as_fd()];
    fds.extend(listeners.iter().map(AsFd::as_fd));
    Worker::start(Role::Peer, &control, &setup, &fds).map_err(|e| chain(&e))
}

/// Block pools of a DataNode VM that other hosts may read.
fn pools(peers: &[PeerSpec], id: &str) -> Vec<String> {
    let grants = peers.iter().flat_map(|p| &p.grants);
    let mut pools: Vec<String> = grants
        .filter(|g| g.datanode == id)
        .flat_map(|g| g.pools.iter().cloned())
        .collect();
    pools.sort_unstable();
    pools.dedup();
    pools
}

/// Gives each worker its end of a socket, and both the same memory.
///
/// # Errors
/// Which worker did not take the order, and why.
fn introduce(
    peers: &Worker,
    reader: &Worker,
    name: &str,
    sources: &[Source],
) -> Result<(), (Role, String)> {
    let made = |e: std::io::Error| (Role::Peer, format!("memory for a reader: {e}"));
    let memory = viola_vread::peer::new_memory().map_err(made)?;
    let (ours, theirs) = socket_pair().map_err(made)?;
    let order = Order::Asker {
        reader: name.to_owned(),
        sources: sources.to_vec(),
    };
    peers
        .order(&order, &[ours.as_fd(), memory.as_fd()])
        .map_err(|e| (Role::Peer, chain(&e)))?;
    reader
        .order(&Order::Remote, &[theirs.as_fd(), memory.as_fd()])
        .map_err(|e| (Role::Reader, chain(&e)))
}
