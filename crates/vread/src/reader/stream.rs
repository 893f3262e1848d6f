// SPDX-License-Identifier: Apache-2.0
//! Serves a VM whose memory this process does not share: the VM's agent forwards the FUSE requests of its kernel in a
//! byte stream. See [`viola_proto::fuse_stream`].
//!
//! One thread receives requests and answers those whose bytes are in memory; pool threads answer the others, in any
//! order. All input is bounded: frames of at most 64 KiB and [`MAX_JOBS`] requests that wait for a disk. If a VM does
//! not read its replies, the worker stops reading its requests. A reply is complete before its first byte is sent, so
//! a slow VM delays no withdrawal.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fuse_backend_rs::api::server::Server;
use viola_proto::fuse_stream::{
    self, FUSE_OUT_HEADER_BYTES, Frame, FrameKind, FrameReader, Hello, RequestHeader,
};

use super::byte_queue::ByteQueue;
use super::device::DISK_THREADS;
use super::fs::BlockFs;
use super::guest_buffers::{retry_waiting, without_waiting};
use super::pool::Pool;
use super::service::{Service, count};
use crate::control::StreamState;
use crate::lock::lock;
use crate::random::random;

/// Maximum requests that wait for a disk.
const MAX_JOBS: usize = 64;
/// Read timeout, after which an incomplete frame is checked.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a frame to arrive.
const FRAME_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two hello requests.
const MIN_HELLO_REQUEST_INTERVAL: Duration = Duration::from_millis(100);

/// Serves the stream of one VM, and keeps the state that outlives a stream.
pub struct StreamServer {
    service: Arc<Service>,
    uid: u32,
    mounted: Arc<Mutex<Option<Mounted>>>,
    current: Mutex<Option<UnixStream>>,
}

/// The file system whose nodes the kernel of a mount knows.
#[derive(Clone)]
struct Mounted {
    mount: u64,
    server: Arc<Server<BlockFs>>,
}

impl StreamServer {
    /// Creates a server without a stream. `uid` owns the files.
    pub fn new(service: Arc<Service>, uid: u32) -> Self {
        Self {
            service,
            uid,
            mounted: Arc::default(),
            current: Mutex::default(),
        }
    }

    /// Starts threads that serve this connected stream until it ends, and closes the previous stream.
    ///
    /// # Errors
    /// When threads or memory cannot be allocated.
    pub fn replace(&self, stream: OwnedFd) -> io::Result<()> {
        let stream = UnixStream::from(stream);
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let old = lock(&self.current).replace(stream.try_clone()?);
        if let Some(old) = old {
            let _ = old.shutdown(std::net::Shutdown::Both);
        }
        let queues = (0..=DISK_THREADS).map(|_| ByteQueue::new());
        let shared = Arc::new(Shared {
            outbox: Mutex::new(Outbox {
                stream: stream.try_clone()?,
                session: None,
            }),
            queues: Mutex::new(queues.collect::<io::Result<_>>()?),
            service: self.service.clone(),
        });
        let waiting = shared.clone();
        let pool = Pool::new(DISK_THREADS, MAX_JOBS, move |job: Job| {
            waiting.serve_job(&job)
        })?;
        let receiver = Receiver {
            shared,
            pool,
            uid: self.uid,
            mounted: self.mounted.clone(),
            server: None,
            nonce: random(),
            last_hello_request: None,
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

/// State that the threads of one stream share.
struct Shared {
    outbox: Mutex<Outbox>,
    /// One per thread.
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
        // The guest's kernel waits for a reply to every request, even a malformed one.
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

/// The receiving thread of a stream.
struct Receiver {
    shared: Arc<Shared>,
    pool: Pool<Job>,
    uid: u32,
    mounted: Arc<Mutex<Option<Mounted>>>,
    /// The session number and the file system, while there is a session.
    server: Option<(u64, Arc<Server<BlockFs>>)>,
    nonce: u64,
    last_hello_request: Option<Instant>,
}

/// How to continue after a frame.
enum Next {
    Continue,
    /// End the session and start again.
    Restart,
}

impl Receiver {
    fn run(mut self, mut stream: UnixStream) {
        // The agent reports the end to its kernel, and the daemon brings the next stream.
        let _ = self.listen(&mut stream);
        lock(&self.shared.outbox).session = None;
        let _ = stream.shutdown(std::net::Shutdown::Both);
        let (state, service) = (self.state(), self.shared.service.clone());
        // Dropping waits for the pool's threads, so a VM that reconnects repeatedly has no more of them.
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
        self.send_hello_request()?;
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

    /// Ends the session and asks for a new hello.
    fn restart_session(&mut self) -> io::Result<()> {
        let before = self.state();
        if self.server.take().is_some() {
            lock(&self.shared.outbox).session = None;
            self.shared
                .service
                .record_stream_state(Some(before), Some(StreamState::Silent));
            self.nonce = random();
            self.last_hello_request = None;
        }
        if self
            .last_hello_request
            .is_none_or(|at| at.elapsed() > MIN_HELLO_REQUEST_INTERVAL)
        {
            self.send_hello_request()?;
        }
        Ok(())
    }

    fn send_hello_request(&mut self) -> io::Result<()> {
        self.last_hello_request = Some(Instant::now());
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
                "the FUSE stream has version {} on the host, {} in the agent; update the older",
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
                self.uid,
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
            // When the pool is full, this thread waits itself and reads no further requests.
            if let Err(job) = self.pool.submit(job) {
                let length = retry_waiting(|| queue.serve(&job.server, &job.request));
                shared.reply(queue, length, asked, session);
            }
        });
    }
}
