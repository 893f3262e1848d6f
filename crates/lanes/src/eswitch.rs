// SPDX-License-Identifier: Apache-2.0
//! The switch inside an SR-IOV NIC (eswitch), as the driver of the PF configures it.

use std::io;

use viola_netdev::{Mac, VfChange};

use crate::error::LaneError;
use crate::format_mac;

/// Settings of a VF while a guest has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VfSettings {
    /// VLAN, 0 for none.
    pub vlan: u32,
    /// Transmit limit in Mbit/s, 0 for none.
    pub max_rate: u32,
}

/// The switch inside a NIC.
pub trait Eswitch {
    /// Delivers packets for this address to this VF, which may send with this address only.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    fn assign(&self, vf: u32, mac: Mac, terms: VfSettings) -> Result<(), LaneError>;

    /// Has the bridge forget that the guest is at its paravirtual port: the guest sends by its VF
    /// from now on.
    fn forget_port(&self, mac: Mac);

    /// Delivers packets for this address to the paravirtual path again. The VF gets an address that
    /// no guest uses, so that its holder receives nothing, whatever address it asks for.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    fn withdraw(&self, vf: u32, mac: Mac) -> Result<(), LaneError>;

    /// Removes the address of a VF that no guest has any more.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    fn clear(&self, vf: u32) -> Result<(), LaneError>;

    /// Takes a VF's link down for the guest that has it, or lets it follow the NIC's link. Returns
    /// `false` if this NIC cannot do that.
    fn set_link(&self, vf: u32, up: bool) -> bool;
}

/// The switch of a PF, configured by rtnetlink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PfEswitch {
    /// Name of the PF's interface.
    pub pf: String,
    /// Whether the PF is the uplink of the bridge with the paravirtual NICs. The PF must then
    /// receive the packets for those NICs.
    pub uplink: bool,
    /// The bridge port of the guest's paravirtual NIC, if known.
    pub port: Option<String>,
}

impl PfEswitch {
    fn index(&self) -> Result<u32, LaneError> {
        let link = viola_netdev::link(&self.pf).map_err(LaneError::net(&self.pf))?;
        Ok(link.index)
    }

    /// Tells the NIC that the owner of this address is behind the PF.
    ///
    /// # Errors
    /// [`LaneError::Net`].
    pub fn route_to_pf(&self, mac: Mac) -> Result<(), LaneError> {
        let set = viola_netdev::set_nic_fdb(self.index()?, mac, true);
        set.map_err(LaneError::net(format!("{}: {}", self.pf, format_mac(mac))))
    }

    /// Tells the bridge that the guest is at its paravirtual port, or no longer. A bridge with an
    /// old entry sends the guest's packets to the wrong port, or drops those that arrive at another
    /// one. The bridge would learn from the guest's broadcasts, but not every guest sends any, and
    /// not every port learns. So a failure is no error.
    fn set_bridge_port(&self, mac: Mac, present: bool) {
        let port = self.port.as_deref().map(viola_netdev::link);
        if let Some(Ok(port)) = port {
            let _ = viola_netdev::set_bridge_fdb(port.index, mac, present);
        }
    }

    fn set(&self, pf: u32, vf: u32, what: VfChange, word: &str) -> Result<(), LaneError> {
        let what = viola_netdev::set_vf(pf, vf, what);
        what.map_err(LaneError::net(format!("{}: {word} of VF {vf}", self.pf)))
    }

    /// Sets what not every driver can set: an unsupported setting is an error only if the operator
    /// asked for it.
    fn set_if_supported(
        &self,
        pf: u32,
        vf: u32,
        what: VfChange,
        word: &str,
        required: bool,
    ) -> Result<(), LaneError> {
        match self.set(pf, vf, what, word) {
            Err(LaneError::Net { source, .. }) if !required && is_unsupported(&source) => Ok(()),
            done => done,
        }
    }
}

/// A locally administered address that no guest has, a different one for each VF.
fn unused_mac(pf: u32, vf: u32) -> Mac {
    let [_, _, _, pf] = pf.to_be_bytes();
    let [_, _, high, low] = vf.to_be_bytes();
    [0x02, b'v', b'f', pf, high, low]
}

fn is_unsupported(e: &io::Error) -> bool {
    // EOPNOTSUPP, ENOTSUPP (only in the kernel's own headers), EINVAL
    e.kind() == io::ErrorKind::Unsupported || matches!(e.raw_os_error(), Some(95 | 524 | 22))
}

impl Eswitch for PfEswitch {
    fn assign(&self, vf: u32, mac: Mac, terms: VfSettings) -> Result<(), LaneError> {
        let pf = self.index()?;
        if self.uplink {
            let removed = viola_netdev::set_nic_fdb(pf, mac, false);
            removed.map_err(LaneError::net(format!("{}: {}", self.pf, format_mac(mac))))?;
        }
        self.set(pf, vf, VfChange::Mac(Some(mac)), "address")?;
        self.set(pf, vf, VfChange::SpoofCheck(true), "spoof check")?;
        // the link may be down from the last revocation; not every NIC can change it
        let _ = viola_netdev::set_vf(pf, vf, VfChange::Link(true));
        self.set_if_supported(pf, vf, VfChange::Trust(false), "trust", false)?;
        let (vlan, rate) = (terms.vlan, terms.max_rate);
        self.set_if_supported(pf, vf, VfChange::Vlan(vlan), "VLAN", vlan != 0)?;
        self.set_if_supported(pf, vf, VfChange::MaxRate(rate), "rate", rate != 0)
    }

    fn forget_port(&self, mac: Mac) {
        self.set_bridge_port(mac, false);
    }

    fn withdraw(&self, vf: u32, mac: Mac) -> Result<(), LaneError> {
        self.set_bridge_port(mac, true);
        let pf = self.index()?;
        // Not "no address": the VF's driver could then choose one, and a bond that releases the VF
        // gives it the guest's again. Packets for the guest would go to the VF and be lost.
        let unused = unused_mac(pf, vf);
        self.set(pf, vf, VfChange::Mac(Some(unused)), "address")?;
        match self.uplink {
            true => self.route_to_pf(mac),
            false => Ok(()),
        }
    }

    fn clear(&self, vf: u32) -> Result<(), LaneError> {
        let pf = self.index()?;
        self.set(pf, vf, VfChange::Mac(None), "address")
    }

    fn set_link(&self, vf: u32, up: bool) -> bool {
        let Ok(pf) = self.index() else { return false };
        viola_netdev::set_vf(pf, vf, VfChange::Link(up)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn withdrawn_vfs_have_distinct_unicast_addresses() {
        let macs = [
            unused_mac(3, 0),
            unused_mac(3, 1),
            unused_mac(3, 256),
            unused_mac(4, 0),
        ];
        for (i, mac) in macs.iter().enumerate() {
            assert_eq!(mac[0] & 3, 2, "locally administered, not a group");
            assert!(!macs[..i].contains(mac));
        }
    }
}
