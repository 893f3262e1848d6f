// SPDX-License-Identifier: Apache-2.0
//! The event loop of a run of requests. Moments are nanoseconds since its start.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddrV4;
use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, connect, send, socket_with, sockopt,
};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

use super::answer::Answer;
use super::source::Source;
use super::{Http, HttpResult};
use crate::load::socket::{now_us, receive, stamp_arrivals};

/// Time before a request is due, in nanoseconds, in which the thread waits busily: a timer's
/// interrupt and the switch to this thread take some ten microseconds.
const BUSY_WAIT: u64 = 80_000;
/// Events taken at once.
const MAX_EVENTS: usize = 64;
/// Bytes received at once.
const RECEIVE_BYTES: usize = 64 << 10;
/// Event data of the timer; connections have their slot and generation.
const TIMER: u64 = u64::MAX;

/// A request on its way.
#[derive(Debug, Clone, Copy)]
struct Request {
    /// Its latency counts from here.
    from: u64,
    client: usize,
    /// Whether it is sent for the second time, because the server had closed an idle connection.
    is_repeated: bool,
}

struct Connection {
    socket: OwnedFd,
    is_connected: bool,
    request: Option<Request>,
    /// When the connection was established, if it was opened for this request.
    connected_at: Option<u64>,
    /// Sent bytes of the request.
    written: usize,
    answer: Answer,
    /// End of the answer, while the server has not yet closed the connection.
    answered_at: Option<u64>,
    /// Complete answers so far.
    served: usize,
}

/// A slot for a connection. Events of an earlier connection have another generation.
#[derive(Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

struct Engine<'a> {
    to: SocketAddrV4,
    options: &'a Http,
    request: Vec<u8>,
    source: Source,
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Moment 0 on the monotonic clock.
    begin: u64,
    /// End of the run.
    end: u64,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Connections without a request; the one used last is taken first.
    idle: Vec<usize>,
    /// Due requests without a connection.
    waiting: VecDeque<Request>,
    in_use: usize,
    unfinished: usize,
    last_answer: u64,
    buffer: Vec<u8>,
    result: HttpResult,
}

/// Sends the requests of `source` and returns what became of them.
pub(super) fn run(to: SocketAddrV4, options: &Http, source: Source) -> io::Result<HttpResult> {
    Engine::new(to, options, source)?.run()
}

fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

fn timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: (ns / 1_000_000_000).cast_signed(),
        tv_nsec: (ns % 1_000_000_000) as _,
    }
}

impl<'a> Engine<'a> {
    fn new(to: SocketAddrV4, options: &'a Http, source: Source) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
        let token = EventData::new_u64(TIMER);
        epoll::add(&epoll, &timer, token, EventFlags::IN | EventFlags::ET)?;
        let version = match options.keep_alive {
            true => "HTTP/1.1\r\nConnection: keep-alive",
            false => "HTTP/1.0",
        };
        let request = format!("GET {} {version}\r\nHost: lab\r\n\r\n", options.path);
        Ok(Self {
            to,
            options,
            request: request.into_bytes(),
            source,
            epoll,
            timer,
            begin: monotonic(),
            end: (options.limit + options.grace).as_nanos() as u64,
            slots: Vec::new(),
            free: Vec::new(),
            idle: Vec::new(),
            waiting: VecDeque::new(),
            in_use: 0,
            unfinished: 0,
            last_answer: 0,
            buffer: vec![0; RECEIVE_BYTES],
            result: HttpResult::default(),
        })
    }

    fn now(&self) -> u64 {
        monotonic().saturating_sub(self.begin)
    }

    fn run(mut self) -> io::Result<HttpResult> {
        let mut events = Vec::with_capacity(MAX_EVENTS);
        loop {
            self.take_up();
            let now = self.now();
            let is_over = self.source.next_at().is_none() && self.unfinished == 0;
            if is_over || now >= self.end {
                return Ok(self.finish(now));
            }
            events.clear();
            self.wait(now, &mut events)?;
            for event in &events {
                self.handle(event.data.u64(), event.flags);
                self.dispatch();
            }
        }
    }

    /// Takes up all requests that are due.
    fn take_up(&mut self) {
        loop {
            let now = self.now();
            let Some(due) = self.source.take(now) else {
                return;
            };
            self.result.planned += 1;
            self.unfinished += 1;
            let from = match self.source.is_open() {
                true => {
                    self.result.late_us.push((now - due.at) as f64 / 1e3);
                    due.at
                }
                false => now,
            };
            self.waiting.push_back(Request {
                from,
                client: due.client,
                is_repeated: false,
            });
            self.dispatch();
        }
    }

    /// Gives waiting requests to free connections, or to new ones up to the bound.
    fn dispatch(&mut self) {
        while !self.waiting.is_empty() {
            let slot = self.idle.pop();
            if slot.is_none() && self.in_use >= self.options.connections {
                return;
            }
            let Some(request) = self.waiting.pop_front() else {
                return;
            };
            match slot {
                Some(slot) => {
                    if let Some(connection) = &mut self.slots[slot].connection {
                        connection.begin(request);
                    }
                    self.write(slot);
                }
                None => {
                    if let Err(e) = self.connect(request) {
                        self.failed(request, &e.to_string());
                    }
                }
            }
        }
    }

    fn connect(&mut self, request: Request) -> io::Result<()> {
        let socket = socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        stamp_arrivals(&socket)?;
        match connect(&socket, &self.to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(e) => return Err(e.into()),
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let token = (u64::from(self.slots[slot].generation) << 32) | slot as u64;
        if let Err(e) = epoll::add(&self.epoll, &socket, EventData::new_u64(token), flags) {
            self.free.push(slot);
            return Err(e.into());
        }
        let mut connection = Connection {
            socket,
            is_connected: false,
            request: None,
            connected_at: None,
            written: 0,
            answer: Answer::new(self.options.bytes),
            answered_at: None,
            served: 0,
        };
        connection.begin(request);
        self.slots[slot].connection = Some(connection);
        self.in_use += 1;
        self.result.connections = self.result.connections.max(self.in_use);
        Ok(())
    }

    /// Waits for events, at most until the next request is due. Near that moment it does not sleep.
    fn wait(&self, now: u64, events: &mut Vec<epoll::Event>) -> io::Result<()> {
        let next = self.source.next_at().unwrap_or(u64::MAX).min(self.end);
        let no_time = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let timeout = if next.saturating_sub(now) > BUSY_WAIT {
            let value = Itimerspec {
                it_interval: no_time,
                it_value: timespec(self.begin + next - BUSY_WAIT),
            };
            timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &value)?;
            None
        } else {
            Some(&no_time)
        };
        match epoll::wait(&self.epoll, spare_capacity(events), timeout) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn handle(&mut self, token: u64, flags: EventFlags) {
        let slot = (token & u64::from(u32::MAX)) as usize;
        if token == TIMER || self.slots[slot].generation != (token >> 32) as u32 {
            return;
        }
        let now = self.now();
        let Some(connection) = &mut self.slots[slot].connection else {
            return;
        };
        let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        if !connection.is_connected && (ended || flags.contains(EventFlags::OUT)) {
            match sockopt::socket_error(&connection.socket) {
                Ok(Ok(())) => {
                    connection.is_connected = true;
                    connection.connected_at = Some(now);
                }
                Ok(Err(e)) | Err(e) => return self.broken(slot, &io::Error::from(e).to_string()),
            }
        }
        if flags.contains(EventFlags::OUT) {
            self.write(slot);
        }
        if ended || flags.contains(EventFlags::IN) {
            self.read(slot, ended);
        }
    }

    /// Sends the rest of the connection's request.
    fn write(&mut self, slot: usize) {
        let Some(connection) = &mut self.slots[slot].connection else {
            return;
        };
        let is_ready = connection.is_connected && connection.request.is_some();
        while is_ready && connection.written < self.request.len() {
            let rest = &self.request[connection.written..];
            match send(&connection.socket, rest, SendFlags::NOSIGNAL) {
                Ok(count) => {
                    connection.written += count;
                    if connection.written == self.request.len() {
                        self.result.sent += 1;
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                // Reading finds out what the server had to say before.
                Err(_) => return self.read(slot, true),
            }
        }
    }

    /// Receives all that is there. `ended`: the end of the connection may be among it.
    fn read(&mut self, slot: usize, ended: bool) {
        loop {
            let Some(connection) = &mut self.slots[slot].connection else {
                return;
            };
            match receive(&connection.socket, &mut self.buffer) {
                Ok((0, _)) => return self.closed(slot),
                Ok((count, arrived)) => {
                    let age = ((now_us() - arrived) * 1e3).max(0.0) as u64;
                    let data = &self.buffer[..count];
                    if connection.request.is_none() || connection.answered_at.is_some() {
                        return self.broken(slot, "more bytes than an answer");
                    }
                    match connection.answer.feed(data) {
                        Ok(false) => {}
                        Ok(true) => {
                            let at = self.now().saturating_sub(age);
                            self.complete(slot, at);
                        }
                        Err(why) => return self.broken(slot, &why),
                    }
                    if count < self.buffer.len() && !ended {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return self.broken_or_stale(slot, &e.to_string()),
            }
        }
    }

    /// The last byte of an answer has come. The server closes first where it closes at all, so that
    /// the closed connections' ports do not stay taken here.
    fn complete(&mut self, slot: usize, at: u64) {
        let Some(connection) = &mut self.slots[slot].connection else {
            return;
        };
        connection.served += 1;
        if !self.options.keep_alive || connection.answer.closes() {
            connection.answered_at = Some(at);
            return;
        }
        let (request, connected_at) = (connection.request.take(), connection.connected_at.take());
        self.idle.push(slot);
        if let Some(request) = request {
            self.answered(request, connected_at, at);
        }
    }

    /// The server has closed the connection.
    fn closed(&mut self, slot: usize) {
        let Some(connection) = &self.slots[slot].connection else {
            return;
        };
        let (request, connected_at) = (connection.request, connection.connected_at);
        let at = match (connection.answered_at, connection.answer.end()) {
            (Some(at), _) => at,
            (None, Ok(())) => self.now(),
            (None, Err(why)) => return self.broken_or_stale(slot, &why),
        };
        self.drop_connection(slot);
        if let Some(request) = request {
            self.answered(request, connected_at, at);
        }
    }

    fn answered(&mut self, request: Request, connected_at: Option<u64>, at: u64) {
        let us = |at: u64| at.saturating_sub(request.from) as f64 / 1e3;
        self.result.answered += 1;
        self.result.us.push(us(at));
        self.result.connect_us.extend(connected_at.map(us));
        self.last_answer = self.last_answer.max(at);
        self.unfinished -= 1;
        self.source.done(request.client, self.now(), true);
    }

    /// As [`Self::broken`], but a request that met the end of an idle connection is sent again.
    fn broken_or_stale(&mut self, slot: usize, why: &str) {
        let stale = self.slots[slot].connection.as_ref().and_then(|connection| {
            let is_stale = connection.served > 0 && connection.answer.is_empty();
            connection
                .request
                .filter(|r| is_stale && !r.is_repeated && connection.answered_at.is_none())
        });
        let Some(request) = stale else {
            return self.broken(slot, why);
        };
        self.drop_connection(slot);
        self.waiting.push_front(Request {
            is_repeated: true,
            ..request
        });
    }

    /// Closes a connection that failed and counts its request as an error.
    fn broken(&mut self, slot: usize, why: &str) {
        let request = self.drop_connection(slot);
        if let Some(request) = request {
            self.failed(request, why);
        }
    }

    fn failed(&mut self, request: Request, why: &str) {
        self.result.errors += 1;
        self.unfinished -= 1;
        let first = &mut self.result.first_failure;
        first.get_or_insert_with(|| why.to_owned());
        self.source.done(request.client, self.now(), false);
    }

    /// Closes a connection. Returns its request.
    fn drop_connection(&mut self, slot: usize) -> Option<Request> {
        let connection = self.slots[slot].connection.take()?;
        self.slots[slot].generation = self.slots[slot].generation.wrapping_add(1);
        self.idle.retain(|idle| *idle != slot);
        self.free.push(slot);
        self.in_use -= 1;
        connection.request
    }

    /// Counts what is still open.
    fn finish(mut self, now: u64) -> HttpResult {
        for slot in 0..self.slots.len() {
            let connection = self.slots[slot].connection.take();
            let Some((request, connection)) = connection.and_then(|c| Some((c.request?, c))) else {
                continue;
            };
            match connection.answered_at {
                Some(at) => self.answered(request, connection.connected_at, at),
                None => self.waiting.push_back(request),
            }
        }
        let mut result = self.result;
        result.open = self.waiting.len();
        let age = |request: &Request| now.saturating_sub(request.from) as f64 / 1e3;
        result.us.extend(self.waiting.iter().map(age));
        let last = match result.open {
            0 => self.last_answer,
            _ => now,
        };
        result.seconds = last as f64 / 1e9;
        result
    }
}

impl Connection {
    /// Gives the connection a request.
    fn begin(&mut self, request: Request) {
        self.request = Some(request);
        self.written = 0;
        self.answer.reset();
    }
}
