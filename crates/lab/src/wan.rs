// SPDX-License-Identifier: Apache-2.0
//! A client behind a wide-area line: a network namespace of its own, connected to the lab's by a
//! line that delays packets.
//!
//! A thread does what netem does where the kernel has it. It delays each packet to the lab by a
//! constant or random time, so packets may overtake each other as with netem; packets from the lab
//! pass at once. At most [`MAX_QUEUED_PACKETS`] wait, netem's default limit.

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
use crate::load::{Client, ClientNetwork, Intervals, apply_placement};
use crate::spec::BridgeSpec;
use crate::tun::{MAX_PACKET_BYTES, Tun};

/// Packets that may wait on their way to the lab; further ones are dropped.
pub const MAX_QUEUED_PACKETS: usize = 1000;
/// Packets read from one device before the other gets its turn.
const MAX_BURST_PACKETS: usize = 64;
/// Addresses of the line's ends. The client's subnet contains the lab's, so it needs no route.
const LAB_END: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 1);
const CLIENT_END: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 2);
const LAB_END_PREFIX: u8 = 24;
const SUBNET: &str = "10.78.0.0/24";
const CLIENT_PREFIX: u8 = 8;

/// Delay of packets to the lab, uniform between two bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delay {
    /// Lower bound.
    pub low: Duration,
    /// Upper bound.
    pub high: Duration,
}

impl Delay {
    /// The same delay for each packet.
    pub fn constant(time: Duration) -> Self {
        Self {
            low: time,
            high: time,
        }
    }
}

/// The client's network. Dropping it removes the network.
pub struct WanClient {
    netns: Netns,
    bridges: Vec<BridgeSpec>,
    delay: Arc<Mutex<Delay>>,
    up: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl WanClient {
    /// Connects to a lab whose guests have addresses in 10.0.0.0/8 and adds routes back to the
    /// client in all guests. `client` says where the line's thread runs; give it a higher priority
    /// than the loads.
    ///
    /// # Errors
    /// [`Error::Net`] if the line cannot be made, [`Error::Guest`] if a guest takes no route.
    pub fn new(lab: &Lab, client: Client, delay: Delay) -> Result<Self> {
        let failed = |what: &str| Error::net(format!("{what} the line to a WAN client"));
        let netns = Netns::new().map_err(failed("making"))?;
        let end = |name: &'static str, address, prefix| -> io::Result<Tun> {
            let tun = Tun::new(name)?;
            device::set_address(name, address, prefix)?;
            Ok(tun)
        };
        let near = lab.in_netns(|| {
            // this file is the setting of the calling thread's namespace
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
            end("near", LAB_END, LAB_END_PREFIX)
        })?;
        let near = near.map_err(failed("making"))?;
        let far = netns.run(|| end("far", CLIENT_END, CLIENT_PREFIX));
        let far = far.and_then(|far| far).map_err(failed("making"))?;
        let bridges = lab.spec().bridges.clone();
        let gateway = bridges.first().map(|b| b.address.to_string());
        for guest in lab.guests() {
            let gateway = gateway.as_deref().unwrap_or_default();
            let output = guest.exec(&["ip", "route", "replace", SUBNET, "via", gateway])?;
            if output.status != 0 {
                return Err(Error::guest(guest.name(), output.stderr.trim()));
            }
        }
        let (up, stop) = UnixStream::pair().map_err(failed("making"))?;
        let delay = Arc::new(Mutex::new(delay));
        let mut line = Line {
            near,
            far,
            stop,
            delay: Arc::clone(&delay),
            random: Intervals::new(client.seed, (Duration::ZERO, Duration::from_secs(1))),
            waiting: BinaryHeap::new(),
            count: 0,
            data: vec![0; MAX_PACKET_BYTES],
        };
        let thread = std::thread::Builder::new()
            .name("viola-lab-far".into())
            .spawn(move || {
                // without the priority the line only delays more
                let _ = apply_placement(client);
                while line.step().unwrap_or(false) {}
            })
            .map_err(failed("starting"))?;
        Ok(Self {
            netns,
            bridges,
            delay,
            up,
            thread: Some(thread),
        })
    }

    /// Changes the delay of later packets.
    pub fn set_delay(&self, delay: Delay) {
        *self.delay.lock().unwrap_or_else(PoisonError::into_inner) = delay;
    }

    /// The client's address.
    pub fn address(&self) -> Ipv4Addr {
        CLIENT_END
    }
}

impl ClientNetwork for WanClient {
    fn bridges(&self) -> &[BridgeSpec] {
        &self.bridges
    }

    fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T> {
        self.netns
            .run(job)
            .map_err(Error::net("entering a WAN client's namespace"))
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

/// Waiting packets, ordered by due time and then by arrival.
type Waiting = BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>;

struct Line {
    near: Tun,
    far: Tun,
    stop: UnixStream,
    delay: Arc<Mutex<Delay>>,
    random: Intervals,
    waiting: Waiting,
    count: u64,
    data: Vec<u8>,
}

impl Line {
    /// Waits for a packet or a due time and handles it. Returns false when the line ends.
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
            PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        if !fds[2].revents().is_empty() {
            return Ok(false);
        }
        for _ in 0..MAX_BURST_PACKETS {
            let Some(length) = self.near.read(&mut self.data)? else {
                break;
            };
            self.far.write(&self.data[..length]);
        }
        for _ in 0..MAX_BURST_PACKETS {
            let Some(length) = self.far.read(&mut self.data)? else {
                break;
            };
            if self.waiting.len() < MAX_QUEUED_PACKETS {
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
