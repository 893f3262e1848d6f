// SPDX-License-Identifier: Apache-2.0
//! Reads a snapshot of the guest.

use std::collections::{BTreeMap, BTreeSet};

use super::cpus::Cpus;
use super::irqbalance;
use super::knob::TURBO_GROUP;
use super::plan::serves_io;
use super::snapshot::{Cgroup, Irq, Irqbalance, Nic, Snapshot, Task, TurboGroup};
use super::system::System;

/// Flags in `/proc/PID/stat` (`include/linux/sched.h`).
const PF_KTHREAD: u64 = 0x0020_0000;
const PF_NO_SETAFFINITY: u64 = 0x0400_0000;

/// Settings that are read.
const SYSCTLS: [&str; 3] = [
    "net/core/rmem_max",
    "net/core/rmem_default",
    "net/ipv4/tcp_rmem",
];

/// Reads everything; what does not exist is left out. Threads of applications are read only on demand: there may be
/// thousands.
pub fn read_snapshot(system: &dyn System, applications: bool) -> Snapshot {
    let list = |path: &str| text(system, path).and_then(|t| Cpus::parse_list(&t));
    let cpus = "/sys/devices/system/cpu";
    let (tasks, daemon) = tasks(system, applications);
    Snapshot {
        online: list(&format!("{cpus}/online")).unwrap_or_default(),
        possible: list(&format!("{cpus}/possible")).unwrap_or_default(),
        irqs: irqs(system),
        nics: nics(system),
        disks: disks(system),
        virtio: virtio(system),
        workqueues: text(system, WORKQUEUES).and_then(|t| Cpus::parse_mask(&t)),
        tasks,
        cgroup: cgroup(system),
        irqbalance: daemon.map(|pid| Irqbalance {
            pid,
            banned: system
                .irqbalance(pid, "setup")
                .ok()
                .and_then(|answer| irqbalance::banned(&answer)),
        }),
        sysctls: sysctls(system),
        memory: memory(system),
    }
}

/// CPUs of unbound workqueues.
pub const WORKQUEUES: &str = "/sys/devices/virtual/workqueue/cpumask";

/// A file's text without blanks around it.
fn text(system: &dyn System, path: &str) -> Option<String> {
    system.read(path).ok().map(|text| text.trim().to_owned())
}

fn number<T: std::str::FromStr>(system: &dyn System, path: &str) -> Option<T> {
    text(system, path)?.parse().ok()
}

/// `0x010000`
fn hex(system: &dyn System, path: &str) -> Option<u32> {
    let text = text(system, path)?;
    u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}

fn irqs(system: &dyn System) -> BTreeMap<u32, Irq> {
    let seen = seen(&system.read("/proc/interrupts").unwrap_or_default());
    let devices = pci(system);
    let mut all = BTreeMap::new();
    for name in system.list_dir("/proc/irq") {
        let Ok(irq) = name.parse::<u32>() else {
            continue;
        };
        let at = |what: &str| format!("/proc/irq/{irq}/{what}");
        let Some(cpus) = text(system, &at("smp_affinity_list")).and_then(|t| Cpus::parse_list(&t))
        else {
            continue;
        };
        let named = text(system, &format!("/sys/kernel/irq/{irq}/actions"));
        let actions = match named {
            Some(names) => names.split(',').map(|n| n.trim().to_owned()).collect(),
            // each handler has a directory there
            None => folders(system, &at("")),
        };
        let effective = text(system, &at("effective_affinity_list"));
        let device = devices.get(&irq);
        let known = Irq {
            actions: actions.into_iter().filter(|a| !a.is_empty()).collect(),
            class: device.map(|(class, _)| *class),
            device: device.map(|(_, path)| path.clone()),
            cpus,
            effective: effective.and_then(|text| Cpus::parse_list(&text)),
            seen: seen.get(&irq).cloned().unwrap_or_default(),
            settable: system.is_writable(&at("smp_affinity_list")),
        };
        all.insert(irq, known);
    }
    all
}

/// Names in an interrupt's directory that are not files of the kernel.
fn folders(system: &dyn System, path: &str) -> Vec<String> {
    const FILES: [&str; 8] = [
        "affinity_hint",
        "effective_affinity",
        "effective_affinity_list",
        "node",
        "smp_affinity",
        "smp_affinity_list",
        "spurious",
        "threaded",
    ];
    let mut names = system.list_dir(path);
    names.retain(|name| !FILES.contains(&name.as_str()));
    names
}

/// Class and path of the PCI device of each interrupt that has one.
fn pci(system: &dyn System) -> BTreeMap<u32, (u32, String)> {
    let mut all = BTreeMap::new();
    for device in system.list_dir("/sys/bus/pci/devices") {
        let at = format!("/sys/bus/pci/devices/{device}");
        let (Some(class), Some(path)) =
            (hex(system, &format!("{at}/class")), system.real_path(&at))
        else {
            continue;
        };
        let mut irqs: Vec<u32> = system
            .list_dir(&format!("{at}/msi_irqs"))
            .iter()
            .filter_map(|name| name.parse().ok())
            .collect();
        if irqs.is_empty() {
            irqs.extend(number::<u32>(system, &format!("{at}/irq")).filter(|irq| *irq > 0));
        }
        let path = path.trim_start_matches("/sys/devices").to_owned();
        for irq in irqs {
            all.insert(irq, (class, path.clone()));
        }
    }
    all
}

/// CPUs that each interrupt has ever arrived at, by `/proc/interrupts`.
fn seen(text: &str) -> BTreeMap<u32, Cpus> {
    let mut lines = text.lines();
    let head = lines.next().unwrap_or_default();
    let cpus: Vec<u32> = head
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("CPU")?.parse().ok())
        .collect();
    lines
        .filter_map(|line| {
            let (irq, counts) = line.split_once(':')?;
            let irq = irq.trim().parse().ok()?;
            let counts = counts.split_whitespace().zip(&cpus);
            let came = counts.filter(|(count, _)| *count != "0");
            Some((irq, came.map(|(_, cpu)| *cpu).collect()))
        })
        .collect()
}

fn nics(system: &dyn System) -> BTreeMap<String, Nic> {
    let mut all = BTreeMap::new();
    for name in system.list_dir("/sys/class/net") {
        let at = |what: &str| format!("/sys/class/net/{name}/{what}");
        let Some(device) = system.real_path(&at("device")) else {
            continue;
        };
        let (mut rps, mut rfs, mut xps) = (Vec::new(), Vec::new(), Vec::new());
        let mask = |path: String| text(system, &path).and_then(|t| Cpus::parse_mask(&t));
        for queue in 0.. {
            let Some(cpus) = mask(at(&format!("queues/rx-{queue}/rps_cpus"))) else {
                break;
            };
            rps.push(cpus);
            let flows = number(system, &at(&format!("queues/rx-{queue}/rps_flow_cnt")));
            rfs.push(flows.unwrap_or_default());
        }
        // with a single queue the file exists and is empty
        for queue in 0.. {
            let Some(cpus) = mask(at(&format!("queues/tx-{queue}/xps_cpus"))) else {
                break;
            };
            xps.push(cpus);
        }
        let nic = Nic {
            index: number(system, &at("ifindex")).unwrap_or_default(),
            device: device.trim_start_matches("/sys/devices").to_owned(),
            mbit: number(system, &at("speed")).filter(|mbit| *mbit > 0 && *mbit < u32::MAX),
            rps,
            rfs,
            xps,
        };
        all.insert(name, nic);
    }
    all
}

fn disks(system: &dyn System) -> BTreeMap<String, String> {
    system
        .list_dir("/sys/block")
        .into_iter()
        .filter(|disk| {
            system
                .real_path(&format!("/sys/block/{disk}/device"))
                .is_some()
        })
        .filter_map(|disk| {
            let affinity = text(system, &format!("/sys/block/{disk}/queue/rq_affinity"))?;
            Some((disk, affinity))
        })
        .collect()
}

/// The device type of each virtio device (Virtio 1.2, 5), by its name.
pub(crate) fn virtio(system: &dyn System) -> BTreeMap<String, u32> {
    let devices = "/sys/bus/virtio/devices";
    system
        .list_dir(devices)
        .into_iter()
        .filter_map(|name| {
            let kind = hex(system, &format!("{devices}/{name}/device"))?;
            Some((name, kind))
        })
        .collect()
}

/// Kernel threads that do I/O, all other threads on demand, and irqbalance's process id.
fn tasks(system: &dyn System, applications: bool) -> (BTreeMap<i32, Task>, Option<i32>) {
    let (mut all, mut daemon) = (BTreeMap::new(), None);
    for pid in numbers(system, "/proc") {
        let at = format!("/proc/{pid}");
        let Some(first) = task(system, &at, pid) else {
            continue;
        };
        if first.kernel {
            if serves_io(&first.name) && !first.fixed {
                all.extend(whole(system, &at, first).map(|task| (pid, task)));
            }
            continue;
        }
        if first.name == "irqbalance" {
            daemon = Some(pid);
        }
        if applications {
            for tid in numbers(system, &format!("{at}/task")) {
                let at = format!("{at}/task/{tid}");
                let found = task(system, &at, pid).and_then(|task| whole(system, &at, task));
                all.extend(found.map(|task| (tid, task)));
            }
        }
    }
    (all, daemon)
}

fn numbers(system: &dyn System, path: &str) -> Vec<i32> {
    let names = system.list_dir(path);
    names.iter().filter_map(|name| name.parse().ok()).collect()
}

/// Parses `stat`: number (name) state parent ... flags (9th) ... start (22nd).
fn task(system: &dyn System, at: &str, pid: i32) -> Option<Task> {
    let stat = system.read(&format!("{at}/stat")).ok()?;
    let (head, rest) = stat.rsplit_once(')')?;
    let (_, name) = head.split_once('(')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let flags: u64 = fields.get(6)?.parse().ok()?;
    Some(Task {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
        name: name.to_owned(),
        kernel: flags & PF_KTHREAD != 0,
        fixed: flags & PF_NO_SETAFFINITY != 0,
        ..Task::default()
    })
}

/// Adds affinity and group; `None` when the thread has ended.
fn whole(system: &dyn System, at: &str, task: Task) -> Option<Task> {
    let status = system.read(&format!("{at}/status")).ok()?;
    let mut lines = status.lines();
    let cpus = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let groups = system.read(&format!("{at}/cgroup")).unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    Some(Task {
        cpus: Cpus::parse_list(cpus)?,
        cgroup: group.unwrap_or("/").to_owned(),
        ..task
    })
}

/// Mount point of cgroup v2, if it has the cpuset controller.
pub fn cgroup_root(system: &dyn System) -> Option<String> {
    let mounts = system.read("/proc/mounts").ok()?;
    let root = mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let at = words.next()?;
        (words.next()? == "cgroup2").then(|| at.to_owned())
    })?;
    let controllers = text(system, &format!("{root}/cgroup.controllers"))?;
    has_cpuset(&controllers).then_some(root)
}

fn has_cpuset(controllers: &str) -> bool {
    controllers.split_whitespace().any(|name| name == "cpuset")
}

fn cgroup(system: &dyn System) -> Option<Cgroup> {
    let root = cgroup_root(system)?;
    let given = text(system, &format!("{root}/cgroup.subtree_control"))?;
    let groups: BTreeSet<String> = system
        .list_dir(&root)
        .into_iter()
        // only groups have this file
        .filter(|name| system.read(&format!("{root}/{name}/cgroup.procs")).is_ok())
        .collect();
    let value = |group: &str, what: &str| {
        text(system, &format!("{root}/{group}/{what}")).unwrap_or_default()
    };
    Some(Cgroup {
        enabled: has_cpuset(&given),
        turbo_group: groups.contains(TURBO_GROUP).then(|| TurboGroup {
            cpus: value(TURBO_GROUP, "cpuset.cpus"),
            partition: value(TURBO_GROUP, "cpuset.cpus.partition"),
        }),
        slices: groups
            .iter()
            .filter(|name| *name != TURBO_GROUP)
            .map(|name| (name.clone(), value(name, "cpuset.cpus")))
            .collect(),
    })
}

fn sysctls(system: &dyn System) -> BTreeMap<String, String> {
    let read = |name: &str| {
        let words = text(system, &format!("/proc/sys/{name}"))?;
        let words: Vec<&str> = words.split_whitespace().collect();
        Some((name.to_owned(), words.join(" ")))
    };
    SYSCTLS.iter().filter_map(|name| read(name)).collect()
}

fn memory(system: &dyn System) -> u64 {
    let text = system.read("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or_default() << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delivered_interrupts_are_read_per_cpu() {
        let text = "            CPU0       CPU2\n  1:          9          0   IO-APIC   1-edge      i8042\n \
                    24:          0         17  PCI-MSIX-0000:00:02.0   0-edge      virtio0-config\nNMI:          0          0   Non-maskable interrupts\n";
        let seen = seen(text);
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[&1], Cpus::one(0));
        assert_eq!(seen[&24], Cpus::one(2));
    }
}
