// SPDX-License-Identifier: Apache-2.0
//! A QEMU guest: the VF is passed through by vfio-pci, hot-plugged and unplugged by QMP.
//!
//! Where the virtio NIC has `failover=on`, QEMU and the guest's net_failover make one interface of both. The guest then
//! changes paths by itself when the VF comes and goes. The moment in which it lets the VF go is not told by QEMU, which
//! tells when the device is gone, up to half a second later; but the VF's interrupts are gone from the host at that
//! moment, and that can be seen.
//!
//! Where the guest has a bond by viola-agent instead, it is told before, and goes over first.

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

/// Time between two looks whether a device is gone...
const DEVICE_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// ...and whether its interrupts are.
const INTERRUPT_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Part of the host's free memory, in percent, that stays free when a guest's is pinned.
const MIN_FREE_PERCENT: u64 = 5;

/// Such a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuGuest {
    /// A QMP socket that nobody else uses for long, as this program can open it.
    pub qmp: PathBuf,
    /// Its process.
    pub pid: Tid,
    /// When that began, clock ticks after boot.
    pub start_time: u64,
    /// Address of the NIC that the VF is to stand in for.
    pub mac: Mac,
    /// Root port to plug into; `None`: one that is free.
    pub port: Option<String>,
    /// Way to the agent that keeps its VF in a bond, if it has one.
    #[serde(default, rename = "voice")]
    pub agent: Option<PathBuf>,
    /// How long it may take to give a VF back.
    #[serde(rename = "patience")]
    pub release_timeout: Duration,
}

fn qmp(cause: QmpFailure) -> LaneError {
    LaneError::Qmp(cause.to_string())
}

/// What a VF is called in QEMU.
fn id_of(vf: &VfDevice) -> String {
    format!("viola-vf-{}", vf.address.replace([':', '.'], "-"))
}

impl QemuGuest {
    fn connect(&self) -> Result<Devices, LaneError> {
        Devices::connect(&self.qmp).map_err(qmp)
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

    /// VFIO pins all memory of the guest: what of it is not there yet has to fit into the host's free memory.
    fn check_memory(&self, devices: &mut Devices) -> Result<(), LaneError> {
        let size = devices.memory().map_err(qmp)?;
        let status = read(&format!("/proc/{}/status", self.pid))?;
        let there = kib(&status, "VmRSS:") * 1024;
        let free = kib(&read("/proc/meminfo")?, "MemAvailable:") * 1024;
        let more = size.saturating_sub(there);
        if more > free - free / 100 * MIN_FREE_PERCENT {
            let mib = |bytes: u64| bytes >> 20;
            return Err(LaneError::Unusable(format!(
                "a VF would pin all {} MiB of its memory, of which {} MiB are not there yet, and the host has {} MiB free",
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

/// A number in a file of lines such as `VmRSS:  123 kB`.
fn kib(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|l| l.strip_prefix(key));
    let number = line.and_then(|l| l.split_whitespace().next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Whether VFIO has interrupts of this device.
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
                LaneError::Unusable("it has no free PCIe root port to plug a VF into".into())
            })?,
        };
        let mut device = json!({
            "driver": "vfio-pci", "host": vf.address, "id": id_of(vf), "bus": port,
        });
        if let Some(nic) = self.nic(&mut devices)?.filter(|n| n.failover) {
            if !devices.has_standby(&nic.id).map_err(qmp)? {
                let what = "its net_failover is not there, or not yet";
                return Err(LaneError::Unusable(what.into()));
            }
            device["failover_pair_id"] = nic.id.into();
        }
        steps.time("plug", || devices.plug(device)).map_err(qmp)?;
        match devices.has(&id_of(vf)).map_err(qmp)? {
            true => Ok(()),
            false => Err(LaneError::Qmp("it keeps the VF back from the guest".into())),
        }
    }

    fn fail_over(&mut self, _: &VfDevice) -> Result<Failover, LaneError> {
        if self.is_gone() {
            return Ok(Failover::Done);
        }
        if let Some(port) = &self.agent
            && agent::ask(port, self.mac, VfAction::Release).is_ok()
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
                steps.add("stops", begin.elapsed());
                released();
            }
            let now = Instant::now();
            if now >= next {
                next = now + DEVICE_POLL_INTERVAL;
                match devices.has(&id) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) if self.is_gone() => break,
                    // It was asked to let go, and does so whether the monitor answers or not.
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
            Some(port) => agent::ask(port, self.mac, VfAction::Use).map_err(|e| {
                LaneError::Unusable(format!("its agent does not take the VF again: {e}"))
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
    fn interrupts_of_a_vf_are_told_from_others() {
        let text = " 45:  12  0  PCI-MSIX-0000:01:10.0  0-edge  vfio-msix[0](0000:01:10.0)\n\
                    \x2046:  12  0  PCI-MSIX-0000:01:10.2  0-edge  vf01102-rx-0\n";
        assert!(has_interrupts(text, "0000:01:10.0"));
        assert!(!has_interrupts(text, "0000:01:10.2"));
        assert!(!has_interrupts("", "0000:01:10.0"));
    }

    #[test]
    fn memory_is_read_by_its_key() {
        let text = "VmPeak:\t 900 kB\nVmRSS:\t     123 kB\n";
        assert_eq!(kib(text, "VmRSS:"), 123);
        assert_eq!(kib(text, "VmSwap:"), 0);
    }

    #[test]
    fn a_guest_whose_process_is_gone_has_given_its_vf_back() {
        let mut guest = QemuGuest {
            qmp: "/nowhere".into(),
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

    /// A monitor that says of each connection's `qom-list`s whether the VF is there, and hangs up after the last one.
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
            pid,
            start_time: proc::stat(pid).unwrap().unwrap().start_time,
            mac: [2, 0, 0, 0, 0, 1],
            port: None,
            agent: None,
            release_timeout,
        }
    }

    #[test]
    fn a_monitor_that_hangs_up_once_the_guest_was_asked_is_asked_again() {
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
    fn a_guest_that_refuses_keeps_its_vf_and_nothing_was_released() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor = monitor(&path, vec![vec![true; 10_000]]);
        let mut guest = running(path, Duration::from_millis(200));
        let mut released = 0;
        let said = guest
            .unplug(&vf(), &mut || released += 1, &mut StepTimes::default())
            .unwrap_err();
        assert!(matches!(said, LaneError::ReleaseTimeout { .. }), "{said}");
        assert_eq!(released, 0);
        monitor.join().unwrap();
    }

    #[test]
    fn a_guest_that_dies_once_it_was_asked_has_given_its_vf_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let monitor = monitor(&path, vec![vec![true, true, true]]);
        let mut process = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = process.id();
        let mut guest = QemuGuest {
            pid,
            start_time: proc::stat(pid).unwrap().unwrap().start_time,
            ..running(path, Duration::from_secs(20))
        };
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
