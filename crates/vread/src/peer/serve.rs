// SPDX-License-Identifier: Apache-2.0
//! The serving side: connections of other hosts, a thread each.
//!
//! A connection may have [`MAX_OUTSTANDING`] requests unanswered and [`MOST`] bytes of answers in memory; what comes
//! above that waits. Whoever sends more requests is hung up on.

use std::collections::VecDeque;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use rustls::ServerConfig;
use viola_extents::host::Readahead;
use viola_proto::agent::BlockKey;

use super::channel::{Broken, Channel};
use super::frames::{Frames, Sink};
use super::hosts::{Host, Hosts, add, less};
use super::jobs::{Ask, Asking, Finished, Job};
use super::tls;
use super::wire::{Bad, Code, MAX_OUTSTANDING, Message, WIRE_VERSION};
use crate::reader::{Pool, Service};

/// Connections at a time. With those of the pool there are not more threads than hazard cells.
const MAX_LINKS: usize = 48;
/// Connections that have not said who they are.
const MAX_STRANGERS: usize = 16;
/// Threads that wait for disks and agents.
const THREADS: usize = 8;
/// Bytes of answers of one connection in memory, but for the last one.
const MOST: usize = 8 << 20;
/// How long a connection may take until it has said who it is.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// How long a connection may be silent. The asking side gives signs of life far more often.
const SILENCE: Duration = Duration::from_secs(30);
/// Longest sleep.
const TICK: Duration = Duration::from_millis(500);
/// Reads up to so long are tried at once; longer ones are read by others while this thread encrypts.
const SHORT: u32 = 64 << 10;
/// Files of one connection whose order of reads is remembered.
const FILES: usize = 16;

/// What all connections share.
pub(super) struct Server {
    pub(super) service: Arc<Service>,
    pub(super) hosts: Arc<Hosts>,
    tls: Arc<ServerConfig>,
    pool: Pool<Job>,
    links: AtomicUsize,
    strangers: AtomicUsize,
}

impl Server {
    pub(super) fn new(
        service: Arc<Service>,
        hosts: Arc<Hosts>,
        tls: Arc<ServerConfig>,
    ) -> io::Result<Self> {
        let limit = MAX_LINKS * MAX_OUTSTANDING;
        Ok(Self {
            service,
            hosts,
            tls,
            pool: Pool::new(THREADS, limit, Job::work)?,
            links: AtomicUsize::new(0),
            strangers: AtomicUsize::new(0),
        })
    }

    /// Accepts connections for ever.
    pub(super) fn listen(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let Ok((socket, _)) = listener.accept() else {
                // No descriptors left, as a rule: somebody will hang up.
                std::thread::sleep(TICK);
                continue;
            };
            let Some(place) = Place::take(self) else {
                add(&self.hosts.strangers, 1);
                continue;
            };
            let thread = std::thread::Builder::new().name("peer-in".into());
            // Without a thread the socket is closed, which the other host understands.
            let _ = thread.spawn(move || {
                // Why it ended is the asking host's to tell.
                let _ = Link::run(place, socket);
            });
        }
    }
}

/// A place among those that have not said who they are, and later among all.
struct Place {
    server: Arc<Server>,
    known: Option<Arc<Host>>,
}

impl Place {
    fn take(server: &Arc<Server>) -> Option<Self> {
        let place = Self {
            server: server.clone(),
            known: None,
        };
        let links = server.links.fetch_add(1, Ordering::SeqCst);
        let strangers = server.strangers.fetch_add(1, Ordering::SeqCst);
        (links < MAX_LINKS && strangers < MAX_STRANGERS).then_some(place)
    }

    fn know(&mut self, host: Arc<Host>) {
        self.server.strangers.fetch_sub(1, Ordering::SeqCst);
        add(&host.counts.links_in, 1);
        self.known = Some(host);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.server.links.fetch_sub(1, Ordering::SeqCst);
        match &self.known {
            Some(host) => less(&host.counts.links_in),
            None => drop(self.server.strangers.fetch_sub(1, Ordering::SeqCst)),
        }
    }
}

/// Requests as they come.
struct Requests {
    new: Vec<(u64, Message)>,
    room: usize,
}

impl Sink for Requests {
    fn message(&mut self, id: u64, message: Message) -> Result<(), Bad> {
        if self.new.len() >= self.room {
            return Err(Bad("too many requests at a time"));
        }
        self.new.push((id, message));
        Ok(())
    }

    fn data(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), Bad> {
        Err(Bad("bytes that nobody has asked for"))
    }
}

/// One connection.
struct Link {
    place: Place,
    channel: Channel,
    frames: Frames,
    asking: Option<Asking>,
    waiting: VecDeque<(u64, Ask)>,
    /// Requests and bytes that others are about.
    given: usize,
    reserved: usize,
    finished: Arc<Finished>,
    ahead: VecDeque<(BlockKey, bool, Readahead)>,
}

impl Link {
    fn run(place: Place, socket: TcpStream) -> Result<(), Broken> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let connection = tls::accept(&place.server.tls).map_err(io::Error::other)?;
        let mut link = Self {
            channel: Channel::server(socket, connection),
            place,
            frames: Frames::default(),
            asking: None,
            waiting: VecDeque::new(),
            given: 0,
            reserved: 0,
            finished: Arc::new(Finished::new()?),
            ahead: VecDeque::new(),
        };
        let done = link.serve();
        if link.place.known.is_none() {
            add(&link.place.server.hosts.strangers, 1);
        }
        done
    }

    fn serve(&mut self) -> Result<(), Broken> {
        let begun = Instant::now();
        let mut heard = begun;
        loop {
            self.wait()?;
            self.receive()?;
            for (cost, frame) in self.finished.take() {
                self.given -= 1;
                self.reserved -= cost;
                self.channel.send(frame);
            }
            loop {
                self.start();
                self.channel.flush()?;
                // What is left is begun when something was read or sent.
                if self.waiting.is_empty() || self.reserved + self.channel.queued() >= MOST {
                    break;
                }
            }
            let now = Instant::now();
            if self.channel.heard() {
                heard = now;
            }
            if now.saturating_duration_since(heard) > SILENCE {
                return Err(Bad("silence").into());
            }
            match &self.asking {
                None if now.saturating_duration_since(begun) > INTRODUCTION => {
                    return Err(Bad("it does not say who it is").into());
                }
                Some(asking) if asking.host.gone() => return Err(Bad("not known any more").into()),
                _ => {}
            }
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&self) -> io::Result<()> {
        let mut flags = PollFlags::empty();
        if self.waiting.len() + self.given < MAX_OUTSTANDING && self.channel.queued() < MOST {
            flags |= PollFlags::IN;
        }
        if self.channel.wants_write() {
            flags |= PollFlags::OUT;
        }
        let tick = Timespec {
            tv_sec: 0,
            tv_nsec: TICK.subsec_nanos().into(),
        };
        let mut fds = [
            PollFd::new(&self.channel, flags),
            PollFd::new(&self.finished, PollFlags::IN),
        ];
        match poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn receive(&mut self) -> Result<(), Broken> {
        let unanswered = self.waiting.len() + self.given;
        if unanswered >= MAX_OUTSTANDING || self.channel.queued() >= MOST {
            return Ok(());
        }
        let mut requests = Requests {
            new: Vec::new(),
            room: MAX_OUTSTANDING - unanswered,
        };
        let frames = &mut self.frames;
        self.channel
            .receive(&mut |bytes| frames.feed(bytes, &mut requests))?;
        for (id, message) in requests.new {
            self.take(id, message)?;
        }
        Ok(())
    }

    fn take(&mut self, id: u64, message: Message) -> Result<(), Broken> {
        if self.asking.is_none() {
            return match message {
                Message::Hello { version, reader } => self.welcome(id, version, &reader),
                _ => Err(Bad("no hello").into()),
            };
        }
        match message {
            Message::Ping => self.say(id, &Message::Pong),
            Message::Find { key } => self.waiting.push_back((id, Ask::Find { key })),
            Message::Read {
                key,
                meta,
                offset,
                length,
            } => {
                let ask = Ask::Read {
                    key,
                    meta,
                    offset,
                    length,
                };
                self.waiting.push_back((id, ask));
            }
            _ => return Err(Bad("no request").into()),
        }
        Ok(())
    }

    fn say(&mut self, id: u64, message: &Message) {
        let mut frame = self.channel.buffer();
        message.put(id, &mut frame);
        self.channel.send(frame);
    }

    fn welcome(&mut self, id: u64, version: u16, reader: &str) -> Result<(), Broken> {
        // The handshake has looked at the certificate; its host may have been taken away since.
        let known = self.channel.peer();
        let hosts = &self.place.server.hosts;
        let host = known
            .and_then(|fingerprint| hosts.of(fingerprint))
            .ok_or(Bad("a certificate that is not known any more"))?;
        if version != WIRE_VERSION {
            self.say(id, &Message::Failed(Code::Refused));
            self.channel.flush()?;
            return Err(Bad("another version").into());
        }
        self.place.know(host.clone());
        self.asking = Some(Asking {
            host,
            reader: reader.into(),
        });
        self.say(
            id,
            &Message::Welcome {
                version: WIRE_VERSION,
            },
        );
        Ok(())
    }

    /// Begins what was asked for, as far as its answers have room.
    fn start(&mut self) {
        let Some(asking) = self.asking.clone() else {
            return;
        };
        while self.reserved + self.channel.queued() < MOST {
            let Some((id, ask)) = self.waiting.pop_front() else {
                return;
            };
            self.look_ahead(&asking, &ask);
            let service = &self.place.server.service;
            let mut buffer = self.channel.buffer();
            let is_short = match &ask {
                Ask::Find { .. } => true,
                Ask::Read { length, .. } => *length <= SHORT,
            };
            if is_short && let Some(frame) = asking.answer(service, id, &ask, &mut buffer, false) {
                self.channel.send(frame);
                continue;
            }
            let cost = ask.cost();
            let job = Job {
                service: service.clone(),
                asking: asking.clone(),
                id,
                ask,
                buffer,
                finished: self.finished.clone(),
            };
            match self.place.server.pool.give(job) {
                Ok(()) => {
                    self.given += 1;
                    self.reserved += cost;
                }
                Err(job) => self.say(job.id, &Message::Failed(Code::Refused)),
            }
        }
    }

    /// Brings in what will be asked for next, when a file is read in order.
    fn look_ahead(&mut self, asking: &Asking, ask: &Ask) {
        let Ask::Read {
            key,
            meta,
            offset,
            length,
        } = ask
        else {
            return;
        };
        let Some(block) = asking.known(&self.place.server.service, key) else {
            return;
        };
        let place = self
            .ahead
            .iter()
            .position(|(k, m, _)| k == key && m == meta);
        let mut entry = match place.and_then(|i| self.ahead.remove(i)) {
            Some(entry) => entry,
            None => (key.clone(), *meta, Readahead::default()),
        };
        if let Some(range) = entry.2.read(*offset, (*length).into(), block.len(*meta)) {
            block.prefetch(*meta, range);
        }
        if self.ahead.len() == FILES {
            self.ahead.pop_front();
        }
        self.ahead.push_back(entry);
    }
}
