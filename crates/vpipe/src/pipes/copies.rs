// SPDX-License-Identifier: Apache-2.0
//! The thread that copies from file to file. Copies wait for disks, and connections must not wait with them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_proto::pipe::status::{PipeStats, Transfer, TransferKind};
use viola_proto::pipe::{PipeId, PipeReply};

use super::pause::{PauseWatch, Thread as PausedThread};
use super::rate_limit::RateLimit;
use super::{cpu_ms, wake};
use crate::transfer::{FileToFile, StepOutcome};

/// Bytes that one copy moves before the next copy, and between two checks for orders.
const STEP_BYTES: u64 = 4 << 20;
/// Longest sleep for the rate limit or a paused VM: the thread checks for orders in between.
const MAX_PAUSE: Duration = Duration::from_millis(20);
/// Time between two progress replies.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two updates of the statistics.
const STATS_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug)]
enum Order {
    Start(PipeId, Box<FileToFile>),
    Stop(PipeId),
    /// Ends all copies; the answer means that no write follows.
    ResetAll(Sender<()>),
}

/// Handle of the thread.
#[derive(Debug)]
pub(super) struct Copies {
    orders: Sender<Order>,
    stats: Arc<Mutex<PipeStats>>,
}

impl Copies {
    pub(super) fn start(
        report: Sender<(u64, PipeReply)>,
        replied: Arc<OwnedFd>,
        (rate_limit, pause_watch): (Arc<RateLimit>, Arc<PauseWatch>),
    ) -> io::Result<Self> {
        let (orders, queue) = channel();
        let stats = Arc::<Mutex<PipeStats>>::default();
        let thread = Thread {
            orders: queue,
            rate_limit,
            pause_watch,
            report,
            replied,
            stats: Arc::clone(&stats),
            counts: PipeStats::default(),
            agents: 0,
            copies: BTreeMap::new(),
            published: Instant::now(),
        };
        std::thread::Builder::new()
            .name("viola-copies".into())
            .spawn(move || thread.run())?;
        Ok(Self { orders, stats })
    }

    /// Starts a copy. The answer is [`PipeReply::Finished`].
    pub(super) fn add(&self, pipe: PipeId, copy: FileToFile) {
        let _ = self.orders.send(Order::Start(pipe, Box::new(copy)));
    }

    pub(super) fn stop(&self, pipe: PipeId) {
        let _ = self.orders.send(Order::Stop(pipe));
    }

    /// Ends all copies. No write follows after this returns.
    pub(super) fn reset_all(&self) {
        let (done, ended) = channel();
        if self.orders.send(Order::ResetAll(done)).is_ok() {
            let _ = ended.recv();
        }
    }

    pub(super) fn stats(&self) -> PipeStats {
        let stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.clone()
    }
}

struct ActiveCopy {
    copy: FileToFile,
    started: Instant,
    replied: Instant,
}

struct Thread {
    orders: Receiver<Order>,
    rate_limit: Arc<RateLimit>,
    pause_watch: Arc<PauseWatch>,
    report: Sender<(u64, PipeReply)>,
    replied: Arc<OwnedFd>,
    stats: Arc<Mutex<PipeStats>>,
    counts: PipeStats,
    agents: u64,
    copies: BTreeMap<PipeId, ActiveCopy>,
    published: Instant,
}

impl Thread {
    fn run(mut self) {
        loop {
            // without copies wait for an order, else only check for one
            let order = match self.copies.is_empty() {
                true => self
                    .orders
                    .recv()
                    .map_err(|_| RecvTimeoutError::Disconnected),
                false if self.pause_watch.is_paused() => self.orders.recv_timeout(MAX_PAUSE),
                false => self.orders.recv_timeout(Duration::ZERO),
            };
            match order {
                Ok(order) => self.execute(order),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => self.step_all(),
            }
            self.pause_watch
                .set_busy(PausedThread::Copies, !self.copies.is_empty());
            self.publish();
        }
    }

    fn execute(&mut self, order: Order) {
        match order {
            Order::Start(pipe, copy) => {
                let now = Instant::now();
                if self.copies.contains_key(&pipe) {
                    let why = "this pipe exists already".into();
                    self.counts.refused += 1;
                    return self.reply(PipeReply::Refused { pipe, why });
                }
                self.counts.begun += 1;
                let active = ActiveCopy {
                    copy: *copy,
                    started: now,
                    replied: now,
                };
                self.copies.insert(pipe, active);
            }
            Order::Stop(pipe) => self.finish(pipe, 0),
            Order::ResetAll(done) => {
                self.counts.broken += self.copies.len() as u64;
                self.copies.clear();
                self.agents += 1;
                let _ = done.send(());
            }
        }
    }

    /// One step of each copy.
    fn step_all(&mut self) {
        for pipe in self.copies.keys().copied().collect::<Vec<_>>() {
            let Some(active) = self.copies.get_mut(&pipe) else {
                continue;
            };
            if self.pause_watch.is_paused() {
                return;
            }
            let budget = match self.rate_limit.available(Instant::now(), STEP_BYTES) {
                Ok(budget) => budget,
                Err(pause) => {
                    std::thread::sleep(pause.min(MAX_PAUSE));
                    continue;
                }
            };
            let before = active.copy.moved();
            let turn = active.copy.step(budget);
            self.rate_limit.consume(active.copy.moved() - before);
            match turn {
                Ok(StepOutcome::BudgetUsed | StepOutcome::SinkFull | StepOutcome::SourceEmpty) => {
                    if active.replied.elapsed() >= PROGRESS_INTERVAL {
                        active.replied = Instant::now();
                        let sent = active.copy.moved();
                        self.reply(PipeReply::Progress { pipe, sent });
                    }
                }
                Ok(StepOutcome::Done | StepOutcome::SourceEnded) => self.finish(pipe, 0),
                Err(e) => self.finish(pipe, e.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
    }

    fn finish(&mut self, pipe: PipeId, errno: i32) {
        let Some(active) = self.copies.remove(&pipe) else {
            return;
        };
        let sent = active.copy.moved();
        self.counts.bytes += sent;
        match errno {
            0 => self.counts.returned += 1,
            _ => self.counts.broken += 1,
        }
        self.reply(PipeReply::Finished {
            pipe,
            source: None,
            sink: None,
            sent,
            errno,
            host_us: 0,
        });
    }

    fn reply(&self, message: PipeReply) {
        // a closed channel means that the agent is gone; the order to end everything follows
        let _ = self.report.send((self.agents, message));
        wake(&self.replied);
    }

    fn publish(&mut self) {
        let now = Instant::now();
        if !self.copies.is_empty() && now < self.published + STATS_INTERVAL {
            return;
        }
        self.published = now;
        let status = |active: &ActiveCopy| Transfer {
            kind: TransferKind::Copy,
            local: None,
            peer: None,
            length: active.copy.length(),
            sent: active.copy.moved(),
            age_ms: u64::try_from(active.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        let work = PipeStats {
            transfers: self.copies.values().map(status).collect(),
            cpu_ms: cpu_ms(),
            ..self.counts.clone()
        };
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }
}
