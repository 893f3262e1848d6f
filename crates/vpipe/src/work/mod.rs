// SPDX-License-Identifier: Apache-2.0
//! All that a VM's agent asks for.
//!
//! | module | does |
//! |---|---|
//! | `run` | the thread that has the connections |
//! | `one` | the life of one pipe |
//! | `going` | connections that are held before and after it |
//! | `allowance` | the cap in bytes a second |
//! | `copies` | the thread that copies from file to file |
//! | `congestion` | what the host may send with |
//! | `standstill` | whether the VM runs at all |
//!
//! [`Pipes`] takes orders, which come from the agent by way of whoever reads its channel, and answers with what is to
//! be said to the agent ([`ToGuest`]). It never waits for a VM: a connection that is not taken back in time is
//! let go, one that cannot be given back is reset.

mod allowance;
mod congestion;
mod copies;
mod going;
mod one;
mod run;
mod standstill;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use viola_proto::pipe::shown::Work;
use viola_proto::pipe::{Connection, PipeId, ToGuest};

use crate::moving::{Copying, Part};
use crate::{Flow, Flows, Gate, Park};
use allowance::Allowance;
pub use congestion::congestion_controls;
use copies::Copies;
use one::Home;
pub use standstill::Pulse;
use standstill::Standstill;

/// What the thread works with. All of it can be made by one process and used by another one, which has no more privilege than
/// CAP_NET_ADMIN and CAP_NET_BIND_SERVICE in the VM's [`crate::Space`].
#[derive(Debug)]
pub struct Place {
    /// Who has which connection.
    pub flows: Flows,
    /// What keeps its sockets silent while it stands still.
    pub gate: Gate,
    /// Where held packets are kept.
    pub park: Park,
    /// Interface index of the VM's tap.
    pub tap: u32,
    /// Of the veth to the space.
    pub veth: u32,
    /// Of the veth for held packets.
    pub parked: u32,
    /// The VM's own addresses: those of its ends of connections.
    pub addresses: Vec<IpAddr>,
    /// What the VM's sockets may send with, if the VM has: [`congestion_controls`].
    pub congestion: Vec<String>,
    /// Most pipes at a time.
    pub most: usize,
    /// Most bytes a second for all of them together; `None` for no cap.
    pub rate: Option<u64>,
}

impl Place {
    /// A connection of the VM.
    fn flow(&self, guest: SocketAddr, peer: SocketAddr) -> Flow {
        Flow {
            tap: self.tap,
            guest,
            peer,
        }
    }

    /// Where connections go back to.
    fn home(&self) -> Home<'_> {
        Home {
            flows: &self.flows,
            parked: self.parked,
        }
    }
}

/// One end of a pipe.
#[derive(Debug)]
pub enum End {
    /// A part of a file.
    File(Part),
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
pub struct Give {
    /// A new number, or that of a connection that is held: the source.
    pub pipe: PipeId,
    /// From here.
    pub source: End,
    /// To there.
    pub sink: End,
    /// How many bytes.
    pub length: u64,
}

#[derive(Debug)]
enum Order {
    Hold(PipeId, SocketAddr, SocketAddr),
    Give(Box<Give>),
    Stop(PipeId),
    Reset(PipeId),
    Taken(PipeId),
    /// Everything is reset; nothing is read or written any more when this is answered.
    End(Sender<()>),
}

/// The threads' other end. Dropped, it resets all connections that the host has.
#[derive(Debug)]
pub struct Pipes {
    orders: Sender<Order>,
    wake: Arc<OwnedFd>,
    answers: Receiver<(u64, ToGuest)>,
    /// How often the agent was gone: what is said to one is not said to the next.
    agents: u64,
    told: Arc<OwnedFd>,
    board: Arc<Mutex<Work>>,
    copies: Copies,
    standstill: Arc<Standstill>,
}

impl Pipes {
    /// Starts the threads, in the calling thread's network namespace, which has to be the VM's [`crate::Space`].
    ///
    /// # Errors
    /// That there is no thread or no descriptor to be had.
    pub fn start(place: Place) -> io::Result<Self> {
        let flag = || -> io::Result<_> {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            Ok(Arc::new(eventfd(0, flags)?))
        };
        let (wake, told) = (flag()?, flag()?);
        let (orders, queue) = channel();
        let (report, answers) = channel();
        let board = Arc::<Mutex<Work>>::default();
        let told_too = (told.clone(), board.clone());
        let allowance = Arc::new(Allowance::new(place.rate));
        let gate = place.gate.descriptor().map_err(io::Error::other)?;
        let standstill = Standstill::start(gate.into(), wake.clone())?;
        let shared = (allowance, standstill.clone());
        let copies = Copies::start(report.clone(), told.clone(), shared.clone())?;
        let queue = (queue, wake.clone());
        let worker = run::Worker::new(place, queue, report, told_too, shared);
        std::thread::Builder::new()
            .name("viola-pipes".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            orders,
            wake,
            answers,
            agents: 0,
            told,
            board,
            copies,
            standstill,
        })
    }

    /// By what it is seen from now on whether the VM stands still. What is under way then stops within a tenth of a second, and
    /// goes on when the VM does.
    pub fn watch(&self, pulse: Pulse) {
        self.standstill.watch(pulse);
    }

    /// Whether the VM stands still, in the middle of something.
    pub fn stands_still(&self) -> bool {
        self.standstill.is_on()
    }

    /// Answered with [`ToGuest::Held`] or [`ToGuest::Refused`].
    pub fn hold(&self, pipe: PipeId, local: SocketAddr, peer: SocketAddr) {
        self.order(Order::Hold(pipe, local, peer));
    }

    /// Answered with [`ToGuest::Refused`], or later with [`ToGuest::Back`].
    ///
    /// # Errors
    /// Why a copy cannot be made, in a sentence.
    pub fn give(&self, give: Give) -> Result<(), String> {
        match give {
            Give {
                pipe,
                source: End::File(from),
                sink: End::File(to),
                length,
            } => {
                let copying = Copying::new(from, to, length).map_err(|e| no_sink(&e))?;
                self.copies.begin(pipe, copying);
            }
            give => self.order(Order::Give(Box::new(give))),
        }
        Ok(())
    }

    /// No more is moved; answered with [`ToGuest::Back`].
    pub fn stop(&self, pipe: PipeId) {
        self.copies.stop(pipe);
        self.order(Order::Stop(pipe));
    }

    /// Its connections are reset; answered with [`ToGuest::Back`] without any, if they had not come back before.
    pub fn reset(&self, pipe: PipeId) {
        self.copies.stop(pipe);
        self.order(Order::Reset(pipe));
    }

    /// The VM has it again, and gets what was kept for it.
    pub fn taken(&self, pipe: PipeId) {
        self.order(Order::Taken(pipe));
    }

    /// The agent is gone: everything is reset, nothing is read or written any more when this returns, and nothing is answered to
    /// what was before.
    pub fn end(&mut self) {
        self.agents += 1;
        self.copies.end();
        let (done, ended) = channel();
        self.order(Order::End(done));
        let _ = ended.recv();
    }

    /// What is to be said to the agent.
    pub fn heard(&self) -> impl Iterator<Item = ToGuest> {
        let _ = rustix::io::read(&*self.told, &mut [0; 8]);
        let now = self.agents;
        (self.answers.try_iter()).filter_map(move |(to, message)| (to == now).then_some(message))
    }

    /// What is done, as of the last half second.
    pub fn work(&self) -> Work {
        let board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let copies = self.copies.work();
        let transfers = board.transfers.iter().chain(&copies.transfers);
        Work {
            transfers: transfers.cloned().collect(),
            begun: board.begun + copies.begun,
            refused: board.refused + copies.refused,
            returned: board.returned + copies.returned,
            broken: board.broken + copies.broken,
            bytes: board.bytes + copies.bytes,
            cpu_ms: board.cpu_ms + copies.cpu_ms,
            other_congestion: board.other_congestion + copies.other_congestion,
            paused: self.stands_still(),
        }
    }

    /// Readable when there is something to be said.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }

    fn order(&self, order: Order) {
        // the thread ends only with this
        let _ = self.orders.send(order);
        wake(&self.wake);
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        self.end();
        self.standstill.end();
    }
}

/// Why nothing can be written to a file.
fn no_sink(error: &io::Error) -> String {
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
