// SPDX-License-Identifier: Apache-2.0
//! Who may have a VF, and what its NIC counts on both paths.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::{Hypervisor, Vm, VmId, proc, sockets};
use viola_lanes::netns::NetnsGuest;
use viola_lanes::qemu::QemuGuest;
use viola_lanes::uml::UmlGuest;
use viola_lanes::{Attachment, GuestAccess, Mac, VfDevice};
use viola_netdev::{Counters, Link};
use viola_policy::lanes::{CpuTime, Samples, di2};
use viola_proto::lanes::LaneSetting;
use viola_proto::lanes::guest::PORT;

use viola_config::Config;
use viola_config::lanes::VmLane;
use viola_config::pipe::parse_mac;

/// A NIC of a guest in the network of a pool.
#[derive(Debug, Clone)]
pub struct Nic {
    /// Identity of the guest: `qemu:NAME`, `uml:NAME`, `netns:NAME`.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The host's interface of its paravirtual path.
    pub interface: String,
    /// The bridge that this is a port of.
    pub bridge: String,
    /// Its address.
    pub mac: Mac,
    /// How it is reached.
    pub access: GuestAccess,
    /// What the configuration says, if anything.
    pub setting: Option<LaneSetting>,
    /// DI2, where it can be found.
    pub di2: Option<f64>,
    /// What went through its paravirtual path.
    pub counters: Counters,
}

/// Everything that is looked at to find them.
pub struct Sight<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// VMs of this host.
    pub vms: &'a [Vm],
    /// How they spent their time.
    pub cpus: &'a BTreeMap<VmId, Vec<CpuTime>>,
    /// Interfaces of this host.
    pub links: &'a [Link],
}

impl Sight<'_> {
    fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|l| l.name == name)
    }

    /// The bridge that an interface is a port of, if a pool names it.
    fn bridge(&self, port: &Link) -> Option<String> {
        let master = self.links.iter().find(|l| Some(l.index) == port.master)?;
        let pools = &self.config.lanes.pools;
        let is_ours = pools.iter().any(|p| p.bridge == master.name);
        is_ours.then(|| master.name.clone())
    }

    /// All NICs, at most one for each guest and bridge. Beside them, why others are left out.
    pub fn nics(&self, groups: &mut Groups) -> (Vec<Nic>, Vec<String>) {
        let mut why = Vec::new();
        let mut nics = Vec::new();
        for guest in &self.config.lanes.guests {
            match self.netns(guest, groups) {
                Ok(nic) => nics.push(nic),
                Err(e) => why.push(format!("{}: {e}", guest.name)),
            }
        }
        let here = proc::netns(std::process::id()).ok().flatten();
        for vm in self.vms {
            for nic in vm.nics.iter().filter(|n| Some(n.netns) == here) {
                let Some(link) = self.link(&nic.tap) else {
                    continue;
                };
                let Some(bridge) = self.bridge(link) else {
                    continue;
                };
                let has = |n: &Nic| n.id == vm.id.as_str() && n.bridge == bridge;
                if nics.iter().any(has) {
                    why.push(format!(
                        "{}: {} is its second NIC at {bridge}",
                        vm.name, nic.tap
                    ));
                    continue;
                }
                match self.vm(vm, nic.mac.as_deref(), link, bridge) {
                    Ok(nic) => nics.push(nic),
                    Err(e) => why.push(format!("{}: {e}", vm.name)),
                }
            }
        }
        (nics, why)
    }

    fn netns(
        &self,
        guest: &viola_config::lanes::NetnsGuest,
        groups: &mut Groups,
    ) -> Result<Nic, String> {
        let link = self.link(&guest.host);
        let link = link.ok_or_else(|| format!("there is no interface {}", guest.host))?;
        let bridge = self.bridge(link);
        let bridge =
            bridge.ok_or_else(|| format!("{} is no port of a pool's bridge", guest.host))?;
        let mut how = NetnsGuest {
            netns: guest.netns.clone(),
            bond: guest.bond.clone(),
            port: guest.port.clone(),
        };
        Ok(Nic {
            id: format!("netns:{}", guest.name),
            name: guest.name.clone(),
            interface: guest.host.clone(),
            bridge,
            mac: how.mac().map_err(|e| e.to_string())?,
            access: GuestAccess::Netns(how),
            setting: Some(guest.lane),
            di2: guest.cgroup.as_deref().and_then(|g| groups.di2(g)),
            counters: link.counters,
        })
    }

    fn vm(&self, vm: &Vm, mac: Option<&str>, link: &Link, bridge: String) -> Result<Nic, String> {
        let said = self.config.vm(vm.id.as_str(), &vm.name).map(|v| &v.lane);
        let mac = mac.and_then(parse_mac);
        let mac =
            mac.ok_or_else(|| format!("the address of its NIC at {} is not known", link.name))?;
        let how = match vm.hypervisor {
            Hypervisor::Qemu => GuestAccess::Qemu(self.qemu(vm, mac, said)?),
            Hypervisor::Uml => GuestAccess::Uml(self.uml(vm, mac)?),
            Hypervisor::Firecracker | Hypervisor::CloudHypervisor => {
                return Err("lanes do not plug VFs into VMs of its hypervisor yet".into());
            }
        };
        Ok(Nic {
            id: vm.id.to_string(),
            name: vm.name.clone(),
            interface: link.name.clone(),
            bridge,
            mac,
            access: how,
            setting: said.map(|s| s.set),
            di2: self.cpus.get(&vm.id).map(|cpus| di2(cpus)),
            counters: link.counters,
        })
    }

    fn qemu(&self, vm: &Vm, mac: Mac, said: Option<&VmLane>) -> Result<QemuGuest, String> {
        let qmp = match said.and_then(|s| s.qmp.clone()) {
            Some(path) => Some(path),
            None => sockets::device_socket(vm).map_err(|e| e.one_line())?,
        };
        Ok(QemuGuest {
            qmp: qmp.ok_or("it has no QMP socket to plug a VF by")?,
            pid: vm.pid,
            start_time: vm.start_time,
            mac,
            port: said.and_then(|s| s.port.clone()),
            agent: sockets::port_socket(vm, PORT).map_err(|e| e.one_line())?,
            release_timeout: self.config.lanes.release_timeout,
        })
    }

    fn uml(&self, vm: &Vm, mac: Mac) -> Result<UmlGuest, String> {
        let folder = sockets::uml_folder(vm).map_err(|e| e.one_line())?;
        Ok(UmlGuest {
            folder: folder.ok_or("its folder with its console is not found")?,
            pid: vm.pid,
            start_time: vm.start_time,
            mac,
            // behind those that it was started with
            unit: vm.nics.len() as u32,
            release_timeout: self.config.lanes.release_timeout,
        })
    }
}

/// CPU time of control groups, by which a namespace's DI2 is found: what its processes ran, and the rest.
#[derive(Debug, Default)]
pub struct Groups(BTreeMap<std::path::PathBuf, (Instant, u64, Option<f64>)>);

impl Groups {
    /// Shortest time that DI2 is taken over.
    const WINDOW: Duration = Duration::from_secs(1);

    fn di2(&mut self, group: &Path) -> Option<f64> {
        let text = fs::read_to_string(group.join("cpu.stat")).ok()?;
        let ran = usage(&text)?;
        let now = Instant::now();
        let last = self.0.entry(group.to_owned()).or_insert((now, ran, None));
        let span = now.duration_since(last.0);
        if span >= Self::WINDOW {
            let gotten = ran.saturating_sub(last.1);
            let blocked = (span.as_nanos() as u64).saturating_sub(gotten);
            *last = (now, ran, Some(di2(&[CpuTime { gotten, blocked }])));
        }
        last.2
    }
}

/// CPU time of a group, ns.
fn usage(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("usage_usec "));
    Some(line?.trim().parse::<u64>().ok()? * 1_000)
}

/// What one NIC counts: samples of both paths together, and totals of each.
#[derive(Debug)]
pub struct Count {
    /// The last samples.
    pub samples: Samples,
    last: Option<Counters>,
    last_vf: Option<(u32, u32, Counters)>,
    /// Total of its VFs so far.
    pub vf: Counters,
    /// How long the last switch to it took, ns.
    pub attach: u64,
}

impl Count {
    /// For decisions by so many samples.
    pub fn new(samples: usize) -> Self {
        Self {
            samples: Samples::new(samples),
            last: None,
            last_vf: None,
            vf: Counters::default(),
            attach: 0,
        }
    }

    /// One more sample: its paravirtual path's counters and, with pool and number, those of the VF that it has.
    pub fn take(&mut self, nic: Counters, vf: Option<(u32, u32, Counters)>) {
        let slow = self.last.map_or(0, |last| more(nic, last).packets());
        self.last = Some(nic);
        let fast = match (vf, self.last_vf) {
            (Some((pool, index, now)), Some((p, i, last))) if (pool, index) == (p, i) => {
                more(now, last)
            }
            _ => Counters::default(),
        };
        self.last_vf = vf;
        self.vf.rx_packets += fast.rx_packets;
        self.vf.rx_bytes += fast.rx_bytes;
        self.vf.tx_packets += fast.tx_packets;
        self.vf.tx_bytes += fast.tx_bytes;
        self.samples.push(slow + fast.packets());
    }
}

/// What came since; counters that begin anew count from zero.
fn more(now: Counters, last: Counters) -> Counters {
    let part = |now: u64, last: u64| match now >= last {
        true => now - last,
        false => now,
    };
    Counters {
        rx_packets: part(now.rx_packets, last.rx_packets),
        rx_bytes: part(now.rx_bytes, last.rx_bytes),
        tx_packets: part(now.tx_packets, last.tx_packets),
        tx_bytes: part(now.tx_bytes, last.tx_bytes),
    }
}

/// What went through a VF: its interface knows where the host or a namespace has one, the PF where its driver tells, and for one
/// that is passed through otherwise its interrupts are counted: each stands for a packet at least.
pub fn vf_counters(
    how: &GuestAccess,
    vf: &VfDevice,
    by_pf: Option<Counters>,
    interrupts: &str,
) -> Counters {
    let of = |links: Vec<Link>| {
        let is_it = |l: &&Link| l.device.as_deref() == Some(vf.address.as_str());
        let found = links.iter().find(is_it);
        found.map(|l| l.counters).unwrap_or_default()
    };
    match how {
        GuestAccess::Netns(guest) => of(guest.links().unwrap_or_default()),
        GuestAccess::Uml(_) => of(viola_netdev::links().unwrap_or_default()),
        GuestAccess::Qemu(_) => match by_pf.filter(|c| *c != Counters::default()) {
            Some(counters) => counters,
            None => Counters {
                rx_packets: counted(interrupts, &vf.address),
                ..Counters::default()
            },
        },
    }
}

/// VFIO's interrupts of a device so far, in the text of /proc/interrupts.
fn counted(text: &str, address: &str) -> u64 {
    let device = format!("({address})");
    let lines = text
        .lines()
        .filter(|l| l.contains("vfio") && l.contains(&device));
    lines
        .flat_map(|l| {
            l.split_whitespace()
                .skip(1)
                .map_while(|n| n.parse::<u64>().ok())
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets(rx: u64, tx: u64) -> Counters {
        Counters {
            rx_packets: rx,
            tx_packets: tx,
            ..Counters::default()
        }
    }

    #[test]
    fn both_paths_count_and_a_vf_counts_from_when_it_came() {
        let mut count = Count::new(4);
        count.take(packets(1000, 1000), None);
        count.take(packets(1005, 1000), Some((0, 3, packets(70, 0))));
        count.take(packets(1005, 1001), Some((0, 3, packets(80, 10))));
        // another VF, whose past was another guest's
        count.take(packets(1005, 1001), Some((0, 4, packets(9000, 9000))));
        let traffic = count.samples.traffic();
        assert_eq!((traffic.freq, traffic.avg), (50.0, 6.5));
        assert_eq!((count.vf.rx_packets, count.vf.tx_packets), (10, 10));
    }

    #[test]
    fn counters_that_begin_anew_do_not_count_backwards() {
        let mut count = Count::new(2);
        count.take(packets(100, 0), None);
        count.take(packets(7, 0), None);
        assert_eq!(count.samples.traffic().avg, 3.5);
    }

    #[test]
    fn interrupts_of_all_cpus_and_vectors_add_up() {
        let text = "           CPU0       CPU1\n\
                    \x2045:         12          3  PCI-MSIX-0000:01:10.0   0-edge      vfio-msix[0](0000:01:10.0)\n\
                    \x2046:          5          0  PCI-MSIX-0000:01:10.0   1-edge      vfio-msix[1](0000:01:10.0)\n\
                    \x2047:        900          0  PCI-MSIX-0000:01:10.2   0-edge      vfio-msix[0](0000:01:10.2)\n";
        assert_eq!(counted(text, "0000:01:10.0"), 20);
        assert_eq!(counted(text, "0000:01:10.4"), 0);
    }

    #[test]
    fn the_cpu_time_of_a_group_is_read() {
        assert_eq!(usage("usage_usec 17\nuser_usec 3\n"), Some(17_000));
        assert_eq!(usage(""), None);
    }
}
