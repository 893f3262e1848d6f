// SPDX-License-Identifier: Apache-2.0
//! Copies from file to file, on a thread of their own: they wait for disks, and connections must not wait with them.

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

/// Bytes that one copy moves before the next one's turn, and between two looks at the orders.
const STEP_BYTES: u64 = 4 << 20;
/// Longest sleep for the cap's sake, or the VM's: orders are looked at in between.
const MAX_PAUSE: Duration = Duration::from_millis(20);
/// The agent hears so often how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);
/// The stats is painted anew so often.
const STATS_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug)]
enum Order {
    Start(PipeId, Box<FileToFile>),
    Stop(PipeId),
    /// All end at once; nothing is written any more when this is answered.
    ResetAll(Sender<()>),
}

/// The thread's other end.
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
            all: BTreeMap::new(),
            published: Instant::now(),
        };
        std::thread::Builder::new()
            .name("viola-copies".into())
            .spawn(move || thread.run())?;
        Ok(Self { orders, stats })
    }

    /// Answered with [`PipeReply::Finished`].
    pub(super) fn add(&self, pipe: PipeId, copy: FileToFile) {
        let _ = self.orders.send(Order::Start(pipe, Box::new(copy)));
    }

    pub(super) fn stop(&self, pipe: PipeId) {
        let _ = self.orders.send(Order::Stop(pipe));
    }

    /// Ends all of them, and waits until nothing is written any more.
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
    all: BTreeMap<PipeId, ActiveCopy>,
    published: Instant,
}

impl Thread {
    fn run(mut self) {
        loop {
            // with nothing to do until there is an order, else as long as there are any
            let order = match self.all.is_empty() {
                true => self
                    .orders
                    .recv()
                    .map_err(|_| RecvTimeoutError::Disconnected),
                false if self.pause_watch.is_paused() => self.orders.recv_timeout(MAX_PAUSE),
                false => self.orders.recv_timeout(Duration::ZERO),
            };
            match order {
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => self.turns(),
            }
            self.pause_watch
                .set_busy(PausedThread::Copies, !self.all.is_empty());
            self.publish();
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Start(pipe, copy) => {
                let now = Instant::now();
                if self.all.contains_key(&pipe) {
                    let why = "it is given already".into();
                    self.counts.refused += 1;
                    return self.say(PipeReply::Refused { pipe, why });
                }
                self.counts.begun += 1;
                let one = ActiveCopy {
                    copy: *copy,
                    started: now,
                    replied: now,
                };
                self.all.insert(pipe, one);
            }
            Order::Stop(pipe) => self.over(pipe, 0),
            Order::ResetAll(done) => {
                self.counts.broken += self.all.len() as u64;
                self.all.clear();
                self.agents += 1;
                let _ = done.send(());
            }
        }
    }

    /// ActiveCopy turn of each.
    fn turns(&mut self) {
        for pipe in self.all.keys().copied().collect::<Vec<_>>() {
            let Some(one) = self.all.get_mut(&pipe) else {
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
            let before = one.copy.moved();
            let turn = one.copy.step(budget);
            self.rate_limit.consume(one.copy.moved() - before);
            match turn {
                Ok(StepOutcome::BudgetUsed | StepOutcome::SinkFull | StepOutcome::SourceEmpty) => {
                    if one.replied.elapsed() >= PROGRESS_INTERVAL {
                        one.replied = Instant::now();
                        let sent = one.copy.moved();
                        self.say(PipeReply::Progress { pipe, sent });
                    }
                }
                Ok(StepOutcome::Done | StepOutcome::SourceEnded) => self.over(pipe, 0),
                Err(e) => self.over(pipe, e.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
    }

    fn over(&mut self, pipe: PipeId, errno: i32) {
        let Some(one) = self.all.remove(&pipe) else {
            return;
        };
        let sent = one.copy.moved();
        self.counts.bytes += sent;
        match errno {
            0 => self.counts.returned += 1,
            _ => self.counts.broken += 1,
        }
        self.say(PipeReply::Finished {
            pipe,
            source: None,
            sink: None,
            sent,
            errno,
            host_us: 0,
        });
    }

    fn say(&self, message: PipeReply) {
        // nobody listens: then the agent is gone, and an end to everything follows
        let _ = self.report.send((self.agents, message));
        wake(&self.replied);
    }

    fn publish(&mut self) {
        let now = Instant::now();
        if !self.all.is_empty() && now < self.published + STATS_INTERVAL {
            return;
        }
        self.published = now;
        let shown = |one: &ActiveCopy| Transfer {
            kind: TransferKind::Copy,
            local: None,
            peer: None,
            length: one.copy.length(),
            sent: one.copy.moved(),
            age_ms: u64::try_from(one.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        let work = PipeStats {
            transfers: self.all.values().map(shown).collect(),
            cpu_ms: cpu_ms(),
            ..self.counts.clone()
        };
        *self.stats.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }
}
