// SPDX-License-Identifier: Apache-2.0
//! The thread that has the connections.
//!
//! | module | what it does |
//! |---|---|
//! | this one | takes orders, ends pipes, publishes statistics |
//! | `start` | holds connections, and starts pipes |
//! | `schedule` | steps all pipes, and sleeps until one can go on |

mod schedule;
mod start;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_proto::agent::truncate_text;
use viola_proto::pipe::status::PipeStats;
use viola_proto::pipe::{PipeId, PipeReply};

use super::pause::{PauseWatch, Thread};
use super::pipe::{Next, Pipe, Wait};
use super::rate_limit::RateLimit;
use super::waiting::{HeldConnection, ReturnedConnections, release_to_vm};
use super::{Order, PipeResources, cpu_ms, wake};
use crate::Flow;

/// Longest sleep, and time between two updates of the statistics. The thread checks for progress
/// and timeouts at least this often.
const MAX_SLEEP: Duration = Duration::from_millis(500);

pub(super) struct Worker {
    rate_limit: Arc<RateLimit>,
    pause_watch: Arc<PauseWatch>,
    /// When the VM was paused, while it is.
    paused_since: Option<Instant>,
    /// Orders that wait until the VM goes on.
    deferred: VecDeque<Order>,
    resources: PipeResources,
    orders: Receiver<Order>,
    wake: Arc<OwnedFd>,
    report: Sender<(u64, PipeReply)>,
    /// Number of agents that have gone.
    agents: u64,
    replied: Arc<OwnedFd>,
    stats: Arc<Mutex<PipeStats>>,
    /// Counters; `stats` has them with the active transfers.
    counts: PipeStats,
    published: Instant,
    held: BTreeMap<PipeId, HeldConnection>,
    pipes: BTreeMap<PipeId, (Pipe, Wait)>,
    returned: BTreeMap<PipeId, ReturnedConnections>,
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
            paused_since: None,
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
            returned: BTreeMap::new(),
        }
    }

    pub(super) fn run(mut self) {
        set_timer_slack();
        loop {
            let paused = self.update_pause();
            loop {
                match self.orders.try_recv() {
                    // a reset would not leave through the closed gate
                    Ok(order) if paused && !matches!(order, Order::ResetAll(_)) => {
                        self.deferred.push_back(order);
                    }
                    Ok(order) => self.execute(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.reset_all(),
                }
            }
            if self.holds_packets() {
                self.resources.hold_queue.receive();
            }
            let is_idle = self.pipes.is_empty() && self.returned.is_empty() && self.held.is_empty();
            self.pause_watch.set_busy(Thread::Connections, !is_idle);
            if !paused {
                self.step_all();
            }
            self.publish();
            self.sleep();
        }
    }

    /// Whether the VM is paused. After a pause all timeouts have as much time left as before.
    fn update_pause(&mut self) -> bool {
        let now = Instant::now();
        match (self.pause_watch.is_paused(), self.paused_since) {
            (true, None) => self.paused_since = Some(now),
            (false, Some(since)) => {
                self.paused_since = None;
                let time = now.saturating_duration_since(since);
                (self.pipes.values_mut()).for_each(|(pipe, _)| pipe.resume(time));
                (self.held.values_mut()).for_each(|held| held.postpone(time));
                (self.returned.values_mut()).for_each(|returned| returned.postpone(time));
                for order in std::mem::take(&mut self.deferred) {
                    self.execute(order);
                }
            }
            _ => {}
        }
        self.paused_since.is_some()
    }

    fn execute(&mut self, order: Order) {
        let now = Instant::now();
        match order {
            Order::Hold(pipe, local, peer) => match self.hold(now, pipe, local, peer) {
                Ok(()) => self.reply(PipeReply::Held { pipe }),
                Err(why) => self.refuse(pipe, why),
            },
            Order::Start(spec) => {
                let pipe = spec.pipe;
                if let Err(why) = self.start(now, *spec) {
                    self.release_held(pipe);
                    self.refuse(pipe, why);
                }
            }
            Order::Stop(id) => {
                if let Some((pipe, wait)) = self.pipes.get_mut(&id) {
                    pipe.stop(now, self.resources.return_path());
                    *wait = Wait::Nothing;
                } else if self.release_held(id) {
                    let why = "the agent stopped it before it started".into();
                    self.reply(PipeReply::Refused { pipe: id, why });
                }
            }
            Order::Reset(id) => {
                if let Some((pipe, _)) = self.pipes.remove(&id) {
                    let flows = pipe.flows();
                    let next = pipe.reset(libc::ECONNRESET);
                    self.end_pipe(now, id, flows, next);
                } else if let Some(returned) = self.returned.remove(&id) {
                    returned.reset(&mut self.resources);
                } else {
                    self.release_held(id);
                }
            }
            Order::Restored(id) => {
                if let Some(returned) = self.returned.remove(&id) {
                    for flow in returned.flows() {
                        release_to_vm(&mut self.resources, &flow);
                    }
                }
            }
            Order::ResetAll(done) => {
                self.reset_all();
                self.agents += 1;
                let _ = done.send(());
            }
        }
    }

    fn refuse(&mut self, pipe: PipeId, why: String) {
        self.counts.refused += 1;
        let why = truncate_text(why);
        self.reply(PipeReply::Refused { pipe, why });
    }

    /// Releases a held connection whose pipe has not started; false when there is none.
    fn release_held(&mut self, id: PipeId) -> bool {
        let held = self.held.remove(&id);
        if let Some(held) = &held {
            release_to_vm(&mut self.resources, &held.flow);
        }
        held.is_some()
    }

    /// Whether packets may arrive for the hold queue.
    fn holds_packets(&self) -> bool {
        !self.returned.is_empty()
            || !self.held.is_empty()
            || self.pipes.values().any(|(pipe, _)| pipe.holds_packets())
    }

    /// Forgets a connection that is reset.
    fn forget(&mut self, flow: &Flow) {
        let _ = self.resources.flows.release(flow);
        self.resources.hold_queue.discard(flow);
    }

    /// Ends a pipe that had the connections `flows`.
    fn end_pipe(&mut self, now: Instant, id: PipeId, flows: Vec<Flow>, next: Next) {
        let Next::Ended(replies) = next else {
            return;
        };
        let mut returned = Vec::new();
        if let Some(PipeReply::Finished {
            source, sink, sent, ..
        }) = replies.last()
        {
            self.counts.bytes += sent;
            for connection in source.iter().chain(sink) {
                let flow = self.resources.flow(connection.local, connection.peer);
                returned.push((flow, (**connection).clone()));
            }
        }
        match returned.len() == flows.len() {
            true => self.counts.returned += 1,
            false => self.counts.broken += 1,
        }
        for flow in &flows {
            if !returned.iter().any(|(kept, _)| kept == flow) {
                self.forget(flow);
            }
        }
        if !returned.is_empty() {
            let waiting = ReturnedConnections::new(returned, now);
            self.returned.insert(id, waiting);
        }
        for reply in replies {
            self.reply(reply);
        }
    }

    /// Updates the statistics.
    fn publish(&mut self) {
        let now = Instant::now();
        if !self.pipes.is_empty() && now < self.published + MAX_SLEEP {
            return;
        }
        self.published = now;
        let transfers = self.pipes.values().map(|(pipe, _)| pipe.status(now));
        let stats = PipeStats {
            transfers: transfers.collect(),
            cpu_ms: cpu_ms(),
            ..self.counts.clone()
        };
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }

    /// Resets all connections, and releases held ones.
    fn reset_all(&mut self) {
        self.deferred.clear();
        // the resets must reach the peers even while the VM is paused
        let _ = self.resources.gate.set_closed(false);
        for (pipe, _) in std::mem::take(&mut self.pipes).into_values() {
            let flows = pipe.flows();
            self.counts.broken += 1;
            // before the flows are released, otherwise the reset would not leave the host
            drop(pipe);
            for flow in &flows {
                self.forget(flow);
            }
        }
        for returned in std::mem::take(&mut self.returned).into_values() {
            returned.reset(&mut self.resources);
        }
        for id in self.held.keys().copied().collect::<Vec<_>>() {
            self.release_held(id);
        }
    }

    fn reply(&self, message: PipeReply) {
        // a closed channel means that the agent is gone; the order to end everything follows
        let _ = self.report.send((self.agents, message));
        wake(&self.replied);
    }
}

/// Makes the thread's sleeps end in time. The kernel's default timer slack adds up to 50 us to a
/// sleep, as much as the shortest sleep lasts.
fn set_timer_slack() {
    // SAFETY: a plain system call with a number; where it is refused the sleeps are longer.
    let _ = unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_usize, 0_usize, 0_usize, 0_usize) };
}
