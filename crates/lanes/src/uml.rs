// SPDX-License-Identifier: Apache-2.0
//! A User Mode Linux guest: a second vector device, by its console, is bound to the interface that the VF has on the host.
//!
//! Nothing is passed through: UML has no PCI. The guest's packets still go through its kernel's process, but then straight to
//! the VF, past the bridge and the paravirtual NIC's tap; what is gained is the bridge's work, and the VF's share of the NIC.
//! The two devices have one address, and are one bond in the guest by viola-agent, whose line is the guest's [`LINE`]. A
//! vector device that is up cannot be taken out, so without an agent such a guest keeps its VF until it takes the device
//! down by itself.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use viola_host::uml::console::{Console, ConsoleError};
use viola_host::{Tid, proc};
use viola_netdev::{Mac, NetDevices, inside, set_alias, set_up};
use viola_proto::lanes::guest::Wish;

use crate::attach::{Attachment, GoesOver, Presence, VfAt};
use crate::error::LaneError;
use crate::mac_text;
use crate::netns::{find, name_of, prepare, ready};
use crate::steps::Steps;
use crate::voice;

/// The guest's serial line by which its agent is asked, where it is a terminal (`ssl3=pts`).
const LINE: &str = "ssl3";
/// How long its kernel may take to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long its agent may take to have the line open again.
const OPENS: Duration = Duration::from_secs(1);
/// Time between two tries to take the device out.
const STEP: Duration = Duration::from_millis(20);

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
    pub patience: Duration,
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
        inside(netns.as_fd(), || console.command(text, ANSWER))?
    }

    /// What its kernel says of the line, which has to be a terminal.
    fn line(&self) -> Result<String, String> {
        let said = self.command(&format!("config {LINE}"));
        let said = said.map_err(|e| e.to_string())?;
        match said.trim().starts_with("pts") {
            true => Ok(said),
            false => Err(format!(
                "its {LINE} is no terminal for viola-agent (ssl3=pts)"
            )),
        }
    }

    /// Asks its agent. The terminal is another one each time that the agent has it open anew, which it has a moment after
    /// whoever asked before has gone.
    fn ask(&self, wish: Wish) -> Result<(), String> {
        let end = Instant::now() + OPENS;
        loop {
            let asked = match terminal(&self.line()?) {
                Some(path) => voice::ask(path, self.mac, wish).map_err(|e| e.to_string()),
                None => Err("its agent does not run".into()),
            };
            if asked.is_ok() || Instant::now() > end {
                return asked;
            }
            std::thread::sleep(STEP);
        }
    }

    /// What stands beside a VF's interface while this guest has it.
    fn mark(&self) -> String {
        format!("viola: {} {} vec{}", self.pid, self.start_time, self.unit)
    }

    /// Whether it has the VF.
    fn has(&self, vf: &VfAt) -> Result<bool, LaneError> {
        let found = find(&vf.address).map_err(LaneError::net(&vf.address))?;
        Ok(found.is_some_and(|l| l.alias == Some(self.mark())))
    }

    /// The VF's interface is nobody's, and down.
    fn put_away(&self, vf: &VfAt) -> Result<(), LaneError> {
        let changed = |what| LaneError::net(format!("{}: {what}", vf.address));
        if let Some(found) = find(&vf.address).map_err(changed("its interface"))? {
            set_up(found.index, false).map_err(changed("down"))?;
            set_alias(found.index, "").map_err(changed("alias"))?;
        }
        Ok(())
    }
}

fn console(e: ConsoleError) -> LaneError {
    LaneError::Unfit(e.to_string())
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

    fn prepare(&mut self, vf: &VfAt, mac: Mac, steps: &mut Steps) -> Result<(), LaneError> {
        prepare(vf, mac, steps)
    }

    fn plug(&mut self, vf: &VfAt, steps: &mut Steps) -> Result<(), LaneError> {
        self.line().map_err(LaneError::Unfit)?;
        let ours = ready(vf, self.mac, steps)?;
        let changed = |what| LaneError::net(format!("{}: {what}", ours.name));
        let mark = self.mark();
        set_alias(ours.index, &mark).map_err(changed("alias"))?;
        // the host's own network has nothing to do with it
        let up = || NetDevices::here()?.up_for_packet_socket(&name_of(&vf.address));
        let up = steps.time("up", up).map_err(changed("up"));
        let (unit, name, mac) = (self.unit, &ours.name, mac_text(self.mac));
        let text =
            format!("config vec{unit}:transport=raw,ifname={name},depth=128,gro=1,mac={mac}");
        let plugged = up.and_then(|()| {
            let said = steps.time("plug", || self.command(&text));
            said.map(drop).map_err(console)
        });
        plugged.inspect_err(|_| {
            // what went wrong first is what is told
            let _ = self.put_away(vf);
        })
    }

    fn fail_over(&mut self, _: &VfAt) -> Result<GoesOver, LaneError> {
        if self.is_gone() {
            return Ok(GoesOver::Now);
        }
        Ok(match self.ask(Wish::Leave) {
            Ok(()) => GoesOver::Now,
            Err(_) => GoesOver::WithTheVf,
        })
    }

    fn unplug(
        &mut self,
        vf: &VfAt,
        released: &mut dyn FnMut(),
        steps: &mut Steps,
    ) -> Result<(), LaneError> {
        let text = format!("remove vec{}", self.unit);
        let end = Instant::now() + self.patience;
        let begin = Instant::now();
        while self.has(vf)? && !self.is_gone() {
            match self.command(&text) {
                Ok(_) => break,
                // it is up in the guest, or the guest is busy, or about to be gone
                Err(_) if Instant::now() < end => {}
                Err(ConsoleError::Refused(_)) => {
                    let seconds = self.patience.as_secs();
                    return Err(LaneError::Kept { seconds });
                }
                Err(_) if self.is_gone() => break,
                Err(e) => return Err(console(e)),
            }
            std::thread::sleep(STEP);
        }
        steps.add("unplug", begin.elapsed());
        released();
        steps.time("down", || self.put_away(vf))
    }

    fn resume(&mut self, _: &VfAt) -> Result<(), LaneError> {
        self.ask(Wish::Use)
            .map_err(|e| LaneError::Unfit(format!("it does not take the VF again: {e}")))
    }

    fn presence(&mut self, vf: &VfAt) -> Result<Presence, LaneError> {
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
            patience: Duration::from_secs(1),
        };
        let vf = VfAt {
            pf: crate::Pf::new("p0"),
            index: 0,
            address: "0000:01:10.0".into(),
        };
        assert_eq!(guest.fail_over(&vf).unwrap(), GoesOver::Now);
        assert_eq!(guest.presence(&vf).unwrap(), Presence::Absent);
        let mut released = 0;
        let mut steps = Steps::default();
        guest
            .unplug(&vf, &mut || released += 1, &mut steps)
            .unwrap();
        assert_eq!(released, 1);
    }
}
