// SPDX-License-Identifier: Apache-2.0
//! Active-backup bonds (kernel Documentation/networking/bonding).

use std::io;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    BondMode, InfoBond, InfoData, InfoKind, LinkAttribute, LinkInfo, LinkMessage,
};

use crate::links::{Link, Mac, message_for};
use crate::netlink::{create, execute};

/// Gratuitous ARPs that a bond sends after a failover (`num_peer_notif`).
const PEER_NOTIFICATIONS: u8 = 2;

/// Creates an active-backup bond without ports. The bond is down. It checks the links of its ports
/// every `miimon` ms.
///
/// # Errors
/// The kernel's; EOPNOTSUPP if it was built without bonding.
pub fn add_bond(name: &str, mac: Mac, mtu: u32, miimon: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Address(mac.to_vec()),
        LinkAttribute::Mtu(mtu),
        bond_info(vec![
            InfoBond::Mode(BondMode::ActiveBackup),
            InfoBond::MiiMon(miimon),
            InfoBond::NumPeerNotif(PEER_NOTIFICATIONS),
        ]),
    ];
    create(RouteNetlinkMessage::NewLink(link))
}

/// Sets the port by which a bond sends and receives.
///
/// # Errors
/// The kernel's; EINVAL if the port is not ready.
pub fn set_active_port(bond: u32, port: u32) -> io::Result<()> {
    let info = bond_info(vec![InfoBond::ActivePort(port)]);
    execute(
        RouteNetlinkMessage::NewLink(message_for(bond, vec![info])),
        0,
    )
}

fn bond_info(settings: Vec<InfoBond>) -> LinkAttribute {
    LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Bond),
        LinkInfo::Data(InfoData::Bond(settings)),
    ])
}

/// The ports of a bond or bridge.
pub fn ports_of(links: &[Link], master: u32) -> impl Iterator<Item = &Link> {
    links.iter().filter(move |l| l.master == Some(master))
}
