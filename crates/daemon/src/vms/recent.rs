// SPDX-License-Identifier: Apache-2.0
//! What VMs spent in the last second, as tables show it: rates, shares, waits.

use std::collections::{BTreeMap, VecDeque};

use viola_host::{CpuSet, VmId};
use viola_meter::{Snapshot, Times, Traffic, VmSample, Waits};
use viola_proto::CpuTime;

/// Time over which CPU times and packets are added up, ns.
pub const WINDOW: u64 = 1_000_000_000;
/// Time over which disk bytes are added up, ns; the meter reads them once a second.
const DISK_WINDOW: u64 = 5_000_000_000;

/// What all VMs spent in the last [`WINDOW`].
#[derive(Debug, Default)]
pub struct Recent {
    /// Time that was added up, ns; 0 before the first snapshot.
    pub span: u64,
    /// Sorted by identity.
    vms: Vec<VmSample>,
    /// Disk bytes per second of VMs that read or wrote.
    disk: BTreeMap<VmId, f64>,
}

impl Recent {
    /// Adds up the last snapshots.
    pub fn from_history(history: &VecDeque<Snapshot>) -> Self {
        let mut recent = Self::default();
        let mut disk_span = 0;
        for snapshot in history.iter().rev() {
            if recent.span < WINDOW {
                recent.span += snapshot.span;
                for (i, vm) in snapshot.vms.iter().enumerate() {
                    recent.add(i, vm);
                }
            }
            disk_span += snapshot.span;
            // Most VMs read and write nothing.
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

    /// Adds a sample. `likely` is its index unless VMs came or went between snapshots.
    fn add(&mut self, likely: usize, vm: &VmSample) {
        let place = match self.vms.get(likely) {
            Some(sum) if sum.id == vm.id => Ok(likely),
            _ => self.vms.binary_search_by(|s| s.id.cmp(&vm.id)),
        };
        match place {
            Ok(at) => add_sample(&mut self.vms[at], vm),
            Err(at) => self.vms.insert(at, vm.clone()),
        }
    }

    /// What a VM spent; `None` for a VM that was not measured.
    pub fn vm(&self, id: &VmId) -> Option<&VmSample> {
        let at = self.vms.binary_search_by(|s| s.id.cmp(id)).ok()?;
        Some(&self.vms[at])
    }

    /// Part of the time that a VM waited for a core, 0..=1: the mean of its vCPUs. `None` when it was not measured.
    pub fn waiting(&self, id: &VmId) -> Option<f64> {
        let sample = self.vm(id).filter(|_| self.span > 0)?;
        let time = self.span as f64 * sample.vcpus.len().max(1) as f64;
        // A wait counts when it ends, so it may have begun before.
        Some((sample.vcpu_total().wait as f64 / time).min(1.0))
    }

    /// Bytes per second that a VM read and wrote on disk.
    pub fn disk(&self, id: &VmId) -> f64 {
        self.disk.get(id).copied().unwrap_or_default()
    }

    /// A count per second.
    pub fn per_s(&self, count: u64) -> f64 {
        if self.span == 0 {
            0.0
        } else {
            count as f64 * 1e9 / self.span as f64
        }
    }
}

/// Adds a sample of a VM to a sum; vCPUs that only one of them has are left out.
pub fn add_sample(sum: &mut VmSample, more: &VmSample) {
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

/// The part of its cores that each VM gets by weight and cap while all VMs want to run, 0..=1. A VM on several cores is assumed to
/// use them evenly. `vms` are (cores, number of vCPUs, weight, cap in thousandths of one core).
pub fn shares(vms: &[(&CpuSet, usize, u32, Option<u32>)]) -> Vec<f64> {
    // vCPUs per core.
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
            let max = density(cores, *vcpus).min(1.0);
            let own = f64::from(*weight) * max;
            let mean = cores.iter().map(|cpu| own / pull[&cpu]).sum::<f64>() / cores.len() as f64;
            let cap = cap.map_or(1.0, |p| f64::from(p) / 1000.0 / cores.len() as f64);
            mean.min(max).min(cap)
        })
        .collect()
}

/// Times and waits of each vCPU.
pub fn by_vcpu(sample: &VmSample, waits: &[Waits]) -> Vec<CpuTime> {
    let mut all: Vec<CpuTime> = sample.vcpus.iter().map(spent).collect();
    for (spent, waits) in all.iter_mut().zip(waits) {
        spent.waits = waits.histogram.buckets().collect();
    }
    all
}

/// Times as the control socket shows them.
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
    fn shares_of_a_core_add_up_to_at_most_one() {
        let (a, b) = (cpus("1"), cpus("1-2"));
        let s = shares(&[(&a, 1, 256, None), (&b, 2, 256, None)]);
        assert_eq!(round(s), [50, 75]);
        assert_eq!(shares(&[(&CpuSet::new(), 0, 256, None)]), [0.0]);
    }

    #[test]
    fn a_vm_that_waited_296_ms_of_a_second_waited_30_percent_of_it_whatever_it_wanted() {
        let id = VmId::new(viola_host::Hypervisor::Uml, "a");
        let ms = 1_000_000;
        let vcpu = Times {
            run: 81 * ms,
            wait: 296 * ms,
            blocked: 623 * ms,
            ..Times::default()
        };
        let mut recent = Recent {
            span: WINDOW,
            vms: vec![VmSample {
                id: id.clone(),
                vcpus: vec![vcpu],
                service: Times::default(),
                traffic: Traffic::default(),
            }],
            disk: BTreeMap::new(),
        };
        assert_eq!(recent.waiting(&id), Some(0.296));
        let share = recent.vm(&id).unwrap().vcpu_total().wait_share();
        assert!(
            (share - 0.785).abs() < 0.001,
            "of the time it wanted to run"
        );
        // A second vCPU that sleeps.
        recent.vms[0].vcpus.push(Times::default());
        assert_eq!(recent.waiting(&id), Some(0.148));
        assert_eq!(Recent::default().waiting(&id), None);
    }

    #[test]
    fn only_the_last_second_is_added_up() {
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
        let recent = Recent::from_history(&history);
        assert_eq!(recent.span, WINDOW);
        assert_eq!(recent.vm(&id).unwrap().vcpus[0].run, 18 + 19);
        assert_eq!(
            recent.per_s(recent.vm(&id).unwrap().traffic.rx_packets),
            100.0
        );
        assert_eq!(recent.disk(&id), 2000.0);
        assert_eq!(Recent::from_history(&VecDeque::new()).per_s(5), 0.0);
    }
}
