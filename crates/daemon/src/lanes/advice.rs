// SPDX-License-Identifier: Apache-2.0
//! Which VMs would gain from a VF of a NIC that no pool names yet.

use std::fs;
use std::path::Path;

use viola_config::Config;
use viola_host::{Hypervisor, NicKind, Vm, VmId, proc};
use viola_lanes::Pf;
use viola_meter::Snapshot;
use viola_policy::lanes::{CpuTime, VfWorth, WorthThresholds, WorthWindow, di2};
use viola_policy::slices::Nanos;
use viola_proto::VmReport;

use crate::vms::report::propose;
use crate::vms::signs::{Sign, Signs, Sum};
use viola_cli::quantities::percent;

/// Whether a VF is worth it for a VM, and what its last window showed.
#[derive(Debug)]
struct State {
    worth: VfWorth,
    last: WorthWindow,
}

/// The packets of each VM.
#[derive(Debug, Default)]
pub struct PacketLoads(Signs<State>);

impl PacketLoads {
    /// Takes what each VM did in a window. Returns a line for the log for each VM for which a VF has become worth it, and could
    /// be had.
    pub fn observe(
        &mut self,
        window: &Snapshot,
        vms: &[Vm],
        config: &Config,
    ) -> Vec<(VmId, String)> {
        let began = self.0.observe(window);
        let lines = began.into_iter().filter_map(|sample| {
            let vm = vms.iter().find(|vm| vm.id == sample.id)?;
            let uplink = Uplink::of(vm, config, Path::new("/sys"))?;
            let state = self.0.get(&sample.id)?;
            Some((
                sample.id.clone(),
                format!("lanes could help: it {state}; {uplink}"),
            ))
        });
        lines.collect()
    }

    /// Advises VMs with many packets to get a VF, where their bridge has a NIC that can make VFs and no pool names the bridge.
    pub fn add_advice(&self, reports: &mut [VmReport], vms: &[Vm], config: &Config) {
        self.add_advice_of(reports, vms, config, Path::new("/sys"));
    }

    fn add_advice_of(&self, reports: &mut [VmReport], vms: &[Vm], config: &Config, sys: &Path) {
        for (report, vm) in reports.iter_mut().zip(vms) {
            let Some(state) = self.0.get(&vm.id) else {
                continue;
            };
            let Some(uplink) = Uplink::of(vm, config, sys) else {
                continue;
            };
            let sentence = format!(
                "{}: it {state}; a VF could carry them past the host, and {uplink}: the book's page on lanes tells what \
                 [[lanes.pool]] and the VM need",
                report.name
            );
            propose(report, "lanes", sentence);
        }
    }

    /// Forgets a VM that is gone.
    pub fn forget(&mut self, id: &VmId) {
        self.0.forget(id);
    }
}

/// The NIC through which a VM's bridge reaches its network, and which can make VFs.
#[derive(Debug, PartialEq, Eq)]
struct Uplink {
    pf: String,
    bridge: String,
    max_vfs: u32,
}

impl Uplink {
    /// That of a VM into which VFs can be plugged, unless a pool has the bridge. Nothing can be granted under a name that is not
    /// confirmed.
    fn of(vm: &Vm, config: &Config, sys: &Path) -> Option<Self> {
        if vm.confirmed.is_none() || vm.hypervisor != Hypervisor::Qemu {
            return None;
        }
        let here = proc::netns(std::process::id()).ok().flatten();
        let class = sys.join("class/net");
        let is_tap = |n: &&viola_host::Nic| n.kind == NicKind::Tap && Some(n.netns) == here;
        vm.nics.iter().filter(is_tap).find_map(|nic| {
            let master = fs::read_link(class.join(&nic.tap).join("master")).ok()?;
            let bridge = master.file_name()?.to_str()?.to_owned();
            if config.lanes.pools.iter().any(|pool| pool.bridge == bridge) {
                return None;
            }
            let ports = fs::read_dir(class.join(&bridge).join("brif")).ok()?;
            let able = ports.flatten().filter_map(|port| {
                let pf = port.file_name().to_str()?.to_owned();
                let max_vfs = Pf::at(sys, &pf).max_vfs().ok().filter(|n| *n > 0)?;
                Some((pf, max_vfs))
            });
            // The first by name: a folder has no order.
            let (pf, max_vfs) = able.min()?;
            Some(Self {
                pf,
                bridge,
                max_vfs,
            })
        })
    }
}

impl std::fmt::Display for Uplink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            pf,
            bridge,
            max_vfs,
        } = self;
        write!(f, "{pf} at its bridge {bridge} can make {max_vfs} VFs")
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            worth: VfWorth::new(WorthThresholds::default()),
            last: WorthWindow::default(),
        }
    }
}

impl Sign for State {
    fn observe(&mut self, at: Nanos, window: &Sum) -> bool {
        let (total, traffic) = (&window.total, &window.total.traffic);
        let vcpus = total.vcpus.iter().map(|times| CpuTime {
            gotten: times.run,
            blocked: times.blocked,
        });
        self.last = WorthWindow {
            di2: di2(&vcpus.collect::<Vec<_>>()),
            freq: 100.0 * window.part_with_packets(),
            packets: window.per_s(traffic.rx_packets + traffic.tx_packets),
            service: window.cores(total.service.run),
        };
        self.worth.observe(at, &self.last)
    }

    fn is_there(&self) -> bool {
        self.worth.is_worth_it()
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "has {:.0} packets/s, and its service threads use {} of a core",
            self.last.packets,
            percent(self.last.service)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{view, vm};
    use viola_host::Nic;
    use viola_meter::{Times, Traffic, VmSample};

    /// A confirmed QEMU VM with a tap in this namespace.
    fn with_tap() -> Vm {
        let mut db = vm("db", 7, &[&[1]]);
        db.hypervisor = Hypervisor::Qemu;
        db.nics.push(Nic {
            tap: "tap0".into(),
            kind: NicKind::Tap,
            mac: None,
            netns: proc::netns(std::process::id()).unwrap().unwrap(),
            ifindex: Some(3),
        });
        db
    }

    /// The files of a host whose tap0 and eth0 are ports of br0, and whose eth0 can make this number of VFs.
    fn sys(max_vfs: u32) -> tempfile::TempDir {
        let top = tempfile::tempdir().unwrap();
        let class = top.path().join("class/net");
        for folder in ["tap0", "br0/brif/tap0", "br0/brif/eth0", "eth0/device"] {
            fs::create_dir_all(class.join(folder)).unwrap();
        }
        std::os::unix::fs::symlink("../br0", class.join("tap0/master")).unwrap();
        let limit = format!("{max_vfs}\n");
        fs::write(class.join("eth0/device/sriov_totalvfs"), limit).unwrap();
        top
    }

    fn config(text: &str) -> Config {
        Config::parse(Path::new("v.toml"), text).unwrap()
    }

    /// The loads after 15 s with so many packets per second.
    fn after(packets_per_s: u64) -> PacketLoads {
        let mut loads = PacketLoads::default();
        for tick in 0..150 {
            let window = Snapshot {
                at: tick * 100_000_000,
                span: 100_000_000,
                with_disks: tick % 10 == 9,
                vms: vec![VmSample {
                    id: with_tap().id,
                    vcpus: vec![Times {
                        run: 40_000_000,
                        blocked: 60_000_000,
                        ..Times::default()
                    }],
                    service: Times {
                        run: 20_000_000,
                        ..Times::default()
                    },
                    traffic: Traffic {
                        rx_packets: packets_per_s / 20,
                        tx_packets: packets_per_s / 20,
                        ..Traffic::default()
                    },
                }],
            };
            loads.0.observe(&window);
        }
        loads
    }

    fn advice(loads: &PacketLoads, vm: &Vm, text: &str, sys: &Path) -> String {
        let mut reports = view(&["db"]).vms.vms;
        loads.add_advice_of(&mut reports, std::slice::from_ref(vm), &config(text), sys);
        let report = reports.remove(0);
        assert_eq!(report.help.is_empty(), report.advice.is_none());
        report.advice.unwrap_or_default()
    }

    #[test]
    fn a_vm_with_many_packets_is_told_of_the_nic_of_its_bridge() {
        let sys = sys(7);
        let said = advice(&after(40_000), &with_tap(), "", sys.path());
        assert!(
            said.starts_with(
                "db: it has 40000 packets/s, and its service threads use 20 % of a core; a VF could carry them past the \
                 host, and eth0 at its bridge br0 can make 7 VFs:"
            ),
            "{said}"
        );
        assert_eq!(advice(&after(2_000), &with_tap(), "", sys.path()), "");
    }

    #[test]
    fn nothing_is_said_where_no_vf_could_be_granted() {
        let (loads, able, unable) = (after(40_000), sys(7), sys(0));
        assert_eq!(advice(&loads, &with_tap(), "", unable.path()), "");
        let pool = "[[lanes.pool]]\npf = \"eth0\"\nvfs = 2\nbridge = \"br0\"";
        assert_eq!(advice(&loads, &with_tap(), pool, able.path()), "");
        let (mut stranger, mut uml, mut elsewhere) = (with_tap(), with_tap(), with_tap());
        stranger.confirmed = None;
        uml.hypervisor = Hypervisor::Uml;
        elsewhere.nics[0].netns += 1;
        for vm in [stranger, uml, elsewhere] {
            assert_eq!(advice(&loads, &vm, "", able.path()), "", "{vm:?}");
        }
    }
}
