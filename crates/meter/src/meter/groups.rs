// SPDX-License-Identifier: Apache-2.0
//! The threads of each vCPU as one group, and their counters.

use std::collections::BTreeMap;

use viola_host::{Thread, Tid};

use crate::acct::{AccountTimes, Acct, AcctError, HIST_BUCKETS, bucket_of};
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
    /// Waits as sampled, without the accounting program.
    pub(super) sampled: Option<Box<[u32; HIST_BUCKETS]>>,
    pub(super) wait_log: WaitLog,
}

impl ThreadGroup {
    pub(super) fn new(account: u32) -> Self {
        Self {
            account,
            threads: Vec::new(),
            stats: BTreeMap::new(),
            sampled: None,
            wait_log: WaitLog::default(),
        }
    }

    /// The number of waits of each length so far.
    pub(super) fn waits(&self, source: &TimeSource) -> [u32; HIST_BUCKETS] {
        match source {
            TimeSource::Acct(acct) => acct.accounts().hist(self.account),
            TimeSource::SchedStat => self
                .sampled
                .as_deref()
                .copied()
                .unwrap_or([0; HIST_BUCKETS]),
        }
    }

    /// Logs the waits once a second.
    pub(super) fn log_waits(&mut self, source: &TimeSource, second: u64) {
        if self.wait_log.is_due(second) {
            let waits = self.waits(source);
            self.wait_log.push(second, waits);
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
    pub(super) vcpus: Vec<ThreadGroup>,
    pub(super) service: ThreadGroup,
    pub(super) traffic: Option<Traffic>,
    /// Whether `traffic` includes the disks' counters: a VM is first followed between two readings of them.
    pub(super) has_disks: bool,
}

/// Accounts these threads to a group from now on.
pub(super) fn enrol(
    source: &mut TimeSource,
    index: u32,
    group: &mut ThreadGroup,
    threads: Vec<Thread>,
) -> Result<(), AcctError> {
    if let TimeSource::Acct(acct) = source {
        for thread in &threads {
            if !group.threads.contains(thread) {
                acct.enrol(thread.tid as i32, index, group.account)?;
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
pub(super) fn sample(group: &mut ThreadGroup, sum: &mut AccountTimes, is_vcpu: bool) {
    for thread in &group.threads {
        let Some(new) = schedstat::read(thread) else {
            continue;
        };
        let Some(old) = group.stats.insert(thread.tid, new) else {
            continue;
        };
        let switches = new.switches.saturating_sub(old.switches);
        let wait = new.wait.saturating_sub(old.wait);
        sum.run += new.run.saturating_sub(old.run);
        sum.wait += wait;
        sum.switches += switches;
        if is_vcpu && switches > 0 && wait > 0 {
            let sampled = group
                .sampled
                .get_or_insert_with(|| Box::new([0; HIST_BUCKETS]));
            let count = &mut sampled[bucket_of(wait / switches)];
            *count = count.wrapping_add(switches as u32);
        }
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
