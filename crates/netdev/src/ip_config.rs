// SPDX-License-Identifier: Apache-2.0
//! Addresses and routes of an interface, and moving them to another one.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE};
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netlink::{create, dump, execute};

/// Network mask of a prefix length, 0 to 32.
pub fn netmask(prefix: u8) -> u32 {
    u32::MAX
        .checked_shl(32 - u32::from(prefix.min(32)))
        .unwrap_or(0)
}

/// Gives an interface one more address, without duplicate address detection.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::AlreadyExists`] if the interface has the address.
pub fn add_address(index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    let mut message = AddressMessage::default();
    message.header.family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.header.prefix_len = prefix;
    message.header.scope = AddressScope::Universe;
    message.header.index = index;
    message.header.flags = AddressHeaderFlags::Nodad;
    message.attributes = vec![
        AddressAttribute::Local(address),
        AddressAttribute::Address(address),
    ];
    create(RouteNetlinkMessage::NewAddress(message))
}

/// Addresses and routes that an administrator or program gave to an interface, without those that
/// the kernel adds by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IpConfig {
    addresses: Vec<AddressMessage>,
    routes: Vec<RouteMessage>,
}

impl IpConfig {
    /// Reads those of an interface.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(index: u32) -> io::Result<Self> {
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
                    && uses_interface(&route, index)
                    && is_configured(&route.header)
                {
                    all.routes.push(route);
                }
            }
        }
        Ok(all)
    }

    /// Removes the addresses from an interface. The kernel removes their routes with them.
    ///
    /// # Errors
    /// The kernel's. An address that is already gone is no error.
    pub fn remove_from(&self, index: u32) -> io::Result<()> {
        for address in &self.addresses {
            let mut message = AddressMessage::default();
            message.header.family = address.header.family;
            message.header.prefix_len = address.header.prefix_len;
            message.header.index = index;
            let is_part = |a: &&AddressAttribute| {
                matches!(a, AddressAttribute::Local(_) | AddressAttribute::Address(_))
            };
            message.attributes = address.attributes.iter().filter(is_part).cloned().collect();
            match execute(RouteNetlinkMessage::DelAddress(message), 0) {
                Err(e) if e.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
                done => done?,
            }
        }
        Ok(())
    }

    /// Adds all addresses and routes to an interface, which must be up. Another interface may have
    /// them at the same time. Skips those that the interface has.
    ///
    /// # Errors
    /// The kernel's error for the first address, else for the first route, that could not be added.
    /// All others were added.
    pub fn add_to(&self, index: u32) -> io::Result<()> {
        let mut failed = None;
        for address in &self.addresses {
            match create(RouteNetlinkMessage::NewAddress(moved_address(
                address, index,
            ))) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    failed.get_or_insert(e);
                }
                _ => {}
            }
        }
        // a route's gateway may be reachable only by another of the routes: repeat while some
        // succeed
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

fn uses_interface(route: &RouteMessage, index: u32) -> bool {
    let by = |a: &RouteAttribute| matches!(a, RouteAttribute::Oif(oif) if *oif == index);
    route.attributes.iter().any(by)
}

/// Whether an administrator or program added the route, rather than the kernel, from an address or
/// a router advertisement.
fn is_configured(header: &RouteHeader) -> bool {
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
    // the host had the address before, so it is no duplicate
    message.header.flags = AddressHeaderFlags::Nodad;
    let is_kept = |a: &&AddressAttribute| {
        matches!(
            a,
            AddressAttribute::Local(_)
                | AddressAttribute::Address(_)
                | AddressAttribute::Broadcast(_)
                | AddressAttribute::CacheInfo(_)
        )
    };
    message.attributes = address.attributes.iter().filter(is_kept).cloned().collect();
    message
}

fn moved_route(route: &RouteMessage, index: u32) -> RouteMessage {
    let mut message = route.clone();
    // these flags describe the route's state, they are no setting
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

/// Adds a route beside one to the same destination by another interface.
fn append(route: RouteMessage) -> io::Result<()> {
    let message = RouteNetlinkMessage::NewRoute(route);
    execute(message, NLM_F_CREATE | NLM_F_APPEND)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::links::tests::in_new_netns;
    use crate::{add_veth, link, set_up};
    use netlink_packet_route::route::{RouteAddress, RouteScope};
    use std::net::Ipv4Addr;

    #[test]
    fn a_prefix_becomes_its_mask() {
        assert_eq!(Ipv4Addr::from(netmask(24)), Ipv4Addr::new(255, 255, 255, 0));
        assert_eq!(netmask(0), 0);
        assert_eq!(netmask(32), u32::MAX);
    }

    /// Its addresses, with the lengths of their prefixes.
    pub(crate) fn addresses(config: &IpConfig) -> Vec<(IpAddr, u8)> {
        config
            .addresses
            .iter()
            .filter_map(|a| {
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
            .collect()
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
    fn addresses_and_routes_move_to_another_interface() {
        in_new_netns(|_| {
            add_veth("a0", "b0", None).unwrap();
            let (a, b) = (link("a0").unwrap().index, link("b0").unwrap().index);
            for index in [a, b] {
                set_up(index, true).unwrap();
            }
            add_address(a, IpAddr::V4(Ipv4Addr::new(10, 7, 0, 2)), 24).unwrap();
            let far = Ipv4Addr::new(10, 99, 0, 1);
            // the last route needs the one before to reach its gateway
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
                create(RouteNetlinkMessage::NewRoute(message)).unwrap();
            }
            let had = IpConfig::read(a).unwrap();
            let address = (IpAddr::V4(Ipv4Addr::new(10, 7, 0, 2)), 24);
            assert_eq!(addresses(&had), [address]);
            assert_eq!(had.routes.len(), 3);
            // both have them for a moment: there is no moment without
            had.add_to(b).unwrap();
            had.remove_from(a).unwrap();
            set_up(a, false).unwrap();
            set_up(a, true).unwrap();
            assert_eq!(IpConfig::read(a).unwrap(), IpConfig::default());
            let has = IpConfig::read(b).unwrap();
            assert_eq!(addresses(&has), [address]);
            assert_eq!(has.routes.len(), 3);
            // repeating it is no error
            had.add_to(b).unwrap();
        });
    }
}
