// SPDX-License-Identifier: Apache-2.0
//! All that a VM's agent asks for.
//!
//! | module | does |
//! |---|---|
//! | `run` | the thread that has the connections |
//! | `one` | the life of one pipe |
//! | `going` | connections that are held before and after it |
//! | `rate_limit` | the cap in bytes a second |
//! | `copies` | the thread that copies from file to file |
//! | `congestion` | what the host may send with |
//! | `pause_watch` | whether the VM runs at all |
//!
//! [`Pipes`] takes orders, which come from the agent by way of whoever reads its channel, and answers with what is to
//! be said to the agent ([`PipeReply`]). It never waits for a VM: a connection that is not taken back in time is
//! let go, one that cannot be given back is reset.

mod congestion;
mod copies;
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

/// What the thread works with. All of it can be made by one process and used by another one, which has no more privilege than
/// CAP_NET_ADMIN and CAP_NET_BIND_SERVICE in the VM's [`crate::VmNetns`].
#[derive(Debug)]
pub struct PipeResources {
    /// Who has which connection.
    pub flows: FlowTable,
    /// What keeps its sockets silent while it stands still.
    pub gate: EgressGate,
    /// Where held packets are kept.
    pub hold_queue: HoldQueue,
    /// Interface index of the VM's tap.
    pub tap: u32,
    /// Of the veth to the space.
    pub veth: u32,
    /// Of the veth for held packets.
    pub hold_veth: u32,
    /// The VM's own addresses: those of its ends of connections.
    pub addresses: Vec<IpAddr>,
    /// What the VM's sockets may send with, if the VM has: [`congestion_controls`].
    pub congestion_controls: Vec<String>,
    /// Most pipes at a time.
    pub max_pipes: usize,
    /// Most bytes a second for all of them together; `None` for no cap.
    pub max_bytes_per_s: Option<u64>,
}

impl PipeResources {
    /// A connection of the VM.
    fn flow(&self, guest: SocketAddr, peer: SocketAddr) -> Flow {
        Flow {
            tap: self.tap,
            guest,
            peer,
        }
    }

    /// Where connections go back to.
    fn return_path(&self) -> ReturnPath<'_> {
        ReturnPath {
            flows: &self.flows,
            hold_veth: self.hold_veth,
        }
    }
}

/// One end of a pipe.
#[derive(Debug)]
pub enum Endpoint {
    /// A part of a file.
    File(FileRange),
    /// A connection, taken out of the VM's socket.
    Connection {
        /// As the agent has taken it.
        connection: Connection,
        /// MAC address to which the VM sends its packets for the peer.
        next_hop: [u8; 6],
    },
}

/// What is to be moved.
#[derive(Debug)]
pub struct PipeSpec {
    /// A new number, or that of a connection that is held: the source.
    pub pipe: PipeId,
    /// From here.
    pub source: Endpoint,
    /// To there.
    pub sink: Endpoint,
    /// How many bytes.
    pub length: u64,
}

#[derive(Debug)]
enum Order {
    Hold(PipeId, SocketAddr, SocketAddr),
    Start(Box<PipeSpec>),
    Stop(PipeId),
    Reset(PipeId),
    Restored(PipeId),
    /// Everything is reset; nothing is read or written any more when this is answered.
    ResetAll(Sender<()>),
}

/// The threads' other end. Dropped, it resets all connections that the host has.
#[derive(Debug)]
pub struct Pipes {
    orders: Sender<Order>,
    wake: Arc<OwnedFd>,
    answers: Receiver<(u64, PipeReply)>,
    /// How often the agent was gone: what is said to one is not said to the next.
    agents: u64,
    replied: Arc<OwnedFd>,
    stats: Arc<Mutex<PipeStats>>,
    copies: Copies,
    pause_watch: Arc<PauseWatch>,
}

impl Pipes {
    /// Starts the threads, in the calling thread's network namespace, which has to be the VM's [`crate::VmNetns`].
    ///
    /// # Errors
    /// That there is no thread or no descriptor to be had.
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

    /// By what it is seen from now on whether the VM stands still. What is under way then stops within a tenth of a second, and
    /// goes on when the VM does.
    pub fn watch_pause(&self, probe: PauseProbe) {
        self.pause_watch.watch(probe);
    }

    /// Whether the VM stands still, in the middle of something.
    pub fn is_paused(&self) -> bool {
        self.pause_watch.is_paused()
    }

    /// Answered with [`PipeReply::Held`] or [`PipeReply::Refused`].
    pub fn hold(&self, pipe: PipeId, local: SocketAddr, peer: SocketAddr) {
        self.order(Order::Hold(pipe, local, peer));
    }

    /// Answered with [`PipeReply::Refused`], or later with [`PipeReply::Finished`].
    ///
    /// # Errors
    /// Why a copy cannot be made, in a sentence.
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
            spec => self.order(Order::Start(Box::new(spec))),
        }
        Ok(())
    }

    /// No more is moved; answered with [`PipeReply::Finished`].
    pub fn stop(&self, pipe: PipeId) {
        self.copies.stop(pipe);
        self.order(Order::Stop(pipe));
    }

    /// Its connections are reset; answered with [`PipeReply::Finished`] without any, if they had not come back before.
    pub fn reset(&self, pipe: PipeId) {
        self.copies.stop(pipe);
        self.order(Order::Reset(pipe));
    }

    /// The VM has it again, and gets what was kept for it.
    pub fn restored(&self, pipe: PipeId) {
        self.order(Order::Restored(pipe));
    }

    /// The agent is gone: everything is reset, nothing is read or written any more when this returns, and nothing is answered to
    /// what was before.
    pub fn reset_all(&mut self) {
        self.agents += 1;
        self.copies.reset_all();
        let (done, ended) = channel();
        self.order(Order::ResetAll(done));
        let _ = ended.recv();
    }

    /// What is to be said to the agent.
    pub fn replies(&self) -> impl Iterator<Item = PipeReply> {
        let _ = rustix::io::read(&*self.replied, &mut [0; 8]);
        let now = self.agents;
        (self.answers.try_iter()).filter_map(move |(to, message)| (to == now).then_some(message))
    }

    /// What is done, as of the last half second.
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

    /// Readable when there is something to be said.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.replied.as_fd()
    }

    fn order(&self, order: Order) {
        // the thread ends only with this
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

/// Why nothing can be written to a file.
fn write_refusal(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "this VM's files are not written by the host: see `writes` in [vm.pipe]; it takes raw images that go through \
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
    // full: then it is readable anyway
    let _ = rustix::io::write(flag, &1_u64.to_ne_bytes());
}
