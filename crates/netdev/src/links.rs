// SPDX-License-Identifier: Apache-2.0
//! Interfaces of the calling thread's network namespace, by rtnetlink: what they are, and what is changed of them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkPayload};
use netlink_packet_route::link::{
    InfoBond, InfoData, InfoKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netlink::{ask, dump, look_up, request};

/// An Ethernet address.
pub type Mac = [u8; 6];

/// What went through an interface since it was made, as its own side counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
}

impl Counters {
    /// Packets in both directions.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.rx_packets.saturating_add(self.tx_packets)
    }

    /// Bytes in both directions.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.rx_bytes.saturating_add(self.tx_bytes)
    }
}

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its Ethernet address, if it has one.
    pub mac: Option<Mac>,
    /// Whether it was taken up.
    pub up: bool,
    /// Whether it is up and can carry packets.
    pub running: bool,
    /// The bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// Address of its device on its bus (`0000:01:10.0`).
    pub device: Option<String>,
    /// `bond`, `veth`...; none for hardware.
    pub kind: Option<String>,
    /// A word that somebody wrote beside it (`ip link set DEV alias WORD`).
    pub alias: Option<String>,
    /// Its largest packet, bytes.
    pub mtu: u32,
    /// For a bond: the port that it sends by.
    pub active: Option<u32>,
    /// What went through it.
    pub counters: Counters,
}

impl Link {
    fn read(message: &LinkMessage) -> Self {
        let flags = message.header.flags;
        let mut link = Self {
            index: message.header.index,
            up: flags.contains(LinkFlags::Up),
            running: flags.contains(LinkFlags::Up | LinkFlags::Running),
            ..Self::default()
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Address(bytes) => link.mac = bytes.as_slice().try_into().ok(),
                LinkAttribute::Controller(master) => {
                    link.master = Some(*master).filter(|m| *m != 0);
                }
                LinkAttribute::IfAlias(alias) => {
                    link.alias = Some(alias.clone()).filter(|a| !a.is_empty());
                }
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::ParentDevName(name) => link.device = Some(name.clone()),
                LinkAttribute::Stats64(s) => {
                    link.counters = Counters {
                        rx_packets: s.rx_packets,
                        rx_bytes: s.rx_bytes,
                        tx_packets: s.tx_packets,
                        tx_bytes: s.tx_bytes,
                    };
                }
                LinkAttribute::LinkInfo(infos) => link.read_info(infos),
                _ => {}
            }
        }
        link
    }

    fn read_info(&mut self, infos: &[LinkInfo]) {
        for info in infos {
            match info {
                LinkInfo::Kind(kind) => self.kind = Some(kind.to_string()),
                LinkInfo::Data(InfoData::Bond(bond)) => {
                    self.active = bond.iter().find_map(|b| match b {
                        InfoBond::ActivePort(port) if *port != 0 => Some(*port),
                        _ => None,
                    });
                }
                _ => {}
            }
        }
    }
}

/// All interfaces.
///
/// # Errors
/// What the kernel answers.
pub fn links() -> io::Result<Vec<Link>> {
    let answers = dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let link = |answer: &RouteNetlinkMessage| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(Link::read(link)),
        _ => None,
    };
    Ok(answers.iter().filter_map(link).collect())
}

/// One interface, by its name.
///
/// # Errors
/// What the kernel answers; ENODEV where there is none of this name.
pub fn link(name: &str) -> io::Result<Link> {
    Ok(Link::read(&question(name, &[])?))
}

pub(crate) fn question(name: &str, more: &[LinkExtentMask]) -> io::Result<LinkMessage> {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
    if !more.is_empty() {
        let more = LinkAttribute::ExtMask(more.to_vec());
        message.attributes.push(more);
    }
    match look_up(RouteNetlinkMessage::GetLink(message))? {
        RouteNetlinkMessage::NewLink(found) => Ok(found),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Takes an interface up or down.
///
/// # Errors
/// What the kernel answers.
pub fn set_up(index: u32, up: bool) -> io::Result<()> {
    let mut message = about(index, Vec::new());
    message.header.change_mask = LinkFlags::Up;
    if up {
        message.header.flags = LinkFlags::Up;
    }
    set(RouteNetlinkMessage::SetLink(message))
}

/// Makes an interface a port of a bridge or bond, or of none.
///
/// # Errors
/// What the kernel answers.
pub fn set_master(index: u32, master: Option<u32>) -> io::Result<()> {
    change(index, vec![LinkAttribute::Controller(master.unwrap_or(0))])
}

/// Gives an interface another Ethernet address.
///
/// # Errors
/// What the kernel answers.
pub fn set_address_of(index: u32, mac: Mac) -> io::Result<()> {
    change(index, vec![LinkAttribute::Address(mac.to_vec())])
}

/// Moves an interface into another network namespace, where it has this name, and is down.
///
/// # Errors
/// What the kernel answers.
pub fn move_to(index: u32, netns: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let name = LinkAttribute::IfName(name.to_owned());
    change(index, vec![LinkAttribute::NetNsFd(netns.as_raw_fd()), name])
}

/// Tells a bond which of its ports to send and receive by.
///
/// # Errors
/// What the kernel answers; EINVAL for a port that is not ready.
pub fn set_active_port(bond: u32, port: u32) -> io::Result<()> {
    let info = LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Bond),
        LinkInfo::Data(InfoData::Bond(vec![InfoBond::ActivePort(port)])),
    ]);
    set(RouteNetlinkMessage::NewLink(about(bond, vec![info])))
}

/// Tells a NIC's own switch that the owner of an Ethernet address is behind this interface, or no longer. What is so
/// already is no error.
///
/// # Errors
/// What the kernel answers.
pub fn set_behind(index: u32, mac: Mac, behind: bool) -> io::Result<()> {
    let message = owner_at(index, mac, NeighbourState::Permanent, NeighbourFlags::Own);
    let (done, already) = if behind {
        let done = ask(RouteNetlinkMessage::NewNeighbour(message));
        (done, io::ErrorKind::AlreadyExists)
    } else {
        let done = set(RouteNetlinkMessage::DelNeighbour(message));
        (done, io::ErrorKind::NotFound)
    };
    match done {
        Err(e) if e.kind() == already => Ok(()),
        done => done,
    }
}

/// Tells a bridge that the owner of an Ethernet address is at this port of it, until it hears the owner elsewhere, or no
/// longer. What is so already is no error.
///
/// # Errors
/// What the kernel answers; EOPNOTSUPP for what is no port of a bridge, EPERM for one without a link.
pub fn set_at_port(port: u32, mac: Mac, there: bool) -> io::Result<()> {
    // as if it had been learned, so that it is moved and forgotten as well
    let (state, flags) = (NeighbourState::Reachable, NeighbourFlags::Controller);
    let message = owner_at(port, mac, state, flags);
    let plain = NLM_F_REQUEST | NLM_F_ACK;
    if there {
        let message = RouteNetlinkMessage::NewNeighbour(message);
        return answered(request(message, plain | NLM_F_CREATE | NLM_F_REPLACE)?);
    }
    match set(RouteNetlinkMessage::DelNeighbour(message)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// An entry of a forwarding table: the owner of an Ethernet address is at this interface.
fn owner_at(
    index: u32,
    mac: Mac,
    state: NeighbourState,
    flags: NeighbourFlags,
) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index;
    message.header.state = state;
    message.header.flags = flags;
    message.attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
    message
}

pub(crate) fn change(index: u32, attributes: Vec<LinkAttribute>) -> io::Result<()> {
    set(RouteNetlinkMessage::SetLink(about(index, attributes)))
}

fn about(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

fn set(message: RouteNetlinkMessage) -> io::Result<()> {
    answered(request(message, NLM_F_REQUEST | NLM_F_ACK)?)
}

fn answered(answer: NetlinkPayload<RouteNetlinkMessage>) -> io::Result<()> {
    match answer {
        NetlinkPayload::Error(e) if e.code.is_some() => Err(e.to_io()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Netns, add_veth};
    use std::os::fd::AsFd;

    /// In a namespace of its own; `None` where that is not allowed.
    fn alone<T: Send>(work: impl FnOnce(&Netns) -> T + Send) -> Option<T> {
        let netns = match Netns::new() {
            Ok(netns) => netns,
            Err(e) => {
                eprintln!("left out: no network namespace: {e}");
                return None;
            }
        };
        Some(netns.run(|| work(&netns)).unwrap())
    }

    #[test]
    fn an_interface_is_seen_changed_and_moved() {
        alone(|_| {
            add_veth("a0", "b0", None).unwrap();
            let (a, b) = (link("a0").unwrap(), link("b0").unwrap());
            assert!(!a.up && a.kind.as_deref() == Some("veth") && a.mac.is_some());
            set_up(a.index, true).unwrap();
            set_up(b.index, true).unwrap();
            let up = link("a0").unwrap();
            assert!(up.up && up.running, "{up:?}");
            set_address_of(b.index, [0x52, 0x54, 0, 0, 0, 9]).unwrap();
            assert_eq!(link("b0").unwrap().mac, Some([0x52, 0x54, 0, 0, 0, 9]));
            let other = Netns::new().unwrap();
            move_to(b.index, other.as_fd(), "eth7").unwrap();
            assert!(link("b0").is_err());
            let there = other.run(|| links().unwrap()).unwrap();
            let moved = there.iter().find(|l| l.name == "eth7").unwrap();
            assert!(!moved.up);
            assert_eq!(moved.mac, Some([0x52, 0x54, 0, 0, 0, 9]));
            assert!(links().unwrap().iter().any(|l| l.name == "a0"));
        });
    }

    /// Ports at which a bridge looks for the owner of an address.
    fn looked_for(mac: Mac) -> Vec<u32> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Bridge;
        let all = dump(RouteNetlinkMessage::GetNeighbour(message)).unwrap();
        let wanted = NeighbourAttribute::LinkLayerAddress(mac.to_vec());
        let port = |m: RouteNetlinkMessage| match m {
            RouteNetlinkMessage::NewNeighbour(m) if m.attributes.contains(&wanted) => {
                Some(m.header.ifindex)
            }
            _ => None,
        };
        all.into_iter().filter_map(port).collect()
    }

    #[test]
    fn a_bridge_is_told_where_somebody_is_and_forgets_it() {
        alone(|_| {
            let devices = crate::NetDevices::here().unwrap();
            devices.add_bridge("br0").unwrap();
            add_veth("a0", "b0", None).unwrap();
            add_veth("c0", "d0", None).unwrap();
            for port in ["a0", "c0"] {
                devices.add_port("br0", port).unwrap();
            }
            // a port without a link learns nothing, and is told nothing
            for name in ["br0", "a0", "b0", "c0", "d0"] {
                devices.up(name).unwrap();
            }
            let [a, b, c] = ["a0", "b0", "c0"].map(|name| link(name).unwrap().index);
            let mac = [0x52, 0x54, 0, 0, 9, 2];
            set_at_port(a, mac, false).unwrap();
            assert_eq!(looked_for(mac), []);
            set_at_port(a, mac, true).unwrap();
            set_at_port(a, mac, true).unwrap();
            assert_eq!(looked_for(mac), [a]);
            set_at_port(c, mac, true).unwrap();
            assert_eq!(looked_for(mac), [c]);
            // it is elsewhere already
            set_at_port(a, mac, false).unwrap();
            assert_eq!(looked_for(mac), [c]);
            set_at_port(c, mac, false).unwrap();
            assert_eq!(looked_for(mac), []);
            assert!(set_at_port(b, mac, true).is_err(), "b0 is no port");
        });
    }

    #[test]
    fn an_interface_that_is_not_there_is_an_error_that_says_so() {
        let e = link("no-such-link").unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENODEV), "{e}");
        assert!(set_up(0x7fff_0000, true).is_err());
    }
}
