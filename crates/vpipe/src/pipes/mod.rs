// SPDX-License-Identifier: Apache-2.0
//! Serves the requests of a VM's agent.
//!
//! | module | what it does |
//! |---|---|
//! | `worker` | the thread that has the connections |
//! | `pipe` | one pipe, from restored to returned connections |
//! | `drain_poll` | when to poll for acknowledgements at the end of a pipe |
//! | `waiting` | held connections before and after a pipe |
//! | `rate_limit` | the VM's cap in bytes per second |
//! | `copies` | the thread that copies from file to file |
//! | `congestion` | congestion controls that the host may use |
//! | `pause` | pauses all work while the VM is paused |
//!
//! [`Pipes`] takes the requests of the agent and returns the replies ([`PipeReply`]). It never waits for a VM: it
//! releases a held connection that the VM does not use in time, and resets a connection that the VM does not restore
//! in time.

mod congestion;
mod copies;
mod drain_poll;
mod pause;
mod pipe;
mod rate_limit;
mod waiting;
mod worker;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use viola_proto::pipe::status::PipeStats;
use viola_proto::pipe::{Connection, PipeId, PipeReply};

use crate::transfer::{FileRange, FileToFile};
use crate::{EgressGate, Flow, FlowTable, HoldQueue};
pub use congestion::congestion_controls;
use copies::Copies;
pub use pause::PauseProbe;
use pause::PauseWatch;
use pipe::ReturnPath;
use rate_limit::RateLimit;

/// What the threads need. One process can make it and pass it to another, which needs only CAP_NET_ADMIN and
/// CAP_NET_BIND_SERVICE in the VM's [`crate::VmNetns`].
#[derive(Debug)]
pub struct PipeResources {
    /// The table of held and redirected connections.
    pub flows: FlowTable,
    /// Keeps the host's sockets silent while the VM is paused.
    pub gate: EgressGate,
    /// Packets of held connections.
    pub hold_queue: HoldQueue,
    /// Interface index of the VM's tap.
    pub tap: u32,
    /// Interface index of the veth to the VM's namespace.
    pub veth: u32,
    /// Interface index of the veth for held packets.
    pub hold_veth: u32,
    /// The VM's connections must have one of these addresses; empty for any.
    pub addresses: Vec<IpAddr>,
    /// Congestion controls that the VM's connections may use: [`congestion_controls`].
    pub congestion_controls: Vec<String>,
    /// Most pipes at a time.
    pub max_pipes: usize,
    /// Cap in bytes per second over all pipes and copies; `None` for no cap.
    pub max_bytes_per_s: Option<u64>,
    /// What limits the rate at which the VM receives (a queueing discipline of its tap); `None` for no limit. Bytes to a socket of
    /// the host would bypass the limit, so such a VM's connections cannot be a source.
    pub receive_limit: Option<String>,
}

impl PipeResources {
    /// The flow of one of the VM's connections.
    fn flow(&self, guest: SocketAddr, peer: SocketAddr) -> Flow {
        Flow {
            tap: self.tap,
            guest,
            peer,
        }
    }

    /// Where connections go when a pipe ends.
    fn return_path(&self) -> ReturnPath<'_> {
        ReturnPath {
            flows: &self.flows,
            hold_veth: self.hold_veth,
        }
    }
}

/// Source or sink of a pipe.
#[derive(Debug)]
pub enum Endpoint {
    /// A part of a file.
    File(FileRange),
    /// A connection that the agent extracted from the VM's socket.
    Connection {
        /// State of the connection.
        connection: Connection,
        /// MAC address to which the VM sends packets for the peer.
        next_hop: [u8; 6],
    },
}

/// A new pipe.
#[derive(Debug)]
pub struct PipeSpec {
    /// A new number, or that of a held connection: the source.
    pub pipe: PipeId,
    /// Where the bytes come from.
    pub source: Endpoint,
    /// Where they go.
    pub sink: Endpoint,
    /// Number of bytes.
    pub length: u64,
}

#[derive(Debug)]
enum Order {
    Hold(PipeId, SocketAddr, SocketAddr),
    Start(Box<PipeSpec>),
    Stop(PipeId),
    Reset(PipeId),
    Restored(PipeId),
    /// Resets everything; the answer means that no read or write follows.
    ResetAll(Sender<()>),
}

/// Handle of the threads. When it is dropped, the threads reset all connections that the host has.
#[derive(Debug)]
pub struct Pipes {
    orders: Sender<Order>,
    wake: Arc<OwnedFd>,
    answers: Receiver<(u64, PipeReply)>,
    /// Number of agents that have gone: replies to one of them do not go to the next.
    agents: u64,
    replied: Arc<OwnedFd>,
    stats: Arc<Mutex<PipeStats>>,
    copies: Copies,
    pause_watch: Arc<PauseWatch>,
}

impl Pipes {
    /// Starts the threads in the calling thread's network namespace, which must be the VM's [`crate::VmNetns`].
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn spawn(resources: PipeResources) -> io::Result<Self> {
        let flag = || -> io::Result<_> {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            Ok(Arc::new(eventfd(0, flags)?))
        };
        let (wake, replied) = (flag()?, flag()?);
        let (orders, queue) = channel();
        let (report, answers) = channel();
        let stats = Arc::<Mutex<PipeStats>>::default();
        let told_too = (replied.clone(), stats.clone());
        let rate_limit = Arc::new(RateLimit::new(resources.max_bytes_per_s));
        let gate = resources.gate.descriptor().map_err(io::Error::other)?;
        let pause_watch = PauseWatch::start(gate.into(), wake.clone())?;
        let shared = (rate_limit, pause_watch.clone());
        let copies = Copies::start(report.clone(), replied.clone(), shared.clone())?;
        let queue = (queue, wake.clone());
        let worker = worker::Worker::new(resources, queue, report, told_too, shared);
        std::thread::Builder::new()
            .name("viola-pipes".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            orders,
            wake,
            answers,
            agents: 0,
            replied,
            stats,
            copies,
            pause_watch,
        })
    }

    /// Sets the files that show whether the VM is paused. Work stops within 100 ms of a pause, and goes on when the
    /// VM does.
    pub fn watch_pause(&self, probe: PauseProbe) {
        self.pause_watch.watch(probe);
    }

    /// Whether the VM is paused while the host works for it.
    pub fn is_paused(&self) -> bool {
        self.pause_watch.is_paused()
    }

    /// Holds the packets of a connection's peer. The reply is [`PipeReply::Held`] or [`PipeReply::Refused`].
    pub fn hold(&self, pipe: PipeId, local: SocketAddr, peer: SocketAddr) {
        self.send_order(Order::Hold(pipe, local, peer));
    }

    /// Starts a pipe. The reply is [`PipeReply::Refused`], or later [`PipeReply::Finished`].
    ///
    /// # Errors
    /// Why a copy is not possible, in one sentence.
    pub fn start(&self, spec: PipeSpec) -> Result<(), String> {
        match spec {
            PipeSpec {
                pipe,
                source: Endpoint::File(from),
                sink: Endpoint::File(to),
                length,
            } => {
                let copy = FileToFile::new(from, to, length).map_err(|e| write_refusal(&e))?;
                self.copies.add(pipe, copy);
            }
            spec => self.send_order(Order::Start(Box::new(spec))),
        }
        Ok(())
    }

    /// Stops a pipe. The reply is [`PipeReply::Finished`].
    pub fn stop(&self, pipe: PipeId) {
        self.copies.stop(pipe);
        self.send_order(Order::Stop(pipe));
    }

    /// Resets the connections of a pipe. The reply is [`PipeReply::Finished`] without connections, unless they went
    /// back before.
    pub fn reset(&self, pipe: PipeId) {
        self.copies.stop(pipe);
        self.send_order(Order::Reset(pipe));
    }

    /// Releases the connections of a pipe, with their held packets: the VM has restored them.
    pub fn restored(&self, pipe: PipeId) {
        self.send_order(Order::Restored(pipe));
    }

    /// Resets everything: the agent is gone. After this returns, no read or write and no reply to an earlier request
    /// follows.
    pub fn reset_all(&mut self) {
        self.agents += 1;
        self.copies.reset_all();
        let (done, ended) = channel();
        self.send_order(Order::ResetAll(done));
        let _ = ended.recv();
    }

    /// The replies for the agent.
    pub fn replies(&self) -> impl Iterator<Item = PipeReply> {
        let _ = rustix::io::read(&*self.replied, &mut [0; 8]);
        let now = self.agents;
        (self.answers.try_iter()).filter_map(move |(to, message)| (to == now).then_some(message))
    }

    /// Transfers and counters, at most half a second old.
    pub fn stats(&self) -> PipeStats {
        let stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        let copies = self.copies.stats();
        let transfers = stats.transfers.iter().chain(&copies.transfers);
        PipeStats {
            transfers: transfers.cloned().collect(),
            begun: stats.begun + copies.begun,
            refused: stats.refused + copies.refused,
            returned: stats.returned + copies.returned,
            broken: stats.broken + copies.broken,
            bytes: stats.bytes + copies.bytes,
            cpu_ms: stats.cpu_ms + copies.cpu_ms,
            other_congestion: stats.other_congestion + copies.other_congestion,
            paused: self.is_paused(),
        }
    }

    /// Readable when replies are available.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.replied.as_fd()
    }

    fn send_order(&self, order: Order) {
        // the thread ends only with this handle
        let _ = self.orders.send(order);
        wake(&self.wake);
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.reset_all();
        self.pause_watch.stop();
    }
}

/// Explains why the host cannot write to a file.
fn write_refusal(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "the host may not write to this VM's files; set `writes` in [vm.pipe], and use a raw image that goes through \
             the page cache"
                .into()
        }
        io::ErrorKind::InvalidInput => "the file does not have these bytes, or no blocks for them".into(),
        _ => error.to_string(),
    }
}

/// CPU time of the calling thread so far, in milliseconds.
fn cpu_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let ms = time.tv_sec * 1000 + time.tv_nsec / 1_000_000;
    u64::try_from(ms).unwrap_or(0)
}

fn wake(flag: &OwnedFd) {
    // a full counter is readable too
    let _ = rustix::io::write(flag, &1_u64.to_ne_bytes());
}
