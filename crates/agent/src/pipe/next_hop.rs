// SPDX-License-Identifier: Apache-2.0
//! The MAC address of a peer's next hop, from the kernel's route and neighbour tables.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use viola_netdev::look_up;

use super::reason::Reason;
use crate::clock::Millis;

/// How long a looked-up MAC address is used.
const CACHE_TIMEOUT: Millis = 1000;
/// Maximum number of cached pairs of addresses.
const MAX_CACHED_NEIGHBOURS: usize = 4096;

/// The next hop of a route: interface index and address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hop {
    device: u32,
    address: IpAddr,
}

/// A cache of next hops that is emptied every `CACHE_TIMEOUT`.
#[derive(Debug, Default)]
pub struct NextHopCache {
    known: BTreeMap<(IpAddr, IpAddr), [u8; 6]>,
    since: Millis,
    now: Millis,
}

impl NextHopCache {
    /// Sets the current time.
    pub fn set_time(&mut self, now: Millis) {
        self.now = now;
    }

    /// As [`next_hop`], which is called at most once per `CACHE_TIMEOUT` for the same pair of addresses.
    ///
    /// # Errors
    /// As [`next_hop`].
    pub fn get(&mut self, local: SocketAddr, peer: SocketAddr) -> Result<[u8; 6], Reason> {
        if self.now >= self.since + CACHE_TIMEOUT || self.known.len() > MAX_CACHED_NEIGHBOURS {
            self.known.clear();
            self.since = self.now;
        }
        let ends = (local.ip(), peer.ip());
        if let Some(mac) = self.known.get(&ends) {
            return Ok(*mac);
        }
        let mac = next_hop(local, peer)?;
        self.known.insert(ends, mac);
        Ok(mac)
    }
}

/// The MAC address to which this VM sends its packets for `peer`.
///
/// # Errors
/// [`Reason::BadSocket`] when the peer is this VM itself, [`Reason::NoNextHop`] when the kernel does not know the
/// address (yet).
pub fn next_hop(local: SocketAddr, peer: SocketAddr) -> Result<[u8; 6], Reason> {
    let hop = match look_up(route_to(local, peer)) {
        Ok(RouteNetlinkMessage::NewRoute(route)) => read_route(&route, peer.ip())?,
        _ => return Err(Reason::NoNextHop),
    };
    match look_up(neighbour_at(hop)) {
        Ok(RouteNetlinkMessage::NewNeighbour(found)) => {
            read_neighbour(&found).ok_or(Reason::NoNextHop)
        }
        _ => Err(Reason::NoNextHop),
    }
}

fn family(address: IpAddr) -> (AddressFamily, u8) {
    match address {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    }
}

fn route_to(local: SocketAddr, peer: SocketAddr) -> RouteNetlinkMessage {
    let mut message = RouteMessage::default();
    let (family, bits) = family(peer.ip());
    message.header.address_family = family;
    message.header.destination_prefix_length = bits;
    message.header.source_prefix_length = bits;
    message.attributes = vec![
        RouteAttribute::Destination(RouteAddress::from(peer.ip())),
        RouteAttribute::Source(RouteAddress::from(local.ip())),
    ];
    // a link-local address needs its interface
    if let SocketAddr::V6(peer) = peer
        && peer.scope_id() != 0
    {
        message
            .attributes
            .push(RouteAttribute::Oif(peer.scope_id()));
    }
    RouteNetlinkMessage::GetRoute(message)
}

fn read_route(route: &RouteMessage, peer: IpAddr) -> Result<Hop, Reason> {
    if route.header.kind != RouteType::Unicast {
        return Err(Reason::BadSocket);
    }
    let (mut device, mut address) = (None, peer);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Gateway(RouteAddress::Inet(ip))
            | RouteAttribute::Via(RouteVia::Inet(ip)) => address = (*ip).into(),
            RouteAttribute::Gateway(RouteAddress::Inet6(ip))
            | RouteAttribute::Via(RouteVia::Inet6(ip)) => address = (*ip).into(),
            _ => {}
        }
    }
    let device = device.ok_or(Reason::NoNextHop)?;
    Ok(Hop { device, address })
}

fn neighbour_at(hop: Hop) -> RouteNetlinkMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(hop.address).0;
    message.header.ifindex = hop.device;
    message.attributes = vec![NeighbourAttribute::Destination(match hop.address {
        IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
        IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
    })];
    RouteNetlinkMessage::GetNeighbour(message)
}

fn read_neighbour(found: &NeighbourMessage) -> Option<[u8; 6]> {
    let usable = matches!(
        found.header.state,
        NeighbourState::Reachable
            | NeighbourState::Stale
            | NeighbourState::Delay
            | NeighbourState::Probe
            | NeighbourState::Permanent
    );
    found
        .attributes
        .iter()
        .filter(|_| usable)
        .find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => bytes.as_slice().try_into().ok(),
            _ => None,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_local_address_has_no_next_hop() {
        for (local, peer) in [("127.0.0.1:1", "127.0.0.1:2"), ("[::1]:1", "[::1]:2")] {
            assert_eq!(next_hop(end(local), end(peer)), Err(Reason::BadSocket));
        }
    }

    #[test]
    fn a_next_hop_is_cached_for_a_second() {
        let (local, peer) = (end("127.0.0.1:1"), end("127.0.0.1:2"));
        let mut next_hops = NextHopCache::default();
        next_hops.set_time(500);
        // the kernel has no such neighbour
        next_hops.known.insert((local.ip(), peer.ip()), [7; 6]);
        assert_eq!(next_hops.get(local, peer), Ok([7; 6]));
        next_hops.set_time(CACHE_TIMEOUT - 1);
        assert_eq!(next_hops.get(local, peer), Ok([7; 6]));
        next_hops.set_time(CACHE_TIMEOUT);
        assert_eq!(next_hops.get(local, peer), Err(Reason::BadSocket));
        assert!(next_hops.known.is_empty());
    }

    #[test]
    fn a_gateway_is_the_next_hop() {
        let peer = IpAddr::from([10, 0, 0, 9]);
        let gateway = [10, 1, 0, 1].into();
        let mut route = RouteMessage::default();
        route.header.kind = RouteType::Unicast;
        assert_eq!(read_route(&route, peer), Err(Reason::NoNextHop));
        route.attributes = vec![RouteAttribute::Oif(3)];
        let device = 3;
        let address = peer;
        assert_eq!(read_route(&route, peer), Ok(Hop { device, address }));
        let via = RouteAttribute::Gateway(RouteAddress::Inet(gateway));
        route.attributes.push(via);
        let address = gateway.into();
        assert_eq!(read_route(&route, peer), Ok(Hop { device, address }));
        route.header.kind = RouteType::Local;
        assert_eq!(read_route(&route, peer), Err(Reason::BadSocket));
    }

    #[test]
    fn only_neighbours_in_a_usable_state_count() {
        let mut found = NeighbourMessage::default();
        found.attributes = vec![NeighbourAttribute::LinkLayerAddress(vec![2, 0, 0, 0, 0, 1])];
        found.header.state = NeighbourState::Stale;
        assert_eq!(read_neighbour(&found), Some([2, 0, 0, 0, 0, 1]));
        found.header.state = NeighbourState::Failed;
        assert_eq!(read_neighbour(&found), None);
        found.header.state = NeighbourState::Permanent;
        found.attributes = vec![NeighbourAttribute::LinkLayerAddress(vec![1; 20])];
        assert_eq!(read_neighbour(&found), None);
    }
}
