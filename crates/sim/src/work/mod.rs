// SPDX-License-Identifier: Apache-2.0
//! Workloads of VMs: the benchmarks of the papers, and services of operators.

mod blocks;
mod disk;
mod files;
mod http;
mod lookbusy;
mod mpi;
mod ping;
mod requests;
mod stream;
mod tcp;
mod udp;

pub use blocks::Blocks;
pub use disk::{Disk, Read, Write};
pub use files::Files;
pub use http::Http;
pub use lookbusy::Lookbusy;
pub use mpi::{Mpi, Pattern};
pub use ping::Ping;
pub use requests::{Arrivals, Requests};
pub use stream::{Direction, MediaStream};
pub use tcp::{Tcp, TcpConfig};
pub use udp::Udp;

use viola_policy::slices::Nanos;

/// Costs of a guest's own I/O work on one testbed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GuestCosts {
    /// System call that moves data, ns.
    pub call: Nanos,
    /// Waking the process that waits in it, ns; a process that finds data does not wait.
    pub wake: Nanos,
    /// Copying between kernel and process, ns per byte.
    pub copy: f64,
    /// Sending a packet, ns.
    pub send: Nanos,
}

impl GuestCosts {
    /// Cost of a system call that waited and copies `bytes` bytes, ns.
    pub fn blocking_call(&self, bytes: u64) -> Nanos {
        self.wake + self.call_cost(bytes)
    }

    /// Cost of a system call that did not wait and copies `bytes` bytes, ns.
    pub fn call_cost(&self, bytes: u64) -> Nanos {
        self.call + (bytes as f64 * self.copy).round() as Nanos
    }
}

/// A result of [`crate::world::Workload::figures`] by name; NaN if there is none of that name.
pub fn figure(figures: &[(String, f64)], name: &str) -> f64 {
    figures
        .iter()
        .find(|(n, _)| n == name)
        .map_or(f64::NAN, |&(_, v)| v)
}

/// Measured durations, ns.
#[derive(Debug, Clone, Default)]
pub struct Durations(Vec<Nanos>);

impl Durations {
    /// Adds a duration.
    pub fn push(&mut self, time: Nanos) {
        self.0.push(time);
    }

    /// Number of durations.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Mean, ms; 0 without any.
    pub fn mean_ms(&self) -> f64 {
        let sum: f64 = self.0.iter().map(|&t| t as f64).sum();
        sum / self.0.len().max(1) as f64 / 1e6
    }

    /// Quantile `p` (0.0 ..= 1.0), ms; 0 without any.
    pub fn quantile_ms(&self, p: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = ((sorted.len() as f64 * p).ceil() as usize).clamp(1, sorted.len().max(1));
        sorted.get(at - 1).map_or(0.0, |&t| t as f64 / 1e6)
    }

    /// Mean, median, 99th percentile and maximum, ms, as results.
    pub fn figures(&self, name: &str) -> Vec<(String, f64)> {
        vec![
            (format!("{name} mean ms"), self.mean_ms()),
            (format!("{name} p50 ms"), self.quantile_ms(0.5)),
            (format!("{name} p99 ms"), self.quantile_ms(0.99)),
            (format!("{name} max ms"), self.quantile_ms(1.0)),
        ]
    }
}

/// Interarrival jitter (RFC 3550, section 6.4.1) and its mean.
#[derive(Debug, Clone, Copy, Default)]
pub struct Jitter {
    last: Option<(Nanos, Nanos)>,
    smooth: f64,
    sum: f64,
    count: u64,
}

impl Jitter {
    /// Adds a packet with the times at which it was sent and arrived, ns.
    pub fn push(&mut self, sent: Nanos, came: Nanos) {
        if let Some((s, c)) = self.last {
            let d = ((came as f64 - c as f64) - (sent as f64 - s as f64)).abs();
            self.smooth += (d - self.smooth) / 16.0;
            self.sum += d;
            self.count += 1;
        }
        self.last = Some((sent, came));
    }

    /// Mean of |D| of RFC 3550, without its smoothing, ms; 0 with fewer than two packets.
    pub fn mean_ms(&self) -> f64 {
        self.sum / self.count.max(1) as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_awake_is_not_woken() {
        let costs = GuestCosts {
            call: 100,
            wake: 50,
            copy: 0.5,
            send: 0,
        };
        assert_eq!(
            (costs.blocking_call(1_000), costs.call_cost(1_000)),
            (650, 600)
        );
    }

    #[test]
    fn quantiles_and_jitter_match_their_definitions() {
        let mut times = Durations::default();
        assert_eq!((times.mean_ms(), times.quantile_ms(0.5)), (0.0, 0.0));
        for t in (1..=100).rev() {
            times.push(t * 1_000_000);
        }
        assert_eq!(
            (times.quantile_ms(0.5), times.quantile_ms(0.99)),
            (50.0, 99.0)
        );
        assert_eq!((times.quantile_ms(1.0), times.mean_ms()), (100.0, 50.5));
        let mut jitter = Jitter::default();
        for (sent, came) in [(0, 5), (20, 27), (40, 45)] {
            jitter.push(sent * 1_000_000, came * 1_000_000);
        }
        assert_eq!(jitter.mean_ms(), 2.0);
    }
}
