// SPDX-License-Identifier: Apache-2.0
//! Settings and counters that the physical function (PF) of an SR-IOV NIC keeps of its virtual
//! functions (VFs): Ethernet address, VLAN, checks, rate.

use std::io;

use netlink_packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkMessage, LinkVfInfo, VfInfo, VfInfoLinkState, VfInfoMac,
    VfInfoRate, VfInfoSpoofCheck, VfInfoTrust, VfInfoVlan, VfLinkState, VfStats,
};

use crate::links::{Counters, Mac, change, query};

/// State of a VF as its PF reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VfState {
    /// Its number, from 0.
    pub index: u32,
    /// The address that the PF has set. `None` (all zeros): the VF's driver chooses its own.
    pub mac: Option<Mac>,
    /// VLAN of its packets, 0 for none.
    pub vlan: u32,
    /// Whether the NIC drops packets with another sender address.
    pub spoof_check: bool,
    /// Transmit limit in Mbit/s, 0 for none.
    pub max_rate: u32,
    /// Its traffic as the NIC counts it; all zeros if the driver does not report it.
    pub counters: Counters,
}

/// A setting of a VF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VfChange {
    /// Its Ethernet address, which the holder of the VF cannot change; `None` removes the filter.
    Mac(Option<Mac>),
    /// Its VLAN, 0 for none.
    Vlan(u32),
    /// Whether it may send with its own address only.
    SpoofCheck(bool),
    /// Whether it may change its address and receive all packets.
    Trust(bool),
    /// Transmit limit in Mbit/s, 0 for none.
    MaxRate(u32),
    /// Whether its link follows the NIC's (`true`) or is down.
    Link(bool),
}

/// All VFs of a PF, ordered by number.
///
/// # Errors
/// The kernel's.
pub fn vfs(pf: &str) -> io::Result<Vec<VfState>> {
    let found = query(pf, &[LinkExtentMask::Vf])?;
    let mut vfs: Vec<VfState> = infos(&found).iter().map(read).collect();
    vfs.sort_by_key(|vf| vf.index);
    Ok(vfs)
}

/// Changes one setting of a VF; `pf` is the index of the PF's interface.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::Unsupported`] if the driver has no such setting.
pub fn set_vf(pf: u32, vf: u32, what: VfChange) -> io::Result<()> {
    let info = match what {
        VfChange::Mac(mac) => VfInfo::Mac(VfInfoMac::new(vf, &mac.unwrap_or_default())),
        VfChange::Vlan(vlan) => VfInfo::Vlan(VfInfoVlan::new(vf, vlan, 0)),
        VfChange::SpoofCheck(on) => VfInfo::SpoofCheck(VfInfoSpoofCheck::new(vf, on)),
        VfChange::Trust(on) => VfInfo::Trust(VfInfoTrust::new(vf, on)),
        VfChange::MaxRate(mbit) => VfInfo::Rate(VfInfoRate::new(vf, 0, mbit)),
        VfChange::Link(auto) => {
            let state = match auto {
                true => VfLinkState::Auto,
                false => VfLinkState::Disable,
            };
            VfInfo::LinkState(VfInfoLinkState::new(vf, state))
        }
    };
    let list = LinkAttribute::VfInfoList(vec![LinkVfInfo(vec![info])]);
    change(pf, vec![list])
}

fn infos(message: &LinkMessage) -> &[LinkVfInfo] {
    let list = message.attributes.iter().find_map(|a| match a {
        LinkAttribute::VfInfoList(list) => Some(list.as_slice()),
        _ => None,
    });
    list.unwrap_or_default()
}

fn read(info: &LinkVfInfo) -> VfState {
    let mut vf = VfState::default();
    for what in &info.0 {
        match what {
            VfInfo::Mac(m) => {
                vf.index = m.vf_id;
                let mac: Mac = m.mac[..6].try_into().unwrap_or_default();
                vf.mac = Some(mac).filter(|mac| *mac != Mac::default());
            }
            VfInfo::Vlan(v) => vf.vlan = v.vlan_id,
            VfInfo::SpoofCheck(s) => vf.spoof_check = s.enabled,
            VfInfo::Rate(r) => vf.max_rate = r.max_tx_rate,
            VfInfo::Stats(stats) => vf.counters = counters(stats),
            _ => {}
        }
    }
    vf
}

fn counters(stats: &[VfStats]) -> Counters {
    let mut counters = Counters::default();
    for stat in stats {
        match stat {
            VfStats::RxPackets(n) => counters.rx_packets = *n,
            VfStats::RxBytes(n) => counters.rx_bytes = *n,
            VfStats::TxPackets(n) => counters.tx_packets = *n,
            VfStats::TxBytes(n) => counters.tx_bytes = *n,
            _ => {}
        }
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_vfs_is_read() {
        let mut message = LinkMessage::default();
        let info = |vf, mac: &[u8]| {
            LinkVfInfo(vec![
                VfInfo::Mac(VfInfoMac::new(vf, mac)),
                VfInfo::Vlan(VfInfoVlan::new(vf, 7, 0)),
                VfInfo::SpoofCheck(VfInfoSpoofCheck::new(vf, true)),
                VfInfo::Rate(VfInfoRate::new(vf, 0, 1000)),
                VfInfo::Stats(vec![VfStats::RxPackets(3), VfStats::TxBytes(4)]),
            ])
        };
        let mac = [2, 0, 0, 0, 0, 1];
        let list = vec![info(0, &[0; 6]), info(1, &mac)];
        message.attributes.push(LinkAttribute::VfInfoList(list));
        let seen: Vec<VfState> = infos(&message).iter().map(read).collect();
        assert_eq!((seen[0].index, seen[0].mac), (0, None));
        assert_eq!((seen[1].index, seen[1].mac), (1, Some(mac)));
        assert_eq!(
            (seen[1].vlan, seen[1].spoof_check, seen[1].max_rate),
            (7, true, 1000)
        );
        assert_eq!(
            (seen[1].counters.packets(), seen[1].counters.bytes()),
            (3, 4)
        );
    }

    #[test]
    fn an_interface_without_vfs_has_none() {
        assert_eq!(vfs("lo").unwrap(), []);
    }
}
