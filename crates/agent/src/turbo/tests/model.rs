// SPDX-License-Identifier: Apache-2.0
//! A guest's settings as a change leaves them.

use std::collections::BTreeSet;

use crate::turbo::cpus::Cpus;
use crate::turbo::knob::{Knob, MEMBER, ON, THERE};
use crate::turbo::snapshot::{Snapshot, TurboGroup};

/// The model of a change: what the snapshot is afterwards, as far as this setting alone is concerned.
pub fn carry_out(snapshot: &mut Snapshot, knob: &Knob, value: &str) {
    let cpus = || Cpus::parse_list(value).unwrap_or_default();
    let ours = snapshot
        .cgroup
        .as_mut()
        .and_then(|c| c.turbo_group.as_mut());
    match knob {
        Knob::Irqbalance { .. } => {
            if let Some(daemon) = &mut snapshot.irqbalance {
                let words = value.split(' ').filter_map(|w| w.parse().ok());
                daemon.banned = Some(words.collect::<BTreeSet<u32>>());
            }
        }
        Knob::Irq { irq } => {
            if let Some(irq) = snapshot.irqs.get_mut(irq) {
                irq.cpus = cpus();
            }
        }
        Knob::Rps { nic, queue } => {
            snapshot
                .nics
                .entry(nic.clone())
                .and_modify(|n| n.rps[*queue] = cpus());
        }
        Knob::Rfs { nic, queue } => {
            let count = value.parse().unwrap_or_default();
            snapshot
                .nics
                .entry(nic.clone())
                .and_modify(|n| n.rfs[*queue] = count);
        }
        Knob::Xps { nic, queue } => {
            snapshot
                .nics
                .entry(nic.clone())
                .and_modify(|n| n.xps[*queue] = cpus());
        }
        Knob::Completion { disk } => {
            snapshot.disks.insert(disk.clone(), value.to_owned());
        }
        Knob::Workqueues => snapshot.workqueues = Some(cpus()),
        Knob::Controller => {
            if let Some(cgroup) = &mut snapshot.cgroup {
                cgroup.enabled = value == ON;
            }
        }
        Knob::Group => {
            if let Some(cgroup) = &mut snapshot.cgroup {
                cgroup.turbo_group = (value == THERE).then(|| TurboGroup {
                    cpus: String::new(),
                    partition: MEMBER.to_owned(),
                });
            }
        }
        Knob::GroupCpus => {
            if let Some(ours) = ours {
                ours.cpus = value.to_owned();
            }
        }
        Knob::Partition => {
            if let Some(ours) = ours {
                ours.partition = value.to_owned();
            }
        }
        Knob::Slice { name } => {
            if let Some(cgroup) = &mut snapshot.cgroup {
                cgroup.slices.insert(name.clone(), value.to_owned());
            }
        }
        Knob::Member { tid } => {
            if let (Some(task), Some((group, cpus))) =
                (snapshot.tasks.get_mut(tid), value.split_once(' '))
            {
                task.cgroup = group.to_owned();
                task.cpus = Cpus::parse_list(cpus).unwrap_or_default();
            }
        }
        Knob::Thread { tid } => {
            if let Some(task) = snapshot.tasks.get_mut(tid) {
                task.cpus = cpus();
            }
        }
        Knob::Sysctl { name } => {
            snapshot.sysctls.insert(name.clone(), value.to_owned());
        }
    }
}
