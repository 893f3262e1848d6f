// SPDX-License-Identifier: Apache-2.0
//! The thread that has the connections.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_proto::agent::truncate_text;
use viola_proto::pipe::status::PipeStats;
use viola_proto::pipe::{Connection, PipeId, PipeReply};

use super::pause::{PauseWatch, Thread};
use super::pipe::{Next, Pipe, Transfer, Wait};
use super::rate_limit::RateLimit;
use super::waiting::{HeldConnection, ReturnedConnections, release_to_vm, socket_for};
use super::{Endpoint, Order, PipeResources, PipeSpec, cpu_ms, wake, write_refusal};
use crate::transfer::{FileToSocket, SocketToFile, SocketToSocket};
use crate::{Error, Flow, HostConnection};

/// Longest sleep: progress and what is late are looked at so often.
const MAX_SLEEP: Duration = Duration::from_millis(500);

pub(super) struct Worker {
    rate_limit: Arc<RateLimit>,
    pause_watch: Arc<PauseWatch>,
    /// Since when the VM stands still.
    still: Option<Instant>,
    /// What it had said before, and is to be done when it goes on.
    deferred: VecDeque<Order>,
    resources: PipeResources,
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
    report: Sender<(u64, PipeReply)>,
    agents: u64,
    replied: Arc<OwnedFd>,
    stats: Arc<Mutex<PipeStats>>,
    /// What is on the stats but for the transfers.
    counts: PipeStats,
    published: Instant,
    held: BTreeMap<PipeId, HeldConnection>,
    pipes: BTreeMap<PipeId, (Pipe, Wait)>,
    going: BTreeMap<PipeId, ReturnedConnections>,
}

/// What a connection becomes an end of.
struct ConnectionSpec {
    flow: Flow,
    connection: Connection,
    next_hop: [u8; 6],
}

impl Worker {
    pub(super) fn new(
        resources: PipeResources,
        (orders, wake): (Receiver<Order>, Arc<OwnedFd>),
        report: Sender<(u64, PipeReply)>,
        (replied, stats): (Arc<OwnedFd>, Arc<Mutex<PipeStats>>),
        (rate_limit, pause_watch): (Arc<RateLimit>, Arc<PauseWatch>),
    ) -> Self {
        Self {
            rate_limit,
            pause_watch,
            still: None,
            deferred: VecDeque::new(),
            resources,
            orders,
            wake,
            report,
            agents: 0,
            replied,
            stats,
            counts: PipeStats::default(),
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
                    Ok(order) if still && !matches!(order, Order::ResetAll(_)) => {
                        self.deferred.push_back(order);
                    }
                    Ok(order) => self.obey(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.end(),
                }
            }
            if self.holds_packets() {
                self.resources.hold_queue.receive();
            }
            let busy = !(self.pipes.is_empty() && self.going.is_empty() && self.held.is_empty());
            self.pause_watch.set_busy(Thread::Connections, busy);
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
        match (self.pause_watch.is_paused(), self.still) {
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
                for order in std::mem::take(&mut self.deferred) {
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
                Ok(()) => self.say(PipeReply::Held { pipe }),
                Err(why) => self.refuse(pipe, why),
            },
            Order::Start(spec) => {
                let pipe = spec.pipe;
                let begun = self.begin(now, *spec);
                if let Err(why) = begun {
                    self.free(pipe);
                    self.refuse(pipe, why);
                }
            }
            Order::Stop(id) => {
                if let Some((one, wait)) = self.pipes.get_mut(&id) {
                    one.stop(now, self.resources.return_path());
                    *wait = Wait::Nothing;
                } else if self.free(id) {
                    let why = "it was stopped before it began".into();
                    self.say(PipeReply::Refused { pipe: id, why });
                }
            }
            Order::Reset(id) => {
                if let Some((one, _)) = self.pipes.remove(&id) {
                    let flows = one.flows();
                    let next = one.reset(libc::ECONNRESET);
                    self.over(now, id, flows, next);
                } else if let Some(going) = self.going.remove(&id) {
                    going.reset(&mut self.resources);
                } else {
                    self.free(id);
                }
            }
            Order::Restored(id) => {
                if let Some(going) = self.going.remove(&id) {
                    for flow in going.flows() {
                        release_to_vm(&mut self.resources, &flow);
                    }
                }
            }
            Order::ResetAll(done) => {
                self.end();
                self.agents += 1;
                let _ = done.send(());
            }
        }
    }

    fn refuse(&mut self, pipe: PipeId, why: String) {
        self.counts.refused += 1;
        let why = truncate_text(why);
        self.say(PipeReply::Refused { pipe, why });
    }

    /// A connection that was held is the VM's alone; whether it was.
    fn free(&mut self, id: PipeId) -> bool {
        let held = self.held.remove(&id);
        if let Some(held) = &held {
            release_to_vm(&mut self.resources, &held.flow);
        }
        held.is_some()
    }

    /// Whether packets arrive that are to be kept.
    fn holds_packets(&self) -> bool {
        !self.going.is_empty()
            || !self.held.is_empty()
            || self.pipes.values().any(|(one, _)| one.holds_packets())
    }

    /// A connection that the VM may have moved, and that is not moved already.
    fn flow(&self, local: SocketAddr, peer: SocketAddr) -> Result<Flow, String> {
        let flow = self.resources.flow(local, peer);
        if !self.resources.addresses.contains(&local.ip()) {
            return Err(format!("{} is no address of this VM", local.ip()));
        }
        let held = self.held.values().map(|held| held.flow);
        let pipes = self.pipes.values().flat_map(|(one, _)| one.flows());
        let going = self.going.values().flat_map(ReturnedConnections::flows);
        match held.chain(pipes).chain(going).any(|f| f == flow) {
            true => Err("it is given already".into()),
            false => Ok(flow),
        }
    }

    fn has_room(&self, id: PipeId) -> Result<(), String> {
        if self.pipes.contains_key(&id) || self.going.contains_key(&id) {
            return Err("it is given already".into());
        }
        match self.held.len() + self.pipes.len() + self.going.len() < self.resources.max_pipes {
            true => Ok(()),
            false => Err(format!(
                "{} pipes are open already",
                self.resources.max_pipes
            )),
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
        let (flows, hold_veth) = (&self.resources.flows, self.resources.hold_veth);
        flows
            .hold(&flow, None, Some(hold_veth))
            .map_err(|e| e.to_string())?;
        self.held.insert(id, HeldConnection::new(flow, now));
        Ok(())
    }

    fn begin(&mut self, now: Instant, spec: PipeSpec) -> Result<(), String> {
        let PipeSpec {
            pipe: id,
            source,
            sink,
            length,
        } = spec;
        let describe = |end: Endpoint| match end {
            Endpoint::File(part) => Ok((Some(part), None)),
            Endpoint::Connection {
                connection,
                next_hop,
            } => {
                let flow = self.resources.flow(connection.local, connection.peer);
                // the source may be held for this very pipe
                if self.held.get(&id).is_none_or(|held| held.flow != flow) {
                    self.flow(connection.local, connection.peer)?;
                }
                let connection = ConnectionSpec {
                    flow,
                    connection,
                    next_hop,
                };
                Ok::<_, String>((None, Some(connection)))
            }
        };
        let ((from, source), (to, sink)) = (describe(source)?, describe(sink)?);
        match self.held.get(&id) {
            None => self.has_room(id)?,
            Some(held) if source.as_ref().is_none_or(|s| s.flow != held.flow) => {
                return Err("another connection was held".into());
            }
            Some(_) => {}
        }
        let same = |(a, b): (&ConnectionSpec, &ConnectionSpec)| a.flow == b.flow;
        if source.as_ref().zip(sink.as_ref()).is_some_and(same) {
            return Err("a connection into itself".into());
        }
        let job = match (from, to) {
            (Some(from), None) => {
                Transfer::Send(FileToSocket::new(from.image, from.map, from.offset, length))
            }
            (None, Some(to)) => {
                let receiving = SocketToFile::new(to.image, to.map, to.offset, length);
                Transfer::Receive(receiving.map_err(|e| write_refusal(&e))?)
            }
            (None, None) => {
                Transfer::Relay(SocketToSocket::new(length).map_err(|e| e.to_string())?)
            }
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
        let one = Pipe::new(id, job, (source, sink), now);
        self.pipes.insert(id, (one, Wait::Nothing));
        self.counts.begun += 1;
        Ok(())
    }

    /// A connection into a socket of the host.
    fn take(&mut self, end: ConnectionSpec, source: bool) -> Result<HostConnection, String> {
        let resources = &mut self.resources;
        let state = viola_handover::from_wire(end.connection);
        let hold_veth = source.then_some(resources.hold_veth);
        let park = source.then_some((&mut resources.hold_queue, resources.hold_veth));
        let (flows, veth) = (&resources.flows, resources.veth);
        let begun = (flows.hold(&end.flow, Some(end.next_hop), hold_veth))
            .and_then(|()| socket_for(&end.flow))
            .and_then(|socket| {
                let same = viola_handover::apply_pacing(
                    socket.as_fd(),
                    &state,
                    &resources.congestion_controls,
                );
                self.counts.other_congestion += u64::from(!same.map_err(Error::Connection)?);
                Ok(socket)
            })
            .and_then(|socket| {
                HostConnection::restore(flows, veth, socket, end.flow, &state, park)
            });
        begun.map_err(|e| {
            let _ = resources.flows.release(&end.flow);
            e.to_string()
        })
    }

    /// Of two connections only one could be taken: the VM goes on with both, and nobody hears of this one's socket.
    fn untake(&mut self, end: HostConnection) {
        let flow = *end.flow();
        let (flows, hold_veth) = (&self.resources.flows, self.resources.hold_veth);
        if end.extract(flows, Some(hold_veth)).is_ok() {
            release_to_vm(&mut self.resources, &flow);
        }
    }

    /// Everybody's turn.
    fn work(&mut self) {
        let now = Instant::now();
        for (id, (one, wait)) in std::mem::take(&mut self.pipes) {
            let waits = matches!(wait, Wait::Source | Wait::Sink) && !one.is_late(now);
            if waits || self.pause_watch.is_paused() {
                self.pipes.insert(id, (one, wait));
                continue;
            }
            let flows = one.flows();
            let next = one.step(now, self.resources.return_path(), &self.rate_limit);
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
                going.reset(&mut self.resources);
            }
        }
        while let Some(id) = (self.held.iter()).find_map(|(id, h)| h.is_late(now).then_some(*id)) {
            self.free(id);
            self.refuse(id, "it was not given in time".into());
        }
    }

    /// A pipe goes on, or is over.
    fn put(&mut self, now: Instant, id: PipeId, had: Vec<Flow>, next: (Option<Pipe>, Next)) {
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
        let _ = self.resources.flows.release(flow);
        self.resources.hold_queue.discard(flow);
    }

    /// A pipe is over; its connections were these.
    fn over(&mut self, now: Instant, id: PipeId, had: Vec<Flow>, next: Next) {
        let Next::Over(words) = next else {
            return;
        };
        let mut back = Vec::new();
        if let Some(PipeReply::Finished {
            source, sink, sent, ..
        }) = words.last()
        {
            self.counts.bytes += sent;
            for connection in source.iter().chain(sink) {
                let flow = self.resources.flow(connection.local, connection.peer);
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
            self.going.insert(id, ReturnedConnections::new(back, now));
        }
        for word in words {
            self.say(word);
        }
    }

    /// Puts on the stats what is done.
    fn publish(&mut self) {
        let now = Instant::now();
        let is_idle = self.pipes.is_empty();
        if !is_idle && now < self.published + MAX_SLEEP {
            return;
        }
        self.published = now;
        let transfers = self
            .pipes
            .values()
            .map(|(one, _)| one.status(now))
            .collect();
        let work = PipeStats {
            transfers,
            cpu_ms: cpu_ms(),
            ..self.counts.clone()
        };
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }

    /// All connections are reset.
    fn end(&mut self) {
        self.deferred.clear();
        // the peers are to hear of it, whatever the VM does
        let _ = self.resources.gate.set_closed(false);
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
            going.reset(&mut self.resources);
        }
        for id in self.held.keys().copied().collect::<Vec<_>>() {
            self.free(id);
        }
    }

    fn sleep(&mut self) {
        let mut limit = MAX_SLEEP;
        let mut fds = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
        if self.holds_packets() {
            fds.push(PollFd::from_borrowed_fd(
                self.resources.hold_queue.fd(),
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
                // an error or a hang-up is replied without being asked for
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
        // an interrupted wait is as good as a truncate_text one
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
                    let next = one.end_failed(source);
                    self.put(now, id, flows, next);
                }
            } else if let Some((_, wait)) = self.pipes.get_mut(&id) {
                *wait = Wait::Nothing;
            }
        }
    }

    fn say(&self, message: PipeReply) {
        // nobody listens: then the agent is gone, and an end to everything follows
        let _ = self.report.send((self.agents, message));
        wake(&self.replied);
    }
}

/// The calling thread's sleeps end when they are to: the kernel adds 50 us otherwise, which is as long as the shortest of them.
fn punctual() {
    // SAFETY: a plain system call with a number; where it is refused the sleeps are longer.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize, 0_usize, 0_usize, 0_usize) };
}
