// SPDX-License-Identifier: Apache-2.0
//! The network namespace of a VM's sockets on the host.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use viola_netdev::{Netns, create, device};

use crate::{Error, Result};

/// Name of the inner device that has the VM's addresses.
const VM_DEVICE: &str = "vm";
/// Name of the inner device at which held packets arrive.
const HOLD_DEVICE: &str = "hold";
/// The main routing table.
const MAIN_TABLE: u8 = RouteHeader::RT_TABLE_MAIN;

/// A network namespace for the sockets that have a VM's connections, with one end of a veth in it. The inner device
/// has the VM's addresses. It sends no ARP: the steering program fills in MAC addresses. A second veth leads to the
/// packet socket of [`crate::HoldQueue`]. Its inner end has another MAC address than the packets, so the kernel does
/// not answer them.
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
        for ipv4 in [true, false] {
            let route = default_route(ipv4, vm_netns.inner);
            match vm_netns.run(|| create(RouteNetlinkMessage::NewRoute(route)))? {
                // a host without IPv6 needs no IPv6 route
                Err(e) if !ipv4 && e.raw_os_error() != Some(libc::EEXIST) => {}
                made => made.map_err(Error::kernel("making a route"))?,
            }
        }
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

    /// Adds an address of the VM, unless the namespace has it.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn add_address(&self, address: IpAddr) -> Result<()> {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        match self.run(|| viola_netdev::add_address(self.inner, address, prefix))? {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
            done => done.map_err(Error::kernel(format!("adding the address {address}"))),
        }
    }

    /// Opens a TCP socket in the namespace, for the family of `address`.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn socket(&self, address: SocketAddr) -> Result<OwnedFd> {
        let socket = self.netns.tcp_socket(address.ip());
        socket.map_err(Error::kernel("making a socket"))
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

fn default_route(ipv4: bool, device: u32) -> RouteMessage {
    let mut route = RouteMessage::default();
    route.header.address_family = match ipv4 {
        true => AddressFamily::Inet,
        false => AddressFamily::Inet6,
    };
    route.header.table = MAIN_TABLE;
    route.header.protocol = RouteProtocol::Static;
    route.header.scope = RouteScope::Link;
    route.header.kind = RouteType::Unicast;
    route.attributes.push(RouteAttribute::Oif(device));
    route
}

/// Sets a device of the calling thread's namespace up and returns its index.
fn set_up(name: &str) -> std::io::Result<u32> {
    device::up(name)?;
    device::index(name)
}
