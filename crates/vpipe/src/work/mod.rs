// SPDX-License-Identifier: Apache-2.0
//! All that a VM's agent asks for, done on one thread.
//!
//! [`Pipes`] takes orders, which come from the agent by way of whoever reads its channel, and answers with what is to
//! be said to the agent ([`ToGuest`]). It never waits for a VM: a connection that is not taken back in time is
//! let go, one that cannot be given back is reset.

mod one;
mod run;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use viola_extents::CheckedMap;
use viola_extents::host::Image;
use viola_proto::pipe::shown::Work;
use viola_proto::pipe::{Connection, PipeId, ToGuest};

use crate::{Flows, Park};

/// What the thread works with. All of it can be made by one process and used by another one, which has no more privilege than
/// CAP_NET_ADMIN and CAP_NET_BIND_SERVICE in the VM's [`crate::Space`].
#[derive(Debug)]
pub struct Place {
    /// Who has which connection.
    pub flows: Flows,
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
    /// Most pipes at a time.
    pub most: usize,
}

/// A connection, and a part of a file to be sent down it.
#[derive(Debug)]
pub struct Give {
    /// A new number.
    pub pipe: PipeId,
    /// Taken out of the VM's socket.
    pub connection: Connection,
    /// MAC address to which the VM sends its packets for the peer.
    pub next_hop: [u8; 6],
    /// Of the VM's disk.
    pub image: Arc<Image>,
    /// Where the file is on it.
    pub map: CheckedMap,
    /// First byte.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

#[derive(Debug)]
enum Order {
    Give(Box<Give>),
    Stop(PipeId),
    Reset(PipeId),
    Taken(PipeId),
    End,
}

/// The thread's other end. Dropped, it resets all connections that the host has.
#[derive(Debug)]
pub struct Pipes {
    orders: Sender<Order>,
    wake: Arc<OwnedFd>,
    answers: Receiver<(u64, ToGuest)>,
    /// How often the agent was gone: what is said to one is not said to the next.
    agents: u64,
    told: Arc<OwnedFd>,
    board: Arc<Mutex<Work>>,
}

impl Pipes {
    /// Starts the thread, in the calling thread's network namespace, which has to be the VM's [`crate::Space`].
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
        let worker = run::Worker::new(place, queue, wake.clone(), report, told_too);
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
        })
    }

    /// Answered with [`ToGuest::Refused`], or later with [`ToGuest::Back`].
    pub fn give(&self, give: Give) {
        self.order(Order::Give(Box::new(give)));
    }

    /// No more is sent; answered with [`ToGuest::Back`].
    pub fn stop(&self, pipe: PipeId) {
        self.order(Order::Stop(pipe));
    }

    /// The connection is reset; answered with [`ToGuest::Back`] without one.
    pub fn reset(&self, pipe: PipeId) {
        self.order(Order::Reset(pipe));
    }

    /// The VM has it again, and gets what was kept for it.
    pub fn taken(&self, pipe: PipeId) {
        self.order(Order::Taken(pipe));
    }

    /// The agent is gone: everything is reset, and nothing is answered any more to what was before.
    pub fn end(&mut self) {
        self.agents += 1;
        self.order(Order::End);
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
        board.clone()
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
        self.order(Order::End);
    }
}

fn wake(flag: &OwnedFd) {
    // full: then it is readable anyway
    let _ = rustix::io::write(flag, &1_u64.to_ne_bytes());
}
