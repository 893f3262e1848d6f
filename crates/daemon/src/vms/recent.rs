// SPDX-License-Identifier: Apache-2.0
//! From snapshots to what tables show: means over the last second, shares, waits.

use std::collections::{BTreeMap, VecDeque};

use viola_host::{CpuSet, VmId};
use viola_meter::{Snapshot, Times, Traffic, VmSample, WaitHist};
use viola_proto::CpuTime;

/// Time over which times and packets are taken.
pub const WINDOW: u64 = 1_000_000_000;
/// Time over which disk bytes are taken; the meter reads them once a second.
const DISK_WINDOW: u64 = 5_000_000_000;

/// What all VMs spent over the last while.
#[derive(Debug, Default)]
pub struct Recent {
    /// Length, ns; 0 before the first snapshot.
    pub span: u64,
    /// In the order of identities, as in a snapshot.
    vms: Vec<VmSample>,
    /// Those that read or wrote.
    disk: BTreeMap<VmId, f64>,
}

impl Recent {
    /// Adds up the snapshots of the last [`WINDOW`].
    pub fn of(history: &VecDeque<Snapshot>) -> Self {
        let mut recent = Self::default();
        let mut disk_span = 0;
        for snapshot in history.iter().rev() {
            if recent.span < WINDOW {
                recent.span += snapshot.span;
                for (i, vm) in snapshot.vms.iter().enumerate() {
                    recent.take(i, vm);
                }
            }
            disk_span += snapshot.span;
            // Most have none, and there are many.
            for vm in snapshot.vms.iter().filter(|_| snapshot.with_disks) {
                let bytes = vm.traffic.disk_read + vm.traffic.disk_written;
                if bytes > 0 {
                    *recent.disk.entry(vm.id.clone()).or_default() += bytes as f64;
                }
            }
            if disk_span >= DISK_WINDOW {
                break;
            }
        }
        let seconds = disk_span.max(1) as f64 / 1e9;
        recent.disk.values_mut().for_each(|b| *b /= seconds);
        recent
    }

    /// Adds a sample; `likely` is its place unless VMs came or went since.
    fn take(&mut self, likely: usize, vm: &VmSample) {
        let place = match self.vms.get(likely) {
            Some(sum) if sum.id == vm.id => Ok(likely),
            _ => self.vms.binary_search_by(|s| s.id.cmp(&vm.id)),
        };
        match place {
            Ok(at) => add(&mut self.vms[at], vm),
            Err(at) => self.vms.insert(at, vm.clone()),
        }
    }

    /// What a VM spent, if it was there.
    pub fn vm(&self, id: &VmId) -> Option<&VmSample> {
        let at = self.vms.binary_search_by(|s| s.id.cmp(id)).ok()?;
        Some(&self.vms[at])
    }

    /// Bytes per second that a VM read and wrote.
    pub fn disk(&self, id: &VmId) -> f64 {
        self.disk.get(id).copied().unwrap_or_default()
    }

    /// A count over the time measured, per second.
    pub fn per_s(&self, count: u64) -> f64 {
        if self.span == 0 {
            0.0
        } else {
            count as f64 * 1e9 / self.span as f64
        }
    }
}

/// Adds up two samples of a VM; of vCPUs those that both have.
pub fn add(sum: &mut VmSample, more: &VmSample) {
    for (s, m) in sum.vcpus.iter_mut().zip(&more.vcpus) {
        s.add(m);
    }
    sum.service.add(&more.service);
    let (s, m): (&mut Traffic, &Traffic) = (&mut sum.traffic, &more.traffic);
    s.rx_packets += m.rx_packets;
    s.rx_bytes += m.rx_bytes;
    s.tx_packets += m.tx_packets;
    s.tx_bytes += m.tx_bytes;
    s.disk_read += m.disk_read;
    s.disk_written += m.disk_written;
}

/// The part of its cores that each VM's weight and cap entitle it to while all VMs want to run, 0..=1. A VM that may
/// run on several cores is taken to use them evenly. `vms` are cores, vCPUs, weight and cap in thousandths of one
/// core.
pub fn shares(vms: &[(&CpuSet, usize, u32, Option<u32>)]) -> Vec<f64> {
    // vCPUs of a VM per core of its own.
    let density = |cores: &CpuSet, vcpus: usize| vcpus as f64 / cores.len().max(1) as f64;
    let mut pull: BTreeMap<u32, f64> = BTreeMap::new();
    for (cores, vcpus, weight, _) in vms {
        for cpu in cores.iter() {
            *pull.entry(cpu).or_default() += f64::from(*weight) * density(cores, *vcpus).min(1.0);
        }
    }
    vms.iter()
        .map(|(cores, vcpus, weight, cap)| {
            if cores.is_empty() {
                return 0.0;
            }
            let most = density(cores, *vcpus).min(1.0);
            let own = f64::from(*weight) * most;
            let mean = cores.iter().map(|cpu| own / pull[&cpu]).sum::<f64>() / cores.len() as f64;
            let cap = cap.map_or(1.0, |p| f64::from(p) / 1000.0 / cores.len() as f64);
            mean.min(most).min(cap)
        })
        .collect()
}

/// Each vCPU of a VM with its waits.
pub fn by_vcpu(sample: &VmSample, waits: &[WaitHist]) -> Vec<CpuTime> {
    let mut all: Vec<CpuTime> = sample.vcpus.iter().map(spent).collect();
    for (spent, hist) in all.iter_mut().zip(waits) {
        spent.waits = hist.buckets().collect();
    }
    all
}

/// Times as the control socket tells them.
pub fn spent(t: &Times) -> CpuTime {
    CpuTime {
        run_ns: t.run,
        wait_ns: t.wait,
        blocked_ns: t.blocked,
        wakes: t.wakes,
        switches: t.switches,
        preempted: t.preempted,
        waits: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(list: &str) -> CpuSet {
        list.parse().unwrap()
    }

    fn round(shares: Vec<f64>) -> Vec<u32> {
        shares.iter().map(|s| (s * 100.0).round() as u32).collect()
    }

    #[test]
    fn a_core_is_shared_by_weight() {
        let one = cpus("1");
        assert_eq!(
            round(shares(&[
                (&one, 1, 512, None),
                (&one, 1, 256, None),
                (&one, 1, 256, None)
            ])),
            [50, 25, 25]
        );
    }

    #[test]
    fn a_cap_and_the_number_of_vcpus_bound_a_share() {
        let (one, many) = (cpus("1"), cpus("4-15"));
        assert_eq!(
            round(shares(&[(&one, 1, 256, Some(200)), (&one, 1, 256, None)])),
            [20, 50]
        );
        assert_eq!(
            round(shares(&[(&many, 1, 256, None), (&many, 3, 256, None)])),
            [8, 25]
        );
    }

    #[test]
    fn nobody_gets_more_than_there_is() {
        let (a, b) = (cpus("1"), cpus("1-2"));
        let s = shares(&[(&a, 1, 256, None), (&b, 2, 256, None)]);
        assert_eq!(round(s), [50, 75]);
        assert_eq!(shares(&[(&CpuSet::new(), 0, 256, None)]), [0.0]);
    }

    #[test]
    fn the_last_second_is_added_up_and_what_was_before_is_not() {
        let id = VmId::new(viola_host::Hypervisor::Uml, "a");
        let snapshot = |at: u64, run: u64| Snapshot {
            at,
            span: 500_000_000,
            with_disks: at.is_multiple_of(2),
            vms: vec![VmSample {
                id: id.clone(),
                vcpus: vec![Times {
                    run,
                    ..Times::default()
                }],
                service: Times::default(),
                traffic: Traffic {
                    rx_packets: 50,
                    disk_read: if at.is_multiple_of(2) { 2000 } else { 0 },
                    ..Traffic::default()
                },
            }],
        };
        let history: VecDeque<_> = (0..20).map(|i| snapshot(i, i)).collect();
        let recent = Recent::of(&history);
        assert_eq!(recent.span, WINDOW);
        assert_eq!(recent.vm(&id).unwrap().vcpus[0].run, 18 + 19);
        assert_eq!(
            recent.per_s(recent.vm(&id).unwrap().traffic.rx_packets),
            100.0
        );
        assert_eq!(recent.disk(&id), 2000.0);
        assert_eq!(Recent::of(&VecDeque::new()).per_s(5), 0.0);
    }
}
