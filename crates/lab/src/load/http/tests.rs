// SPDX-License-Identifier: Apache-2.0
//! Runs against a server on loopback that stalls when it is told to.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::spec::BridgeSpec;

const MS: Duration = Duration::from_millis(1);
const BODY: usize = 100;

/// This machine's loopback.
struct Loopback(Vec<BridgeSpec>);

impl Loopback {
    fn new() -> Self {
        Self(vec![BridgeSpec {
            name: "lo".into(),
            address: Ipv4Addr::LOCALHOST,
            prefix: 8,
        }])
    }
}

impl ClientNetwork for Loopback {
    fn bridges(&self) -> &[BridgeSpec] {
        &self.0
    }

    fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(std::thread::scope(|scope| {
            scope.spawn(job).join().expect("the job")
        }))
    }
}

/// What the server does, and what it saw.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Begin and length of a stall.
    stall: Mutex<Option<(Instant, Duration)>>,
    accepted: AtomicUsize,
    most: AtomicUsize,
    requests: AtomicUsize,
    /// Answers of a connection after which the server closes it; 0: any number.
    answers: usize,
    /// Whether the last answer says so.
    announces: bool,
    status: &'static str,
}

/// A server of one thread, which answers all requests in turn.
struct Server {
    port: u16,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Peer {
    stream: TcpStream,
    received: Vec<u8>,
    answered: usize,
}

impl Server {
    fn start(shared: Shared) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(shared);
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || serve(&listener, &shared)
        });
        Self {
            port,
            shared,
            thread: Some(thread),
        }
    }

    fn plain() -> Self {
        Self::start(Shared {
            status: "200 OK",
            ..Shared::default()
        })
    }

    /// Stalls after `wait` for `length`: it accepts, reads and answers nothing.
    fn stall(&self, wait: Duration, length: Duration) {
        *self.shared.stall.lock().unwrap() = Some((Instant::now() + wait, length));
    }

    fn load(&self, options: Http) -> HttpResult {
        let options = Http {
            port: self.port,
            bytes: BODY,
            client: Client {
                core: None,
                ..Client::default()
            },
            ..options
        };
        http(&Loopback::new(), Ipv4Addr::LOCALHOST, &options).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn serve(listener: &TcpListener, shared: &Shared) {
    let mut peers: Vec<Peer> = Vec::new();
    while !shared.stop.load(Ordering::Relaxed) {
        let mut fds = vec![PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        fds.extend(
            peers
                .iter()
                .map(|p| PollFd::from_borrowed_fd(p.stream.as_fd(), PollFlags::IN)),
        );
        let limit = Timespec {
            tv_sec: 0,
            tv_nsec: 1_000_000,
        };
        let _ = poll(&mut fds, Some(&limit));
        drop(fds);
        let stall = *shared.stall.lock().unwrap();
        if let Some((at, length)) = stall.filter(|(at, _)| Instant::now() >= *at) {
            while at.elapsed() < length && !shared.stop.load(Ordering::Relaxed) {
                std::thread::sleep(MS.min(length - at.elapsed().min(length)));
            }
            *shared.stall.lock().unwrap() = None;
        }
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true).unwrap();
            stream.set_nodelay(true).unwrap();
            shared.accepted.fetch_add(1, Ordering::Relaxed);
            peers.push(Peer {
                stream,
                received: Vec::new(),
                answered: 0,
            });
            shared.most.fetch_max(peers.len(), Ordering::Relaxed);
        }
        peers.retain_mut(|peer| peer.turn(shared));
    }
}

impl Peer {
    /// Answers what has come. Returns whether the connection stays.
    fn turn(&mut self, shared: &Shared) -> bool {
        let mut data = [0; 4096];
        loop {
            match self.stream.read(&mut data) {
                Ok(0) => return false,
                Ok(count) => self.received.extend_from_slice(&data[..count]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return false,
            }
        }
        while let Some(end) = self.received.windows(4).position(|w| w == b"\r\n\r\n") {
            let head: Vec<u8> = self.received.drain(..end + 4).collect();
            let head = String::from_utf8(head).unwrap();
            shared.requests.fetch_add(1, Ordering::Relaxed);
            self.answered += 1;
            let is_old = head.contains("HTTP/1.0");
            let is_last = is_old || self.answered == shared.answers;
            let says = is_old || is_last && shared.announces;
            let answer = format!(
                "HTTP/1.1 {}\r\nContent-Length: {BODY}\r\nConnection: {}\r\n\r\n{}",
                shared.status,
                if says { "close" } else { "keep-alive" },
                "x".repeat(BODY)
            );
            self.stream.write_all(answer.as_bytes()).unwrap();
            if is_last {
                return false;
            }
        }
        true
    }
}

const RUN: Duration = Duration::from_secs(2);
const STALL: Duration = Duration::from_millis(400);
const RATE: f64 = 400.0;

fn open_loop(connections: usize) -> Http {
    Http {
        arrivals: Arrivals::poisson(RATE),
        connections,
        keep_alive: true,
        requests: 1_000_000,
        limit: RUN,
        ..Http::default()
    }
}

/// Requests that are due during a stall of length D wait D minus the time since its begin. So of N
/// requests in a run of length T a part x has a latency of at least D - x T.
fn check_stall(us: Summary) {
    let of_stall = |part: f64| STALL.as_secs_f64() * 1e6 - part * RUN.as_secs_f64() * 1e6;
    let (early, late) = (80_000.0, 1_000_000.0); // another program may take the core
    for (found, part) in [(us.p90, 0.1), (us.p99, 0.01), (us.max, 0.0)] {
        let expected = of_stall(part);
        assert!(
            (expected - early..expected + late).contains(&found),
            "part {part}: {found} us where {expected} were expected; {us:?}"
        );
    }
    assert!(us.p50 < 100_000.0, "{us:?}");
}

#[test]
fn an_open_loop_shows_the_queue_behind_a_stall() {
    let server = Server::plain();
    server.stall(800 * MS, STALL);
    // below the listener's backlog, so that no SYN is lost
    let found = server.load(open_loop(64));
    let us = found.summary().unwrap();
    check_stall(us);
    let sent = (found.sent, found.answered, found.open, found.errors);
    assert_eq!(sent, (found.planned, found.planned, 0, 0), "{us:?}");
    assert!((us.planned_per_s - RATE).abs() < 60.0, "{us:?}");
    assert!(
        found.connections > 20,
        "one stalled request does not stop the next"
    );
    assert_eq!(found.late_us.len(), found.planned);
}

#[test]
fn a_closed_loop_hides_the_stall_from_its_percentiles() {
    let server = Server::plain();
    server.stall(800 * MS, STALL);
    let found = server.load(Http {
        arrivals: Arrivals::CLOSED,
        ..open_loop(1)
    });
    let us = found.summary().unwrap();
    assert!(us.max >= 390_000.0, "one request met it: {us:?}");
    assert!(found.answered > 400 && us.p99 < 100_000.0, "{us:?}");
    assert!(found.late_us.is_empty() && us.late_p99 == 0.0);
}

#[test]
fn requests_that_find_no_connection_wait_and_count_on() {
    let server = Server::plain();
    server.stall(800 * MS, STALL);
    let found = server.load(open_loop(3));
    check_stall(found.summary().unwrap());
    assert_eq!(found.answered, found.planned);
    assert!(found.connections <= 3, "{}", found.connections);
    assert!(server.shared.most.load(Ordering::Relaxed) <= 3);
}

#[test]
fn requests_without_an_answer_count_with_their_age() {
    let server = Server::plain();
    server.stall(300 * MS, Duration::from_secs(60));
    let found = server.load(Http {
        limit: 600 * MS,
        grace: 200 * MS,
        ..open_loop(8)
    });
    // due from 0.3 to 0.6 s, and the run ends at 0.8 s
    assert!((60..=160).contains(&found.open), "{}", found.open);
    assert_eq!(found.answered + found.open, found.planned);
    assert_eq!(found.us.len(), found.planned);
    assert_eq!(found.errors, 0);
    let ages = &found.us[found.answered..];
    assert!(
        ages.iter().all(|age| (199e3..900e3).contains(age)),
        "{ages:?}"
    );
    let us = found.summary().unwrap();
    assert!(us.max > 400_000.0 && us.p99 > 400_000.0, "{us:?}");
    assert!(
        found.seconds >= 0.79,
        "the run waited for them: {}",
        found.seconds
    );
    assert!(found.sent < found.planned, "some found no connection");
}

#[test]
fn connections_are_kept_or_not() {
    let ask = |keep_alive| {
        let server = Server::plain();
        let found = server.load(Http {
            requests: 20,
            keep_alive,
            ..Http::default()
        });
        assert_eq!(
            (found.answered, found.errors),
            (20, 0),
            "{:?}",
            found.first_failure
        );
        (
            server.shared.accepted.load(Ordering::Relaxed),
            found.connect_us.len(),
        )
    };
    assert_eq!(ask(true), (1, 1));
    assert_eq!(ask(false), (20, 20));
}

#[test]
fn a_server_may_close_kept_connections() {
    for announces in [true, false] {
        let server = Server::start(Shared {
            status: "200 OK",
            answers: 5,
            announces,
            ..Shared::default()
        });
        let found = server.load(Http {
            requests: 20,
            keep_alive: true,
            ..Http::default()
        });
        let counts = (found.planned, found.answered, found.errors);
        assert_eq!(counts, (20, 20, 0), "{:?}", found.first_failure);
        assert_eq!(server.shared.accepted.load(Ordering::Relaxed), 4);
    }
}

#[test]
fn errors_are_counted_and_are_no_answers() {
    let server = Server::start(Shared {
        status: "503 Service Unavailable",
        ..Shared::default()
    });
    let begin = Instant::now();
    let found = server.load(Http {
        requests: 6,
        connections: 2,
        ..Http::default()
    });
    assert_eq!((found.planned, found.answered, found.errors), (6, 0, 6));
    assert_eq!(found.first_failure.as_deref(), Some("status 503"));
    assert!(
        found.us.is_empty() && found.summary().is_none(),
        "{:?}",
        found.us
    );
    assert!(begin.elapsed() >= 20 * MS, "a pause after an error");

    let port = server.port;
    drop(server);
    let nobody = Server {
        port,
        shared: Arc::default(),
        thread: None,
    };
    let found = nobody.load(Http {
        limit: 50 * MS,
        ..open_loop(4)
    });
    assert!(
        found.planned > 0 && found.errors == found.planned,
        "{found:?}"
    );
    assert!(found.first_failure.unwrap().contains("refused"));
}

#[test]
fn a_pause_spaces_the_requests_of_a_closed_loop() {
    let server = Server::plain();
    let begin = Instant::now();
    let found = server.load(Http {
        arrivals: Arrivals::Closed {
            pause: (10 * MS, 10 * MS),
        },
        requests: 10,
        ..Http::default()
    });
    assert_eq!(found.answered, 10);
    assert!(begin.elapsed() >= 100 * MS);
    assert!(
        found.summary().unwrap().p50 < 10_000.0,
        "the pause does not count"
    );
}

/// A generator that cannot keep up says so: all requests of this plan are due at once.
#[test]
fn own_lateness_is_measured() {
    let server = Server::plain();
    let options = Http {
        bytes: BODY,
        connections: 16,
        keep_alive: true,
        limit: Duration::from_secs(5),
        ..Http::default()
    };
    let to = SocketAddrV4::new(Ipv4Addr::LOCALHOST, server.port);
    let found = engine::run(to, &options, Source::open(vec![0; 500])).unwrap();
    assert_eq!(
        (found.answered, found.errors),
        (500, 0),
        "{:?}",
        found.first_failure
    );
    assert_eq!(found.late_us.len(), 500);
    assert!(found.late_us.is_sorted() && found.late_us[499] > found.late_us[0]);
    let longest = found.us.iter().copied().fold(0.0, f64::max);
    assert!(
        longest >= found.late_us[499],
        "latency counts from the planned moment"
    );
}

#[test]
fn figures_of_a_late_generator_are_refused() {
    let of = |late: f64, latency: f64| HttpResult {
        us: vec![latency; 100],
        late_us: vec![late; 100],
        answered: 100,
        ..HttpResult::default()
    };
    assert!(of(99.0, 50.0).check_punctual(1).is_ok());
    assert!(
        of(300.0, 4000.0).check_punctual(1).is_ok(),
        "a small part of the latency"
    );
    let error = of(300.0, 1000.0).check_punctual(1).unwrap_err().to_string();
    assert!(
        error.contains("p99 0.300 ms") && error.contains("p99 is 1.000 ms"),
        "{error}"
    );
    assert!(
        of(190.0, 1000.0).check_punctual(2).is_ok(),
        "two generators wait for each other"
    );
    let few = HttpResult {
        late_us: (0..1000)
            .map(|k| if k < 9 { 5000.0 } else { 10.0 })
            .collect(),
        ..of(0.0, 200.0)
    };
    assert!(few.check_punctual(1).is_ok(), "less than one in a hundred");
    assert!(HttpResult::default().check_punctual(1).is_ok());
}

#[test]
fn unusable_options_are_refused() {
    for options in [
        Http {
            connections: 0,
            ..Http::default()
        },
        Http {
            connections: 257,
            ..Http::default()
        },
        Http {
            arrivals: Arrivals::poisson(0.0),
            ..Http::default()
        },
    ] {
        let refused = http(&Loopback::new(), Ipv4Addr::LOCALHOST, &options);
        assert!(matches!(refused, Err(Error::Load(_))), "{options:?}");
    }
}
