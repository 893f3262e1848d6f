// SPDX-License-Identifier: Apache-2.0
//! Finds the guests' NICs that may get a VF: NICs of VMs and network namespaces at the bridge of a pool.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use viola_host::{Hypervisor, Vm, VmId, proc, sockets};
use viola_lanes::netns::NetnsGuest;
use viola_lanes::qemu::QemuGuest;
use viola_lanes::uml::UmlGuest;
use viola_lanes::{Attachment, GuestAccess, Mac};
use viola_netdev::{Counters, Link};
use viola_policy::lanes::{CpuTime, di2};
use viola_proto::lanes::LaneSetting;
use viola_proto::lanes::guest::PORT;

use viola_config::Config;
use viola_config::lanes::VmLane;
use viola_config::pipe::parse_mac;

/// A NIC of a guest in the network of a pool.
#[derive(Debug, Clone)]
pub struct GuestNic {
    /// Identity of the guest: `qemu:NAME`, `uml:NAME`, `netns:NAME`.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The host interface of its paravirtual path.
    pub interface: String,
    /// The bridge of which that interface is a port.
    pub bridge: String,
    /// Its MAC address.
    pub mac: Mac,
    /// How the daemon plugs VFs into it.
    pub access: GuestAccess,
    /// Its lane setting in the configuration.
    pub setting: Option<LaneSetting>,
    /// DI2 (Raccoon, equation 1), where CPU times are known.
    pub di2: Option<f64>,
    /// Counters of its paravirtual path.
    pub counters: Counters,
}

/// What is needed to find NICs.
pub struct NicFinder<'a> {
    /// The configuration.
    pub config: &'a Config,
    /// VMs of this host.
    pub vms: &'a [Vm],
    /// CPU times of their vCPUs.
    pub cpus: &'a BTreeMap<VmId, Vec<CpuTime>>,
    /// Interfaces of this host.
    pub links: &'a [Link],
}

impl NicFinder<'_> {
    fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|l| l.name == name)
    }

    /// The bridge of an interface, if a pool names that bridge.
    fn bridge(&self, port: &Link) -> Option<String> {
        let master = self.links.iter().find(|l| Some(l.index) == port.master)?;
        let pools = &self.config.lanes.pools;
        let is_ours = pools.iter().any(|p| p.bridge == master.name);
        is_ours.then(|| master.name.clone())
    }

    /// All NICs, at most one for each guest and bridge, and why others are left out.
    pub fn nics(&self, cgroups: &mut CgroupTimes) -> (Vec<GuestNic>, Vec<String>) {
        let mut why = Vec::new();
        let mut nics = Vec::new();
        for guest in &self.config.lanes.guests {
            match self.netns(guest, cgroups) {
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
                let has = |n: &GuestNic| n.id == vm.id.as_str() && n.bridge == bridge;
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
        cgroups: &mut CgroupTimes,
    ) -> Result<GuestNic, String> {
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
        Ok(GuestNic {
            id: format!("netns:{}", guest.name),
            name: guest.name.clone(),
            interface: guest.host.clone(),
            bridge,
            mac: how.mac().map_err(|e| e.to_string())?,
            access: GuestAccess::Netns(how),
            setting: Some(guest.lane),
            di2: guest.cgroup.as_deref().and_then(|g| cgroups.di2(g)),
            counters: link.counters,
        })
    }

    fn vm(
        &self,
        vm: &Vm,
        mac: Option<&str>,
        link: &Link,
        bridge: String,
    ) -> Result<GuestNic, String> {
        let section = self.config.vm(vm.id.as_str(), &vm.name).map(|v| &v.lane);
        let mac = mac.and_then(parse_mac);
        let mac =
            mac.ok_or_else(|| format!("the address of its NIC at {} is not known", link.name))?;
        let how = match vm.hypervisor {
            Hypervisor::Qemu => GuestAccess::Qemu(self.qemu(vm, mac, section)?),
            Hypervisor::Uml => GuestAccess::Uml(self.uml(vm, mac)?),
            Hypervisor::Firecracker | Hypervisor::CloudHypervisor => {
                return Err("lanes do not plug VFs into VMs of its hypervisor yet".into());
            }
        };
        Ok(GuestNic {
            id: vm.id.to_string(),
            name: vm.name.clone(),
            interface: link.name.clone(),
            bridge,
            mac,
            access: how,
            setting: section.map(|s| s.set),
            di2: self.cpus.get(&vm.id).map(|cpus| di2(cpus)),
            counters: link.counters,
        })
    }

    fn qemu(&self, vm: &Vm, mac: Mac, section: Option<&VmLane>) -> Result<QemuGuest, String> {
        let named = section.and_then(|s| s.qmp.clone());
        let qmp_of_vm = named.is_none();
        let qmp = match named {
            Some(path) => Some(path),
            None => sockets::device_socket(vm).map_err(|e| e.one_line())?,
        };
        Ok(QemuGuest {
            qmp: qmp.ok_or("it has no QMP socket to plug a VF by")?,
            qmp_of_vm,
            pid: vm.pid,
            start_time: vm.start_time,
            mac,
            port: section.and_then(|s| s.port.clone()),
            agent: sockets::port_socket(vm, PORT).map_err(|e| e.one_line())?,
            release_timeout: self.config.lanes.release_timeout(),
        })
    }

    fn uml(&self, vm: &Vm, mac: Mac) -> Result<UmlGuest, String> {
        let folder = sockets::uml_folder(vm).map_err(|e| e.one_line())?;
        Ok(UmlGuest {
            folder: folder.ok_or("its folder with its console is not found")?,
            pid: vm.pid,
            start_time: vm.start_time,
            mac,
            // The first unit after the NICs that it was started with.
            unit: vm.nics.len() as u32,
            release_timeout: self.config.lanes.release_timeout(),
        })
    }
}

/// CPU times of control groups, from which DI2 of a network namespace follows (Raccoon, equation
/// 1); time that its processes did not run counts as blocked. By path of the group: when it was
/// read last, its CPU time then in ns, and DI2.
#[derive(Debug, Default)]
pub struct CgroupTimes(BTreeMap<std::path::PathBuf, (Instant, u64, Option<f64>)>);

impl CgroupTimes {
    /// Shortest time over which DI2 is computed.
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

/// CPU time of a group, ns, from the text of `cpu.stat`.
fn usage(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("usage_usec "));
    Some(line?.trim().parse::<u64>().ok()? * 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_a_group_is_read() {
        assert_eq!(usage("usage_usec 17\nuser_usec 3\n"), Some(17_000));
        assert_eq!(usage(""), None);
    }
}
