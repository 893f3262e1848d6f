// SPDX-License-Identifier: Apache-2.0
//! A client far away from a lab: a network namespace of its own, and a line to the lab's that takes its time.
//!
//! What netem does where the kernel has it, a thread does here: packets to the lab wait for a constant or random time each,
//! and may overtake each other as netem's do; those from the lab pass at once. At most [`LIMIT`] wait, as netem's do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use viola_netdev::{Netns, device};

use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::load::{Client, ClientNetwork, Intervals, place};
use crate::spec::BridgeSpec;
use crate::tun::{LONGEST, Tun};

/// Most packets under way to the lab; further ones are dropped.
pub const LIMIT: usize = 1000;
/// Packets read of a device before the others get their turn.
const TURN: usize = 64;
/// The line's ends. The far one's subnet holds the lab's, so that it needs no route.
const NEAR: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const PREFIX: u8 = 24;
const SUBNET: &str = "10.78.0.0/24";
const AROUND: u8 = 8;

/// How long a packet to the lab takes; uniform between the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delay {
    /// At least.
    pub low: Duration,
    /// At most.
    pub high: Duration,
}

impl Delay {
    /// The same for each packet.
    pub fn constant(time: Duration) -> Self {
        Self {
            low: time,
            high: time,
        }
    }
}

/// The far client's network. It goes with this value.
pub struct WanClient {
    netns: Netns,
    bridges: Vec<BridgeSpec>,
    delay: Arc<Mutex<Delay>>,
    up: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl WanClient {
    /// Makes the line to a lab whose guests have addresses in 10.0.0.0/8, and tells them the way back. `client` says where
    /// its thread runs; give it a higher priority than the loads'.
    ///
    /// # Errors
    /// What could not be made.
    pub fn new(lab: &Lab, client: Client, delay: Delay) -> Result<Self> {
        let made = |what: &str| Error::net(format!("{what} the line to a far client"));
        let netns = Netns::new().map_err(made("making"))?;
        let end = |name: &'static str, address, prefix| -> io::Result<Tun> {
            let tun = Tun::new(name)?;
            device::set_address(name, address, prefix)?;
            Ok(tun)
        };
        let near = lab.in_netns(|| {
            // that of the thread's own namespace
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
            end("near", NEAR, PREFIX)
        })?;
        let near = near.map_err(made("making"))?;
        let far = netns.run(|| end("far", FAR, AROUND));
        let far = far.and_then(|far| far).map_err(made("making"))?;
        let bridges = lab.spec().bridges.clone();
        let gateway = bridges.first().map(|b| b.address.to_string());
        for guest in lab.guests() {
            let gateway = gateway.as_deref().unwrap_or_default();
            let told = guest.exec(&["ip", "route", "replace", SUBNET, "via", gateway])?;
            if told.status != 0 {
                return Err(Error::guest(guest.name(), told.stderr.trim()));
            }
        }
        let (up, told) = UnixStream::pair().map_err(made("making"))?;
        let delay = Arc::new(Mutex::new(delay));
        let mut line = Line {
            near,
            far,
            told,
            delay: Arc::clone(&delay),
            random: Intervals::new(client.seed, (Duration::ZERO, Duration::from_secs(1))),
            waiting: BinaryHeap::new(),
            count: 0,
            data: vec![0; LONGEST],
        };
        let thread = std::thread::Builder::new()
            .name("viola-lab-far".into())
            .spawn(move || {
                // at an ordinary priority it would only be late
                let _ = place(client);
                while line.step().unwrap_or(false) {}
            })
            .map_err(made("starting"))?;
        Ok(Self {
            netns,
            bridges,
            delay,
            up,
            thread: Some(thread),
        })
    }

    /// Changes the delay of packets that are sent from now on.
    pub fn set_delay(&self, delay: Delay) {
        *self.delay.lock().unwrap_or_else(PoisonError::into_inner) = delay;
    }

    /// The far client's address.
    pub fn address(&self) -> Ipv4Addr {
        FAR
    }
}

impl ClientNetwork for WanClient {
    fn bridges(&self) -> &[BridgeSpec] {
        &self.bridges
    }

    fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T> {
        self.netns
            .run(job)
            .map_err(Error::net("entering a far client's namespace"))
    }
}

impl Drop for WanClient {
    fn drop(&mut self) {
        let _ = self.up.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Packets under way, by when they arrive and in which order they were sent.
type Waiting = BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>;

struct Line {
    near: Tun,
    far: Tun,
    told: UnixStream,
    delay: Arc<Mutex<Delay>>,
    random: Intervals,
    waiting: Waiting,
    count: u64,
    data: Vec<u8>,
}

impl Line {
    /// Waits until there is something to do and does it; whether there will be more.
    fn step(&mut self) -> io::Result<bool> {
        let now = Instant::now();
        let wait = self.waiting.peek().map(|Reverse((due, ..))| {
            let wait = due.saturating_duration_since(now);
            Timespec {
                tv_sec: wait.as_secs().cast_signed(),
                tv_nsec: wait.subsec_nanos().into(),
            }
        });
        let mut fds = [
            PollFd::from_borrowed_fd(self.near.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.far.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.told.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        if !fds[2].revents().is_empty() {
            return Ok(false);
        }
        for _ in 0..TURN {
            let Some(length) = self.near.read(&mut self.data)? else {
                break;
            };
            self.far.write(&self.data[..length]);
        }
        for _ in 0..TURN {
            let Some(length) = self.far.read(&mut self.data)? else {
                break;
            };
            if self.waiting.len() < LIMIT {
                let due = Instant::now() + self.delay();
                self.count += 1;
                self.waiting
                    .push(Reverse((due, self.count, self.data[..length].to_vec())));
            }
        }
        let now = Instant::now();
        while let Some(Reverse((due, ..))) = self.waiting.peek()
            && *due <= now
        {
            if let Some(Reverse((_, _, packet))) = self.waiting.pop() {
                self.near.write(&packet);
            }
        }
        Ok(true)
    }

    fn delay(&mut self) -> Duration {
        let Delay { low, high } = *self.delay.lock().unwrap_or_else(PoisonError::into_inner);
        let part = self.random.next().as_secs_f64();
        low + high.saturating_sub(low).mul_f64(part)
    }
}
