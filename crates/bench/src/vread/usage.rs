// SPDX-License-Identifier: Apache-2.0
//! CPU time of a measurement by user: client guest, DataNode guest, daemon with its workers, whole host.

use std::fs::read_to_string;

use crate::harness::cpu::{self, CpuSample, ThreadSampler};
use viola_cli::error::{Failure, Outcome};

/// CPU-seconds of one measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// The client's guest, or its process without a guest.
    pub client: f64,
    /// The DataNode's guest, or its process without a guest.
    pub node: f64,
    /// `viola run` and its workers; on two hosts the sum of both.
    pub daemon: f64,
    /// All cores of the host, including all other programs.
    pub host: f64,
}

impl Usage {
    /// The same per GiB.
    pub fn per_gib(&self, bytes: u64) -> Self {
        let gib = bytes as f64 / f64::from(1 << 30);
        let per = |seconds: f64| seconds / gib;
        Self {
            client: per(self.client),
            node: per(self.node),
            daemon: per(self.daemon),
            host: per(self.host),
        }
    }
}

/// Processes whose CPU time is measured.
#[derive(Debug, Clone, Copy)]
pub enum Processes {
    /// Two guests, and the daemon if there is one.
    Guests {
        /// Process of the client's guest.
        client: u32,
        /// Process of the DataNode's guest.
        node: u32,
        /// Process of `viola run`.
        daemon: Option<u32>,
    },
    /// Two guests on two hosts, and the daemon of each.
    Hosts {
        /// Process of the client's guest.
        client: u32,
        /// Process of the DataNode's guest.
        node: u32,
        /// Processes of `viola run`.
        daemons: [u32; 2],
    },
    /// Processes of the host.
    OnHost {
        /// The client's.
        client: u32,
        /// The DataNode's.
        node: u32,
    },
}

/// CPU totals at one moment.
pub struct CpuTotals {
    samples: Vec<CpuSample>,
    host: f64,
}

impl CpuTotals {
    /// Samples all processes.
    ///
    /// # Errors
    /// A guest has ended, or /proc cannot be read.
    pub fn now(sampler: &mut ThreadSampler, processes: Processes) -> Outcome<Self> {
        let samples = match processes {
            Processes::Guests {
                client,
                node,
                daemon,
            } => {
                let mut samples = vec![sampler.vms(&[client, node])?];
                samples.extend(daemon.map(cpu::tree));
                samples
            }
            Processes::Hosts {
                client,
                node,
                daemons,
            } => {
                let mut samples = vec![sampler.vms(&[client, node])?];
                samples.extend(daemons.map(cpu::tree));
                samples
            }
            Processes::OnHost { client, node } => vec![cpu::tree(client), cpu::tree(node)],
        };
        Ok(Self {
            samples,
            host: busy()?,
        })
    }

    /// CPU use since `before`.
    pub fn since(&self, before: &Self) -> Usage {
        let seconds: Vec<f64> = self
            .samples
            .iter()
            .zip(&before.samples)
            .flat_map(|(now, then)| now.seconds_since(then))
            .collect();
        let of = |index: usize| seconds.get(index).copied().unwrap_or_default();
        Usage {
            client: of(0),
            node: of(1),
            daemon: seconds.iter().skip(2).sum(),
            host: self.host - before.host,
        }
    }
}

/// Seconds that all cores together were busy since the host booted.
///
/// # Errors
/// /proc/stat cannot be read or parsed.
pub fn busy() -> Outcome<f64> {
    let text =
        read_to_string("/proc/stat").map_err(|e| Failure::run(format!("/proc/stat: {e}")))?;
    let ticks = busy_ticks(&text).ok_or_else(|| {
        Failure::run("/proc/stat: the line `cpu` is missing or has an unknown format")
    })?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// user, nice, system, irq and softirq; user includes guest time.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let numbers: Vec<u64> = line
        .split_ascii_whitespace()
        .map_while(|n| n.parse().ok())
        .collect();
    Some([0, 1, 2, 5, 6].iter().filter_map(|i| numbers.get(*i)).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_stolen_time_are_not_usage() {
        let stat = "cpu  10 2 30 1000 500 4 6 70 8 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(busy_ticks(stat), Some(10 + 2 + 30 + 4 + 6));
        assert_eq!(busy_ticks("intr 5\n"), None);
    }

    #[test]
    fn usage_is_per_gib() {
        let usage = Usage {
            client: 1.0,
            node: 0.5,
            daemon: 0.25,
            host: 2.0,
        };
        let per = usage.per_gib(1 << 28);
        assert_eq!(
            (per.client, per.node, per.daemon, per.host),
            (4.0, 2.0, 1.0, 8.0)
        );
    }
}
