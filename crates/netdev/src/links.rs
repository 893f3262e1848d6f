// SPDX-License-Identifier: Apache-2.0
//! Interfaces of the calling thread's network namespace: their state, and changes by index.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoBond, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo,
    LinkMessage,
};

use crate::netlink::{create, dump, execute, look_up};

/// Longest name of an interface, in bytes (`IFNAMSIZ` without the end of the string).
pub const MAX_IFNAME_BYTES: usize = libc::IFNAMSIZ - 1;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Traffic of an interface since it was created. `rx` is what the interface itself received.
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
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its Ethernet address, if it has one.
    pub mac: Option<Mac>,
    /// Whether an administrator has taken it up.
    pub up: bool,
    /// Whether it is up and can carry packets.
    pub running: bool,
    /// Index of the bridge or bond that it is a port of.
    pub master: Option<u32>,
    /// PCI address of its device (`0000:01:10.0`). Kernels before 5.14 do not report it.
    pub device: Option<String>,
    /// `bond`, `veth`...; none for hardware.
    pub kind: Option<String>,
    /// Its alias (`ip link set DEV alias TEXT`).
    pub alias: Option<String>,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// For a bond: index of the active port.
    pub active: Option<u32>,
    /// For a veth: index of the other end, if that is in the same namespace.
    pub peer: Option<u32>,
    /// Its traffic since it was created.
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
        let mut peer_elsewhere = false;
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
                LinkAttribute::Link(other) if *other != link.index => link.peer = Some(*other),
                LinkAttribute::LinkNetNsId(_) => peer_elsewhere = true,
                _ => {}
            }
        }
        if peer_elsewhere {
            link.peer = None;
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
/// The kernel's.
pub fn links() -> io::Result<Vec<Link>> {
    let answers = dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
    let link = |answer: &RouteNetlinkMessage| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(Link::read(link)),
        _ => None,
    };
    Ok(answers.iter().filter_map(link).collect())
}

/// The interface of this name.
///
/// # Errors
/// The kernel's; ENODEV if there is no interface of this name.
pub fn link(name: &str) -> io::Result<Link> {
    Ok(Link::read(&query(name, &[])?))
}

/// Asks for an interface, with these further parts of the answer.
pub(crate) fn query(name: &str, more: &[LinkExtentMask]) -> io::Result<LinkMessage> {
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

/// Creates two interfaces that are the ends of one cable (veth(4)); the second one in another
/// network namespace, if one is given.
///
/// # Errors
/// The kernel's; ERANGE if a name is longer than [`MAX_IFNAME_BYTES`].
pub fn add_veth(name: &str, peer: &str, netns: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut other = LinkMessage::default();
    other.attributes = vec![LinkAttribute::IfName(peer.to_owned())];
    let netns = netns.map(|netns| LinkAttribute::NetNsFd(netns.as_raw_fd()));
    other.attributes.extend(netns);
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(other))),
        ]),
    ];
    create(RouteNetlinkMessage::NewLink(link))
}

/// Deletes an interface that is not hardware.
///
/// # Errors
/// The kernel's.
pub fn delete_link(index: u32) -> io::Result<()> {
    execute(
        RouteNetlinkMessage::DelLink(message_for(index, Vec::new())),
        0,
    )
}

/// Takes an interface up or down.
///
/// # Errors
/// The kernel's.
pub fn set_up(index: u32, up: bool) -> io::Result<()> {
    set_flags(index, LinkFlags::Up, up)
}

/// Sets or clears these flags.
pub(crate) fn set_flags(index: u32, flags: LinkFlags, on: bool) -> io::Result<()> {
    let mut message = message_for(index, Vec::new());
    message.header.change_mask = flags;
    if on {
        message.header.flags = flags;
    }
    execute(RouteNetlinkMessage::SetLink(message), 0)
}

/// Makes an interface a port of a bridge or bond; `None` takes it out.
///
/// # Errors
/// The kernel's.
pub fn set_master(index: u32, master: Option<u32>) -> io::Result<()> {
    change(index, vec![LinkAttribute::Controller(master.unwrap_or(0))])
}

/// Sets the Ethernet address of an interface.
///
/// # Errors
/// The kernel's.
pub fn set_mac(index: u32, mac: Mac) -> io::Result<()> {
    change(index, vec![LinkAttribute::Address(mac.to_vec())])
}

/// Sets the alias of an interface (`ip link set DEV alias TEXT`); an empty text removes it.
///
/// # Errors
/// The kernel's.
pub fn set_alias(index: u32, alias: &str) -> io::Result<()> {
    change(index, vec![LinkAttribute::IfAlias(alias.to_owned())])
}

/// Moves an interface into another network namespace and renames it. The interface is down there.
///
/// # Errors
/// The kernel's.
pub fn move_to(index: u32, netns: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let name = LinkAttribute::IfName(name.to_owned());
    change(index, vec![LinkAttribute::NetNsFd(netns.as_raw_fd()), name])
}

/// Changes attributes of an interface.
pub(crate) fn change(index: u32, attributes: Vec<LinkAttribute>) -> io::Result<()> {
    let message = message_for(index, attributes);
    execute(RouteNetlinkMessage::SetLink(message), 0)
}

pub(crate) fn message_for(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Netns;
    use std::os::fd::AsFd;

    /// Runs a test in a network namespace of its own; skips it where that is not allowed.
    pub(crate) fn in_new_netns(work: impl FnOnce(&Netns) + Send) {
        match Netns::new() {
            Ok(netns) => netns.run(|| work(&netns)).unwrap(),
            Err(e) => eprintln!("skipped: no network namespace: {e}"),
        }
    }

    #[test]
    fn an_interface_is_created_changed_moved_and_deleted() {
        in_new_netns(|_| {
            add_veth("a0", "b0", None).unwrap();
            let (a, b) = (link("a0").unwrap(), link("b0").unwrap());
            assert!(!a.up && a.kind.as_deref() == Some("veth") && a.mac.is_some());
            assert_eq!((a.peer, b.peer), (Some(b.index), Some(a.index)));
            set_up(a.index, true).unwrap();
            set_up(b.index, true).unwrap();
            let up = link("a0").unwrap();
            assert!(up.up && up.running, "{up:?}");
            set_mac(b.index, [0x52, 0x54, 0, 0, 0, 9]).unwrap();
            assert_eq!(link("b0").unwrap().mac, Some([0x52, 0x54, 0, 0, 0, 9]));
            assert_eq!(a.alias, None);
            set_alias(a.index, "a word").unwrap();
            assert_eq!(link("a0").unwrap().alias.as_deref(), Some("a word"));
            set_alias(a.index, "").unwrap();
            assert_eq!(link("a0").unwrap().alias, None);
            let other = Netns::new().unwrap();
            move_to(b.index, other.as_fd(), "eth7").unwrap();
            assert!(link("b0").is_err());
            assert_eq!(link("a0").unwrap().peer, None);
            let there = other.run(|| links().unwrap()).unwrap();
            let moved = there.iter().find(|l| l.name == "eth7").unwrap();
            assert!(!moved.up);
            assert_eq!(moved.mac, Some([0x52, 0x54, 0, 0, 0, 9]));
            delete_link(a.index).unwrap();
            assert!(links().unwrap().iter().all(|l| l.name != "a0"));
        });
    }

    #[test]
    fn a_missing_interface_is_enodev_and_a_long_name_is_refused() {
        let e = link("no-such-link").unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ENODEV), "{e}");
        assert!(set_up(0x7fff_0000, true).is_err());
        in_new_netns(|_| {
            assert!(add_veth("fifteen-byte-na", "b0", None).is_ok());
            assert!(add_veth("sixteen-byte-nam", "c0", None).is_err());
        });
    }
}
