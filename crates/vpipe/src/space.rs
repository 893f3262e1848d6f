// SPDX-License-Identifier: Apache-2.0
//! Where a VM's sockets on the host live.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily as Family, SocketFlags, SocketType, socket_with};
use viola_netdev::{NetDevices, Netns, ask};

use crate::{Error, Result};

/// Name of the device inside.
const INSIDE: &str = "vm";
/// Of the table that all unmarked routes are in.
const MAIN: u8 = RouteHeader::RT_TABLE_MAIN;

/// A network namespace for the sockets that have a VM's connections, with one end of a veth in it. The device has the VM's own
/// addresses; it asks nobody for MAC addresses, the steering program fills them in.
///
/// The namespace goes when this and the last socket in it are gone, and the veth with it.
#[derive(Debug)]
pub struct Space {
    netns: Netns,
    veth: u32,
    inside: u32,
}

impl Space {
    /// Makes one. `name` is that of the veth's other end, in the calling thread's namespace (at most 15 bytes); `mac` is that of the
    /// VM's NIC, and `mtu` its largest packet in bytes.
    ///
    /// # Errors
    /// What the kernel refused. Needs CAP_SYS_ADMIN and CAP_NET_ADMIN.
    pub fn new(name: &str, mac: [u8; 6], mtu: u32) -> Result<Self> {
        let netns = Netns::new().map_err(Error::kernel("making a network namespace"))?;
        let mut inner = link(INSIDE, LinkFlags::Noarp);
        inner.attributes.extend([
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
        ]);
        let mut outer = link(name, LinkFlags::Noarp);
        outer.attributes.extend([
            LinkAttribute::Mtu(mtu),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(inner))),
            ]),
        ]);
        ask(RouteNetlinkMessage::NewLink(outer))
            .map_err(Error::kernel(format!("making the veth {name}")))?;
        // not before both ends are there
        up(name).map_err(Error::kernel(format!("taking up the veth {name}")))?;
        let veth = index(name).map_err(Error::kernel(format!("looking for the veth {name}")))?;
        let mut space = Self {
            netns,
            veth,
            inside: 0,
        };
        space.inside = space
            .run(|| up(INSIDE).and_then(|()| index(INSIDE)))?
            .map_err(Error::kernel("looking for the veth's other end"))?;
        for ipv4 in [true, false] {
            let route = default_route(ipv4, space.inside);
            match space.run(|| ask(RouteNetlinkMessage::NewRoute(route)))? {
                // a host without IPv6 needs no route for it
                Err(e) if !ipv4 && e.raw_os_error() != Some(libc::EEXIST) => {}
                made => made.map_err(Error::kernel("making a route"))?,
            }
        }
        Ok(space)
    }

    /// Interface index of the veth's end outside.
    pub fn veth(&self) -> u32 {
        self.veth
    }

    /// Gives the VM's address to its sockets here; nothing happens where they have it.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn add(&self, address: IpAddr) -> Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = family(address.is_ipv4());
        message.header.prefix_len = if address.is_ipv4() { 32 } else { 128 };
        message.header.scope = AddressScope::Universe;
        message.header.index = self.inside;
        // it is in use already, at the VM
        message.header.flags = AddressHeaderFlags::Nodad;
        message.attributes = vec![
            AddressAttribute::Local(address),
            AddressAttribute::Address(address),
        ];
        match self.run(|| ask(RouteNetlinkMessage::NewAddress(message)))? {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            done => done.map_err(Error::kernel(format!("giving it the address {address}"))),
        }
    }

    /// A TCP socket in it, for a connection of this address's family.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn socket(&self, address: SocketAddr) -> Result<OwnedFd> {
        let family = match address.is_ipv4() {
            true => Family::INET,
            false => Family::INET6,
        };
        self.run(|| socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None))?
            .map_err(|e| Error::kernel("making a socket")(e.into()))
    }

    /// Does something in the namespace.
    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let entered = self.netns.run(work);
        entered.map_err(Error::kernel("entering a network namespace"))
    }
}

fn link(name: &str, flags: LinkFlags) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.flags = flags;
    link.header.change_mask = flags;
    link.attributes.push(LinkAttribute::IfName(name.to_owned()));
    link
}

fn default_route(ipv4: bool, device: u32) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = family(ipv4);
    route.header.table = MAIN;
    route.header.protocol = RouteProtocol::Static;
    route.header.scope = RouteScope::Link;
    route.header.kind = RouteType::Unicast;
    route.attributes.push(RouteAttribute::Oif(device));
    route
}

fn family(ipv4: bool) -> AddressFamily {
    match ipv4 {
        true => AddressFamily::Inet,
        false => AddressFamily::Inet6,
    }
}

fn up(name: &str) -> std::io::Result<()> {
    NetDevices::here()?.up(name)
}

/// Of a device in the calling thread's namespace.
fn index(name: &str) -> std::io::Result<u32> {
    let socket = socket_with(Family::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(name_to_index(&socket, name)?)
}
