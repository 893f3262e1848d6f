// SPDX-License-Identifier: Apache-2.0
//! A User Mode Linux guest. Its management console plugs a second vector device, which sends and
//! receives by the VF's interface on the host.
//!
//! UML has no PCI, so nothing is passed through. The guest's packets still go through its kernel's
//! process, but then straight to the VF, past the bridge and the tap of the paravirtual NIC: this
//! saves the bridge's work and gives the guest the VF's share of the NIC. Both devices have one
//! address; viola-agent makes one bond of them in the guest. The host reaches the agent by the line
//! `ssl3`. A vector device that is up cannot be removed: a guest without the agent keeps
//! its VF until it takes the device down.

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
use crate::answers;
use crate::attach::{Attachment, Failover, Presence};
use crate::error::LaneError;
use crate::format_mac;
use crate::pool::VfDevice;
use crate::steps::StepTimes;
use crate::vf_interface::{self, find, name_of};

/// Serial line of the agent, if it is a terminal (`ssl3=pts`).
const AGENT_LINE: &str = "ssl3";
/// Time limit for the kernel's answer on the console.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the agent to open its line again after an earlier client.
const AGENT_OPEN_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of tries to reach the agent or to remove the device.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A User Mode Linux guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UmlGuest {
    /// Folder of its umid, as a path that this process can open.
    pub folder: PathBuf,
    /// Its main process.
    pub pid: Tid,
    /// Start time of that process, in clock ticks after boot.
    pub start_time: u64,
    /// Address of the NIC that the VF replaces.
    pub mac: Mac,
    /// Number of the vector device that uses the VF (`vecN`).
    pub unit: u32,
    /// Time limit for the guest to release a VF.
    pub release_timeout: Duration,
}

impl UmlGuest {
    fn is_gone(&self) -> bool {
        let alive = |stat: &proc::Stat| stat.start_time == self.start_time && !stat.is_dead();
        !matches!(proc::stat(self.pid), Ok(Some(stat)) if alive(&stat))
    }

    /// Runs a command on its console, from the guest's network namespace. Another process reads the answer.
    fn command(&self, text: &str) -> Result<String, ConsoleError> {
        let console = Console::of(&self.folder);
        let netns = File::open(format!("/proc/{}/ns/net", self.pid))?;
        let answers_to = in_netns(netns.as_fd(), || console.send(text))??;
        answers::of_console(answers_to, CONSOLE_TIMEOUT)
    }

    /// The console's description of the agent's line, which must be a terminal.
    fn agent_line(&self) -> Result<String, String> {
        let answer = self.command(&format!("config {AGENT_LINE}"));
        let answer = answer.map_err(|e| e.to_string())?;
        match answer.trim().starts_with("pts") {
            true => Ok(answer),
            false => Err(format!(
                "its {AGENT_LINE} is no terminal for viola-agent; start it with ssl3=pts"
            )),
        }
    }

    /// Asks its agent. The agent opens a new terminal after each client, so the path is read anew
    /// for each try.
    fn ask(&self, action: VfAction) -> Result<(), String> {
        let end = Instant::now() + AGENT_OPEN_TIMEOUT;
        loop {
            let asked = match terminal(&self.agent_line()?) {
                Some(number) => self.ask_at(number, action),
                None => Err("its viola-agent does not run".into()),
            };
            if asked.is_ok() || Instant::now() > end {
                return asked;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Asks its agent at terminal `number`, which has to be one that the guest's process made.
    fn ask_at(&self, number: u32, action: VfAction) -> Result<(), String> {
        let own = proc::terminals(self.pid).map_err(|e| e.to_string())?;
        if !own.contains(&number) {
            return Err(format!(
                "its {AGENT_LINE} names terminal {number}, which is not its own"
            ));
        }
        let path = format!("/proc/{}/root/dev/pts/{number}", self.pid);
        agent::ask(Path::new(&path), None, self.mac, action).map_err(|e| e.to_string())
    }

    /// Alias of a VF's interface while this guest has the VF.
    fn alias(&self) -> String {
        format!("viola: {} {} vec{}", self.pid, self.start_time, self.unit)
    }

    /// Whether this guest has the VF, by the alias.
    fn has(&self, vf: &VfDevice) -> Result<bool, LaneError> {
        let found = find(&vf.address).map_err(LaneError::net(&vf.address))?;
        Ok(found.is_some_and(|l| l.alias == Some(self.alias())))
    }

    /// Takes the VF's interface down and removes the alias.
    fn release_interface(&self, vf: &VfDevice) -> Result<(), LaneError> {
        let changed = |what| LaneError::net(format!("{}: {what}", vf.address));
        if let Some(found) = find(&vf.address).map_err(changed("its interface"))? {
            set_up(found.index, false).map_err(changed("down"))?;
            set_alias(found.index, "").map_err(changed("alias"))?;
        }
        Ok(())
    }
}

fn console_error(e: ConsoleError) -> LaneError {
    LaneError::Unusable(e.to_string())
}

/// The number in `pts:/dev/pts/7`.
fn terminal(answer: &str) -> Option<u32> {
    let number = answer.trim().strip_prefix("pts:/dev/pts/")?;
    let is_number = number.bytes().all(|b| b.is_ascii_digit());
    is_number.then(|| number.parse().ok())?
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
        let alias = self.alias();
        set_alias(ours.index, &alias).map_err(changed("alias"))?;
        // the host's network stack does not use the interface
        let up = || device::up_for_packet_socket(&name_of(&vf.address));
        let up = steps.time("up", up).map_err(changed("up"));
        let (unit, name, mac) = (self.unit, &ours.name, format_mac(self.mac));
        let text =
            format!("config vec{unit}:transport=raw,ifname={name},depth=128,gro=1,mac={mac}");
        let plugged = up.and_then(|()| {
            let plugged = steps.time("plug", || self.command(&text));
            plugged.map(drop).map_err(console_error)
        });
        plugged.inspect_err(|_| {
            // the caller gets the first error
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
                // the device is up in the guest, or the guest is busy or about to end
                Err(_) if Instant::now() < end => {}
                Err(ConsoleError::Refused(_)) => {
                    let seconds = self.release_timeout.as_secs();
                    return Err(LaneError::ReleaseTimeout { seconds });
                }
                Err(_) if self.is_gone() => break,
                Err(e) => return Err(console_error(e)),
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        steps.add("unplug", begin.elapsed());
        released();
        steps.time("down", || self.release_interface(vf))
    }

    fn resume(&mut self, _: &VfDevice) -> Result<(), LaneError> {
        self.ask(VfAction::Use)
            .map_err(|e| LaneError::Unusable(format!("its agent does not use the VF again: {e}")))
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
    fn only_a_terminal_is_accepted_as_agent_line() {
        assert_eq!(terminal("pts:/dev/pts/7\n"), Some(7));
        for other in [
            "null",
            "fd:9",
            "pts:/etc/passwd",
            "pts:/dev/pts/../x",
            "pts:/dev/pts/+7",
            "",
        ] {
            assert_eq!(terminal(other), None, "{other}");
        }
    }

    #[test]
    fn a_dead_guest_has_no_vf() {
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
