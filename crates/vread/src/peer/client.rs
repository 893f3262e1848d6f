// SPDX-License-Identifier: Apache-2.0
//! The asking side: one thread for each reader of this host, with a connection to each host that the reader may ask.
//!
//! The reader chooses the slot of its shared memory for the bytes, and the thread writes them there as it decrypts
//! them. All requests to a host fail at once when the host cannot be reached, closes the connection, or sends nothing
//! for 0.65 s while requests are pending. The thread reconnects after 0.1 s, 0.2 s and so on up to 5 s.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::connection::{Answer, Connection, Pending};
use super::datagram::Datagram;
use super::hosts::{Host, Hosts, add, decrement};
use super::requests::FinishedFrames;
use super::shared_memory::{SLOT_COUNT, SharedMemory};
use super::tls::Identity;
use super::versions::Versions;
use super::wire::{ErrorCode, Located, Message};
use crate::control::Source;
use crate::pattern;
use crate::poll;

/// First delay before a reconnect.
const MIN_RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Longest delay before a reconnect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(5);
/// Longest sleep while requests are pending.
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest sleep otherwise.
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Requests taken from the reader before the connections have their turn.
const MAX_REQUESTS_PER_TURN: usize = 64;
/// Maximum answers that the reader has not received yet. At this number the thread takes no further
/// requests.
const MAX_UNREAD_ANSWERS: usize = 256;
/// Maximum hosts that a reader may ask.
const MAX_SOURCES: usize = 64;

/// A reader that may ask other hosts.
#[derive(Debug)]
pub(super) struct Client {
    wake: Arc<FinishedFrames>,
    ended: Arc<AtomicBool>,
}

impl Client {
    /// Starts the reader's thread.
    pub(super) fn start(
        identity: &Arc<Identity>,
        versions: Versions,
        hosts: &Arc<Hosts>,
        reader: String,
        sources: Vec<Source>,
        socket: OwnedFd,
        memory: OwnedFd,
    ) -> io::Result<Self> {
        if sources.len() > MAX_SOURCES {
            return Err(io::Error::other(format!("more than {MAX_SOURCES} hosts")));
        }
        let memory = SharedMemory::map(memory, true)?;
        let (wake, ended) = (
            Arc::new(FinishedFrames::new()?),
            Arc::new(AtomicBool::new(false)),
        );
        let now = Instant::now();
        let upstreams = sources.into_iter().map(|source| Upstream {
            host: None,
            source,
            line: None,
            ready: false,
            retry: now,
            pause: MIN_RECONNECT_DELAY,
            address: 0,
            only_lowest: false,
        });
        let mut work = ClientThread {
            identity: identity.clone(),
            versions,
            hosts: hosts.clone(),
            reader,
            socket,
            memory,
            upstreams: upstreams.collect(),
            finds: HashMap::new(),
            answers: VecDeque::new(),
            wake: wake.clone(),
            ended: ended.clone(),
        };
        let thread = std::thread::Builder::new().name("peer-out".into());
        thread.spawn(move || {
            // The thread drops the socket, which the reader notices.
            let _ = work.run();
            for upstream in 0..work.upstreams.len() {
                work.disconnect(upstream, "the reader closed its socket");
            }
        })?;
        Ok(Self { wake, ended })
    }

    /// Whether the reader has closed its socket.
    pub(super) fn ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Makes the thread check at once whether hosts have changed.
    pub(super) fn wake(&self) {
        self.wake.wake();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        self.wake();
    }
}

/// A host that the reader may ask, and the connection to it.
struct Upstream {
    source: Source,
    host: Option<Arc<Host>>,
    line: Option<Box<Connection>>,
    /// Whether the connection was counted as ready.
    ready: bool,
    retry: Instant,
    pause: Duration,
    /// Index of the address to try next.
    address: usize,
    /// Whether the next hello offers only the lowest version: the host refused all of them together.
    only_lowest: bool,
}

impl Upstream {
    /// The connection, if the host has said welcome.
    fn open(&mut self) -> Option<(&mut Connection, &Host)> {
        let line = self.line.as_deref_mut().filter(|line| line.welcomed())?;
        Some((line, self.host.as_deref()?))
    }

    /// Whether the reader accepts blocks of this DataNode VM from the host.
    fn accepts(&self, located: &Located) -> bool {
        self.source
            .datanodes
            .iter()
            .any(|p| pattern::matches(p, &located.datanode) || pattern::matches(p, &located.name))
    }
}

struct ClientThread {
    identity: Arc<Identity>,
    versions: Versions,
    hosts: Arc<Hosts>,
    reader: String,
    socket: OwnedFd,
    memory: SharedMemory,
    upstreams: Vec<Upstream>,
    /// Pending look-ups, each with the number of hosts that have not answered.
    finds: HashMap<u64, usize>,
    answers: VecDeque<Datagram>,
    wake: Arc<FinishedFrames>,
    ended: Arc<AtomicBool>,
}

impl Drop for ClientThread {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
    }
}

impl ClientThread {
    fn run(&mut self) -> io::Result<()> {
        while !self.ended.load(Ordering::SeqCst) {
            self.memory.bump_heartbeat();
            self.connect(Instant::now());
            self.receive_requests()?;
            for upstream in 0..self.upstreams.len() {
                self.work(upstream);
            }
            self.send_answers()?;
            self.wait()?;
            let _ = self.wake.take();
        }
        Ok(())
    }

    fn wait(&self) -> io::Result<()> {
        let now = Instant::now();
        let mut time = IDLE_POLL_INTERVAL;
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        let mut flags = PollFlags::IN;
        if !self.answers.is_empty() {
            flags |= PollFlags::OUT;
        }
        fds.push(PollFd::new(&self.socket, flags));
        for upstream in &self.upstreams {
            let Some(line) = &upstream.line else {
                if upstream
                    .host
                    .as_ref()
                    .is_some_and(|h| !h.addresses.is_empty())
                {
                    time = time.min(upstream.retry.saturating_duration_since(now));
                }
                continue;
            };
            let mut flags = PollFlags::IN;
            if line.wants_write() {
                flags |= PollFlags::OUT;
            }
            if line.busy() || !line.welcomed() {
                time = time.min(BUSY_POLL_INTERVAL);
            }
            fds.push(PollFd::new(line.as_ref(), flags));
        }
        // At least 1 ms, so that a retry that is due now does not spin.
        poll::wait(&mut fds, Some(time.max(Duration::from_millis(1))))
    }

    /// Connects to the hosts whose reconnect is due.
    fn connect(&mut self, now: Instant) {
        for at in 0..self.upstreams.len() {
            let gone = self.upstreams[at]
                .host
                .as_ref()
                .is_none_or(|host| host.is_revoked());
            if gone {
                self.disconnect(at, "the host's configuration changed");
                let upstream = &mut self.upstreams[at];
                upstream.host = self.hosts.get(&upstream.source.peer);
                (upstream.retry, upstream.pause) = (now, MIN_RECONNECT_DELAY);
            }
            let upstream = &mut self.upstreams[at];
            let Some(host) = upstream.host.clone() else {
                continue;
            };
            if upstream.line.is_some() || now < upstream.retry || host.addresses.is_empty() {
                continue;
            }
            let address = host.addresses[upstream.address % host.addresses.len()];
            upstream.address += 1;
            let versions = match upstream.only_lowest {
                true => self.versions.only_lowest(),
                false => self.versions,
            };
            match Connection::open(&self.identity, &host, address, &self.reader, versions) {
                Ok(line) => upstream.line = Some(Box::new(line)),
                Err(e) => self.disconnect(at, &e.to_string()),
            }
        }
    }

    /// Closes a connection, fails its pending requests, and schedules the reconnect.
    fn disconnect(&mut self, at: usize, why: &str) {
        let upstream = &mut self.upstreams[at];
        upstream.retry = Instant::now() + upstream.pause;
        upstream.pause = (upstream.pause * 2).min(MAX_RECONNECT_DELAY);
        if let Some(host) = &upstream.host {
            host.counts.set_last_error(why.to_owned());
            if upstream.ready {
                decrement(&host.counts.links_out);
                add(&host.counts.broken, 1);
            }
        }
        upstream.ready = false;
        let Some(line) = upstream.line.take() else {
            return;
        };
        for pending in line.close() {
            self.answer(at, pending, Answer::Failed(ErrorCode::Gone));
        }
    }

    /// Receives and sends on one connection.
    fn work(&mut self, at: usize) {
        let upstream = &mut self.upstreams[at];
        let (Some(line), Some(host)) = (&mut upstream.line, &upstream.host) else {
            return;
        };
        let done = line.work(&self.memory);
        let answers = line.answers();
        let refused = line.refused();
        if line.welcomed() && !upstream.ready {
            upstream.ready = true;
            upstream.pause = MIN_RECONNECT_DELAY;
            add(&host.counts.links_out, 1);
            host.counts.set_last_error(String::new());
        }
        for (pending, answer) in answers {
            self.answer(at, pending, answer);
        }
        if let Err(e) = done {
            let upstream = &mut self.upstreams[at];
            // After a second refusal all versions again: the host may run another program by then.
            upstream.only_lowest = refused && !upstream.only_lowest;
            self.disconnect(at, &e.to_string());
        }
    }

    /// Handles an answer of a host, or the failure of a request.
    fn answer(&mut self, at: usize, pending: Pending, answer: Answer) {
        let upstream = &self.upstreams[at];
        if let Some(host) = &upstream.host {
            match (&answer, &pending) {
                (Answer::Failed(code), _) => host.counts.failed(*code),
                (_, Pending::Read { length, .. }) => add(&host.counts.bytes_in, (*length).into()),
                _ => {}
            }
        }
        let reply = |id: u64, slot: u16, message: Message| Datagram {
            host: at as u16,
            slot,
            id,
            message,
        };
        match (pending, answer) {
            (Pending::Read { id, slot, length }, Answer::Data) => {
                self.answers
                    .push_back(reply(id, slot, Message::Data { length }));
            }
            (Pending::Read { id, slot, .. }, Answer::Failed(code)) => {
                self.answers.push_back(reply(id, slot, failed(code)));
            }
            (Pending::Find(id), Answer::Found(mut located)) if upstream.accepts(&located) => {
                // Another host may have answered before.
                if self.finds.remove(&id).is_some() {
                    located.datanode = format!("{}@{}", located.datanode, upstream.source.peer);
                    self.answers
                        .push_back(reply(id, 0, Message::Found(located)));
                }
            }
            (Pending::Find(id), _) => {
                if let Some(left) = self.finds.get_mut(&id) {
                    *left -= 1;
                    if *left == 0 {
                        self.finds.remove(&id);
                        self.answers
                            .push_back(reply(id, 0, failed(ErrorCode::Unknown)));
                    }
                }
            }
            // A connection never returns this combination.
            (Pending::Read { id, slot, .. }, Answer::Found(_)) => {
                self.answers
                    .push_back(reply(id, slot, failed(ErrorCode::Io)));
            }
        }
    }

    /// Receives the reader's requests.
    fn receive_requests(&mut self) -> io::Result<()> {
        for _ in 0..MAX_REQUESTS_PER_TURN {
            if self.answers.len() >= MAX_UNREAD_ANSWERS {
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
                    for upstream in &mut self.upstreams {
                        let fits = upstream.source.pools.iter();
                        let fits = fits.clone().any(|p| pattern::matches(p, key.pool()));
                        if let Some((line, host)) = upstream.open()
                            && fits
                            && line.ask(host, &message, Pending::Find(id))
                        {
                            asked += 1;
                        }
                    }
                    match asked {
                        0 => self.refuse(host, slot, id, ErrorCode::Unknown),
                        _ => drop(self.finds.insert(id, asked)),
                    }
                }
                Message::Read { key, length, .. } => {
                    let length = *length;
                    let Some(upstream) = self.upstreams.get_mut(usize::from(host)) else {
                        return Err(io::Error::other("invalid host number"));
                    };
                    if usize::from(slot) >= SLOT_COUNT {
                        return Err(io::Error::other("invalid slot number"));
                    }
                    let fits = upstream.source.pools.iter();
                    let fits = fits.clone().any(|p| pattern::matches(p, key.pool()));
                    let pending = Pending::Read { id, slot, length };
                    let refused = match upstream.open() {
                        _ if !fits => Some(ErrorCode::Unknown),
                        None => Some(ErrorCode::Gone),
                        Some((line, other)) => {
                            (!line.ask(other, &message, pending)).then_some(ErrorCode::Refused)
                        }
                    };
                    if let Some(code) = refused {
                        self.refuse(host, slot, id, code);
                    }
                }
                _ => return Err(io::Error::other("the datagram is not a request")),
            }
        }
        Ok(())
    }

    fn refuse(&mut self, host: u16, slot: u16, id: u64, code: ErrorCode) {
        self.answers.push_back(Datagram {
            host,
            slot,
            id,
            message: failed(code),
        });
    }

    /// Sends answers to the reader, as far as its socket has room.
    fn send_answers(&mut self) -> io::Result<()> {
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

fn failed(code: ErrorCode) -> Message {
    Message::Failed(code)
}
