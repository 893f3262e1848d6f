// SPDX-License-Identifier: Apache-2.0
//! What each VM spent since the daemon found it: sums of snapshots, for Prometheus' counters.

use std::collections::BTreeMap;

use viola_host::VmId;
use viola_meter::{Snapshot, VmSample};

use crate::vms::recent;

/// The sums, by identity.
#[derive(Debug, Default)]
pub struct Totals(BTreeMap<VmId, VmSample>);

impl Totals {
    /// Adds a snapshot.
    pub fn add(&mut self, snapshot: &Snapshot) {
        for vm in &snapshot.vms {
            match self.0.get_mut(&vm.id) {
                Some(sum) => {
                    // A vCPU that was plugged in starts with its own counters.
                    let known = sum.vcpus.len().min(vm.vcpus.len());
                    recent::add_sample(sum, vm);
                    sum.vcpus.extend_from_slice(&vm.vcpus[known..]);
                }
                None => drop(self.0.insert(vm.id.clone(), vm.clone())),
            }
        }
    }

    /// Forgets a VM that is gone; a later VM of the same name starts at zero.
    pub fn forget(&mut self, id: &VmId) {
        self.0.remove(id);
    }

    /// The sums, by identity.
    pub fn shown(&self) -> BTreeMap<String, VmSample> {
        let all = self.0.iter();
        all.map(|(id, sum)| (id.to_string(), sum.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use viola_meter::{Times, Traffic};

    fn snapshot(runs: &[u64]) -> Snapshot {
        let times = |run: &u64| Times {
            run: *run,
            ..Times::default()
        };
        Snapshot {
            at: 0,
            span: 1,
            with_disks: false,
            vms: vec![VmSample {
                id: VmId::new(viola_host::Hypervisor::Uml, "a"),
                vcpus: runs.iter().map(times).collect(),
                service: Times::default(),
                traffic: Traffic {
                    rx_bytes: 10,
                    ..Traffic::default()
                },
            }],
        }
    }

    #[test]
    fn sums_grow_and_restart_with_a_new_vm_of_the_same_name() {
        let mut totals = Totals::default();
        let runs = |t: &Totals| {
            let shown = t.shown();
            let vm = &shown["uml:a"];
            let runs: Vec<u64> = vm.vcpus.iter().map(|t| t.run).collect();
            (runs, vm.traffic.rx_bytes)
        };
        totals.add(&snapshot(&[1, 2]));
        totals.add(&snapshot(&[10, 20]));
        assert_eq!(runs(&totals), (vec![11, 22], 20));
        totals.add(&snapshot(&[1, 1, 5]));
        assert_eq!(runs(&totals), (vec![12, 23, 5], 30), "a vCPU was plugged");
        totals.add(&snapshot(&[1]));
        assert_eq!(runs(&totals), (vec![13, 23, 5], 40), "and unplugged");
        totals.forget(&VmId::new(viola_host::Hypervisor::Uml, "a"));
        totals.add(&snapshot(&[7]));
        assert_eq!(runs(&totals), (vec![7], 10));
    }
}
