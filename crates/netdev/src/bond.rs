// SPDX-License-Identifier: Apache-2.0
//! Bonds (active-backup), and what an interface's addresses and routes need to go over to another one.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_REQUEST, NetlinkPayload};
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    BondMode, InfoBond, InfoData, InfoKind, LinkAttribute, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily as Family, RecvFlags, SocketFlags, SocketType};

use crate::links::{Link, Mac, change};
use crate::netlink::{ask, dump, request};

/// Group of a route socket that hears of interfaces.
const LINKS: u32 = 1;
/// Announcements of itself that a bond makes after it has gone over to another port.
const ANNOUNCED: u8 = 2;

/// Makes a bond, which sends and receives by one of its ports, and looks at their links every `miimon` ms. It has no port,
/// and is down.
///
/// # Errors
/// What the kernel answers; EOPNOTSUPP where it has no bonds.
pub fn add_bond(name: &str, mac: Mac, mtu: u32, miimon: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Address(mac.to_vec()),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bond),
            LinkInfo::Data(InfoData::Bond(vec![
                InfoBond::Mode(BondMode::ActiveBackup),
                InfoBond::MiiMon(miimon),
                InfoBond::NumPeerNotif(ANNOUNCED),
            ])),
        ]),
    ];
    ask(RouteNetlinkMessage::NewLink(link))
}

/// Writes a word beside an interface (`ip link set DEV alias WORD`), for whoever looks; empty: takes it away.
///
/// # Errors
/// What the kernel answers.
pub fn set_alias(index: u32, alias: &str) -> io::Result<()> {
    change(index, vec![LinkAttribute::IfAlias(alias.to_owned())])
}

/// Takes an interface that is not hardware away.
///
/// # Errors
/// What the kernel answers.
pub fn remove(index: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = index;
    plain(RouteNetlinkMessage::DelLink(link))
}

fn plain(message: RouteNetlinkMessage) -> io::Result<()> {
    match request(message, NLM_F_REQUEST | NLM_F_ACK)? {
        NetlinkPayload::Error(e) if e.code.is_some() => Err(e.to_io()),
        _ => Ok(()),
    }
}

/// Makes a route beside one to the same place by another interface.
fn append(route: RouteMessage) -> io::Result<()> {
    let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_APPEND;
    match request(RouteNetlinkMessage::NewRoute(route), flags)? {
        NetlinkPayload::Error(e) if e.code.is_some() => Err(e.to_io()),
        _ => Ok(()),
    }
}

/// Addresses and routes of an interface that somebody gave it: not those that the kernel makes by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Belongings {
    addresses: Vec<AddressMessage>,
    routes: Vec<RouteMessage>,
}

impl Belongings {
    /// Those of an interface.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn of(index: u32) -> io::Result<Self> {
        let mut all = Self::default();
        for answer in dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))? {
            if let RouteNetlinkMessage::NewAddress(address) = answer
                && address.header.index == index
                && address.header.scope != AddressScope::Link
            {
                all.addresses.push(address);
            }
        }
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut message = RouteMessage::default();
            message.header.address_family = family;
            let answers = match dump(RouteNetlinkMessage::GetRoute(message)) {
                // a kernel without IPv6
                Err(_) if family == AddressFamily::Inet6 => Vec::new(),
                answers => answers?,
            };
            for answer in answers {
                if let RouteNetlinkMessage::NewRoute(route) = answer
                    && goes_by(&route, index)
                    && is_given(&route.header)
                {
                    all.routes.push(route);
                }
            }
        }
        Ok(all)
    }

    /// The addresses.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, u8)> {
        self.addresses.iter().filter_map(|a| {
            let local = a.attributes.iter().find_map(|a| match a {
                AddressAttribute::Local(ip) => Some(*ip),
                _ => None,
            });
            let any = a.attributes.iter().find_map(|a| match a {
                AddressAttribute::Address(ip) => Some(*ip),
                _ => None,
            });
            Some((local.or(any)?, a.header.prefix_len))
        })
    }

    /// How many routes there are.
    #[must_use]
    pub fn routes(&self) -> usize {
        self.routes.len()
    }

    /// Takes the addresses away from an interface; their routes go with them.
    ///
    /// # Errors
    /// What the kernel answers; an address that is gone is none.
    pub fn take_from(&self, index: u32) -> io::Result<()> {
        for address in &self.addresses {
            let mut message = AddressMessage::default();
            message.header.family = address.header.family;
            message.header.prefix_len = address.header.prefix_len;
            message.header.index = index;
            let is_part = |a: &&AddressAttribute| {
                matches!(a, AddressAttribute::Local(_) | AddressAttribute::Address(_))
            };
            message.attributes = address.attributes.iter().filter(is_part).cloned().collect();
            match plain(RouteNetlinkMessage::DelAddress(message)) {
                Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
                done => done?,
            }
        }
        Ok(())
    }

    /// Gives all of them to an interface, which has to be up; who has them now keeps them. What it has already is left.
    ///
    /// # Errors
    /// What the kernel answers to the first address, or else to the first route, that it did not take; all others are there.
    pub fn give_to(&self, index: u32) -> io::Result<()> {
        let mut failed = None;
        for address in &self.addresses {
            match ask(RouteNetlinkMessage::NewAddress(moved_address(
                address, index,
            ))) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    failed.get_or_insert(e);
                }
                _ => {}
            }
        }
        // a route's gateway may be reached by another of them: as long as there is progress
        let mut left: Vec<RouteMessage> =
            self.routes.iter().map(|r| moved_route(r, index)).collect();
        loop {
            let before = left.len();
            let mut last = None;
            left.retain(|route| match append(route.clone()) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    last.get_or_insert(e);
                    true
                }
                _ => false,
            });
            match last {
                Some(e) if left.len() == before => return Err(failed.unwrap_or(e)),
                Some(_) => {}
                None => return failed.map_or(Ok(()), Err),
            }
        }
    }
}

fn goes_by(route: &RouteMessage, index: u32) -> bool {
    let by = |a: &RouteAttribute| matches!(a, RouteAttribute::Oif(oif) if *oif == index);
    route.attributes.iter().any(by)
}

/// Whether a route is somebody's wish, and not what the kernel has made of an address or a router's word.
fn is_given(header: &RouteHeader) -> bool {
    let made = matches!(
        header.protocol,
        RouteProtocol::Kernel | RouteProtocol::Ra | RouteProtocol::IcmpRedirect
    );
    header.kind == RouteType::Unicast && !made
}

fn moved_address(address: &AddressMessage, index: u32) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = address.header.family;
    message.header.prefix_len = address.header.prefix_len;
    message.header.scope = address.header.scope;
    message.header.index = index;
    // it was this machine's before
    message.header.flags = AddressHeaderFlags::Nodad;
    let goes_along = |a: &&AddressAttribute| {
        matches!(
            a,
            AddressAttribute::Local(_)
                | AddressAttribute::Address(_)
                | AddressAttribute::Broadcast(_)
                | AddressAttribute::CacheInfo(_)
        )
    };
    message.attributes = address
        .attributes
        .iter()
        .filter(goes_along)
        .cloned()
        .collect();
    message
}

fn moved_route(route: &RouteMessage, index: u32) -> RouteMessage {
    let mut message = route.clone();
    // what the kernel says of its state is no part of it
    message.header.flags &= RouteFlags::Onlink;
    message
        .attributes
        .retain(|a| !matches!(a, RouteAttribute::CacheInfo(_)));
    for attribute in &mut message.attributes {
        if let RouteAttribute::Oif(oif) = attribute {
            *oif = index;
        }
    }
    message
}

/// A socket that is readable when an interface of the calling thread's network namespace has come, gone or changed.
#[derive(Debug)]
pub struct LinkNews(OwnedFd);

impl LinkNews {
    /// Begins to listen.
    ///
    /// # Errors
    /// What the kernel answers.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::RAW;
        // none is number 0, which is NETLINK_ROUTE
        let socket = rustix::net::socket_with(Family::NETLINK, kind, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, LINKS))?;
        Ok(Self(socket))
    }

    /// Takes all news there are; whether there were any.
    pub fn take(&self) -> bool {
        let mut any = false;
        loop {
            match rustix::net::recv(&self.0, &mut [0; 8192], RecvFlags::empty()) {
                Err(rustix::io::Errno::AGAIN) => return any,
                Err(rustix::io::Errno::INTR) => {}
                // some were lost, which is news as well
                Err(rustix::io::Errno::NOBUFS) => any = true,
                Ok(_) => any = true,
                Err(_) => return any,
            }
        }
    }
}

impl AsFd for LinkNews {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The ports of a bond or bridge.
pub fn ports_of(links: &[Link], master: u32) -> impl Iterator<Item = &Link> {
    links.iter().filter(move |l| l.master == Some(master))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Netns, add_address, add_veth, link, links, set_up};
    use netlink_packet_route::route::{RouteAddress, RouteScope};
    use std::net::Ipv4Addr;

    fn in_netns(work: impl FnOnce() + Send) {
        match Netns::new() {
            Ok(netns) => netns.run(work).unwrap(),
            Err(e) => eprintln!("left out: no network namespace: {e}"),
        }
    }

    fn route(index: u32, to: Ipv4Addr, prefix: u8, by: Option<Ipv4Addr>) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.address_family = AddressFamily::Inet;
        route.header.destination_prefix_length = prefix;
        route.header.table = RouteHeader::RT_TABLE_MAIN;
        route.header.protocol = RouteProtocol::Static;
        route.header.kind = RouteType::Unicast;
        if by.is_none() {
            route.header.scope = RouteScope::Link;
        }
        route.attributes = vec![
            RouteAttribute::Destination(RouteAddress::Inet(to)),
            RouteAttribute::Oif(index),
        ];
        let by = by.map(|by| RouteAttribute::Gateway(RouteAddress::Inet(by)));
        route.attributes.extend(by);
        route
    }

    #[test]
    fn addresses_and_routes_go_over_with_those_that_need_others_first() {
        in_netns(|| {
            add_veth("a0", "b0", None).unwrap();
            let (a, b) = (link("a0").unwrap().index, link("b0").unwrap().index);
            for index in [a, b] {
                set_up(index, true).unwrap();
            }
            add_address(a, IpAddr::V4(Ipv4Addr::new(10, 7, 0, 2)), 24).unwrap();
            let far = Ipv4Addr::new(10, 99, 0, 1);
            // the last one's gateway is reached by the one before
            for (to, prefix, by) in [
                (
                    Ipv4Addr::new(10, 99, 0, 0),
                    24,
                    Some(Ipv4Addr::new(10, 7, 0, 1)),
                ),
                (far, 32, None),
                (Ipv4Addr::new(192, 168, 0, 0), 16, Some(far)),
            ] {
                let message = route(a, to, prefix, by);
                ask(RouteNetlinkMessage::NewRoute(message)).unwrap();
            }
            let had = Belongings::of(a).unwrap();
            let address = (IpAddr::V4(Ipv4Addr::new(10, 7, 0, 2)), 24);
            assert_eq!(had.addresses().collect::<Vec<_>>(), [address]);
            assert_eq!(had.routes(), 3);
            // both have them for a moment, so that at no moment nobody has
            had.give_to(b).unwrap();
            had.take_from(a).unwrap();
            set_up(a, false).unwrap();
            set_up(a, true).unwrap();
            assert_eq!(Belongings::of(a).unwrap(), Belongings::default());
            let has = Belongings::of(b).unwrap();
            assert_eq!(has.addresses().collect::<Vec<_>>(), [address]);
            assert_eq!(has.routes(), 3);
            // what is there already is no error
            had.give_to(b).unwrap();
        });
    }

    #[test]
    fn an_alias_is_read_back_and_news_of_links_are_heard() {
        in_netns(|| {
            let news = LinkNews::open().unwrap();
            assert!(!news.take());
            add_veth("a0", "b0", None).unwrap();
            assert!(news.take());
            let a = link("a0").unwrap();
            assert_eq!(a.alias, None);
            set_alias(a.index, "a word").unwrap();
            news.take();
            set_up(a.index, true).unwrap();
            assert!(news.take());
            assert_eq!(link("a0").unwrap().alias.as_deref(), Some("a word"));
            set_alias(a.index, "").unwrap();
            assert_eq!(link("a0").unwrap().alias, None);
            remove(a.index).unwrap();
            assert!(
                links()
                    .unwrap()
                    .iter()
                    .all(|l| l.kind.as_deref() != Some("veth"))
            );
        });
    }
}
