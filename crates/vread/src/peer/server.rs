// SPDX-License-Identifier: Apache-2.0
//! The serving side: connections of other hosts, one thread each.
//!
//! A connection may have [`MAX_OUTSTANDING`] unanswered requests and [`MAX_ANSWER_BYTES`] of answers in memory;
//! further requests wait. The server closes a connection that sends more requests.

use std::collections::VecDeque;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustls::ServerConfig;
use viola_extents::host::Readahead;
use viola_proto::agent::BlockKey;

use super::frames::{FrameParser, FrameSink};
use super::hosts::{Host, Hosts, add, decrement};
use super::places::{MAX_LINKS, Places, Source};
use super::requests::{FinishedFrames, Job, Request, Requester};
use super::tls;
use super::tls_channel::{ChannelError, TlsChannel};
use super::versions::Versions;
use super::wire::{ErrorCode, MAX_OUTSTANDING, Message, ProtocolError};
use crate::journal::{Journal, Level, LogSink};
use crate::lock::lock;
use crate::poll;
use crate::reader::{Pool, Service};

/// Threads that may wait for disks and agent workers.
const POOL_THREADS: usize = 8;
/// Maximum bytes of answers of one connection in memory, without the last answer.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// Time limit for hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Silence after which the server closes a connection. The asking side pings far more often.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest sleep.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Reads up to this length are tried without waiting in the connection's thread; the pool does longer ones while this
/// thread encrypts.
const MAX_INLINE_READ_BYTES: u32 = 64 << 10;
/// Maximum files of a connection with read-ahead state.
const MAX_READAHEAD_FILES: usize = 16;

/// State that all connections share.
pub(super) struct Server {
    pub(super) service: Arc<Service>,
    pub(super) hosts: Arc<Hosts>,
    tls: Arc<ServerConfig>,
    versions: Versions,
    pool: Pool<Job>,
    places: Mutex<Places>,
    journal: Mutex<Journal>,
}

impl Server {
    pub(super) fn new(
        service: Arc<Service>,
        hosts: Arc<Hosts>,
        tls: Arc<ServerConfig>,
        versions: Versions,
        sink: LogSink,
    ) -> io::Result<Self> {
        let limit = MAX_LINKS * MAX_OUTSTANDING;
        Ok(Self {
            service,
            hosts,
            tls,
            versions,
            pool: Pool::new(POOL_THREADS, limit, Job::work)?,
            places: Mutex::default(),
            journal: Mutex::new(Journal::new(sink)),
        })
    }

    /// Accepts connections, without end.
    pub(super) fn listen(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            let Ok((socket, address)) = listener.accept() else {
                // Usually no descriptor is free; one becomes free when a connection closes.
                std::thread::sleep(POLL_INTERVAL);
                continue;
            };
            let Some(admission) = Admission::admit(self, address.ip().into()) else {
                continue;
            };
            let thread = std::thread::Builder::new().name("peer-in".into());
            // If no thread can start, the socket is closed, which the other host notices.
            let _ = thread.spawn(move || {
                // The asking host reports the reason.
                let _ = Link::run(admission, socket);
            });
        }
    }
}

/// A connection's place.
struct Admission {
    server: Arc<Server>,
    source: Source,
    known: Option<Arc<Host>>,
}

impl Admission {
    /// A place for a connection; `None`, with a line in the journal, when one of the limits is reached.
    fn admit(server: &Arc<Server>, source: Source) -> Option<Self> {
        let admitted = lock(&server.places).admit(source);
        if let Err(full) = admitted {
            add(&server.hosts.over_limit, 1);
            lock(&server.journal).log_limited(
                Instant::now(),
                Level::Warning,
                "over limit",
                &format!("a connection from {source} is refused: {full}"),
            );
            return None;
        }
        Some(Self {
            server: server.clone(),
            source,
            known: None,
        })
    }

    fn authenticate(&mut self, host: Arc<Host>) {
        lock(&self.server.places).authenticate(self.source);
        add(&host.counts.links_in, 1);
        self.known = Some(host);
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        lock(&self.server.places).leave(self.source, self.known.is_some());
        if let Some(host) = &self.known {
            decrement(&host.counts.links_in);
        }
    }
}

/// Collects the requests of one receive.
struct Requests {
    new: Vec<(u64, Message)>,
    room: usize,
}

impl FrameSink for Requests {
    fn message(&mut self, id: u64, message: Message) -> Result<(), ProtocolError> {
        if self.new.len() >= self.room {
            return Err(ProtocolError("too many requests at a time"));
        }
        self.new.push((id, message));
        Ok(())
    }

    fn data(&mut self, _: u64, _: usize, _: &[u8]) -> Result<(), ProtocolError> {
        Err(ProtocolError("bytes without a request"))
    }
}

/// A connection of another host.
struct Link {
    admission: Admission,
    channel: TlsChannel,
    frames: FrameParser,
    requester: Option<Requester>,
    waiting: VecDeque<(u64, Request)>,
    /// Requests in the pool, and the bytes reserved for their answers.
    given: usize,
    reserved: usize,
    finished: Arc<FinishedFrames>,
    ahead: VecDeque<(BlockKey, bool, Readahead)>,
}

impl Link {
    fn run(admission: Admission, socket: TcpStream) -> Result<(), ChannelError> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let connection = tls::accept(&admission.server.tls).map_err(io::Error::other)?;
        let mut link = Self {
            channel: TlsChannel::server(socket, connection),
            admission,
            frames: FrameParser::default(),
            requester: None,
            waiting: VecDeque::new(),
            given: 0,
            reserved: 0,
            finished: Arc::new(FinishedFrames::new()?),
            ahead: VecDeque::new(),
        };
        let done = link.serve();
        if link.admission.known.is_none() {
            add(&link.admission.server.hosts.strangers, 1);
        }
        done
    }

    fn serve(&mut self) -> Result<(), ChannelError> {
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
                // Requests that stay waiting are started after the next receive or send.
                if self.waiting.is_empty()
                    || self.reserved + self.channel.queued() >= MAX_ANSWER_BYTES
                {
                    break;
                }
            }
            let now = Instant::now();
            if self.channel.take_received() {
                heard = now;
            }
            if now.saturating_duration_since(heard) > IDLE_TIMEOUT {
                return Err(ProtocolError("no message for too long").into());
            }
            match &self.requester {
                None if now.saturating_duration_since(begun) > HELLO_TIMEOUT => {
                    return Err(ProtocolError("no hello in time").into());
                }
                Some(requester) if requester.host.is_revoked() => {
                    return Err(ProtocolError("the host was removed").into());
                }
                _ => {}
            }
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&self) -> io::Result<()> {
        let mut flags = PollFlags::empty();
        if self.waiting.len() + self.given < MAX_OUTSTANDING
            && self.channel.queued() < MAX_ANSWER_BYTES
        {
            flags |= PollFlags::IN;
        }
        if self.channel.wants_write() {
            flags |= PollFlags::OUT;
        }
        let mut fds = [
            PollFd::new(&self.channel, flags),
            PollFd::new(&self.finished, PollFlags::IN),
        ];
        poll::wait(&mut fds, Some(POLL_INTERVAL))
    }

    fn receive(&mut self) -> Result<(), ChannelError> {
        let unanswered = self.waiting.len() + self.given;
        if unanswered >= MAX_OUTSTANDING || self.channel.queued() >= MAX_ANSWER_BYTES {
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

    fn take(&mut self, id: u64, message: Message) -> Result<(), ChannelError> {
        if self.requester.is_none() {
            return match message {
                Message::Hello { versions, reader } => self.welcome(id, versions, &reader),
                _ => Err(ProtocolError("no hello").into()),
            };
        }
        match message {
            Message::Ping => self.send(id, &Message::Pong),
            Message::Find { key } => self.waiting.push_back((id, Request::Find { key })),
            Message::Read {
                key,
                meta,
                offset,
                length,
            } => {
                let request = Request::Read {
                    key,
                    meta,
                    offset,
                    length,
                };
                self.waiting.push_back((id, request));
            }
            _ => return Err(ProtocolError("no request").into()),
        }
        Ok(())
    }

    fn send(&mut self, id: u64, message: &Message) {
        let mut frame = self.channel.buffer();
        message.encode(id, &mut frame);
        self.channel.send(frame);
    }

    fn welcome(&mut self, id: u64, theirs: Versions, reader: &str) -> Result<(), ChannelError> {
        // The handshake has checked the certificate; the host may have been removed since.
        let known = self.channel.peer();
        let hosts = &self.admission.server.hosts;
        let host = known
            .and_then(|fingerprint| hosts.by_fingerprint(fingerprint))
            .ok_or(ProtocolError("the certificate was removed"))?;
        let Some(version) = self.admission.server.versions.common(theirs) else {
            self.send(id, &Message::Failed(ErrorCode::Refused));
            self.channel.flush()?;
            return Err(ProtocolError("no common version").into());
        };
        self.admission.authenticate(host.clone());
        self.requester = Some(Requester {
            host,
            reader: reader.into(),
        });
        self.send(id, &Message::Welcome { version });
        Ok(())
    }

    /// Starts waiting requests, as far as their answers have room.
    fn start(&mut self) {
        let Some(requester) = self.requester.clone() else {
            return;
        };
        while self.reserved + self.channel.queued() < MAX_ANSWER_BYTES {
            let Some((id, request)) = self.waiting.pop_front() else {
                return;
            };
            self.look_ahead(&requester, &request);
            let service = &self.admission.server.service;
            let mut buffer = self.channel.buffer();
            let is_short = match &request {
                Request::Find { .. } => true,
                Request::Read { length, .. } => *length <= MAX_INLINE_READ_BYTES,
            };
            if is_short
                && let Some(frame) = requester.answer(service, id, &request, &mut buffer, false)
            {
                self.channel.send(frame);
                continue;
            }
            let cost = request.cost();
            let job = Job {
                service: service.clone(),
                requester: requester.clone(),
                id,
                request,
                buffer,
                finished: self.finished.clone(),
            };
            match self.admission.server.pool.submit(job) {
                Ok(()) => {
                    self.given += 1;
                    self.reserved += cost;
                }
                Err(job) => self.send(job.id, &Message::Failed(ErrorCode::Refused)),
            }
        }
    }

    /// Reads ahead when a file is read sequentially.
    fn look_ahead(&mut self, requester: &Requester, request: &Request) {
        let Request::Read {
            key,
            meta,
            offset,
            length,
        } = request
        else {
            return;
        };
        let Some(block) = requester.known(&self.admission.server.service, key) else {
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
        if let Some(range) = entry.2.record(*offset, (*length).into(), block.len(*meta)) {
            block.prefetch(*meta, range);
        }
        if self.ahead.len() == MAX_READAHEAD_FILES {
            self.ahead.pop_front();
        }
        self.ahead.push_back(entry);
    }
}
