// SPDX-License-Identifier: Apache-2.0
//! A User Mode Linux guest: a second vector device, by its console, is bound to the interface that the VF has on the host.
//!
//! Nothing is passed through: UML has no PCI. The guest's packets still go through its kernel's process, but then straight to
//! the VF, past the bridge and the paravirtual NIC's tap; what is gained is the bridge's work, and the VF's share of the NIC.
//! The two devices have one address, and are one bond in the guest by viola-agent, whose line is the guest's [`AGENT_LINE`]. A
//! vector device that is up cannot be taken out, so without an agent such a guest keeps its VF until it takes the device
//! down by itself.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viola_host::uml::console::{Console, ConsoleError};
use viola_host::{Tid, proc};
use viola_netdev::{Mac, device, in_netns, set_alias, set_up};
use viola_proto::lanes::guest::VfAction;

use crate::agent;
use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::format_mac;
use crate::pool::VfDevice;
use crate::steps::StepTimes;
use crate::vf_interface::{self, find, name_of};

/// The guest's serial line by which its agent is asked, where it is a terminal (`ssl3=pts`).
const AGENT_LINE: &str = "ssl3";
/// How long its kernel may take to answer.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long its agent may take to have the line open again.
const AGENT_OPEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two tries to take the device out.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Such a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UmlGuest {
    /// Folder of its umid, as this program can open it.
    pub folder: PathBuf,
    /// Its main process.
    pub pid: Tid,
    /// When that began, clock ticks after boot.
    pub start_time: u64,
    /// Address of the NIC that the VF is to stand in for.
    pub mac: Mac,
    /// Number of the vector device that the VF becomes.
    pub unit: u32,
    /// How long it may take to give a VF back.
    #[serde(rename = "patience")]
    pub release_timeout: Duration,
}

impl UmlGuest {
    fn is_gone(&self) -> bool {
        let alive = |stat: &proc::Stat| stat.start_time == self.start_time && !stat.is_dead();
        !matches!(proc::stat(self.pid), Ok(Some(stat)) if alive(&stat))
    }

    /// Gives its kernel a command, from its own network namespace.
    fn command(&self, text: &str) -> Result<String, ConsoleError> {
        let console = Console::of(&self.folder);
        let netns = File::open(format!("/proc/{}/ns/net", self.pid))?;
        in_netns(netns.as_fd(), || console.command(text, CONSOLE_TIMEOUT))?
    }

    /// What its kernel says of the line, which has to be a terminal.
    fn agent_line(&self) -> Result<String, String> {
        let said = self.command(&format!("config {AGENT_LINE}"));
        let said = said.map_err(|e| e.to_string())?;
        match said.trim().starts_with("pts") {
            true => Ok(said),
            false => Err(format!(
                "its {AGENT_LINE} is no terminal for viola-agent (ssl3=pts)"
            )),
        }
    }

    /// Asks its agent. The terminal is another one each time that the agent has it open anew, which it has a moment after
    /// whoever asked before has gone.
    fn ask(&self, action: VfAction) -> Result<(), String> {
        let end = Instant::now() + AGENT_OPEN_TIMEOUT;
        loop {
            let asked = match terminal(&self.agent_line()?) {
                Some(path) => agent::ask(path, self.mac, action).map_err(|e| e.to_string()),
                None => Err("its agent does not run".into()),
            };
            if asked.is_ok() || Instant::now() > end {
                return asked;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// What stands beside a VF's interface while this guest has it.
    fn mark(&self) -> String {
        format!("viola: {} {} vec{}", self.pid, self.start_time, self.unit)
    }

    /// Whether it has the VF.
    fn has(&self, vf: &VfDevice) -> Result<bool, LaneError> {
        let found = find(&vf.address).map_err(LaneError::net(&vf.address))?;
        Ok(found.is_some_and(|l| l.alias == Some(self.mark())))
    }

    /// The VF's interface is nobody's, and down.
    fn release_interface(&self, vf: &VfDevice) -> Result<(), LaneError> {
        let changed = |what| LaneError::net(format!("{}: {what}", vf.address));
        if let Some(found) = find(&vf.address).map_err(changed("its interface"))? {
            set_up(found.index, false).map_err(changed("down"))?;
            set_alias(found.index, "").map_err(changed("alias"))?;
        }
        Ok(())
    }
}

fn console(e: ConsoleError) -> LaneError {
    LaneError::Unusable(e.to_string())
}

/// `pts:/dev/pts/7`
fn terminal(said: &str) -> Option<&Path> {
    let path = said.trim().strip_prefix("pts:")?;
    let number = path.strip_prefix("/dev/pts/")?;
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| Path::new(path))
}

impl Attachment for UmlGuest {
    fn mac(&mut self) -> Result<Mac, LaneError> {
        Ok(self.mac)
    }

    fn prepare(&mut self, vf: &VfDevice, mac: Mac, steps: &mut StepTimes) -> Result<(), LaneError> {
        vf_interface::prepare(vf, mac, steps)
    }

    fn plug(&mut self, vf: &VfDevice, steps: &mut StepTimes) -> Result<(), LaneError> {
        self.agent_line().map_err(LaneError::Unusable)?;
        let ours = vf_interface::acquire(vf, self.mac, steps)?;
        let changed = |what| LaneError::net(format!("{}: {what}", ours.name));
        let mark = self.mark();
        set_alias(ours.index, &mark).map_err(changed("alias"))?;
        // the host's own network has nothing to do with it
        let up = || device::up_for_packet_socket(&name_of(&vf.address));
        let up = steps.time("up", up).map_err(changed("up"));
        let (unit, name, mac) = (self.unit, &ours.name, format_mac(self.mac));
        let text =
            format!("config vec{unit}:transport=raw,ifname={name},depth=128,gro=1,mac={mac}");
        let plugged = up.and_then(|()| {
            let said = steps.time("plug", || self.command(&text));
            said.map(drop).map_err(console)
        });
        plugged.inspect_err(|_| {
            // what went wrong first is what is told
            let _ = self.release_interface(vf);
        })
    }

    fn fail_over(&mut self, _: &VfDevice) -> Result<Failover, LaneError> {
        if self.is_gone() {
            return Ok(Failover::Done);
        }
        Ok(match self.ask(VfAction::Release) {
            Ok(()) => Failover::Done,
            Err(_) => Failover::OnUnplug,
        })
    }

    fn unplug(
        &mut self,
        vf: &VfDevice,
        released: &mut dyn FnMut(),
        steps: &mut StepTimes,
    ) -> Result<(), LaneError> {
        let text = format!("remove vec{}", self.unit);
        let end = Instant::now() + self.release_timeout;
        let begin = Instant::now();
        while self.has(vf)? && !self.is_gone() {
            match self.command(&text) {
                Ok(_) => break,
                // it is up in the guest, or the guest is busy, or about to be gone
                Err(_) if Instant::now() < end => {}
                Err(ConsoleError::Refused(_)) => {
                    let seconds = self.release_timeout.as_secs();
                    return Err(LaneError::ReleaseTimeout { seconds });
                }
                Err(_) if self.is_gone() => break,
                Err(e) => return Err(console(e)),
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        steps.add("unplug", begin.elapsed());
        released();
        steps.time("down", || self.release_interface(vf))
    }

    fn resume(&mut self, _: &VfDevice) -> Result<(), LaneError> {
        self.ask(VfAction::Use)
            .map_err(|e| LaneError::Unusable(format!("it does not take the VF again: {e}")))
    }

    fn presence(&mut self, vf: &VfDevice) -> Result<Presence, LaneError> {
        Ok(match self.has(vf)? && !self.is_gone() {
            true => Presence::InUse,
            false => Presence::Absent,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_terminal_is_a_way_to_its_agent() {
        assert_eq!(terminal("pts:/dev/pts/7\n"), Some(Path::new("/dev/pts/7")));
        for other in ["null", "fd:9", "pts:/etc/passwd", "pts:/dev/pts/../x", ""] {
            assert_eq!(terminal(other), None, "{other}");
        }
    }

    #[test]
    fn a_guest_that_is_gone_has_no_vf() {
        let mut guest = UmlGuest {
            folder: "/nowhere".into(),
            pid: u32::MAX,
            start_time: 0,
            mac: [2, 0, 0, 0, 0, 1],
            unit: 1,
            release_timeout: Duration::from_secs(1),
        };
        let vf = VfDevice {
            pf: crate::Pf::new("p0"),
            index: 0,
            address: "0000:01:10.0".into(),
        };
        assert_eq!(guest.fail_over(&vf).unwrap(), Failover::Done);
        assert_eq!(guest.presence(&vf).unwrap(), Presence::Absent);
        let mut released = 0;
        let mut steps = StepTimes::default();
        guest
            .unplug(&vf, &mut || released += 1, &mut steps)
            .unwrap();
        assert_eq!(released, 1);
    }
}
