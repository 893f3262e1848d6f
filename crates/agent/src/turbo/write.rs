// SPDX-License-Identifier: Apache-2.0
//! Changes one setting.

use std::io::{self, ErrorKind};

use super::cpus::Cpus;
use super::irqbalance;
use super::knob::{Knob, ON, THERE, TURBO_GROUP};
use super::read::{WORKQUEUES, cgroup_root};
use super::system::System;

/// Sets `knob` to a value in the planner's form.
///
/// # Errors
/// The kernel's error; [`ErrorKind::NotFound`] when the thing is gone.
pub fn apply(system: &dyn System, knob: &Knob, value: &str) -> io::Result<()> {
    let cpus = || Cpus::parse_list(value).ok_or(io::Error::from(ErrorKind::InvalidInput));
    let queue =
        |nic: &str, queue: &str, what: &str| format!("/sys/class/net/{nic}/queues/{queue}/{what}");
    let group = |rest: &str| match cgroup_root(system) {
        Some(root) => Ok(format!("{root}{rest}")),
        None => Err(io::Error::from(ErrorKind::NotFound)),
    };
    match knob {
        Knob::Irqbalance { pid } => system
            .irqbalance(*pid, &irqbalance::ban_command(value))
            .map(drop),
        Knob::Irq { irq } => system.write(&format!("/proc/irq/{irq}/smp_affinity_list"), value),
        Knob::Rps { nic, queue: n } => {
            let path = queue(nic, &format!("rx-{n}"), "rps_cpus");
            system.write(&path, &cpus()?.to_mask())
        }
        Knob::Rfs { nic, queue: n } => {
            let path = queue(nic, &format!("rx-{n}"), "rps_flow_cnt");
            system.write(&path, value)
        }
        Knob::Xps { nic, queue: n } => {
            let path = queue(nic, &format!("tx-{n}"), "xps_cpus");
            system.write(&path, &cpus()?.to_mask())
        }
        Knob::Completion { disk } => {
            system.write(&format!("/sys/block/{disk}/queue/rq_affinity"), value)
        }
        Knob::Workqueues => system.write(WORKQUEUES, &cpus()?.to_mask()),
        Knob::Controller => {
            let word = if value == ON { "+cpuset" } else { "-cpuset" };
            system.write(&group("/cgroup.subtree_control")?, word)
        }
        Knob::Group if value == THERE => system.create_dir(&group(&format!("/{TURBO_GROUP}"))?),
        Knob::Group => system.remove_dir(&group(&format!("/{TURBO_GROUP}"))?),
        Knob::GroupCpus => {
            let path = group(&format!("/{TURBO_GROUP}/cpuset.cpus"))?;
            system.write(&path, &line(value))
        }
        Knob::Partition => {
            let path = group(&format!("/{TURBO_GROUP}/cpuset.cpus.partition"))?;
            system.write(&path, value)
        }
        Knob::Slice { name } => {
            system.write(&group(&format!("/{name}/cpuset.cpus"))?, &line(value))
        }
        Knob::Member { tid } => {
            let (to, list) = value.split_once(' ').ok_or(ErrorKind::InvalidInput)?;
            let path = group(&format!("{}/cgroup.procs", to.trim_end_matches('/')))?;
            system.write(&path, &tid.to_string())?;
            // a move to the root group allows all CPUs, whatever the mask was before
            let list = Cpus::parse_list(list).ok_or(ErrorKind::InvalidInput)?;
            system.set_affinity(*tid, &list)
        }
        Knob::Thread { tid } => system.set_affinity(*tid, &cpus()?),
        Knob::Sysctl { name } => system.write(&format!("/proc/sys/{name}"), value),
    }
}

/// Appends a newline: an empty write would not reach the kernel.
fn line(value: &str) -> String {
    format!("{value}\n")
}
