// SPDX-License-Identifier: Apache-2.0
//! Copies from file to file, on a thread of their own: they wait for disks, and connections must not wait with them.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use viola_proto::pipe::shown::{Kind, Transfer, Work};
use viola_proto::pipe::{PipeId, ToGuest};

use super::allowance::Allowance;
use super::standstill::{Mover, Standstill};
use super::{cpu_ms, wake};
use crate::moving::{Copying, Turn};

/// Bytes that one copy moves before the next one's turn, and between two looks at the orders.
const BUDGET: u64 = 4 << 20;
/// Longest sleep for the cap's sake, or the VM's: orders are looked at in between.
const PAUSE: Duration = Duration::from_millis(20);
/// The agent hears so often how far it is.
const PROGRESS: Duration = Duration::from_secs(2);
/// The board is painted anew so often.
const TICK: Duration = Duration::from_millis(500);

#[derive(Debug)]
enum Order {
    Begin(PipeId, Box<Copying>),
    Stop(PipeId),
    /// All end at once; nothing is written any more when this is answered.
    End(Sender<()>),
}

/// The thread's other end.
#[derive(Debug)]
pub(super) struct Copies {
    orders: Sender<Order>,
    board: Arc<Mutex<Work>>,
}

impl Copies {
    pub(super) fn start(
        report: Sender<(u64, ToGuest)>,
        told: Arc<OwnedFd>,
        (allowance, standstill): (Arc<Allowance>, Arc<Standstill>),
    ) -> io::Result<Self> {
        let (orders, queue) = channel();
        let board = Arc::<Mutex<Work>>::default();
        let thread = Thread {
            orders: queue,
            allowance,
            standstill,
            report,
            told,
            board: Arc::clone(&board),
            counts: Work::default(),
            agents: 0,
            all: BTreeMap::new(),
            published: Instant::now(),
        };
        std::thread::Builder::new()
            .name("viola-copies".into())
            .spawn(move || thread.run())?;
        Ok(Self { orders, board })
    }

    /// Answered with [`ToGuest::Back`].
    pub(super) fn begin(&self, pipe: PipeId, copying: Copying) {
        let _ = self.orders.send(Order::Begin(pipe, Box::new(copying)));
    }

    pub(super) fn stop(&self, pipe: PipeId) {
        let _ = self.orders.send(Order::Stop(pipe));
    }

    /// Ends all of them, and waits until nothing is written any more.
    pub(super) fn end(&self) {
        let (done, ended) = channel();
        if self.orders.send(Order::End(done)).is_ok() {
            let _ = ended.recv();
        }
    }

    pub(super) fn work(&self) -> Work {
        let board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        board.clone()
    }
}

struct One {
    copying: Copying,
    begun: Instant,
    told: Instant,
}

struct Thread {
    orders: Receiver<Order>,
    allowance: Arc<Allowance>,
    standstill: Arc<Standstill>,
    report: Sender<(u64, ToGuest)>,
    told: Arc<OwnedFd>,
    board: Arc<Mutex<Work>>,
    counts: Work,
    agents: u64,
    all: BTreeMap<PipeId, One>,
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
                false if self.standstill.is_on() => self.orders.recv_timeout(PAUSE),
                false => self.orders.recv_timeout(Duration::ZERO),
            };
            match order {
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => self.turns(),
            }
            self.standstill.busy(Mover::Copies, !self.all.is_empty());
            self.publish();
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Begin(pipe, copying) => {
                let now = Instant::now();
                if self.all.contains_key(&pipe) {
                    let why = "it is given already".into();
                    self.counts.refused += 1;
                    return self.say(ToGuest::Refused { pipe, why });
                }
                self.counts.begun += 1;
                let one = One {
                    copying: *copying,
                    begun: now,
                    told: now,
                };
                self.all.insert(pipe, one);
            }
            Order::Stop(pipe) => self.over(pipe, 0),
            Order::End(done) => {
                self.counts.broken += self.all.len() as u64;
                self.all.clear();
                self.agents += 1;
                let _ = done.send(());
            }
        }
    }

    /// One turn of each.
    fn turns(&mut self) {
        for pipe in self.all.keys().copied().collect::<Vec<_>>() {
            let Some(one) = self.all.get_mut(&pipe) else {
                continue;
            };
            if self.standstill.is_on() {
                return;
            }
            let budget = match self.allowance.ready(Instant::now(), BUDGET) {
                Ok(budget) => budget,
                Err(pause) => {
                    std::thread::sleep(pause.min(PAUSE));
                    continue;
                }
            };
            let before = one.copying.moved();
            let turn = one.copying.turn(budget);
            self.allowance.spent(one.copying.moved() - before);
            match turn {
                Ok(Turn::More | Turn::Full | Turn::Empty) => {
                    if one.told.elapsed() >= PROGRESS {
                        one.told = Instant::now();
                        let sent = one.copying.moved();
                        self.say(ToGuest::Progress { pipe, sent });
                    }
                }
                Ok(Turn::Done | Turn::Ended) => self.over(pipe, 0),
                Err(e) => self.over(pipe, e.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
    }

    fn over(&mut self, pipe: PipeId, errno: i32) {
        let Some(one) = self.all.remove(&pipe) else {
            return;
        };
        let sent = one.copying.moved();
        self.counts.bytes += sent;
        match errno {
            0 => self.counts.returned += 1,
            _ => self.counts.broken += 1,
        }
        self.say(ToGuest::Back {
            pipe,
            source: None,
            sink: None,
            sent,
            errno,
            spent: 0,
        });
    }

    fn say(&self, message: ToGuest) {
        // nobody listens: then the agent is gone, and an end to everything follows
        let _ = self.report.send((self.agents, message));
        wake(&self.told);
    }

    fn publish(&mut self) {
        let now = Instant::now();
        if !self.all.is_empty() && now < self.published + TICK {
            return;
        }
        self.published = now;
        let shown = |one: &One| Transfer {
            kind: Kind::Copy,
            local: None,
            peer: None,
            length: one.copying.length(),
            sent: one.copying.moved(),
            age_ms: u64::try_from(one.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        let work = Work {
            transfers: self.all.values().map(shown).collect(),
            cpu_ms: cpu_ms(),
            ..self.counts.clone()
        };
        *self.board.lock().unwrap_or_else(PoisonError::into_inner) = work;
    }
}
