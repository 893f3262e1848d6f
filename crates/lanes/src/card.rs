// SPDX-License-Identifier: Apache-2.0
//! The switch inside of an SR-IOV NIC, as its PF's driver lets it be set.

use std::io;

use viola_netdev::{Mac, VfChange};

use crate::error::LaneError;
use crate::mac_text;

/// What holds for a VF while a guest has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Terms {
    /// VLAN, 0 for none.
    pub vlan: u32,
    /// Most that it may send, Mbit/s, 0 for no limit.
    pub max_rate: u32,
}

/// The switch.
pub trait Card {
    /// The packets for this address go to this VF, and it may send as nobody else.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    fn admit(&self, vf: u32, mac: Mac, terms: Terms) -> Result<(), LaneError>;

    /// The guest sends by its VF from now on: the bridge looks for it elsewhere than at its paravirtual path.
    fn went(&self, mac: Mac);

    /// They go to the paravirtual path from now on, and nothing else to the VF, whatever address whoever still has it
    /// asks for.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    fn withdraw(&self, vf: u32, mac: Mac) -> Result<(), LaneError>;

    /// Nobody has the VF any more: the switch knows no address of it.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    fn clear(&self, vf: u32) -> Result<(), LaneError>;

    /// Lets a VF's link be down for whoever holds it, or as it is. `false`: this NIC cannot.
    fn link(&self, vf: u32, up: bool) -> bool;
}

/// That of a PF, by netlink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PfCard {
    /// Name of the PF's interface.
    pub pf: String,
    /// Whether the PF is the way out of the bridge with the paravirtual NICs, so that it has to take their packets.
    pub uplink: bool,
    /// The bridge's port with the guest's paravirtual path, where that is known.
    pub port: Option<String>,
}

impl PfCard {
    fn index(&self) -> Result<u32, LaneError> {
        let link = viola_netdev::link(&self.pf).map_err(LaneError::net(&self.pf))?;
        Ok(link.index)
    }

    /// The owner of this address is behind the PF.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    pub fn behind(&self, mac: Mac) -> Result<(), LaneError> {
        let behind = viola_netdev::set_behind(self.index()?, mac, true);
        behind.map_err(LaneError::net(format!("{}: {}", self.pf, mac_text(mac))))
    }

    /// Tells the bridge that the guest is at its paravirtual path, or no longer: a bridge that still looks for it there
    /// brings it nothing, and one that looks for it at the PF or its way out drops what comes from there. It would learn
    /// by what the guest sends to all, which not each guest does, and not each port learns by; so it is no error either
    /// where this cannot be done.
    fn at_port(&self, mac: Mac, there: bool) {
        let port = self.port.as_deref().map(viola_netdev::link);
        if let Some(Ok(port)) = port {
            let _ = viola_netdev::set_at_port(port.index, mac, there);
        }
    }

    fn set(&self, pf: u32, vf: u32, what: VfChange, word: &str) -> Result<(), LaneError> {
        let what = viola_netdev::set_vf(pf, vf, what);
        what.map_err(LaneError::net(format!("{}: {word} of VF {vf}", self.pf)))
    }

    /// What not every driver can, and nobody asked for, is no error.
    fn may(
        &self,
        pf: u32,
        vf: u32,
        what: VfChange,
        word: &str,
        asked: bool,
    ) -> Result<(), LaneError> {
        match self.set(pf, vf, what, word) {
            Err(LaneError::Net { source, .. }) if !asked && cannot(&source) => Ok(()),
            done => done,
        }
    }
}

/// An address that no guest has, for a VF on its way back: locally administered, another one for each VF.
fn nobody(pf: u32, vf: u32) -> Mac {
    let [_, _, _, pf] = pf.to_be_bytes();
    let [_, _, high, low] = vf.to_be_bytes();
    [0x02, b'v', b'f', pf, high, low]
}

fn cannot(e: &io::Error) -> bool {
    // "not supported" has two numbers, one of which only the kernel itself knows
    e.kind() == io::ErrorKind::Unsupported || matches!(e.raw_os_error(), Some(95 | 524 | 22))
}

impl Card for PfCard {
    fn admit(&self, vf: u32, mac: Mac, terms: Terms) -> Result<(), LaneError> {
        let pf = self.index()?;
        if self.uplink {
            let behind = viola_netdev::set_behind(pf, mac, false);
            behind.map_err(LaneError::net(format!("{}: {}", self.pf, mac_text(mac))))?;
        }
        self.set(pf, vf, VfChange::Mac(Some(mac)), "address")?;
        self.set(pf, vf, VfChange::SpoofCheck(true), "sender's check")?;
        // it may have been down; not every NIC knows that
        let _ = viola_netdev::set_vf(pf, vf, VfChange::Link(true));
        self.may(pf, vf, VfChange::Trust(false), "trust", false)?;
        let (vlan, rate) = (terms.vlan, terms.max_rate);
        self.may(pf, vf, VfChange::Vlan(vlan), "VLAN", vlan != 0)?;
        self.may(pf, vf, VfChange::MaxRate(rate), "rate", rate != 0)
    }

    fn went(&self, mac: Mac) {
        self.at_port(mac, false);
    }

    fn withdraw(&self, vf: u32, mac: Mac) -> Result<(), LaneError> {
        self.at_port(mac, true);
        let pf = self.index()?;
        // Not none: a VF without an address of the PF's chooses its own, and a bond that lets it go gives it the guest's
        // again, whose packets would be lost there.
        let nobody = nobody(pf, vf);
        self.set(pf, vf, VfChange::Mac(Some(nobody)), "address")?;
        match self.uplink {
            true => self.behind(mac),
            false => Ok(()),
        }
    }

    fn clear(&self, vf: u32) -> Result<(), LaneError> {
        let pf = self.index()?;
        self.set(pf, vf, VfChange::Mac(None), "address")
    }

    fn link(&self, vf: u32, up: bool) -> bool {
        let Ok(pf) = self.index() else { return false };
        viola_netdev::set_vf(pf, vf, VfChange::Link(up)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_vf_on_its_way_back_has_an_address_of_its_own_for_one_receiver() {
        let macs = [nobody(3, 0), nobody(3, 1), nobody(3, 256), nobody(4, 0)];
        for (i, mac) in macs.iter().enumerate() {
            assert_eq!(mac[0] & 3, 2, "locally administered, not a group");
            assert!(!macs[..i].contains(mac));
        }
    }
}
