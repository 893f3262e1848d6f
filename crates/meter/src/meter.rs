// SPDX-License-Identifier: Apache-2.0
//! The meter: follows the VMs of an inventory and takes snapshots of what they spend.

use std::collections::{BTreeMap, VecDeque};

use viola_host::counters::DiskFiles;
use viola_host::{NicKind, Thread, Tid, Vm, VmId, counters};

use crate::acct::{
    AccountTimes, Acct, AcctError, GuestPackets, HIST_BUCKETS, MAX_ACCOUNTS, MAX_VMS, bucket_of,
};
use crate::hist::WaitHist;
use crate::schedstat::{self, SchedStat};
use crate::snapshot::{Snapshot, Times, Traffic, VmSample};
use crate::waits::Marks;

/// So many snapshots are kept at least...
pub const MIN_HISTORY: usize = 50;
/// ...and all of so much time, but never more than [`MAX_HISTORY`].
const MIN_HISTORY_NS: u64 = 6 * SECOND;
const MAX_HISTORY: usize = 300;

/// Disk counters are a file per process, so they are read less often.
const DISK_INTERVAL: u64 = SECOND;

const SECOND: u64 = 1_000_000_000;

/// Where the times come from.
enum Source {
    /// Exactly, from the accounting program.
    Acct(Box<Acct>),
    /// From schedstat, because the accounting program could not be had.
    SchedStat,
}

struct Unit {
    /// Slot in the accounting program.
    account: u32,
    threads: Vec<Thread>,
    stats: BTreeMap<Tid, SchedStat>,
    /// Waits as sampled, where there is no accounting program.
    sampled: Option<Box<[u32; HIST_BUCKETS]>>,
    marks: Marks,
}

impl Unit {
    fn new(account: u32) -> Self {
        Self {
            account,
            threads: Vec::new(),
            stats: BTreeMap::new(),
            sampled: None,
            marks: Marks::default(),
        }
    }

    /// How many waits of each length there were so far.
    fn waits(&self, source: &Source) -> [u32; HIST_BUCKETS] {
        match source {
            Source::Acct(acct) => acct.accounts().hist(self.account),
            Source::SchedStat => self
                .sampled
                .as_deref()
                .copied()
                .unwrap_or([0; HIST_BUCKETS]),
        }
    }

    /// Notes once a second where the waits stand.
    fn mark(&mut self, source: &Source, second: u64) {
        if self.marks.is_due(second) {
            let waits = self.waits(source);
            self.marks.note(second, waits);
        }
    }
}

/// Counters of a account that is in use.
#[derive(Clone, Copy, Default)]
struct Row {
    is_used: bool,
    /// At the last snapshot.
    before: AccountTimes,
    /// As read last.
    now: AccountTimes,
}

impl Row {
    /// What was spent since this was asked for last.
    fn spent(&mut self, span: u64) -> Times {
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

struct Tracked {
    index: u32,
    pid: Tid,
    start_time: u64,
    vcpus: Vec<Unit>,
    service: Unit,
    traffic: Option<Traffic>,
    /// Whether `traffic` has what its disks did so far; it is met between two readings of them.
    has_disks: bool,
}

/// Follows VMs and accounts their time.
pub struct Meter {
    source: Source,
    vms: BTreeMap<VmId, Tracked>,
    /// By account: read at each turn, so close together.
    rows: Vec<Row>,
    free_accounts: Vec<u32>,
    free_indexes: Vec<u32>,
    last: u64,
    /// The VMs followed, by id.
    followed: Vec<Vm>,
    /// When disk counters were read last.
    disks_at: u64,
    disks: DiskFiles,
    /// Interfaces (ifindex, network namespace) whose packets are announced: VM index and core.
    watched: BTreeMap<(u32, u32), (u32, u32, GuestPackets)>,
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
    /// A meter that counts exactly, at context switches; fails where BPF is not to be had.
    pub fn exact() -> Result<Self, AcctError> {
        Ok(Self::with(Source::Acct(Box::new(Acct::load()?))))
    }

    /// A meter that samples schedstat.
    pub fn sampled() -> Self {
        Self::with(Source::SchedStat)
    }

    fn with(source: Source) -> Self {
        Self {
            source,
            vms: BTreeMap::new(),
            rows: Vec::new(),
            free_accounts: (0..MAX_ACCOUNTS as u32).rev().collect(),
            free_indexes: (0..MAX_VMS as u32).rev().collect(),
            last: now(),
            followed: Vec::new(),
            disks_at: 0,
            disks: DiskFiles::default(),
            watched: BTreeMap::new(),
            history: VecDeque::new(),
        }
    }

    /// The accounting program, if this meter has it.
    pub fn acct(&mut self) -> Option<&mut Acct> {
        match &mut self.source {
            Source::Acct(a) => Some(a),
            Source::SchedStat => None,
        }
    }

    /// Index of a VM in the accounting program's tables.
    pub fn index(&self, id: &VmId) -> Option<u32> {
        self.vms.get(id).map(|t| t.index)
    }

    /// Follows exactly these VMs from now on. VMs beyond the room of the tables are returned, unaccounted.
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
            self.drop_vm(&id)?;
        }
        let mut left_out = Vec::new();
        for vm in vms {
            if !self.vms.contains_key(&vm.id) && !self.take_vm(vm) {
                left_out.push(vm.id.clone());
                continue;
            }
            let Some(t) = self.vms.get_mut(&vm.id) else {
                continue;
            };
            for (unit, vcpu) in t.vcpus.iter_mut().zip(&vm.vcpus) {
                enrol(&mut self.source, t.index, unit, vcpu.threads.clone())?;
            }
            enrol(
                &mut self.source,
                t.index,
                &mut t.service,
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
        Ok(left_out)
    }

    fn take_vm(&mut self, vm: &Vm) -> bool {
        if self.free_indexes.is_empty() || self.free_accounts.len() < vm.vcpus.len() + 1 {
            return false;
        }
        let mut unit = || Unit::new(self.free_accounts.pop().unwrap_or_default());
        let (vcpus, service) = (vm.vcpus.iter().map(|_| unit()).collect::<Vec<_>>(), unit());
        let mut tracked = Tracked {
            index: self.free_indexes.pop().unwrap_or_default(),
            pid: vm.pid,
            start_time: vm.start_time,
            vcpus,
            service,
            traffic: None,
            has_disks: false,
        };
        let second = now() / SECOND;
        for unit in &mut tracked.vcpus {
            unit.mark(&self.source, second);
        }
        for unit in tracked.vcpus.iter().chain([&tracked.service]) {
            let start = match &self.source {
                Source::Acct(acct) => acct.accounts().times(unit.account),
                Source::SchedStat => AccountTimes::default(),
            };
            let at = unit.account as usize;
            if self.rows.len() <= at {
                self.rows.resize(at + 1, Row::default());
            }
            self.rows[at] = Row {
                is_used: true,
                before: start,
                now: start,
            };
        }
        self.vms.insert(vm.id.clone(), tracked);
        true
    }

    fn drop_vm(&mut self, id: &VmId) -> Result<(), AcctError> {
        let Some(t) = self.vms.remove(id) else {
            return Ok(());
        };
        for unit in t.vcpus.iter().chain([&t.service]) {
            if let Source::Acct(acct) = &mut self.source {
                for thread in &unit.threads {
                    acct.unenrol(thread.tid as i32)?;
                }
            }
            self.rows[unit.account as usize].is_used = false;
            self.free_accounts.push(unit.account);
        }
        // Reused last, so that a late event about the old VM is not taken for one about a new VM.
        self.free_indexes.insert(0, t.index);
        Ok(())
    }

    /// Announces packets for these VMs, each on the core on which it takes interrupts, to the cores' controllers
    /// (no others any more). Returns which of them can be served: those whose NICs are all interfaces of the host
    /// whose packets the kernel shows (no macvtap).
    pub fn watch_packets(&mut self, cores: &[(VmId, u32)]) -> Result<Vec<VmId>, AcctError> {
        let Source::Acct(acct) = &mut self.source else {
            return Ok(Vec::new());
        };
        let mut wanted = BTreeMap::new();
        let mut served = Vec::new();
        for (id, cpu) in cores {
            let (Some(t), Some(vm)) = (
                self.vms.get(id),
                self.followed.iter().find(|vm| vm.id == *id),
            ) else {
                continue;
            };
            let nics: Option<Vec<_>> = vm
                .nics
                .iter()
                .map(|n| {
                    let to_guest = match n.kind {
                        NicKind::Tap => GuestPackets::Transmitted,
                        NicKind::Raw => GuestPackets::Received,
                        NicKind::Macvtap => return None,
                    };
                    Some(((n.ifindex?, n.netns as u32), to_guest))
                })
                .collect();
            let Some(nics) = nics.filter(|t| !t.is_empty()) else {
                continue;
            };
            for (nic, to_guest) in nics {
                wanted.insert(nic, (t.index, *cpu, to_guest));
            }
            served.push(id.clone());
        }
        for (&(ifindex, netns), _) in self
            .watched
            .iter()
            .filter(|(k, _)| !wanted.contains_key(*k))
        {
            acct.unwatch_nic(ifindex, netns)?;
        }
        for (key, owner) in &wanted {
            if self.watched.get(key) != Some(owner) {
                acct.watch_nic(key.0, key.1, owner.2, owner.0, owner.1)?;
            }
        }
        self.watched = wanted;
        Ok(served)
    }

    /// Reads the times of all vCPUs; what was spent is in the next [`Meter::snapshot`]. No system call, and no memory is asked for,
    /// where the accounting program runs.
    pub fn read_times(&mut self) {
        self.read_times_at(now());
    }

    fn read_times_at(&mut self, at: u64) {
        match &self.source {
            Source::Acct(acct) => {
                let accounts = acct.accounts();
                for (account, row) in self.rows.iter_mut().enumerate().filter(|(_, r)| r.is_used) {
                    let mut new = accounts.times(account as u32);
                    // Time since the last switch; the next reading takes it off again.
                    if new.on_since != 0 {
                        new.run += at.saturating_sub(new.on_since);
                    }
                    new.run = new.run.max(row.now.run);
                    row.now = new;
                }
            }
            Source::SchedStat => {
                for t in self.vms.values_mut() {
                    for unit in &mut t.vcpus {
                        sample(unit, &mut self.rows[unit.account as usize].now, true);
                    }
                    let unit = &mut t.service;
                    sample(unit, &mut self.rows[unit.account as usize].now, false);
                }
            }
        }
    }

    /// Reads all counters and returns what was spent since the last snapshot; it is kept for [`Meter::history`]. Costs no system
    /// call per vCPU; one small file per network namespace, and once a second one per process.
    pub fn snapshot(&mut self) -> &Snapshot {
        let at = now();
        let span = at.saturating_sub(self.last);
        self.last = at;
        self.read_times_at(at);
        let with_disks = at.saturating_sub(self.disks_at) >= DISK_INTERVAL;
        if with_disks {
            self.disks_at = at;
        }
        let mut snapshot = self.oldest(at);
        self.shape(&mut snapshot);
        (snapshot.at, snapshot.span, snapshot.with_disks) = (at, span, with_disks);
        // A VM that just ended is no reason to lose the others' counters: its own are missing then.
        let nics = counters::nic_counters(&self.followed).unwrap_or_default();
        let samples = snapshot.vms.iter_mut().enumerate();
        for ((i, sample), t) in samples.zip(self.vms.values_mut()) {
            for (times, unit) in sample.vcpus.iter_mut().zip(&mut t.vcpus) {
                *times = self.rows[unit.account as usize].spent(span);
                unit.mark(&self.source, at / SECOND);
            }
            sample.service = self.rows[t.service.account as usize].spent(span);
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
        self.history.push_back(snapshot);
        &self.history[self.history.len() - 1]
    }

    /// The oldest snapshot, to be filled anew, when it is not needed any more.
    fn oldest(&mut self, at: u64) -> Snapshot {
        let is_old = |s: &Snapshot| s.at + MIN_HISTORY_NS < at;
        let enough = |kept: usize, oldest: Option<&Snapshot>| {
            kept >= MAX_HISTORY || (kept >= MIN_HISTORY && oldest.is_some_and(is_old))
        };
        let mut oldest = None;
        // Twice where there are too many, after a shorter interval than now.
        for _ in 0..2 {
            if enough(self.history.len(), self.history.front()) {
                oldest = self.history.pop_front().or(oldest);
            }
        }
        oldest.unwrap_or_default()
    }

    /// Gives a snapshot room for exactly the VMs that are followed.
    fn shape(&self, snapshot: &mut Snapshot) {
        let has = |s: &VmSample, (id, t): (&VmId, &Tracked)| {
            s.id == *id && s.vcpus.len() == t.vcpus.len()
        };
        let fits = snapshot.vms.len() == self.vms.len()
            && snapshot.vms.iter().zip(&self.vms).all(|(s, vm)| has(s, vm));
        if !fits {
            let blank = |(id, t): (&VmId, &Tracked)| VmSample {
                id: id.clone(),
                vcpus: vec![Times::default(); t.vcpus.len()],
                service: Times::default(),
                traffic: Traffic::default(),
            };
            snapshot.vms = self.vms.iter().map(blank).collect();
        }
    }

    /// The last snapshots, oldest first: at least [`MIN_HISTORY`] of them once there were so many.
    pub fn history(&self) -> &VecDeque<Snapshot> {
        &self.history
    }

    /// Waits of each vCPU over the last [`crate::WAIT_WINDOW_SECONDS`] seconds, up to now.
    pub fn waits(&self, id: &VmId) -> Vec<WaitHist> {
        let units = self.vms.get(id).map_or(&[][..], |t| &t.vcpus);
        let since = |unit: &Unit| unit.marks.since(&unit.waits(&self.source));
        units.iter().map(since).collect()
    }

    /// Waits of all vCPUs of a VM together, see [`Meter::waits`].
    pub fn vm_waits(&self, id: &VmId) -> WaitHist {
        let mut sum = WaitHist::default();
        for h in self.waits(id) {
            sum.merge(&h);
        }
        sum
    }
}

fn enrol(
    source: &mut Source,
    index: u32,
    unit: &mut Unit,
    threads: Vec<Thread>,
) -> Result<(), AcctError> {
    if let Source::Acct(acct) = source {
        for thread in &threads {
            if !unit.threads.contains(thread) {
                acct.enrol(thread.tid as i32, index, unit.account)?;
            }
        }
    } else {
        unit.stats
            .retain(|tid, _| threads.iter().any(|t| t.tid == *tid));
    }
    unit.threads = threads;
    Ok(())
}

/// Adds what a unit's threads spent since this was called last, by schedstat.
fn sample(unit: &mut Unit, sum: &mut AccountTimes, is_vcpu: bool) {
    for thread in &unit.threads {
        let Some(new) = schedstat::read(thread) else {
            continue;
        };
        let Some(old) = unit.stats.insert(thread.tid, new) else {
            continue;
        };
        let switches = new.switches.saturating_sub(old.switches);
        let wait = new.wait.saturating_sub(old.wait);
        sum.run += new.run.saturating_sub(old.run);
        sum.wait += wait;
        sum.switches += switches;
        if is_vcpu && switches > 0 && wait > 0 {
            let sampled = unit
                .sampled
                .get_or_insert_with(|| Box::new([0; HIST_BUCKETS]));
            let count = &mut sampled[bucket_of(wait / switches)];
            *count = count.wrapping_add(switches as u32);
        }
    }
}

fn difference(new: &Traffic, old: &Traffic) -> Traffic {
    Traffic {
        rx_packets: new.rx_packets.saturating_sub(old.rx_packets),
        rx_bytes: new.rx_bytes.saturating_sub(old.rx_bytes),
        tx_packets: new.tx_packets.saturating_sub(old.tx_packets),
        tx_bytes: new.tx_bytes.saturating_sub(old.tx_bytes),
        disk_read: new.disk_read.saturating_sub(old.disk_read),
        disk_written: new.disk_written.saturating_sub(old.disk_written),
    }
}

fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * SECOND + t.tv_nsec as u64
}

#[cfg(test)]
mod tests;
