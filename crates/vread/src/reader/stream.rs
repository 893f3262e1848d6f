// SPDX-License-Identifier: Apache-2.0
//! Blocks for a VM whose memory this process does not share: its agent hands the requests of its kernel
//! over by a byte stream. See [`viola_proto::fuse_stream`].
//!
//! One thread hears the stream and answers what is in memory; what has to wait for a disk is answered by
//! others, in any order. Everything that the VM sends is parsed here, within bounds: a frame of at most
//! 64 KiB and those that wait for a disk, [`MAX_JOBS`] of them. A VM that does not read its replies is not
//! receiver either. A reply is complete before its first byte is sent, so that a VM that reads slowly holds
//! up no withdrawal.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fuse_backend_rs::api::server::Server;
use viola_proto::fuse_stream::{
    self, FUSE_OUT_HEADER_BYTES, Frame, FrameKind, FrameReader, Hello, RequestHeader,
};

use super::byte_queue::ByteQueue;
use super::fs::{BlockFs, MountOptions};
use super::guest_buffers::{retry_waiting, without_waiting};
use super::pool::Pool;
use super::service::{Service, count};
use crate::control::StreamState;

/// Requests that wait for a disk.
const MAX_JOBS: usize = 64;
/// How often it is looked whether a frame that has begun has ended.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a frame may take to arrive.
const FRAME_TIMEOUT: Duration = Duration::from_secs(5);
/// Least time between two hails that nobody asked for.
const MIN_HAIL_INTERVAL: Duration = Duration::from_millis(100);

/// The stream of one VM, and what outlives it.
pub struct StreamServer {
    service: Arc<Service>,
    mount: MountOptions,
    waiters: usize,
    mounted: Arc<Mutex<Option<Mounted>>>,
    current: Mutex<Option<UnixStream>>,
}

/// What the kernel of a mount was told of.
#[derive(Clone)]
struct Mounted {
    mount: u64,
    server: Arc<Server<BlockFs>>,
}

impl StreamServer {
    /// No stream yet. `waiters` are threads that wait for disks; files look as `look` says.
    pub fn new(service: Arc<Service>, mount: MountOptions, waiters: usize) -> Self {
        Self {
            service,
            mount,
            waiters,
            mounted: Arc::default(),
            current: Mutex::default(),
        }
    }

    /// Serves the VM behind this connected stream from now on, on threads of its own, until it ends; one
    /// that was there before is closed.
    ///
    /// # Errors
    /// When threads or memory cannot be had.
    pub fn replace(&self, stream: OwnedFd) -> io::Result<()> {
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let old = lock(&self.current).replace(stream.try_clone()?);
        if let Some(old) = old {
            let _ = old.shutdown(std::net::Shutdown::Both);
        }
        let queues = (0..=self.waiters).map(|_| ByteQueue::new());
        let shared = Arc::new(Shared {
            outbox: Mutex::new(Outbox {
                stream: stream.try_clone()?,
                session: None,
            }),
            queues: Mutex::new(queues.collect::<io::Result<_>>()?),
            service: self.service.clone(),
        });
        let waiting = shared.clone();
        let pool = Pool::new(self.waiters, MAX_JOBS, move |job: Job| {
            waiting.serve_job(&job)
        })?;
        let receiver = Receiver {
            shared,
            pool,
            mount: self.mount,
            mounted: self.mounted.clone(),
            server: None,
            nonce: random(),
            last_hail: None,
        };
        self.service
            .record_stream_state(None, Some(StreamState::Silent));
        let spawned = std::thread::Builder::new()
            .name("stream".into())
            .spawn(move || receiver.run(stream));
        if spawned.is_err() {
            self.service
                .record_stream_state(Some(StreamState::Silent), None);
        }
        spawned.map(drop)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that nobody else has.
pub(super) fn random() -> u64 {
    let mut bytes = [0; 8];
    // Eight bytes are never cut short, and the kernel's source is ready long before there are VMs.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

struct Job {
    request: Vec<u8>,
    asked: RequestHeader,
    session: u64,
    server: Arc<Server<BlockFs>>,
}

struct Outbox {
    stream: UnixStream,
    session: Option<u64>,
}

impl Outbox {
    fn send(&mut self, kind: FrameKind, session: u64, payload: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::new();
        fuse_stream::push_frame(&mut bytes, kind, session, payload);
        self.stream.write_all(&bytes)
    }
}

/// What the threads of one stream share.
struct Shared {
    outbox: Mutex<Outbox>,
    /// As many as there are threads.
    queues: Mutex<Vec<ByteQueue>>,
    service: Arc<Service>,
}

impl Shared {
    fn with_arena(&self, work: impl FnOnce(&ByteQueue)) {
        let queue = lock(&self.queues).pop();
        if let Some(queue) = queue {
            work(&queue);
            lock(&self.queues).push(queue);
        }
    }

    fn serve_job(&self, job: &Job) {
        self.with_arena(|queue| {
            let length = retry_waiting(|| queue.serve(&job.server, &job.request));
            self.reply(queue, length, job.asked, job.session);
        });
    }

    fn reply(&self, queue: &ByteQueue, length: Option<usize>, asked: RequestHeader, session: u64) {
        if !asked.expects_reply() {
            return;
        }
        // The agent's kernel waits for a reply, whatever it was that it sent.
        let whole = |length: &usize| {
            let header: Option<[u8; FUSE_OUT_HEADER_BYTES]> = queue.begin();
            header.is_some_and(|h| {
                h[..4] == (*length as u32).to_le_bytes() && h[8..] == asked.unique.to_le_bytes()
            })
        };
        let length = length.filter(|n| *n >= FUSE_OUT_HEADER_BYTES).filter(whole);
        let length = length.or_else(|| {
            count(&self.service.counts.malformed);
            queue.put(&asked.error_reply(libc::EIO))
        });
        let mut outbox = lock(&self.outbox);
        if let Some(length) = length
            && outbox.session == Some(session)
        {
            let header = fuse_stream::header(FrameKind::Reply, session, length);
            let sent = queue.send(
                &header,
                length,
                &fuse_stream::trailer(session),
                &mut outbox.stream,
            );
            if sent.is_err() {
                let _ = outbox.stream.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

/// The side that hears.
struct Receiver {
    shared: Arc<Shared>,
    pool: Pool<Job>,
    mount: MountOptions,
    mounted: Arc<Mutex<Option<Mounted>>>,
    /// While there is a session.
    server: Option<(u64, Arc<Server<BlockFs>>)>,
    nonce: u64,
    last_hail: Option<Instant>,
}

/// What a frame makes of the stream.
enum Next {
    Continue,
    /// Nothing that was said holds any more.
    Restart,
}

impl Receiver {
    fn run(mut self, mut stream: UnixStream) {
        // However it ends, the agent's kernel is told by the agent, and a daemon brings the next stream.
        let _ = self.listen(&mut stream);
        lock(&self.shared.outbox).session = None;
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let (state, service) = (self.state(), self.shared.service.clone());
        // Threads that wait for a disk are waited for: a VM that connects again and again has no more.
        drop(self);
        service.record_stream_state(Some(state), None);
    }

    fn state(&self) -> StreamState {
        match self.server {
            Some(_) => StreamState::Connected,
            None => StreamState::Silent,
        }
    }

    fn listen(&mut self, stream: &mut UnixStream) -> io::Result<()> {
        let mut frames = FrameReader::from_agent();
        let mut begun: Option<Instant> = None;
        self.send_hail()?;
        while frames.fill(stream)? != Some(0) {
            let mut whole = false;
            loop {
                match frames.next(self.server.is_none()) {
                    Ok(Some(frame)) => {
                        whole = true;
                        if let Next::Restart = self.take(frame)? {
                            self.restart_session()?;
                        }
                    }
                    Ok(None) => break,
                    Err(_) => {
                        frames.skip();
                        self.restart_session()?;
                    }
                }
            }
            begun = match begun {
                _ if !frames.is_partial() => None,
                Some(at) if !whole && at.elapsed() > FRAME_TIMEOUT => {
                    frames.skip();
                    self.restart_session()?;
                    None
                }
                Some(at) if !whole => Some(at),
                _ => Some(Instant::now()),
            };
        }
        Ok(())
    }

    /// Ends the session, and says so.
    fn restart_session(&mut self) -> io::Result<()> {
        let before = self.state();
        if self.server.take().is_some() {
            lock(&self.shared.outbox).session = None;
            self.shared
                .service
                .record_stream_state(Some(before), Some(StreamState::Silent));
            self.nonce = random();
            self.last_hail = None;
        }
        if self
            .last_hail
            .is_none_or(|at| at.elapsed() > MIN_HAIL_INTERVAL)
        {
            self.send_hail()?;
        }
        Ok(())
    }

    fn send_hail(&mut self) -> io::Result<()> {
        self.last_hail = Some(Instant::now());
        let version = fuse_stream::VERSION.to_le_bytes();
        lock(&self.shared.outbox).send(FrameKind::Challenge, self.nonce, &version)
    }

    fn take(&mut self, frame: Frame<'_>) -> io::Result<Next> {
        let (session, payload) = (frame.session, frame.payload);
        match frame.kind {
            FrameKind::Hello => {
                if session == self.nonce
                    && let Some(hello) = Hello::decode(payload)
                {
                    self.welcome(&hello)?;
                }
                return Ok(Next::Continue);
            }
            FrameKind::Probe => return Ok(Next::Restart),
            _ => {}
        }
        let Some((_, server)) = self.server.as_ref().filter(|(own, _)| *own == session) else {
            return Ok(Next::Restart);
        };
        if frame.kind == FrameKind::Ping {
            lock(&self.shared.outbox).send(FrameKind::Pong, session, payload)?;
            return Ok(Next::Continue);
        }
        let Some(asked) = RequestHeader::decode(payload) else {
            count(&self.shared.service.counts.malformed);
            return Ok(Next::Restart);
        };
        self.serve(payload, asked, session, &server.clone());
        Ok(Next::Continue)
    }

    fn welcome(&mut self, hello: &Hello) -> io::Result<()> {
        if hello.version != fuse_stream::VERSION {
            let why = format!(
                "viola on the host speaks version {} of this, the agent version {}",
                fuse_stream::VERSION,
                hello.version
            );
            return lock(&self.shared.outbox).send(FrameKind::Refused, self.nonce, why.as_bytes());
        }
        let mut mounted = lock(&self.mounted);
        let kept = mounted.clone().filter(|m| m.mount == hello.mount);
        let is_kept = kept.is_some();
        let now = kept.unwrap_or_else(|| Mounted {
            mount: hello.mount,
            server: Arc::new(Server::new(BlockFs::for_stream(
                self.shared.service.clone(),
                self.mount,
            ))),
        });
        *mounted = Some(now.clone());
        drop(mounted);
        let before = self.state();
        self.server = Some((hello.session, now.server));
        self.nonce = random();
        self.shared
            .service
            .record_stream_state(Some(before), Some(StreamState::Connected));
        let mut outbox = lock(&self.shared.outbox);
        outbox.session = Some(hello.session);
        outbox.send(FrameKind::Welcome, hello.session, &[u8::from(is_kept)])
    }

    fn serve(
        &self,
        request: &[u8],
        asked: RequestHeader,
        session: u64,
        server: &Arc<Server<BlockFs>>,
    ) {
        let shared = &self.shared;
        count(&shared.service.counts.requests);
        shared.with_arena(|queue| {
            if let Some(length) = without_waiting(|| queue.serve(server, request)) {
                return shared.reply(queue, length, asked, session);
            }
            let job = Job {
                request: request.to_vec(),
                asked,
                session,
                server: server.clone(),
            };
            // A VM that asks for more than the disk gives is receiver less often.
            if let Err(job) = self.pool.submit(job) {
                let length = retry_waiting(|| queue.serve(&job.server, &job.request));
                shared.reply(queue, length, asked, session);
            }
        });
    }
}
