// SPDX-License-Identifier: Apache-2.0
//! The meter: follows the VMs of an inventory and takes snapshots of their time and traffic.

mod answers;
mod blocks;
mod delays;
mod groups;
mod packets;
mod readings;

use std::collections::{BTreeMap, VecDeque};

use viola_host::counters::IoFiles;
use viola_host::{Vm, VmId, counters};

use crate::acct::{AccountTimes, Acct, AcctError, MAX_ACCOUNTS, MAX_VMS, Role};
use crate::snapshot::{Snapshot, Times, Traffic, VmSample};
pub use answers::AnswerTimes;
use answers::MeasuredAnswers;
use blocks::BlockCount;
pub use blocks::BlockReads;
pub use delays::Delays;
use groups::{
    DelayLogs, Reading, SECOND, ThreadGroup, TimeSource, TrackedVm, difference, enrol, now, sample,
};
pub use packets::Unseen;
use packets::WatchedNics;
pub use readings::{Span, VmCounters};

/// Minimum number of snapshots that the history keeps, once so many were taken.
pub const MIN_HISTORY: usize = 50;
/// The history keeps the snapshots of at least this time, ns, up to [`MAX_HISTORY`] of them.
const MIN_HISTORY_NS: u64 = 6 * SECOND;
const MAX_HISTORY: usize = 300;

/// Accounts that VMs may take which nobody confirms: any user can start processes that look like VMs.
const MAX_UNCONFIRMED_ACCOUNTS: usize = MAX_ACCOUNTS / 16;

/// Interval between readings of the disk counters, ns: they take a system call per process.
const DISK_INTERVAL: u64 = SECOND;

/// Follows VMs and accounts their time.
pub struct Meter {
    source: TimeSource,
    vms: BTreeMap<VmId, TrackedVm>,
    /// By account: close together, since every turn reads them.
    readings: Vec<Reading>,
    free_accounts: Vec<u32>,
    free_indexes: Vec<u32>,
    last: u64,
    /// The followed VMs, by id.
    followed: Vec<Vm>,
    /// When disk counters were last read, ns.
    disks_at: u64,
    disks: IoFiles,
    nics: WatchedNics,
    answers: MeasuredAnswers,
    blocks: Option<BlockCount>,
    history: VecDeque<Snapshot>,
}

impl std::fmt::Debug for Meter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meter")
            .field("vms", &self.vms.len())
            .finish_non_exhaustive()
    }
}

impl Meter {
    /// A meter that counts exactly, at context switches.
    ///
    /// # Errors
    /// [`AcctError`] when BPF is unavailable.
    pub fn exact() -> Result<Self, AcctError> {
        Ok(Self::with(TimeSource::Acct(Box::new(Acct::load()?))))
    }

    /// A meter that samples schedstat.
    pub fn sampled() -> Self {
        Self::with(TimeSource::SchedStat)
    }

    fn with(source: TimeSource) -> Self {
        Self {
            source,
            vms: BTreeMap::new(),
            readings: Vec::new(),
            free_accounts: (0..MAX_ACCOUNTS as u32).rev().collect(),
            free_indexes: (0..MAX_VMS as u32).rev().collect(),
            last: now(),
            followed: Vec::new(),
            disks_at: 0,
            disks: IoFiles::default(),
            nics: WatchedNics::default(),
            answers: MeasuredAnswers::Unwanted,
            blocks: None,
            history: VecDeque::new(),
        }
    }

    /// The accounting program, when this meter has one.
    pub fn acct(&mut self) -> Option<&mut Acct> {
        match &mut self.source {
            TimeSource::Acct(a) => Some(a),
            TimeSource::SchedStat => None,
        }
    }

    /// Whether this meter counts exactly, with single waits and packets.
    pub fn is_exact(&self) -> bool {
        matches!(self.source, TimeSource::Acct(_))
    }

    /// A VM's index in the tables of the accounting program.
    pub fn index(&self, id: &VmId) -> Option<u32> {
        self.vms.get(id).map(|t| t.index)
    }

    /// Follows exactly these VMs from now on. Returns those that the tables have no room for; they are not accounted.
    ///
    /// # Errors
    /// [`AcctError`].
    pub fn follow(&mut self, vms: &[Vm]) -> Result<Vec<VmId>, AcctError> {
        let gone: Vec<VmId> = self
            .vms
            .iter()
            .filter(|(id, t)| {
                !vms.iter().any(|vm| {
                    vm.id == **id
                        && vm.pid == t.pid
                        && vm.start_time == t.start_time
                        && vm.vcpus.len() == t.vcpus.len()
                })
            })
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            self.remove_vm(&id)?;
        }
        let mut left_out = Vec::new();
        for vm in vms {
            if let Some(t) = self.vms.get_mut(&vm.id) {
                t.confirmed = vm.confirmed.is_some();
            }
            if !self.vms.contains_key(&vm.id) && !self.add_vm(vm)? {
                left_out.push(vm.id.clone());
                continue;
            }
            let Some(t) = self.vms.get_mut(&vm.id) else {
                continue;
            };
            for (group, vcpu) in t.vcpus.iter_mut().zip(&vm.vcpus) {
                let threads = vcpu.threads.clone();
                enrol(&mut self.source, t.index, group, Role::Vcpu, threads)?;
            }
            enrol(
                &mut self.source,
                t.index,
                &mut t.service,
                Role::Service,
                vm.service.iter().map(|s| s.thread).collect(),
            )?;
        }
        self.followed = vms
            .iter()
            .filter(|vm| self.vms.contains_key(&vm.id))
            .cloned()
            .collect();
        self.followed.sort_by(|a, b| a.id.cmp(&b.id));
        self.disks.follow(&self.followed);
        self.watch_nics();
        Ok(left_out)
    }

    fn add_vm(&mut self, vm: &Vm) -> Result<bool, AcctError> {
        let needed = vm.vcpus.len() + 1;
        if self.free_indexes.is_empty() || self.free_accounts.len() < needed {
            return Ok(false);
        }
        let unconfirmed = self.vms.values().filter(|t| !t.confirmed);
        let taken: usize = unconfirmed.map(|t| t.vcpus.len() + 1).sum();
        if vm.confirmed.is_none() && taken + needed > MAX_UNCONFIRMED_ACCOUNTS {
            return Ok(false);
        }
        let mut group = || ThreadGroup::new(self.free_accounts.pop().unwrap_or_default());
        let (vcpus, service) = (
            vm.vcpus.iter().map(|_| group()).collect::<Vec<_>>(),
            group(),
        );
        let mut tracked = TrackedVm {
            index: self.free_indexes.pop().unwrap_or_default(),
            pid: vm.pid,
            start_time: vm.start_time,
            confirmed: vm.confirmed.is_some(),
            vcpus,
            service,
            delays: DelayLogs::default(),
            traffic: None,
            has_disks: false,
        };
        if let TimeSource::Acct(acct) = &mut self.source {
            acct.begin_vm(tracked.index)?;
            tracked.log(acct, now());
        }
        for group in tracked.vcpus.iter().chain([&tracked.service]) {
            let start = match &self.source {
                TimeSource::Acct(acct) => acct.accounts().times(group.account),
                TimeSource::SchedStat => AccountTimes::default(),
            };
            let at = group.account as usize;
            if self.readings.len() <= at {
                self.readings.resize(at + 1, Reading::default());
            }
            self.readings[at] = Reading {
                is_used: true,
                before: start,
                now: start,
            };
        }
        self.vms.insert(vm.id.clone(), tracked);
        Ok(true)
    }

    fn remove_vm(&mut self, id: &VmId) -> Result<(), AcctError> {
        let Some(t) = self.vms.remove(id) else {
            return Ok(());
        };
        for group in t.vcpus.iter().chain([&t.service]) {
            if let TimeSource::Acct(acct) = &mut self.source {
                for thread in &group.threads {
                    acct.unenrol(thread.tid as i32)?;
                }
            }
            self.readings[group.account as usize].is_used = false;
            self.free_accounts.push(group.account);
        }
        // Reused last: a late event of the old VM must not count for a new one.
        self.free_indexes.insert(0, t.index);
        Ok(())
    }

    /// Reads the times of all vCPUs for the next [`Meter::snapshot`]. With the accounting program it makes no system call and
    /// allocates nothing.
    pub fn read_times(&mut self) {
        self.read_times_at(now());
    }

    fn read_times_at(&mut self, at: u64) {
        match &self.source {
            TimeSource::Acct(acct) => {
                let accounts = acct.accounts();
                for (account, reading) in self
                    .readings
                    .iter_mut()
                    .enumerate()
                    .filter(|(_, r)| r.is_used)
                {
                    let mut new = accounts.times(account as u32);
                    // The next reading replaces the time since the last switch.
                    new.run = new.run_until(at).max(reading.now.run);
                    reading.now = new;
                }
            }
            TimeSource::SchedStat => {
                for t in self.vms.values_mut() {
                    for group in &mut t.vcpus {
                        sample(group, &mut self.readings[group.account as usize].now);
                    }
                    let group = &mut t.service;
                    sample(group, &mut self.readings[group.account as usize].now);
                }
            }
        }
    }

    /// Reads all counters and returns the time and traffic since the last snapshot, which [`Meter::history`] keeps. It reads one
    /// small file per network namespace and, once a second, one per process.
    pub fn snapshot(&mut self) -> &Snapshot {
        let at = now();
        let span = at.saturating_sub(self.last);
        self.last = at;
        self.read_times_at(at);
        let with_disks = at.saturating_sub(self.disks_at) >= DISK_INTERVAL;
        if with_disks {
            self.disks_at = at;
        }
        let mut snapshot = self.reusable_snapshot(at);
        self.fit_vms(&mut snapshot);
        (snapshot.at, snapshot.span, snapshot.with_disks) = (at, span, with_disks);
        // A VM that has just ended must not cost the others their counters: only its own are missing then.
        let nics = counters::nic_counters(&self.followed).unwrap_or_default();
        let samples = snapshot.vms.iter_mut().enumerate();
        for ((i, sample), t) in samples.zip(self.vms.values_mut()) {
            for (times, group) in sample.vcpus.iter_mut().zip(&t.vcpus) {
                *times = self.readings[group.account as usize].spent(span);
            }
            if let TimeSource::Acct(acct) = &self.source {
                t.log(acct, at);
            }
            sample.service = self.readings[t.service.account as usize].spent(span);
            sample.traffic = Traffic::default();
            let mut total = t.traffic.unwrap_or_default();
            if let Some(nics) = nics.get(i) {
                (
                    total.rx_packets,
                    total.rx_bytes,
                    total.tx_packets,
                    total.tx_bytes,
                ) = (0, 0, 0, 0);
                for nic in nics.iter().flatten() {
                    total.rx_packets += nic.to_guest_packets;
                    total.rx_bytes += nic.to_guest_bytes;
                    total.tx_packets += nic.from_guest_packets;
                    total.tx_bytes += nic.from_guest_bytes;
                }
            }
            if with_disks && let Some(disk) = self.disks.read(&self.followed[i]) {
                total.disk_read = disk.read_bytes;
                total.disk_written = disk.write_bytes;
                if !std::mem::replace(&mut t.has_disks, true)
                    && let Some(old) = &mut t.traffic
                {
                    (old.disk_read, old.disk_written) = (disk.read_bytes, disk.write_bytes);
                }
            }
            if let Some(old) = &t.traffic {
                sample.traffic = difference(&total, old);
            }
            t.traffic = Some(total);
        }
        self.log_answers(at);
        self.history.push_back(snapshot);
        &self.history[self.history.len() - 1]
    }

    /// The oldest snapshot, when the history no longer needs it; else a new one.
    fn reusable_snapshot(&mut self, at: u64) -> Snapshot {
        let is_old = |s: &Snapshot| s.at + MIN_HISTORY_NS < at;
        let enough = |kept: usize, oldest: Option<&Snapshot>| {
            kept >= MAX_HISTORY || (kept >= MIN_HISTORY && oldest.is_some_and(is_old))
        };
        let mut oldest = None;
        // Twice when there are too many, after shorter intervals than now.
        for _ in 0..2 {
            if enough(self.history.len(), self.history.front()) {
                oldest = self.history.pop_front().or(oldest);
            }
        }
        oldest.unwrap_or_default()
    }

    /// Gives a snapshot one entry for each followed VM.
    fn fit_vms(&self, snapshot: &mut Snapshot) {
        let has = |s: &VmSample, (id, t): (&VmId, &TrackedVm)| {
            s.id == *id && s.vcpus.len() == t.vcpus.len()
        };
        let fits = snapshot.vms.len() == self.vms.len()
            && snapshot.vms.iter().zip(&self.vms).all(|(s, vm)| has(s, vm));
        if !fits {
            let blank = |(id, t): (&VmId, &TrackedVm)| VmSample {
                id: id.clone(),
                vcpus: vec![Times::default(); t.vcpus.len()],
                service: Times::default(),
                traffic: Traffic::default(),
            };
            snapshot.vms = self.vms.iter().map(blank).collect();
        }
    }

    /// The last snapshots, oldest first: at least 50 once there were so many.
    pub fn history(&self) -> &VecDeque<Snapshot> {
        &self.history
    }
}

#[cfg(test)]
mod tests;
