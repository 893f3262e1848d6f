// SPDX-License-Identifier: Apache-2.0
//! A QEMU guest: vfio-pci passes the VF through, QMP plugs and unplugs it.
//!
//! With `failover=on` at the virtio NIC, QEMU and the guest's net_failover make one interface of
//! both, and the guest changes paths by itself when the VF is plugged or unplugged. QEMU reports
//! the deletion of the device up to half a second after the guest has released the VF. The host
//! sees the release earlier: VFIO frees the VF's interrupts at that moment.
//!
//! With a bond made by viola-agent, the host asks the agent first, and the guest fails over before
//! the unplug.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use viola_host::qemu::devices::{Devices, VirtioNic};
use viola_host::qemu::qmp::QmpFailure;
use viola_host::{Tid, proc};
use viola_netdev::Mac;
use viola_proto::lanes::guest::VfAction;

use crate::agent;
use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::format_mac;
use crate::pool::VfDevice;
use crate::steps::StepTimes;

/// Interval of checks whether the device is deleted.
const DEVICE_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of checks whether its interrupts are freed.
const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Share of the host's available memory, in percent, that must stay free when a guest's memory is
/// pinned.
const MIN_FREE_PERCENT: u64 = 5;

/// A QEMU guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuGuest {
    /// A QMP socket that no other client uses for long, as a path that this process can open.
    pub qmp: PathBuf,
    /// Whether the VM's command line names that socket, so that the VM's process has to listen there. Otherwise the operator has
    /// named it.
    #[serde(default)]
    pub qmp_of_vm: bool,
    /// QEMU's process.
    pub pid: Tid,
    /// Start time of that process, in clock ticks after boot.
    pub start_time: u64,
    /// Address of the NIC that the VF replaces.
    pub mac: Mac,
    /// PCIe root port to plug into; `None`: a free one.
    pub port: Option<String>,
    /// Socket of the agent that keeps the VF in a bond, if there is one.
    #[serde(default)]
    pub agent: Option<PathBuf>,
    /// Time limit for the guest to release a VF.
    pub release_timeout: Duration,
}

fn qmp(cause: QmpFailure) -> LaneError {
    LaneError::Qmp(cause.to_string())
}

/// Device id of a VF in QEMU.
fn id_of(vf: &VfDevice) -> String {
    format!("viola-vf-{}", vf.address.replace([':', '.'], "-"))
}

impl QemuGuest {
    fn connect(&self) -> Result<Devices, LaneError> {
        Devices::connect(&self.qmp, self.qmp_of_vm.then_some(self.pid)).map_err(qmp)
    }

    fn is_gone(&self) -> bool {
        let alive = |stat: &proc::Stat| stat.start_time == self.start_time && !stat.is_dead();
        !matches!(proc::stat(self.pid), Ok(Some(stat)) if alive(&stat))
    }

    fn nic(&self, devices: &mut Devices) -> Result<Option<VirtioNic>, LaneError> {
        let wanted = format_mac(self.mac);
        let nics = devices.virtio_nics().map_err(qmp)?;
        Ok(nics
            .into_iter()
            .find(|n| n.mac.eq_ignore_ascii_case(&wanted)))
    }

    /// Checks that the host can pin the guest's memory: VFIO pins all of it, and what QEMU has not
    /// touched yet must fit into the host's available memory.
    fn check_memory(&self, devices: &mut Devices) -> Result<(), LaneError> {
        let size = devices.memory().map_err(qmp)?;
        let status = read(&format!("/proc/{}/status", self.pid))?;
        let resident = kib(&status, "VmRSS:") * 1024;
        let free = kib(&read("/proc/meminfo")?, "MemAvailable:") * 1024;
        let more = size.saturating_sub(resident);
        if more > free - free / 100 * MIN_FREE_PERCENT {
            let mib = |bytes: u64| bytes >> 20;
            return Err(LaneError::Unusable(format!(
                "a VF would pin all {} MiB of its memory; {} MiB of them are not allocated yet, but the host has only {} MiB available",
                mib(size),
                mib(more),
                mib(free)
            )));
        }
        Ok(())
    }
}

fn read(path: &str) -> Result<String, LaneError> {
    let path = Path::new(path);
    fs::read_to_string(path).map_err(LaneError::file(path))
}

/// A number in a file with lines such as `VmRSS:  123 kB`.
fn kib(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(key));
    let number = line.and_then(|l| l.split_whitespace().next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Whether VFIO has interrupts of this device, by the text of /proc/interrupts.
fn has_interrupts(text: &str, address: &str) -> bool {
    let device = format!("({address})");
    text.lines()
        .any(|line| line.contains("vfio") && line.contains(&device))
}

fn interrupts(address: &str) -> bool {
    fs::read_to_string("/proc/interrupts").is_ok_and(|text| has_interrupts(&text, address))
}

impl Attachment for QemuGuest {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        Ok(self.mac)
    }

    fn plug(&mut self, vf: &VfDevice, steps: &mut StepTimes) -> Result<(), LaneError> {
        let mut devices = self.connect()?;
        self.check_memory(&mut devices)?;
        steps.time("driver", || {
            vf.pf.bind(&vf.address, Some("vfio-pci"), false)
        })?;
        if vf.pf.iommu_group(&vf.address).is_none() {
            let what = format!("{} has no IOMMU group: the host's IOMMU is off", vf.address);
            return Err(LaneError::Unusable(what));
        }
        let port = match &self.port {
            Some(port) => port.clone(),
            None => devices.free_port().map_err(qmp)?.ok_or_else(|| {
                LaneError::Unusable(
                    "it has no free PCIe root port for a VF; add one to its configuration".into(),
                )
            })?,
        };
        let mut device = json!({
            "driver": "vfio-pci", "host": vf.address, "id": id_of(vf), "bus": port,
        });
        if let Some(nic) = self.nic(&mut devices)?.filter(|n| n.failover) {
            if !devices.has_standby(&nic.id).map_err(qmp)? {
                let what = "its net_failover driver is not ready";
                return Err(LaneError::Unusable(what.into()));
            }
            device["failover_pair_id"] = nic.id.into();
        }
        steps.time("plug", || devices.plug(device)).map_err(qmp)?;
        match devices.has(&id_of(vf)).map_err(qmp)? {
            true => Ok(()),
            false => Err(LaneError::Qmp("QEMU hides the VF from the guest".into())),
        }
    }

    fn fail_over(&mut self, _: &VfDevice) -> Result<Failover, LaneError> {
        if self.is_gone() {
            return Ok(Failover::Done);
        }
        if let Some(port) = &self.agent
            && agent::ask(port, Some(self.pid), self.mac, VfAction::Release).is_ok()
        {
            return Ok(Failover::Done);
        }
        let mut devices = self.connect()?;
        let paired = self.nic(&mut devices)?.is_some_and(|n| n.failover);
        Ok(match paired {
            true => Failover::OnUnplug,
            false => Failover::OnLinkDown,
        })
    }

    fn unplug(
        &mut self,
        vf: &VfDevice,
        released: &mut dyn FnMut(),
        steps: &mut StepTimes,
    ) -> Result<(), LaneError> {
        if self.is_gone() {
            released();
            return Ok(());
        }
        let (mut devices, id) = (self.connect()?, id_of(vf));
        if devices.has(&id).map_err(qmp)? {
            devices.unplug(&id).map_err(qmp)?;
        }
        let begin = Instant::now();
        let end = begin + self.release_timeout;
        let mut had = interrupts(&vf.address);
        let mut next = Instant::now();
        loop {
            if had && !interrupts(&vf.address) {
                had = false;
                steps.add("release", begin.elapsed());
                released();
            }
            let now = Instant::now();
            if now >= next {
                next = now + DEVICE_POLL_INTERVAL;
                match devices.has(&id) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) if self.is_gone() => break,
                    // The guest was asked to release the VF, and does so whether the monitor
                    // answers or not.
                    Err(_) if now <= end => {
                        if let Ok(again) = self.connect() {
                            devices = again;
                        }
                    }
                    Err(e) => return Err(qmp(e)),
                }
            }
            if now > end {
                let seconds = self.release_timeout.as_secs();
                return Err(LaneError::ReleaseTimeout { seconds });
            }
            std::thread::sleep(INTERRUPT_POLL_INTERVAL);
        }
        steps.add("unplug", begin.elapsed());
        released();
        Ok(())
    }

    fn resume(&mut self, _: &VfDevice) -> Result<(), LaneError> {
        match &self.agent {
            Some(port) => agent::ask(port, Some(self.pid), self.mac, VfAction::Use).map_err(|e| {
                LaneError::Unusable(format!("its agent does not use the VF again: {e}"))
            }),
            None => Ok(()),
        }
    }

    fn presence(&mut self, vf: &VfDevice) -> Result<Presence, LaneError> {
        if self.is_gone() {
            return Ok(Presence::Absent);
        }
        let has = self.connect()?.has(&id_of(vf)).map_err(qmp)?;
        Ok(match has {
            true => Presence::InUse,
            false => Presence::Absent,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use serde_json::Value;

    #[test]
    fn interrupts_of_a_vf_are_found_by_its_address() {
        let text = " 45:  12  0  PCI-MSIX-0000:01:10.0  0-edge  vfio-msix[0](0000:01:10.0)\n\
                    \x2046:  12  0  PCI-MSIX-0000:01:10.2  0-edge  vf01102-rx-0\n";
        assert!(has_interrupts(text, "0000:01:10.0"));
        assert!(!has_interrupts(text, "0000:01:10.2"));
        assert!(!has_interrupts("", "0000:01:10.0"));
    }

    #[test]
    fn memory_sizes_are_read_by_key() {
        let text = "VmPeak:\t 900 kB\nVmRSS:\t     123 kB\n";
        assert_eq!(kib(text, "VmRSS:"), 123);
        assert_eq!(kib(text, "VmSwap:"), 0);
    }

    #[test]
    fn a_dead_guest_has_no_vf() {
        let mut guest = QemuGuest {
            qmp: "/nowhere".into(),
            qmp_of_vm: false,
            pid: u32::MAX,
            start_time: 0,
            mac: [2, 0, 0, 0, 0, 1],
            port: None,
            agent: None,
            release_timeout: Duration::from_secs(1),
        };
        let vf = VfDevice {
            pf: crate::Pf::new("p0"),
            index: 0,
            address: "0000:01:10.0".into(),
        };
        assert_eq!(id_of(&vf), "viola-vf-0000-01-10-0");
        assert_eq!(guest.presence(&vf).unwrap(), Presence::Absent);
        let mut released = 0;
        guest
            .unplug(&vf, &mut || released += 1, &mut StepTimes::default())
            .unwrap();
        assert_eq!(released, 1);
    }

    /// A monitor that answers the `qom-list`s of each connection with whether the VF is there, and
    /// closes the connection after the last answer.
    fn monitor(path: &Path, connections: Vec<Vec<bool>>) -> std::thread::JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for answers in connections {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(b"{\"QMP\": {}}\n").unwrap();
                let mut answers = answers.into_iter();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let asked: Value = serde_json::from_str(&line.unwrap()).unwrap();
                    let value = match asked["execute"].as_str().unwrap() {
                        "qom-list" => match answers.next() {
                            Some(true) => {
                                json!([{"name": id_of(&vf()), "type": "child<vfio-pci>"}])
                            }
                            Some(false) => json!([]),
                            None => break,
                        },
                        _ => json!({}),
                    };
                    let answer = json!({"return": value, "id": asked["id"]});
                    stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
                }
            }
        })
    }

    fn vf() -> VfDevice {
        VfDevice {
            pf: crate::Pf::new("p0"),
            index: 0,
            address: "0000:01:10.0".into(),
        }
    }

    fn running(qmp: PathBuf, release_timeout: Duration) -> QemuGuest {
        let pid = std::process::id();
        QemuGuest {
            qmp,
            qmp_of_vm: true,
            pid,
            start_time: proc::stat(pid).unwrap().unwrap().start_time,
            mac: [2, 0, 0, 0, 0, 1],
            port: None,
            agent: None,
            release_timeout,
        }
    }

    /// A process, and a guest that it runs, whose monitor is there.
    fn process_with(qmp: PathBuf) -> (std::process::Child, QemuGuest) {
        let process = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = process.id();
        let guest = QemuGuest {
            pid,
            start_time: proc::stat(pid).unwrap().unwrap().start_time,
            ..running(qmp, Duration::from_secs(20))
        };
        (process, guest)
    }

    #[test]
    fn unplug_reconnects_to_a_monitor_that_hung_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor = monitor(&path, vec![vec![true, true], vec![true, false]]);
        let mut guest = running(path, Duration::from_secs(20));
        let mut released = 0;
        guest
            .unplug(&vf(), &mut || released += 1, &mut StepTimes::default())
            .unwrap();
        assert_eq!(released, 1);
        monitor.join().unwrap();
    }

    #[test]
    fn a_guest_that_refuses_keeps_its_vf() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor = monitor(&path, vec![vec![true; 10_000]]);
        let mut guest = running(path, Duration::from_millis(200));
        let mut released = 0;
        let error = guest
            .unplug(&vf(), &mut || released += 1, &mut StepTimes::default())
            .unwrap_err();
        assert!(matches!(error, LaneError::ReleaseTimeout { .. }), "{error}");
        assert_eq!(released, 0);
        monitor.join().unwrap();
    }

    #[test]
    fn a_monitor_of_another_process_is_not_asked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let _listener = UnixListener::bind(&path).unwrap();
        let (mut other, mut guest) = process_with(path);
        let refused = guest.presence(&vf()).unwrap_err().to_string();
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(
            refused.contains("another process than the VM's"),
            "{refused}"
        );
    }

    #[test]
    fn a_guest_that_dies_during_unplug_has_no_vf() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor = monitor(&path, vec![vec![true, true, true]]);
        let (mut process, mut guest) = process_with(path);
        guest.qmp_of_vm = false;
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(150));
            process.kill().unwrap();
            process.wait().unwrap();
        });
        let mut released = 0;
        guest
            .unplug(&vf(), &mut || released += 1, &mut StepTimes::default())
            .unwrap();
        assert_eq!(released, 1);
        killer.join().unwrap();
        monitor.join().unwrap();
    }
}
