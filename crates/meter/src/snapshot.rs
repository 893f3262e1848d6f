// SPDX-License-Identifier: Apache-2.0
//! The time and traffic of each VM between two readings.

use serde::{Deserialize, Serialize};
use viola_host::VmId;

/// Time of one vCPU (or of a VM's service threads) in an interval, after XenMon: gotten, waiting, blocked. Their sum is the
/// interval, except that a wait counts when it ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// On a CPU (gotten), ns.
    pub run: u64,
    /// Runnable while another thread ran (waiting), ns.
    pub wait: u64,
    /// Neither (blocked), ns.
    pub blocked: u64,
    /// Wake-ups.
    pub wakes: u64,
    /// Context switches to it.
    pub switches: u64,
    /// Times it lost the CPU while runnable.
    pub preempted: u64,
}

impl Times {
    /// Adds field by field; `blocked` adds up over vCPUs too.
    pub fn add(&mut self, other: &Self) {
        self.run += other.run;
        self.wait += other.wait;
        self.blocked += other.blocked;
        self.wakes += other.wakes;
        self.switches += other.switches;
        self.preempted += other.preempted;
    }

    /// Waiting as a share of run + wait, 0..=1.
    pub fn wait_share(&self) -> f64 {
        let wanted = self.run + self.wait;
        if wanted == 0 {
            0.0
        } else {
            self.wait as f64 / wanted as f64
        }
    }
}

/// Traffic in an interval, from the guest's point of view.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets that the guest received.
    pub rx_packets: u64,
    /// Bytes that the guest received.
    pub rx_bytes: u64,
    /// Packets that the guest sent.
    pub tx_packets: u64,
    /// Bytes that the guest sent.
    pub tx_bytes: u64,
    /// Bytes that its processes read from storage.
    pub disk_read: u64,
    /// Bytes that its processes wrote to storage.
    pub disk_written: u64,
}

/// One VM in a [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmSample {
    /// The VM.
    pub id: VmId,
    /// One entry per vCPU, by index.
    pub vcpus: Vec<Times>,
    /// All its service threads together.
    pub service: Times,
    /// Network and disk.
    pub traffic: Traffic,
}

impl VmSample {
    /// The sum over all vCPUs.
    pub fn vcpu_total(&self) -> Times {
        let mut sum = Times::default();
        for v in &self.vcpus {
            sum.add(v);
        }
        sum
    }
}

/// The time and traffic of all VMs in an interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// End of the interval, CLOCK_MONOTONIC, ns.
    pub at: u64,
    /// Length, ns.
    pub span: u64,
    /// Whether it has disk counters. They are read less often and then cover the time since the last such snapshot.
    #[serde(default)]
    pub with_disks: bool,
    /// The VMs, sorted by identity.
    pub vms: Vec<VmSample>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_share_is_waiting_over_run_and_wait() {
        let t = Times {
            run: 30,
            wait: 10,
            blocked: 960,
            ..Times::default()
        };
        assert_eq!(t.wait_share(), 0.25);
        assert_eq!(Times::default().wait_share(), 0.0);
    }
}
