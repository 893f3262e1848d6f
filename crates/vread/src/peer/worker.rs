// SPDX-License-Identifier: Apache-2.0
//! Carries out the daemon's orders, and starts the threads for other hosts and for this host's readers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::client::Client;
use super::hosts::Hosts;
use super::server::Server;
use super::tls::Identity;
use super::versions::{VERSIONS, Versions};
use crate::control::{Inbox, Order, PeerStat, Report, Role};
use crate::hazard::Cells;
use crate::journal::LogSink;
use crate::reader::{Service, change_datanodes, end_on_panic, two};

/// What the daemon gives a peer worker at its start.
#[derive(Debug)]
pub struct Params {
    /// Name of this host.
    pub host: String,
    /// Its certificate, PEM.
    pub certificate: String,
    /// Its private key, PEM.
    pub key: String,
    /// Listening sockets for other hosts.
    pub listeners: Vec<OwnedFd>,
    /// The worker's hazard cells ([`crate::hazard::create`]), all [`crate::hazard::MAX_CELLS`] of them, writable.
    pub hazards: File,
}

/// Serves and asks other hosts until the daemon orders the worker to quit. `sink` gets the log lines.
///
/// The process must be the worker's own: a panic in any thread ends it.
///
/// # Errors
/// When a parameter is invalid, a thread cannot start, or `poll` fails.
pub fn run(params: Params, sink: LogSink, inbox: Inbox) -> io::Result<()> {
    end_on_panic();
    work(params, VERSIONS, sink, inbox)
}

pub(super) fn work(
    params: Params,
    versions: Versions,
    sink: LogSink,
    mut inbox: Inbox,
) -> io::Result<()> {
    let mut worker = Worker::new(params, versions, sink)?;
    inbox.serve(|order, fds| worker.execute(order, fds))
}

struct Worker {
    host: String,
    identity: Arc<Identity>,
    versions: Versions,
    hosts: Arc<Hosts>,
    service: Arc<Service>,
    listening: Vec<String>,
    clients: BTreeMap<String, Client>,
}

impl Worker {
    fn new(params: Params, versions: Versions, sink: LogSink) -> io::Result<Self> {
        let identity = Identity::new(&params.certificate, &params.key).map_err(io::Error::other)?;
        let cells = Cells::map(&params.hazards)?;
        if cells.count() < crate::hazard::MAX_CELLS {
            return Err(io::Error::other("too few hazard cells"));
        }
        let service = Arc::new(Service::new(cells));
        let hosts = Arc::new(Hosts::default());
        let tls = identity.server(&hosts.pins).map_err(io::Error::other)?;
        let server = Arc::new(Server::new(
            service.clone(),
            hosts.clone(),
            tls,
            versions,
            sink,
        )?);
        let mut listening = Vec::new();
        for listener in params.listeners {
            let listener = TcpListener::from(listener);
            // The thread only accepts, so it may block.
            listener.set_nonblocking(false)?;
            listening.push(listener.local_addr()?.to_string());
            let server = server.clone();
            let thread = std::thread::Builder::new().name("peer-listen".into());
            thread.spawn(move || server.listen(&listener))?;
        }
        Ok(Self {
            host: params.host,
            identity: Arc::new(identity),
            versions,
            hosts,
            service,
            listening,
            clients: BTreeMap::new(),
        })
    }

    fn execute(&mut self, order: Order, fds: Vec<OwnedFd>) -> Report {
        let mut fds = fds.into_iter();
        let done = match order {
            Order::Hello { .. } => {
                return Report::hello(Role::Peer, &self.host);
            }
            Order::Stat => return Report::Peer(self.stat()),
            Order::Peers { peers } => {
                let done = self.hosts.set(&peers);
                self.clients.values().for_each(Client::wake);
                done
            }
            Order::Asker { reader, sources } => two(&mut fds).and_then(|(socket, memory)| {
                self.clients.remove(&reader);
                let client = Client::start(
                    &self.identity,
                    self.versions,
                    &self.hosts,
                    reader.clone(),
                    sources,
                    socket,
                    memory,
                );
                self.clients
                    .insert(reader, client.map_err(|e| e.to_string())?);
                Ok(())
            }),
            Order::NoAsker { reader } => {
                self.clients.remove(&reader);
                Ok(())
            }
            Order::Quit { .. } => Ok(()),
            other => change_datanodes(&self.service, other, fds),
        };
        done.into()
    }

    fn stat(&self) -> PeerStat {
        let service = self.service.stat();
        let askers = self.clients.iter().filter(|(_, asker)| !asker.ended());
        PeerStat {
            listening: self.listening.clone(),
            datanodes: service.datanodes,
            images: service.images,
            askers: askers.map(|(name, _)| name.clone()).collect(),
            strangers: self.hosts.strangers.load(Ordering::Relaxed),
            over_limit: self.hosts.over_limit.load(Ordering::Relaxed),
            peers: self.hosts.snapshot(),
        }
    }
}
