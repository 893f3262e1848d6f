// SPDX-License-Identifier: Apache-2.0
//! Loads on guests, from the host side of a lab: the client half of a measurement.
//!
//! Each load runs on threads of this process inside the lab's network namespace, on a host core of
//! its choice so that it does not compete with the guests, for a bounded number of requests and a
//! bounded time, and only against addresses in the lab's subnets.

mod arrivals;
mod http;
mod media;
mod ping;
mod socket;
mod tcp;
mod udp;

pub use arrivals::{Spacing, plan_arrivals};
pub use http::{Arrivals, Http, HttpResult, MAX_LATE, Summary, http};
pub use media::{Call, CallResult, VideoResult, VideoSession, call, watch_video};
pub use ping::{Ping, ping};
pub use tcp::{TcpBulk, TcpRr, TcpStreamResult, tcp_rr, tcp_stream};
pub use udp::{FloodResult, UdpFlood, udp_flood};

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::sched::set_policy;
use crate::spec::BridgeSpec;

/// Longest run of a load.
pub const MAX_TIME: Duration = Duration::from_secs(600);
/// Largest number of requests of a load.
pub const MAX_REQUESTS: usize = 10_000_000;

/// The network of a client, which reaches a lab's guests.
pub trait ClientNetwork: Sync {
    /// The bridges of the lab.
    fn bridges(&self) -> &[BridgeSpec];

    /// Runs `job` on a fresh thread in that network.
    ///
    /// # Errors
    /// [`Error::Net`] if the thread cannot enter the network.
    fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T>;
}

/// The host of the guests itself.
impl ClientNetwork for Lab {
    fn bridges(&self) -> &[BridgeSpec] {
        &self.spec().bridges
    }

    fn in_netns<T: Send>(&self, job: impl FnOnce() -> T + Send) -> Result<T> {
        self.in_netns(job)
    }
}

/// How the client's threads run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client {
    /// Host core that they are pinned to; `None`: any.
    pub core: Option<usize>,
    /// Real-time priority (`SCHED_FIFO`, 1 to 99), so that the client's own scheduling delay does
    /// not count.
    pub fifo: Option<u8>,
    /// Seed of the random intervals; the same seed makes the same intervals.
    pub seed: u64,
}

impl Default for Client {
    /// Core 0, ordinary scheduling.
    fn default() -> Self {
        Self {
            core: Some(0),
            fifo: None,
            seed: 1,
        }
    }
}

impl Client {
    /// Core 0 at `SCHED_FIFO` 50.
    pub fn real_time() -> Self {
        Self {
            fifo: Some(50),
            ..Self::default()
        }
    }
}

/// Round-trip or response times of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Times {
    /// Time of each answered request in microseconds, in the order sent.
    pub us: Vec<f64>,
    /// Requests sent.
    pub sent: usize,
    /// Requests without an answer in time.
    pub lost: usize,
    /// Time from the first request to the last answer, in seconds.
    pub seconds: f64,
}

impl Times {
    /// The `p`-th percentile in microseconds, `p` from 0 to 100 (nearest rank); `None` without
    /// answers.
    pub fn percentile(&self, p: f64) -> Option<f64> {
        percentile(&self.us, p)
    }

    /// Answers per second.
    pub fn rate(&self) -> f64 {
        if self.seconds > 0.0 {
            self.us.len() as f64 / self.seconds
        } else {
            0.0
        }
    }
}

pub(crate) fn percentile(values: &[f64], p: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile_of_sorted(&sorted, p)
}

fn percentile_of_sorted(sorted: &[f64], p: f64) -> Option<f64> {
    let rank = (p.clamp(0.0, 100.0) / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Checks target and length of a load and runs it in the client's network.
fn run<T: Send>(
    net: &impl ClientNetwork,
    to: Ipv4Addr,
    requests: usize,
    time: Duration,
    client: Client,
    job: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    if !net.bridges().iter().any(|bridge| bridge.contains(to)) {
        let bridges = net
            .bridges()
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ");
        return Err(Error::OutsideLab {
            address: to,
            bridges,
        });
    }
    if requests == 0 || requests > MAX_REQUESTS || time.is_zero() || time > MAX_TIME {
        return Err(Error::Load(format!(
            "{requests} requests in {} s; it must be 1 to {MAX_REQUESTS} in at most {} s",
            time.as_secs(),
            MAX_TIME.as_secs()
        )));
    }
    net.in_netns(|| {
        apply_placement(client)?;
        job()
    })?
}

/// Sets core and priority of the calling thread; threads that it starts inherit them.
pub(crate) fn apply_placement(client: Client) -> Result<()> {
    if let Some(core) = client.core {
        let mut cores = rustix::thread::CpuSet::new();
        cores.set(core);
        rustix::thread::sched_setaffinity(None, &cores)
            .map_err(|e| Error::Load(format!("core {core}: {e}")))?;
    }
    if let Some(priority) = client.fifo {
        set_policy(libc::SCHED_FIFO, priority.into())
            .map_err(|e| Error::Load(format!("SCHED_FIFO {priority}: {e}")))?;
    }
    Ok(())
}

fn failed(what: &str) -> impl Fn(std::io::Error) -> Error {
    move |e| Error::Load(format!("{what}: {e}"))
}

/// Pseudo-random numbers (xorshift64); the same seed makes the same numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Uniform from 0 to below 1.
    pub(crate) fn unit(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with mean 1.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }
}

/// Random intervals, uniform between two bounds.
pub(crate) struct Intervals {
    random: Random,
    low: Duration,
    high: Duration,
}

impl Intervals {
    pub(crate) fn new(seed: u64, (low, high): (Duration, Duration)) -> Self {
        Self {
            random: Random::new(seed),
            low,
            high: high.max(low),
        }
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.low + (self.high - self.low).mul_f64(self.random.unit())
    }
}

/// Sleeps until a moment.
fn sleep_until(when: Instant) {
    let now = Instant::now();
    if when > now {
        std::thread::sleep(when - now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(percentile(&values, 50.0), Some(2.0));
        assert_eq!(percentile(&values, 99.0), Some(4.0));
        assert_eq!(percentile(&values, 0.0), Some(1.0));
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn intervals_fill_their_range_and_repeat_with_the_seed() {
        let bounds = (Duration::from_micros(500), Duration::from_micros(2500));
        let draw = |seed| -> Vec<Duration> {
            let mut intervals = Intervals::new(seed, bounds);
            (0..1000).map(|_| intervals.next()).collect()
        };
        let drawn = draw(7);
        assert!(drawn.iter().all(|d| (bounds.0..=bounds.1).contains(d)));
        let mean = drawn.iter().sum::<Duration>() / 1000;
        assert!((1400..1600).contains(&mean.as_micros()), "{mean:?}");
        assert_eq!(drawn, draw(7));
        assert_ne!(drawn, draw(8));
    }
}
