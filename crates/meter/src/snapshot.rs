// SPDX-License-Identifier: Apache-2.0
//! What each VM spent between two readings.

use serde::{Deserialize, Serialize};
use viola_host::VmId;

/// Time of one vCPU (or of a VM's service threads) in a span, after XenMon: gotten, waiting, blocked. Their sum
/// is the span, but for a wait that is still going on: it counts when it ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// On a CPU (gotten), ns.
    pub run: u64,
    /// Runnable while something else ran (waiting), ns.
    pub wait: u64,
    /// Neither (blocked), ns.
    pub blocked: u64,
    /// Wake-ups.
    pub wakes: u64,
    /// Times it was put on a CPU.
    pub switches: u64,
    /// Times it lost the CPU while it wanted to go on.
    pub preempted: u64,
}

impl Times {
    /// Field by field; `blocked` of several vCPUs adds up as well.
    pub fn add(&mut self, other: &Self) {
        self.run += other.run;
        self.wait += other.wait;
        self.blocked += other.blocked;
        self.wakes += other.wakes;
        self.switches += other.switches;
        self.preempted += other.preempted;
    }

    /// Share of the wanted time (run + wait) that was spent waiting, 0..=1.
    pub fn wait_share(&self) -> f64 {
        let wanted = self.run + self.wait;
        if wanted == 0 {
            0.0
        } else {
            self.wait as f64 / wanted as f64
        }
    }
}

/// Traffic in a span, from the guest's point of view.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Packets that the guest got.
    pub rx_packets: u64,
    /// Bytes that the guest got.
    pub rx_bytes: u64,
    /// Packets that the guest sent.
    pub tx_packets: u64,
    /// Bytes that the guest sent.
    pub tx_bytes: u64,
    /// Bytes read by its processes from storage.
    pub disk_read: u64,
    /// Bytes written by its processes to storage.
    pub disk_written: u64,
}

/// One VM in a [`Snapshot`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmSample {
    /// Which VM.
    pub id: VmId,
    /// Per vCPU, by number.
    pub vcpus: Vec<Times>,
    /// Vhost, I/O and emulator threads together.
    pub service: Times,
    /// Network and disk.
    pub traffic: Traffic,
}

impl VmSample {
    /// All vCPUs together.
    pub fn vcpu_total(&self) -> Times {
        let mut sum = Times::default();
        for v in &self.vcpus {
            sum.add(v);
        }
        sum
    }
}

/// What all VMs spent in a span of time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// CLOCK_MONOTONIC (ns) at its end.
    pub at: u64,
    /// Length, ns.
    pub span: u64,
    /// Whether disk counters were read at its end: only then it has bytes of disks, of all the time since the last such one.
    #[serde(default)]
    pub with_disks: bool,
    /// VMs in the order of their names.
    pub vms: Vec<VmSample>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_share_is_of_the_time_a_vcpu_wanted() {
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
