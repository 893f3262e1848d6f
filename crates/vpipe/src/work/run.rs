// SPDX-License-Identifier: Apache-2.0
//! The thread itself.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_netdev::tcp_socket;
use viola_proto::agent::short;
use viola_proto::pipe::shown::Work;
use viola_proto::pipe::{PipeId, ToGuest};

use super::one::{Going, Next, One, Wait};
use super::{Give, Order, Place, wake};
use crate::{Error, Flow, Pipe, Result, Sending};

/// Longest sleep: progress and what is late are looked at so often.
const TICK: Duration = Duration::from_millis(500);

pub(super) struct Worker {
    place: Place,
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
    report: Sender<(u64, ToGuest)>,
    agents: u64,
    told: Arc<OwnedFd>,
    board: Arc<Mutex<Work>>,
    /// What is on the board but for the transfers.
    counts: Work,
    published: Instant,
    pipes: BTreeMap<PipeId, (One, Wait)>,
    going: BTreeMap<PipeId, Going>,
}

impl Worker {
    pub(super) fn new(
        place: Place,
        orders: Receiver<Order>,
        wake: Arc<OwnedFd>,
        report: Sender<(u64, ToGuest)>,
        (told, board): (Arc<OwnedFd>, Arc<Mutex<Work>>),
    ) -> Self {
        Self {
            place,
            orders,
            wake,
            report,
            agents: 0,
            told,
            board,
            counts: Work::default(),
            published: Instant::now(),
            pipes: BTreeMap::new(),
            going: BTreeMap::new(),
        }
    }

    pub(super) fn run(mut self) {
        loop {
            loop {
                match self.orders.try_recv() {
                    Ok(order) => self.obey(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.end(),
                }
            }
            if !self.going.is_empty() {
                self.place.park.keep();
            }
            self.work();
            self.publish();
            self.sleep();
        }
    }

    fn obey(&mut self, order: Order) {
        let now = Instant::now();
        match order {
            Order::Give(give) => {
                let pipe = give.pipe;
                if let Err(why) = self.begin(now, *give) {
                    self.counts.refused += 1;
                    let why = short(why);
                    self.say(ToGuest::Refused { pipe, why });
                }
            }
            Order::Stop(id) => {
                if let Some((one, wait)) = self.pipes.get_mut(&id) {
                    one.stop(now);
                    *wait = Wait::Nothing;
                }
            }
            Order::Reset(id) => {
                if let Some((one, _)) = self.pipes.remove(&id) {
                    let flow = one.flow();
                    let next = one.broken(libc::ECONNRESET);
                    self.over(now, id, flow, next);
                }
            }
            Order::Taken(id) => {
                if let Some(going) = self.going.remove(&id) {
                    // a connection that is held for ever helps nobody, and the agent cannot do anything about it
                    let _ = self.place.flows.release(&going.flow);
                    self.place.park.let_go(&going.flow);
                }
            }
            Order::End => {
                self.end();
                self.agents += 1;
            }
        }
    }

    fn begin(&mut self, now: Instant, give: Give) -> std::result::Result<(), String> {
        let Give {
            pipe: id,
            connection,
            next_hop,
            image,
            map,
            offset,
            length,
        } = give;
        let flow = Flow {
            tap: self.place.tap,
            guest: connection.local,
            peer: connection.peer,
        };
        if !self.place.addresses.contains(&connection.local.ip()) {
            return Err(format!(
                "{} is no address of this VM",
                connection.local.ip()
            ));
        }
        if self.pipes.len() + self.going.len() >= self.place.most {
            return Err(format!("{} pipes are open already", self.place.most));
        }
        let flows = (self.pipes.values().map(|(one, _)| one.flow()))
            .chain(self.going.values().map(|going| going.flow));
        if self.pipes.contains_key(&id)
            || self.going.contains_key(&id)
            || flows.into_iter().any(|f| f == flow)
        {
            return Err("it is given already".into());
        }
        let state = viola_handover::from_wire(connection);
        let sending = Sending::new(image, map, offset, length);
        let begun = (|| -> Result<Pipe> {
            let place = &self.place;
            place.flows.hold(&flow, Some(next_hop), None)?;
            let socket = socket_for(&flow)?;
            Pipe::begin(&place.flows, place.veth, socket, flow, &state, sending)
        })();
        match begun {
            Ok(pipe) => {
                let one = One::new(id, pipe, now);
                self.pipes.insert(id, (one, Wait::Nothing));
                self.counts.begun += 1;
                Ok(())
            }
            Err(e) => {
                let _ = self.place.flows.release(&flow);
                Err(e.to_string())
            }
        }
    }

    /// Everybody's turn.
    fn work(&mut self) {
        let now = Instant::now();
        for (id, (one, wait)) in std::mem::take(&mut self.pipes) {
            let flow = one.flow();
            if wait == Wait::Socket && !one.is_late(now) {
                self.pipes.insert(id, (one, wait));
                continue;
            }
            match one.step(now, &self.place.flows, self.place.parked) {
                (Some(one), Next::Again(wait)) => {
                    self.pipes.insert(id, (one, wait));
                }
                (_, over) => self.over(now, id, flow, over),
            }
        }
        let progress: Vec<_> = (self.pipes.values_mut())
            .filter_map(|(one, _)| one.progress(now))
            .collect();
        for message in progress {
            self.say(message);
        }
        while let Some(id) = (self.going.iter()).find_map(|(id, g)| g.is_late(now).then_some(*id)) {
            if let Some(going) = self.going.remove(&id) {
                self.abandon(going);
            }
        }
    }

    /// A connection that nobody has taken back.
    fn abandon(&mut self, going: Going) {
        let flow = going.flow;
        self.place.park.forget(&flow);
        let reset = socket_for(&flow)
            .and_then(|socket| going.reset(&self.place.flows, self.place.veth, socket));
        // then the peer finds out by itself
        drop(reset);
        let _ = self.place.flows.release(&flow);
    }

    fn over(&mut self, now: Instant, id: PipeId, flow: Flow, next: Next) {
        let Next::Over { say, returned } = next else {
            return;
        };
        if let ToGuest::Back { sent, .. } = &say {
            self.counts.bytes += sent;
        }
        if returned {
            self.counts.returned += 1;
            if let ToGuest::Back {
                connection: Some(connection),
                ..
            } = &say
            {
                let going = Going::new(flow, (**connection).clone(), now);
                self.going.insert(id, going);
            }
        } else {
            self.counts.broken += 1;
            let _ = self.place.flows.release(&flow);
            self.place.park.forget(&flow);
        }
        self.say(say);
    }

    /// Puts on the board what is done.
    fn publish(&mut self) {
        let now = Instant::now();
        let is_idle = self.pipes.is_empty();
        if !is_idle && now < self.published + TICK {
            return;
        }
        self.published = now;
        let transfers = self.pipes.values().map(|(one, _)| one.shown(now)).collect();
        let work = Work {
            transfers,
            ..self.counts.clone()
        };
        *self.board.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }

    /// All connections are reset.
    fn end(&mut self) {
        for (one, _) in std::mem::take(&mut self.pipes).into_values() {
            let flow = one.flow();
            self.counts.broken += 1;
            // before the flow is the VM's again, else the reset would not go out
            drop(one);
            let _ = self.place.flows.release(&flow);
        }
        for going in std::mem::take(&mut self.going).into_values() {
            self.abandon(going);
        }
    }

    fn sleep(&mut self) {
        let mut limit = TICK;
        let mut fds = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        if !self.going.is_empty() {
            fds.push(PollFd::from_borrowed_fd(
                self.place.park.fd(),
                PollFlags::IN,
            ));
        }
        let first = fds.len();
        let mut waiting = Vec::new();
        for (id, (one, wait)) in &self.pipes {
            let flags = match wait {
                Wait::Nothing => {
                    limit = Duration::ZERO;
                    continue;
                }
                // an error or a hang-up is told without being asked for
                Wait::Time(pause) => {
                    limit = limit.min(*pause);
                    PollFlags::empty()
                }
                Wait::Socket => PollFlags::OUT,
            };
            waiting.push(*id);
            fds.push(PollFd::from_borrowed_fd(one.pipe().socket(), flags));
        }
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        // an interrupted wait is as good as a short one
        let _ = poll(&mut fds, Some(&limit));
        let heard: Vec<(PipeId, PollFlags)> = (waiting.into_iter())
            .zip(fds[first..].iter().map(PollFd::revents))
            .filter(|(_, flags)| !flags.is_empty())
            .collect();
        drop(fds);
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        let now = Instant::now();
        for (id, flags) in heard {
            if flags.contains(PollFlags::ERR) || flags.contains(PollFlags::HUP) {
                if let Some((one, _)) = self.pipes.remove(&id) {
                    let flow = one.flow();
                    let next = one.broken(libc::ECONNRESET);
                    self.over(now, id, flow, next);
                }
            } else if let Some((_, wait)) = self.pipes.get_mut(&id) {
                *wait = Wait::Nothing;
            }
        }
    }

    fn say(&self, message: ToGuest) {
        // nobody listens: then the agent is gone, and an end to everything follows
        let _ = self.report.send((self.agents, message));
        wake(&self.told);
    }
}

/// In the calling thread's network namespace.
fn socket_for(flow: &Flow) -> Result<OwnedFd> {
    tcp_socket(flow.guest.ip()).map_err(Error::kernel("making a socket"))
}
