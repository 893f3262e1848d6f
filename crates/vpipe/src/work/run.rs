// SPDX-License-Identifier: Apache-2.0
//! The thread that has the connections.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::agent::short;
use viola_proto::pipe::shown::Work;
use viola_proto::pipe::{Connection, PipeId, ToGuest};

use super::allowance::Allowance;
use super::going::{Going, Held, let_go, socket_for};
use super::one::{Job, Next, One, Wait};
use super::standstill::{Mover, Standstill};
use super::{End, Give, Order, Place, cpu_ms, no_sink, wake};
use crate::moving::{Receiving, Relaying, Sending};
use crate::{Error, Flow, HostEnd};

/// Longest sleep: progress and what is late are looked at so often.
const TICK: Duration = Duration::from_millis(500);

pub(super) struct Worker {
    allowance: Arc<Allowance>,
    standstill: Arc<Standstill>,
    /// Since when the VM stands still.
    still: Option<Instant>,
    /// What it had said before, and is to be done when it goes on.
    waiting: VecDeque<Order>,
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
    held: BTreeMap<PipeId, Held>,
    pipes: BTreeMap<PipeId, (One, Wait)>,
    going: BTreeMap<PipeId, Going>,
}

/// What a connection becomes an end of.
struct Taking {
    flow: Flow,
    connection: Connection,
    next_hop: [u8; 6],
}

impl Worker {
    pub(super) fn new(
        place: Place,
        (orders, wake): (Receiver<Order>, Arc<OwnedFd>),
        report: Sender<(u64, ToGuest)>,
        (told, board): (Arc<OwnedFd>, Arc<Mutex<Work>>),
        (allowance, standstill): (Arc<Allowance>, Arc<Standstill>),
    ) -> Self {
        Self {
            allowance,
            standstill,
            still: None,
            waiting: VecDeque::new(),
            place,
            orders,
            wake,
            report,
            agents: 0,
            told,
            board,
            counts: Work::default(),
            published: Instant::now(),
            held: BTreeMap::new(),
            pipes: BTreeMap::new(),
            going: BTreeMap::new(),
        }
    }

    pub(super) fn run(mut self) {
        punctual();
        loop {
            let still = self.stands_still();
            loop {
                match self.orders.try_recv() {
                    // a reset would not get out now
                    Ok(order) if still && !matches!(order, Order::End(_)) => {
                        self.waiting.push_back(order);
                    }
                    Ok(order) => self.obey(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.end(),
                }
            }
            if self.parks() {
                self.place.park.keep();
            }
            let busy = !(self.pipes.is_empty() && self.going.is_empty() && self.held.is_empty());
            self.standstill.busy(Mover::Connections, busy);
            if !still {
                self.work();
            }
            self.publish();
            self.sleep();
        }
    }

    /// Whether the VM stands still. When it goes on it has as much time left as it had.
    fn stands_still(&mut self) -> bool {
        let now = Instant::now();
        match (self.standstill.is_on(), self.still) {
            (true, None) => self.still = Some(now),
            (false, Some(since)) => {
                self.still = None;
                let time = now.saturating_duration_since(since);
                self.pipes
                    .values_mut()
                    .for_each(|(one, _)| one.resume(time));
                self.held.values_mut().for_each(|held| held.postpone(time));
                self.going
                    .values_mut()
                    .for_each(|going| going.postpone(time));
                for order in std::mem::take(&mut self.waiting) {
                    self.obey(order);
                }
            }
            _ => {}
        }
        self.still.is_some()
    }

    fn obey(&mut self, order: Order) {
        let now = Instant::now();
        match order {
            Order::Hold(pipe, local, peer) => match self.hold(now, pipe, local, peer) {
                Ok(()) => self.say(ToGuest::Held { pipe }),
                Err(why) => self.refuse(pipe, why),
            },
            Order::Give(give) => {
                let pipe = give.pipe;
                let begun = self.begin(now, *give);
                if let Err(why) = begun {
                    self.free(pipe);
                    self.refuse(pipe, why);
                }
            }
            Order::Stop(id) => {
                if let Some((one, wait)) = self.pipes.get_mut(&id) {
                    one.stop(now, self.place.home());
                    *wait = Wait::Nothing;
                } else if self.free(id) {
                    let why = "it was stopped before it began".into();
                    self.say(ToGuest::Refused { pipe: id, why });
                }
            }
            Order::Reset(id) => {
                if let Some((one, _)) = self.pipes.remove(&id) {
                    let flows = one.flows();
                    let next = one.broken(libc::ECONNRESET);
                    self.over(now, id, flows, next);
                } else if let Some(going) = self.going.remove(&id) {
                    going.abandon(&mut self.place);
                } else {
                    self.free(id);
                }
            }
            Order::Taken(id) => {
                if let Some(going) = self.going.remove(&id) {
                    for flow in going.flows() {
                        let_go(&mut self.place, &flow);
                    }
                }
            }
            Order::End(done) => {
                self.end();
                self.agents += 1;
                let _ = done.send(());
            }
        }
    }

    fn refuse(&mut self, pipe: PipeId, why: String) {
        self.counts.refused += 1;
        let why = short(why);
        self.say(ToGuest::Refused { pipe, why });
    }

    /// A connection that was held is the VM's alone; whether it was.
    fn free(&mut self, id: PipeId) -> bool {
        let held = self.held.remove(&id);
        if let Some(held) = &held {
            let_go(&mut self.place, &held.flow);
        }
        held.is_some()
    }

    /// Whether packets arrive that are to be kept.
    fn parks(&self) -> bool {
        !self.going.is_empty()
            || !self.held.is_empty()
            || self.pipes.values().any(|(one, _)| one.is_parked())
    }

    /// A connection that the VM may have moved, and that is not moved already.
    fn flow(&self, local: SocketAddr, peer: SocketAddr) -> Result<Flow, String> {
        let flow = self.place.flow(local, peer);
        if !self.place.addresses.contains(&local.ip()) {
            return Err(format!("{} is no address of this VM", local.ip()));
        }
        let held = self.held.values().map(|held| held.flow);
        let pipes = self.pipes.values().flat_map(|(one, _)| one.flows());
        let going = self.going.values().flat_map(Going::flows);
        match held.chain(pipes).chain(going).any(|f| f == flow) {
            true => Err("it is given already".into()),
            false => Ok(flow),
        }
    }

    fn has_room(&self, id: PipeId) -> Result<(), String> {
        if self.pipes.contains_key(&id) || self.going.contains_key(&id) {
            return Err("it is given already".into());
        }
        match self.held.len() + self.pipes.len() + self.going.len() < self.place.most {
            true => Ok(()),
            false => Err(format!("{} pipes are open already", self.place.most)),
        }
    }

    fn hold(
        &mut self,
        now: Instant,
        id: PipeId,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Result<(), String> {
        self.has_room(id)?;
        if self.held.contains_key(&id) {
            return Err("it is held already".into());
        }
        let flow = self.flow(local, peer)?;
        let (flows, parked) = (&self.place.flows, self.place.parked);
        flows
            .hold(&flow, None, Some(parked))
            .map_err(|e| e.to_string())?;
        self.held.insert(id, Held::new(flow, now));
        Ok(())
    }

    fn begin(&mut self, now: Instant, give: Give) -> Result<(), String> {
        let Give {
            pipe: id,
            source,
            sink,
            length,
        } = give;
        let taking = |end: End| match end {
            End::File(part) => Ok((Some(part), None)),
            End::Connection {
                connection,
                next_hop,
            } => {
                let flow = self.place.flow(connection.local, connection.peer);
                // the source may be held for this very pipe
                if self.held.get(&id).is_none_or(|held| held.flow != flow) {
                    self.flow(connection.local, connection.peer)?;
                }
                let taking = Taking {
                    flow,
                    connection,
                    next_hop,
                };
                Ok::<_, String>((None, Some(taking)))
            }
        };
        let ((from, source), (to, sink)) = (taking(source)?, taking(sink)?);
        match self.held.get(&id) {
            None => self.has_room(id)?,
            Some(held) if source.as_ref().is_none_or(|s| s.flow != held.flow) => {
                return Err("another connection was held".into());
            }
            Some(_) => {}
        }
        let same = |(a, b): (&Taking, &Taking)| a.flow == b.flow;
        if source.as_ref().zip(sink.as_ref()).is_some_and(same) {
            return Err("a connection into itself".into());
        }
        let job = match (from, to) {
            (Some(from), None) => {
                Job::Send(Sending::new(from.image, from.map, from.offset, length))
            }
            (None, Some(to)) => {
                let receiving = Receiving::new(to.image, to.map, to.offset, length);
                Job::Receive(receiving.map_err(|e| no_sink(&e))?)
            }
            (None, None) => Job::Relay(Relaying::new(length).map_err(|e| e.to_string())?),
            (Some(_), Some(_)) => return Err("a copy has no connection".into()),
        };
        let source = source.map(|end| self.take(end, true)).transpose()?;
        let sink = match sink.map(|end| self.take(end, false)).transpose() {
            Ok(sink) => sink,
            Err(why) => {
                if let Some(source) = source {
                    self.untake(source);
                }
                return Err(why);
            }
        };
        self.held.remove(&id);
        let one = One::new(id, job, (source, sink), now);
        self.pipes.insert(id, (one, Wait::Nothing));
        self.counts.begun += 1;
        Ok(())
    }

    /// A connection into a socket of the host.
    fn take(&mut self, end: Taking, source: bool) -> Result<HostEnd, String> {
        let place = &mut self.place;
        let state = viola_handover::from_wire(end.connection);
        let parked = source.then_some(place.parked);
        let park = source.then_some((&mut place.park, place.parked));
        let (flows, veth) = (&place.flows, place.veth);
        let begun = (flows.hold(&end.flow, Some(end.next_hop), parked))
            .and_then(|()| socket_for(&end.flow))
            .and_then(|socket| {
                let same = viola_handover::pace(socket.as_fd(), &state, &place.congestion);
                self.counts.other_congestion += u64::from(!same.map_err(Error::Connection)?);
                Ok(socket)
            })
            .and_then(|socket| HostEnd::begin(flows, veth, socket, end.flow, &state, park));
        begun.map_err(|e| {
            let _ = place.flows.release(&end.flow);
            e.to_string()
        })
    }

    /// Of two connections only one could be taken: the VM goes on with both, and nobody hears of this one's socket.
    fn untake(&mut self, end: HostEnd) {
        let flow = *end.flow();
        let (flows, parked) = (&self.place.flows, self.place.parked);
        if end.give_back(flows, Some(parked)).is_ok() {
            let_go(&mut self.place, &flow);
        }
    }

    /// Everybody's turn.
    fn work(&mut self) {
        let now = Instant::now();
        for (id, (one, wait)) in std::mem::take(&mut self.pipes) {
            let waits = matches!(wait, Wait::Source | Wait::Sink) && !one.is_late(now);
            if waits || self.standstill.is_on() {
                self.pipes.insert(id, (one, wait));
                continue;
            }
            let flows = one.flows();
            let next = one.step(now, self.place.home(), &self.allowance);
            self.put(now, id, flows, next);
        }
        let progress: Vec<_> = (self.pipes.values_mut())
            .filter_map(|(one, _)| one.progress(now))
            .collect();
        for message in progress {
            self.say(message);
        }
        while let Some(id) = (self.going.iter()).find_map(|(id, g)| g.is_late(now).then_some(*id)) {
            if let Some(going) = self.going.remove(&id) {
                going.abandon(&mut self.place);
            }
        }
        while let Some(id) = (self.held.iter()).find_map(|(id, h)| h.is_late(now).then_some(*id)) {
            self.free(id);
            self.refuse(id, "it was not given in time".into());
        }
    }

    /// A pipe goes on, or is over.
    fn put(&mut self, now: Instant, id: PipeId, had: Vec<Flow>, next: (Option<One>, Next)) {
        match next {
            (Some(one), Next::Again(wait)) => {
                let kept = one.flows();
                for flow in had.iter().filter(|flow| !kept.contains(flow)) {
                    self.forget(flow);
                }
                self.pipes.insert(id, (one, wait));
            }
            (_, over) => self.over(now, id, had, over),
        }
    }

    /// A connection is gone for good.
    fn forget(&mut self, flow: &Flow) {
        let _ = self.place.flows.release(flow);
        self.place.park.forget(flow);
    }

    /// A pipe is over; its connections were these.
    fn over(&mut self, now: Instant, id: PipeId, had: Vec<Flow>, next: Next) {
        let Next::Over(words) = next else {
            return;
        };
        let mut back = Vec::new();
        if let Some(ToGuest::Back {
            source, sink, sent, ..
        }) = words.last()
        {
            self.counts.bytes += sent;
            for connection in source.iter().chain(sink) {
                let flow = self.place.flow(connection.local, connection.peer);
                back.push((flow, (**connection).clone()));
            }
        }
        match back.len() == had.len() {
            true => self.counts.returned += 1,
            false => self.counts.broken += 1,
        }
        for flow in &had {
            if !back.iter().any(|(kept, _)| kept == flow) {
                self.forget(flow);
            }
        }
        if !back.is_empty() {
            self.going.insert(id, Going::new(back, now));
        }
        for word in words {
            self.say(word);
        }
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
            cpu_ms: cpu_ms(),
            ..self.counts.clone()
        };
        *self.board.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }

    /// All connections are reset.
    fn end(&mut self) {
        self.waiting.clear();
        // the peers are to hear of it, whatever the VM does
        let _ = self.place.gate.shut(false);
        for (one, _) in std::mem::take(&mut self.pipes).into_values() {
            let flows = one.flows();
            self.counts.broken += 1;
            // before the flows are the VM's again, else the reset would not go out
            drop(one);
            for flow in &flows {
                self.forget(flow);
            }
        }
        for going in std::mem::take(&mut self.going).into_values() {
            going.abandon(&mut self.place);
        }
        for id in self.held.keys().copied().collect::<Vec<_>>() {
            self.free(id);
        }
    }

    fn sleep(&mut self) {
        let mut limit = TICK;
        let mut fds = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        if self.parks() {
            fds.push(PollFd::from_borrowed_fd(
                self.place.park.fd(),
                PollFlags::IN,
            ));
        }
        let first = fds.len();
        let mut waiting = Vec::new();
        // while the VM stands still nothing is done about them, whatever they have to say
        let pipes = self.pipes.iter().filter(|_| self.still.is_none());
        for (id, (one, wait)) in pipes {
            match wait {
                Wait::Nothing => {
                    limit = Duration::ZERO;
                    continue;
                }
                Wait::Time(pause) => limit = limit.min(*pause),
                Wait::Source | Wait::Sink => {}
            }
            for (socket, source) in one.sockets() {
                // an error or a hang-up is told without being asked for
                let flags = match (wait, source) {
                    (Wait::Source, true) => PollFlags::IN,
                    (Wait::Sink, false) => PollFlags::OUT,
                    _ => PollFlags::empty(),
                };
                waiting.push((*id, source));
                fds.push(PollFd::from_borrowed_fd(socket, flags));
            }
        }
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: limit.subsec_nanos().into(),
        };
        // an interrupted wait is as good as a short one
        let _ = poll(&mut fds, Some(&limit));
        let heard: Vec<(PipeId, bool, PollFlags)> = (waiting.into_iter())
            .zip(fds[first..].iter().map(PollFd::revents))
            .filter(|(_, flags)| !flags.is_empty())
            .map(|((id, source), flags)| (id, source, flags))
            .collect();
        drop(fds);
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        let now = Instant::now();
        for (id, source, flags) in heard {
            if flags.intersects(PollFlags::ERR | PollFlags::HUP) {
                if let Some((one, _)) = self.pipes.remove(&id) {
                    let flows = one.flows();
                    let next = one.lose(source);
                    self.put(now, id, flows, next);
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

/// The calling thread's sleeps end when they are to: the kernel adds 50 us otherwise, which is as long as the shortest of them.
fn punctual() {
    // SAFETY: a plain system call with a number; where it is refused the sleeps are longer.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize, 0_usize, 0_usize, 0_usize) };
}
