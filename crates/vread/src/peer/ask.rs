// SPDX-License-Identifier: Apache-2.0
//! The asking side: a thread for each reader of this host, with a connection to each host that it may ask.
//!
//! The reader says into which slot of its memory the bytes are to go, and they are written there as they are
//! decrypted. A host that cannot be reached, or ends a connection, or gives no sign of life for 0.65 s while something
//! is awaited from it, fails all its requests at once; it is connected to again after 0.1 s, 0.2 s, up to 5 s.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use super::hosts::{Host, Hosts, add, less};
use super::jobs::Finished;
use super::line::{Answer, Awaited, Line};
use super::local::Datagram;
use super::memory::{Memory, SLOTS};
use super::tls::Identity;
use super::wire::{Code, Located, Message};
use crate::control::Source;
use crate::pattern;

/// First pause before a host is connected to again, and the longest.
const FIRST: Duration = Duration::from_millis(100);
/// See `FIRST`.
const LAST: Duration = Duration::from_secs(5);
/// Longest sleep while something is awaited, and otherwise.
const BUSY: Duration = Duration::from_millis(50);
/// See `BUSY`.
const IDLE: Duration = Duration::from_secs(1);
/// Requests taken from the reader before hosts have their turn.
const IN_A_ROW: usize = 64;
/// Answers that the reader has not taken.
const MAX_ANSWERS: usize = 256;
/// Most hosts that a reader may ask.
const MAX_SOURCES: usize = 64;

/// A reader that may ask.
#[derive(Debug)]
pub(super) struct Asker {
    wake: Arc<Finished>,
    ended: Arc<AtomicBool>,
}

impl Asker {
    /// Starts its thread.
    pub(super) fn start(
        identity: &Arc<Identity>,
        hosts: &Arc<Hosts>,
        reader: String,
        sources: Vec<Source>,
        socket: OwnedFd,
        memory: OwnedFd,
    ) -> io::Result<Self> {
        if sources.len() > MAX_SOURCES {
            return Err(io::Error::other(format!("more than {MAX_SOURCES} hosts")));
        }
        let memory = Memory::map(memory, true)?;
        let (wake, ended) = (Arc::new(Finished::new()?), Arc::new(AtomicBool::new(false)));
        let now = Instant::now();
        let lanes = sources.into_iter().map(|source| Lane {
            host: None,
            source,
            line: None,
            ready: false,
            retry: now,
            pause: FIRST,
            address: 0,
        });
        let mut work = Work {
            identity: identity.clone(),
            hosts: hosts.clone(),
            reader,
            socket,
            memory,
            lanes: lanes.collect(),
            finds: HashMap::new(),
            answers: VecDeque::new(),
            wake: wake.clone(),
            ended: ended.clone(),
        };
        let thread = std::thread::Builder::new().name("peer-out".into());
        thread.spawn(move || {
            // Its end is the end of the reader's socket, which the reader sees.
            let _ = work.run();
            for lane in 0..work.lanes.len() {
                work.hang_up(lane, "its reader has ended");
            }
        })?;
        Ok(Self { wake, ended })
    }

    /// Whether its reader has hung up.
    pub(super) fn ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Looks at once whether hosts are still what they were.
    pub(super) fn wake(&self) {
        self.wake.wake();
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        self.wake();
    }
}

/// One host that the reader may ask.
struct Lane {
    source: Source,
    host: Option<Arc<Host>>,
    line: Option<Box<Line>>,
    /// Whether the line was counted as ready.
    ready: bool,
    retry: Instant,
    pause: Duration,
    /// Which of its addresses is tried next.
    address: usize,
}

impl Lane {
    /// The line, if the host has said welcome.
    fn open(&mut self) -> Option<(&mut Line, &Host)> {
        let line = self.line.as_deref_mut().filter(|line| line.welcomed())?;
        Some((line, self.host.as_deref()?))
    }

    /// Whether blocks of this DataNode VM are taken from it.
    fn takes(&self, located: &Located) -> bool {
        self.source
            .datanodes
            .iter()
            .any(|p| pattern::matches(p, &located.datanode) || pattern::matches(p, &located.name))
    }
}

struct Work {
    identity: Arc<Identity>,
    hosts: Arc<Hosts>,
    reader: String,
    socket: OwnedFd,
    memory: Memory,
    lanes: Vec<Lane>,
    /// Look-ups, and how many hosts have not answered each.
    finds: HashMap<u64, usize>,
    answers: VecDeque<Datagram>,
    wake: Arc<Finished>,
    ended: Arc<AtomicBool>,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
    }
}

impl Work {
    fn run(&mut self) -> io::Result<()> {
        while !self.ended.load(Ordering::SeqCst) {
            self.memory.live();
            self.connect(Instant::now());
            self.take()?;
            for lane in 0..self.lanes.len() {
                self.work(lane);
            }
            self.give()?;
            self.wait()?;
            let _ = self.wake.take();
        }
        Ok(())
    }

    fn wait(&self) -> io::Result<()> {
        let now = Instant::now();
        let mut time = IDLE;
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        let mut flags = PollFlags::IN;
        if !self.answers.is_empty() {
            flags |= PollFlags::OUT;
        }
        fds.push(PollFd::new(&self.socket, flags));
        for lane in &self.lanes {
            let Some(line) = &lane.line else {
                if lane.host.as_ref().is_some_and(|h| !h.addresses.is_empty()) {
                    time = time.min(lane.retry.saturating_duration_since(now));
                }
                continue;
            };
            let mut flags = PollFlags::IN;
            if line.wants_write() {
                flags |= PollFlags::OUT;
            }
            if line.busy() || !line.welcomed() {
                time = time.min(BUSY);
            }
            fds.push(PollFd::new(line.as_ref(), flags));
        }
        // A retry that is due now is tried in a moment, not at once: nothing spins here.
        let time = time.max(Duration::from_millis(1));
        let time = time.try_into().map_err(io::Error::other)?;
        match poll(&mut fds, Some(&time)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Connects to hosts that are not connected to, when it is time.
    fn connect(&mut self, now: Instant) {
        for at in 0..self.lanes.len() {
            let gone = self.lanes[at].host.as_ref().is_none_or(|host| host.gone());
            if gone {
                self.hang_up(at, "it is another one now");
                let lane = &mut self.lanes[at];
                lane.host = self.hosts.get(&lane.source.peer);
                (lane.retry, lane.pause) = (now, FIRST);
            }
            let lane = &mut self.lanes[at];
            let Some(host) = lane.host.clone() else {
                continue;
            };
            if lane.line.is_some() || now < lane.retry || host.addresses.is_empty() {
                continue;
            }
            let address = host.addresses[lane.address % host.addresses.len()];
            lane.address += 1;
            match Line::open(&self.identity, &host, address, &self.reader) {
                Ok(line) => lane.line = Some(Box::new(line)),
                Err(e) => self.hang_up(at, &e.to_string()),
            }
        }
    }

    /// Ends a connection, fails what was awaited from it, and sets the time for the next one.
    fn hang_up(&mut self, at: usize, why: &str) {
        let lane = &mut self.lanes[at];
        lane.retry = Instant::now() + lane.pause;
        lane.pause = (lane.pause * 2).min(LAST);
        if let Some(host) = &lane.host {
            host.counts.why(why.to_owned());
            if lane.ready {
                less(&host.counts.links_out);
                add(&host.counts.broken, 1);
            }
        }
        lane.ready = false;
        let Some(line) = lane.line.take() else {
            return;
        };
        for awaited in line.close() {
            self.answer(at, awaited, Answer::Failed(Code::Gone));
        }
    }

    /// Lets one connection go on.
    fn work(&mut self, at: usize) {
        let lane = &mut self.lanes[at];
        let (Some(line), Some(host)) = (&mut lane.line, &lane.host) else {
            return;
        };
        let done = line.work(&self.memory);
        let answers = line.answers();
        if line.welcomed() && !lane.ready {
            lane.ready = true;
            lane.pause = FIRST;
            add(&host.counts.links_out, 1);
            host.counts.why(String::new());
        }
        for (awaited, answer) in answers {
            self.answer(at, awaited, answer);
        }
        if let Err(e) = done {
            self.hang_up(at, &e.to_string());
        }
    }

    /// A host has answered, or never will.
    fn answer(&mut self, at: usize, awaited: Awaited, answer: Answer) {
        let lane = &self.lanes[at];
        if let Some(host) = &lane.host {
            match (&answer, &awaited) {
                (Answer::Failed(code), _) => host.counts.failed(*code),
                (_, Awaited::Read { length, .. }) => add(&host.counts.bytes_in, (*length).into()),
                _ => {}
            }
        }
        let reply = |id: u64, slot: u16, message: Message| Datagram {
            host: at as u16,
            slot,
            id,
            message,
        };
        match (awaited, answer) {
            (Awaited::Read { id, slot, length }, Answer::Here) => {
                self.answers
                    .push_back(reply(id, slot, Message::Data { length }));
            }
            (Awaited::Read { id, slot, .. }, Answer::Failed(code)) => {
                self.answers.push_back(reply(id, slot, failed(code)));
            }
            (Awaited::Find(id), Answer::Found(mut located)) if lane.takes(&located) => {
                // Another host may have been faster.
                if self.finds.remove(&id).is_some() {
                    located.datanode = format!("{}@{}", located.datanode, lane.source.peer);
                    self.answers
                        .push_back(reply(id, 0, Message::Found(located)));
                }
            }
            (Awaited::Find(id), _) => {
                if let Some(left) = self.finds.get_mut(&id) {
                    *left -= 1;
                    if *left == 0 {
                        self.finds.remove(&id);
                        self.answers.push_back(reply(id, 0, failed(Code::Unknown)));
                    }
                }
            }
            // A connection never gives these.
            (Awaited::Read { id, slot, .. }, Answer::Found(_)) => {
                self.answers.push_back(reply(id, slot, failed(Code::Io)));
            }
        }
    }

    /// Takes what the reader asks.
    fn take(&mut self) -> io::Result<()> {
        for _ in 0..IN_A_ROW {
            if self.answers.len() >= MAX_ANSWERS {
                return Ok(());
            }
            let Some(datagram) = Datagram::receive(&self.socket)? else {
                return Ok(());
            };
            let Datagram {
                host,
                slot,
                id,
                message,
            } = datagram;
            match &message {
                Message::Find { key } => {
                    let mut asked = 0;
                    for lane in &mut self.lanes {
                        let fits = lane.source.pools.iter();
                        let fits = fits.clone().any(|p| pattern::matches(p, key.pool()));
                        if let Some((line, host)) = lane.open()
                            && fits
                            && line.ask(host, &message, Awaited::Find(id))
                        {
                            asked += 1;
                        }
                    }
                    match asked {
                        0 => self.refuse(host, slot, id, Code::Unknown),
                        _ => drop(self.finds.insert(id, asked)),
                    }
                }
                Message::Read { key, length, .. } => {
                    let length = *length;
                    let Some(lane) = self.lanes.get_mut(usize::from(host)) else {
                        return Err(io::Error::other("a host that is not there"));
                    };
                    if usize::from(slot) >= SLOTS {
                        return Err(io::Error::other("a slot that is not there"));
                    }
                    let fits = lane.source.pools.iter();
                    let fits = fits.clone().any(|p| pattern::matches(p, key.pool()));
                    let awaited = Awaited::Read { id, slot, length };
                    let refused = match lane.open() {
                        _ if !fits => Some(Code::Unknown),
                        None => Some(Code::Gone),
                        Some((line, other)) => {
                            (!line.ask(other, &message, awaited)).then_some(Code::Refused)
                        }
                    };
                    if let Some(code) = refused {
                        self.refuse(host, slot, id, code);
                    }
                }
                _ => return Err(io::Error::other("no request")),
            }
        }
        Ok(())
    }

    fn refuse(&mut self, host: u16, slot: u16, id: u64, code: Code) {
        self.answers.push_back(Datagram {
            host,
            slot,
            id,
            message: failed(code),
        });
    }

    /// Gives the reader its answers, as far as it takes them.
    fn give(&mut self) -> io::Result<()> {
        while let Some(answer) = self.answers.front() {
            match answer.send(&self.socket) {
                Ok(()) => drop(self.answers.pop_front()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

fn failed(code: Code) -> Message {
    Message::Failed(code)
}
