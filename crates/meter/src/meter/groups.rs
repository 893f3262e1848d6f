// SPDX-License-Identifier: Apache-2.0
//! The threads of each vCPU as one group, and their counters.

use std::collections::BTreeMap;

use viola_host::{Thread, Tid};

use crate::acct::{AccountTimes, Acct, AcctError, Role};
use crate::hist::Histogram;
use crate::schedstat::{self, SchedStat};
use crate::snapshot::{Times, Traffic};
use crate::waits::WaitLog;

pub(super) const SECOND: u64 = 1_000_000_000;

/// Where the times come from.
pub(super) enum TimeSource {
    /// Exact times from the accounting program.
    Acct(Box<Acct>),
    /// Samples of schedstat, where the accounting program is unavailable.
    SchedStat,
}

/// The threads of one vCPU, or the service threads of a VM.
pub(super) struct ThreadGroup {
    /// Account in the accounting program.
    pub(super) account: u32,
    pub(super) threads: Vec<Thread>,
    pub(super) stats: BTreeMap<Tid, SchedStat>,
    /// Single waits; only the accounting program sees them.
    pub(super) wait_log: WaitLog,
}

impl ThreadGroup {
    pub(super) fn new(account: u32) -> Self {
        Self {
            account,
            threads: Vec::new(),
            stats: BTreeMap::new(),
            wait_log: WaitLog::default(),
        }
    }

    /// Logs the waits once a second.
    pub(super) fn log_waits(&mut self, acct: &Acct, at: u64) {
        if self.wait_log.is_due(at) {
            let waits = acct.accounts().waits(self.account);
            self.wait_log.push(at, &waits);
        }
    }
}

/// The delays of packets and wake-ups of a VM.
#[derive(Default)]
pub(super) struct DelayLogs {
    pub(super) packets: WaitLog,
    pub(super) wakes: WaitLog,
    /// All packets since the VM was first followed, as of the last entry of `packets`.
    pub(super) packet_total: Histogram,
}

impl DelayLogs {
    /// Logs the delays once a second. `index` is the VM's.
    pub(super) fn log(&mut self, acct: &Acct, index: u32, at: u64) {
        if self.packets.is_due(at) {
            let delays = acct.delays().vm(index);
            self.packets.push(at, &delays.packets);
            self.packet_total.merge(&self.packets.newest());
            self.wakes.push(at, &delays.wakes);
        }
    }
}

/// Counters of an account.
#[derive(Clone, Copy, Default)]
pub(super) struct Reading {
    pub(super) is_used: bool,
    /// As of the last snapshot.
    pub(super) before: AccountTimes,
    /// As last read.
    pub(super) now: AccountTimes,
}

impl Reading {
    /// The time since the last call, which was `span` ns ago.
    pub(super) fn spent(&mut self, span: u64) -> Times {
        let (old, new) = (&self.before, &self.now);
        let (run, wait) = (
            new.run.saturating_sub(old.run),
            new.wait.saturating_sub(old.wait),
        );
        let times = Times {
            run,
            wait,
            blocked: span.saturating_sub(run + wait),
            wakes: new.wakes.saturating_sub(old.wakes),
            switches: new.switches.saturating_sub(old.switches),
            preempted: new.preempted.saturating_sub(old.preempted),
        };
        self.before = self.now;
        times
    }
}

/// A followed VM.
pub(super) struct TrackedVm {
    pub(super) index: u32,
    pub(super) pid: Tid,
    pub(super) start_time: u64,
    /// Whether somebody confirms it.
    pub(super) confirmed: bool,
    pub(super) vcpus: Vec<ThreadGroup>,
    pub(super) service: ThreadGroup,
    pub(super) delays: DelayLogs,
    pub(super) traffic: Option<Traffic>,
    /// Whether `traffic` includes the disks' counters: a VM is first followed between two readings of them.
    pub(super) has_disks: bool,
}

impl TrackedVm {
    /// Logs waits and delays once a second.
    pub(super) fn log(&mut self, acct: &Acct, at: u64) {
        for group in &mut self.vcpus {
            group.log_waits(acct, at);
        }
        self.delays.log(acct, self.index, at);
    }
}

/// Accounts these threads to a group from now on.
pub(super) fn enrol(
    source: &mut TimeSource,
    index: u32,
    group: &mut ThreadGroup,
    role: Role,
    threads: Vec<Thread>,
) -> Result<(), AcctError> {
    if let TimeSource::Acct(acct) = source {
        for thread in &threads {
            if !group.threads.contains(thread) {
                acct.enrol(thread.tid as i32, index, group.account, role)?;
            }
        }
    } else {
        group
            .stats
            .retain(|tid, _| threads.iter().any(|t| t.tid == *tid));
    }
    group.threads = threads;
    Ok(())
}

/// Adds what a group's threads spent since the last call, by schedstat.
pub(super) fn sample(group: &mut ThreadGroup, sum: &mut AccountTimes) {
    for thread in &group.threads {
        let Some(new) = schedstat::read(thread) else {
            continue;
        };
        let Some(old) = group.stats.insert(thread.tid, new) else {
            continue;
        };
        sum.run += new.run.saturating_sub(old.run);
        sum.wait += new.wait.saturating_sub(old.wait);
        sum.switches += new.switches.saturating_sub(old.switches);
    }
}

/// Traffic between two readings.
pub(super) fn difference(new: &Traffic, old: &Traffic) -> Traffic {
    Traffic {
        rx_packets: new.rx_packets.saturating_sub(old.rx_packets),
        rx_bytes: new.rx_bytes.saturating_sub(old.rx_bytes),
        tx_packets: new.tx_packets.saturating_sub(old.tx_packets),
        tx_bytes: new.tx_bytes.saturating_sub(old.tx_bytes),
        disk_read: new.disk_read.saturating_sub(old.disk_read),
        disk_written: new.disk_written.saturating_sub(old.disk_written),
    }
}

/// CLOCK_MONOTONIC, ns.
pub(super) fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * SECOND + t.tv_nsec as u64
}
