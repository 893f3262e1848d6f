// SPDX-License-Identifier: Apache-2.0
//! The network namespace of a VM's sockets on the host.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rustix::net::sockopt;
use viola_netdev::{Netns, create, delete, device, tcp_socket};

use crate::{Error, Result};

/// Name of the inner device that stands for the VM's NIC.
const VM_DEVICE: &str = "vm";
/// Name of the inner device at which held packets arrive.
const HOLD_DEVICE: &str = "hold";
/// The main routing table.
const MAIN_TABLE: u8 = RouteHeader::RT_TABLE_MAIN;
/// The table of local addresses.
const LOCAL_TABLE: u8 = libc::RT_TABLE_LOCAL;

/// A network namespace for the sockets that have a VM's connections, with one end of a veth in it. Every address is a
/// local one for packets that come from the inner device, and none is for packets that a socket sends. So sockets can
/// have any address of the VM, and any peer. The inner device sends no ARP: the steering program fills in MAC addresses.
/// A second veth leads to the packet socket of [`crate::HoldQueue`]. Its inner end has another MAC address than the
/// packets, so the kernel does not answer them.
///
/// The kernel removes the namespace and the veths when this and the last socket in it are closed.
#[derive(Debug)]
pub struct VmNetns {
    netns: Netns,
    veth: u32,
    inner: u32,
    hold_veth: u32,
}

impl VmNetns {
    /// Makes a namespace. `name` is the outer end of the veth, in the calling thread's namespace (at most 14 bytes;
    /// the second veth has a `p` appended); `mac` is the address of the VM's NIC, `mtu` its largest packet in bytes.
    ///
    /// # Errors
    /// What the kernel refused. Needs CAP_SYS_ADMIN and CAP_NET_ADMIN.
    pub fn new(name: &str, mac: [u8; 6], mtu: u32) -> Result<Self> {
        let netns = Netns::new().map_err(Error::kernel("making a network namespace"))?;
        let veth = make_veth(name, VM_DEVICE, Some(mac), mtu, &netns)?;
        let hold_veth = make_veth(&format!("{name}p"), HOLD_DEVICE, None, mtu, &netns)?;
        let mut vm_netns = Self {
            netns,
            veth,
            inner: 0,
            hold_veth,
        };
        let ends = vm_netns.run(|| set_up(HOLD_DEVICE).and_then(|_| set_up(VM_DEVICE)))?;
        vm_netns.inner = ends.map_err(Error::kernel("setting the inner ends of the veths up"))?;
        let inner = vm_netns.inner;
        vm_netns
            .run(|| {
                route_every_address(AddressFamily::Inet, inner)?;
                // a host without IPv6 has no such folder
                match Path::new("/proc/sys/net/ipv6").exists() {
                    true => route_every_address(AddressFamily::Inet6, inner),
                    false => Ok(()),
                }
            })?
            .map_err(Error::kernel("making routes"))?;
        Ok(vm_netns)
    }

    /// Interface index of the outer end of the veth.
    pub fn veth(&self) -> u32 {
        self.veth
    }

    /// Interface index of the outer end of the veth for held packets.
    pub fn hold_veth(&self) -> u32 {
        self.hold_veth
    }

    /// Interface index of the inner end of the veth.
    pub(crate) fn inner(&self) -> u32 {
        self.inner
    }

    /// The namespace, for a process that enters it.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Opens a TCP socket in the namespace, for the family of `address`.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn socket(&self, address: SocketAddr) -> Result<OwnedFd> {
        self.run(|| vm_socket(address.ip()))?
    }

    /// Interface index of the inner end of the veth for held packets.
    pub(crate) fn hold_inner(&self) -> Result<u32> {
        let index = self.run(|| device::index(HOLD_DEVICE))?;
        index.map_err(Error::kernel("looking up the inner end of a veth"))
    }

    /// Runs `work` in the namespace.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let entered = self.netns.run(work);
        entered.map_err(Error::kernel("entering a network namespace"))
    }
}

/// Opens a TCP socket that can be bound to this address of the VM. The calling thread is in a [`VmNetns`].
///
/// # Errors
/// What the kernel refused.
pub(crate) fn vm_socket(address: IpAddr) -> Result<OwnedFd> {
    let socket = tcp_socket(address).and_then(|socket| {
        // IPv6 looks for the address among those of interfaces, IPv4 in the local table
        if address.is_ipv6() {
            sockopt::set_ipv6_freebind(&socket, true)?;
        }
        Ok(socket)
    });
    socket.map_err(Error::kernel("making a socket"))
}

/// Makes a veth, sets its outer end up and returns that end's index.
fn make_veth(
    name: &str,
    inside: &str,
    mac: Option<[u8; 6]>,
    mtu: u32,
    netns: &Netns,
) -> Result<u32> {
    let mut inner = link(inside, LinkFlags::Noarp);
    inner.attributes.extend([
        LinkAttribute::Mtu(mtu),
        LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
    ]);
    inner
        .attributes
        .extend(mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
    let mut outer = link(name, LinkFlags::Noarp);
    outer.attributes.extend([
        LinkAttribute::Mtu(mtu),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(inner))),
        ]),
    ]);
    create(RouteNetlinkMessage::NewLink(outer))
        .map_err(Error::kernel(format!("making the veth {name}")))?;
    // the kernel makes both ends before this
    set_up(name).map_err(Error::kernel(format!("setting the veth {name} up")))
}

fn link(name: &str, flags: LinkFlags) -> LinkMessage {
    let mut link = LinkMessage::default();
    link.header.flags = flags;
    link.header.change_mask = flags;
    link.attributes.push(LinkAttribute::IfName(name.to_owned()));
    link
}

/// Makes every address a local one for packets that come from the device, and routes all others to it.
///
/// The kernel looks at the local table when a socket is bound, and when it sends from that address, whatever the rules say.
fn route_every_address(family: AddressFamily, device: u32) -> io::Result<()> {
    for (table, kind) in [
        (LOCAL_TABLE, RouteType::Local),
        (MAIN_TABLE, RouteType::Unicast),
    ] {
        let route = default_route(family, table, kind, device);
        create(RouteNetlinkMessage::NewRoute(route))?;
    }
    let local_for = |device: Option<&str>| {
        let mut rule = RuleMessage::default();
        rule.header.family = family;
        rule.header.table = LOCAL_TABLE;
        rule.header.action = RuleAction::ToTable;
        rule.attributes.push(RuleAttribute::Priority(0));
        let device = device.map(|name| RuleAttribute::Iifname(name.to_owned()));
        rule.attributes.extend(device);
        rule
    };
    // The rule for all packets, which every namespace has. The kernel would also take the other one for it.
    delete(RouteNetlinkMessage::DelRule(local_for(None)))?;
    create(RouteNetlinkMessage::NewRule(local_for(Some(VM_DEVICE))))
}

/// A route to all addresses.
fn default_route(family: AddressFamily, table: u8, kind: RouteType, device: u32) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = family;
    route.header.table = table;
    route.header.protocol = RouteProtocol::Static;
    route.header.scope = match kind {
        RouteType::Local => RouteScope::Host,
        _ => RouteScope::Link,
    };
    route.header.kind = kind;
    route.attributes.push(RouteAttribute::Oif(device));
    route
}

/// Sets a device of the calling thread's namespace up and returns its index.
fn set_up(name: &str) -> std::io::Result<u32> {
    device::up(name)?;
    device::index(name)
}
