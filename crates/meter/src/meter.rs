// SPDX-License-Identifier: Apache-2.0
//! The meter: follows the VMs of an inventory and takes snapshots of what they spend.

use std::collections::{BTreeMap, VecDeque};

use viola_host::{NicKind, Thread, Tid, Vm, VmId, counters};

use crate::acct::{Acct, AcctError, HIST_BUCKETS, MAX_SLOTS, MAX_VMS, SlotAcct, Way};
use crate::hist::WaitHist;
use crate::schedstat::{self, SchedStat};
use crate::snapshot::{Snapshot, Times, Traffic, VmSample};

/// Snapshots kept.
pub const HISTORY: usize = 300;
/// Waits are kept per second for so many seconds, for quantiles over the recent past.
pub const WAIT_SECONDS: usize = 10;

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
    slot: u32,
    threads: Vec<Thread>,
    last: SlotAcct,
    stats: BTreeMap<Tid, SchedStat>,
}

impl Unit {
    fn new(slot: u32) -> Self {
        let last = SlotAcct {
            run: 0,
            wait: 0,
            wakes: 0,
            switches: 0,
            preempted: 0,
            on_since: 0,
            hist: [0; HIST_BUCKETS],
        };
        Self {
            slot,
            threads: Vec::new(),
            last,
            stats: BTreeMap::new(),
        }
    }
}

struct Tracked {
    index: u32,
    pid: Tid,
    start_time: u64,
    vcpus: Vec<Unit>,
    service: Unit,
    traffic: Option<Traffic>,
    waits: VecDeque<(u64, Vec<WaitHist>)>,
}

/// Follows VMs and accounts their time.
pub struct Meter {
    source: Source,
    vms: BTreeMap<VmId, Tracked>,
    free_slots: Vec<u32>,
    free_indexes: Vec<u32>,
    last: u64,
    /// The VMs followed, by id.
    followed: Vec<Vm>,
    /// When disk counters were read last, and what they were, in the order of `followed`.
    disks_at: u64,
    /// Interfaces (ifindex, network namespace) whose packets are announced: VM index and core.
    watched: BTreeMap<(u32, u32), (u32, u32, Way)>,
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
            free_slots: (0..MAX_SLOTS as u32).rev().collect(),
            free_indexes: (0..MAX_VMS as u32).rev().collect(),
            last: now(),
            followed: Vec::new(),
            disks_at: 0,
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
        Ok(left_out)
    }

    fn take_vm(&mut self, vm: &Vm) -> bool {
        if self.free_indexes.is_empty() || self.free_slots.len() < vm.vcpus.len() + 1 {
            return false;
        }
        let mut unit = || Unit::new(self.free_slots.pop().unwrap_or_default());
        let (vcpus, service) = (vm.vcpus.iter().map(|_| unit()).collect::<Vec<_>>(), unit());
        let mut tracked = Tracked {
            index: self.free_indexes.pop().unwrap_or_default(),
            pid: vm.pid,
            start_time: vm.start_time,
            vcpus,
            service,
            traffic: None,
            waits: VecDeque::new(),
        };
        if let Source::Acct(acct) = &self.source {
            for unit in tracked.vcpus.iter_mut().chain([&mut tracked.service]) {
                unit.last = acct.slots().get(unit.slot);
            }
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
                    acct.forget(thread.tid as i32)?;
                }
            }
            self.free_slots.push(unit.slot);
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
                    let way = match n.kind {
                        NicKind::Tap => Way::Sent,
                        NicKind::Raw => Way::Arrived,
                        NicKind::Macvtap => return None,
                    };
                    Some(((n.ifindex?, n.netns as u32), way))
                })
                .collect();
            let Some(nics) = nics.filter(|t| !t.is_empty()) else {
                continue;
            };
            for (nic, way) in nics {
                wanted.insert(nic, (t.index, *cpu, way));
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

    /// Reads all counters and returns what was spent since the last call; the snapshot is kept for
    /// [`Meter::history`]. Costs no system call per vCPU; one small file per network namespace, and once a second one per process.
    pub fn snapshot(&mut self) -> Snapshot {
        let at = now();
        let span = at.saturating_sub(self.last);
        self.last = at;
        let mut vms = Vec::with_capacity(self.vms.len());
        // A VM that just ended is no reason to lose the others' counters: its own are missing then.
        let nics = counters::nic_counters(&self.followed).unwrap_or_default();
        let with_disks = at.saturating_sub(self.disks_at) >= DISK_INTERVAL;
        if with_disks {
            self.disks_at = at;
        }
        for (i, (id, t)) in self.vms.iter_mut().enumerate() {
            let mut vcpus = Vec::with_capacity(t.vcpus.len());
            let hists = this_second(&mut t.waits, at, t.vcpus.len());
            for (unit, hist) in t.vcpus.iter_mut().zip(hists) {
                vcpus.push(read(&self.source, unit, at, span, Some(hist)));
            }
            let service = read(&self.source, &mut t.service, at, span, None);
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
            if with_disks && let Ok(Some(disk)) = counters::disk_counters(&self.followed[i]) {
                total.disk_read = disk.read_bytes;
                total.disk_written = disk.write_bytes;
            }
            let traffic = t
                .traffic
                .map_or_else(Traffic::default, |old| difference(&total, &old));
            t.traffic = Some(total);
            vms.push(VmSample {
                id: id.clone(),
                vcpus,
                service,
                traffic,
            });
        }
        let snapshot = Snapshot { at, span, vms };
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(snapshot.clone());
        snapshot
    }

    /// The last [`HISTORY`] snapshots, oldest first.
    pub fn history(&self) -> &VecDeque<Snapshot> {
        &self.history
    }

    /// Waits of each vCPU over the last [`WAIT_SECONDS`] seconds.
    pub fn waits(&self, id: &VmId) -> Vec<WaitHist> {
        let Some(t) = self.vms.get(id) else {
            return Vec::new();
        };
        let mut sum = vec![WaitHist::default(); t.vcpus.len()];
        for (_, hists) in &t.waits {
            for (s, h) in sum.iter_mut().zip(hists) {
                s.merge(h);
            }
        }
        sum
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
                acct.enrol(thread.tid as i32, index, unit.slot)?;
            }
        }
    } else {
        unit.stats
            .retain(|tid, _| threads.iter().any(|t| t.tid == *tid));
    }
    unit.threads = threads;
    Ok(())
}

fn read(
    source: &Source,
    unit: &mut Unit,
    at: u64,
    span: u64,
    mut hist: Option<&mut WaitHist>,
) -> Times {
    let mut t = Times::default();
    match source {
        Source::Acct(acct) => {
            let mut new = acct.slots().get(unit.slot);
            // Time since the last switch; the next reading takes it off again.
            if new.on_since != 0 {
                new.run += at.saturating_sub(new.on_since);
            }
            let old = &unit.last;
            t.run = new.run.saturating_sub(old.run);
            t.wait = new.wait.saturating_sub(old.wait);
            t.wakes = new.wakes.saturating_sub(old.wakes);
            t.switches = new.switches.saturating_sub(old.switches);
            t.preempted = new.preempted.saturating_sub(old.preempted);
            // A wait ends when the thread is put on a core.
            match hist.filter(|_| t.switches > 0) {
                Some(hist) => hist.add_difference(&new.hist, &old.hist),
                None => new.hist = old.hist,
            }
            new.run = new.run.max(old.run);
            unit.last = new;
        }
        Source::SchedStat => {
            for thread in &unit.threads {
                let Some(new) = schedstat::read(thread) else {
                    continue;
                };
                if let Some(old) = unit.stats.insert(thread.tid, new) {
                    let switches = new.switches.saturating_sub(old.switches);
                    let wait = new.wait.saturating_sub(old.wait);
                    t.run += new.run.saturating_sub(old.run);
                    t.wait += wait;
                    t.switches += switches;
                    if let Some(hist) = hist.as_deref_mut()
                        && switches > 0
                        && wait > 0
                    {
                        hist.add(wait / switches, switches);
                    }
                }
            }
        }
    }
    t.blocked = span.saturating_sub(t.run + t.wait);
    t
}

/// The histograms that waits of now are added to; those that are too old are dropped. Allocates once a second.
fn this_second(
    waits: &mut VecDeque<(u64, Vec<WaitHist>)>,
    at: u64,
    vcpus: usize,
) -> &mut [WaitHist] {
    let second = at / SECOND;
    let is_old = |(kept, _): &(u64, Vec<WaitHist>)| kept + WAIT_SECONDS as u64 <= second;
    while waits.front().is_some_and(is_old) {
        waits.pop_front();
    }
    if waits.back().is_none_or(|(kept, _)| *kept != second) {
        waits.push_back((second, vec![WaitHist::default(); vcpus]));
    }
    waits.back_mut().map_or(&mut [], |(_, hists)| hists)
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
mod tests {
    use super::*;

    #[test]
    fn waits_older_than_ten_seconds_are_forgotten() {
        let mut waits = VecDeque::new();
        for second in 0..30 {
            let mut h = WaitHist::default();
            h.add(5_000, 1);
            this_second(&mut waits, second * SECOND + 1, 1)[0].merge(&h);
            this_second(&mut waits, second * SECOND + 2, 1)[0].merge(&h);
        }
        assert_eq!(waits.len(), WAIT_SECONDS);
        assert_eq!(
            waits.iter().map(|(_, h)| h[0].count()).sum::<u64>(),
            2 * WAIT_SECONDS as u64
        );
    }
}
