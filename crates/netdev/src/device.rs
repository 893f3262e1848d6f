// SPDX-License-Identifier: Apache-2.0
//! Interfaces by name, for test beds and a guest's init.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};

use crate::ip_config::add_address;
use crate::links::{self, Mac, link, set_flags, set_master};
use crate::netlink::create;

/// Index of the interface.
///
/// # Errors
/// The kernel's; ENODEV if there is no interface of this name.
pub fn index(name: &str) -> io::Result<u32> {
    Ok(link(name)?.index)
}

/// Whether there is an interface of this name.
pub fn exists(name: &str) -> bool {
    index(name).is_ok()
}

/// Takes the interface up.
///
/// # Errors
/// The kernel's.
pub fn up(name: &str) -> io::Result<()> {
    links::set_up(index(name)?, true)
}

/// Takes the interface up for a program that sends and receives by a packet socket. The kernel's
/// own network stack stays out of it: the interface answers no ARP (the kernel would answer for the
/// addresses of all other interfaces) and has no IPv6 address.
///
/// # Errors
/// The kernel's.
pub fn up_for_packet_socket(name: &str) -> io::Result<()> {
    match fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1") {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => (), // a kernel without IPv6
    }
    set_flags(index(name)?, LinkFlags::Up | LinkFlags::Noarp, true)
}

/// Gives the interface an address and takes it up.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::AlreadyExists`] if the interface has the address.
pub fn set_address(name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
    let index = index(name)?;
    add_address(index, address.into(), prefix)?;
    links::set_up(index, true)
}

/// Sets the interface's Ethernet address.
///
/// # Errors
/// The kernel's.
pub fn set_mac(name: &str, mac: Mac) -> io::Result<()> {
    links::set_mac(index(name)?, mac)
}

/// Creates a bridge. It has no spanning tree, so its ports forward at once.
///
/// # Errors
/// The kernel's.
pub fn add_bridge(name: &str) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
    ];
    create(RouteNetlinkMessage::NewLink(link))
}

/// Makes the interface a port of the bridge.
///
/// # Errors
/// The kernel's.
pub fn add_port(bridge: &str, port: &str) -> io::Result<()> {
    set_master(index(port)?, Some(index(bridge)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::tests::in_new_netns;
    use crate::{IpConfig, add_veth};

    #[test]
    fn an_interface_gets_an_address_a_mac_and_a_bridge() {
        in_new_netns(|_| {
            add_veth("a0", "b0", None).unwrap();
            let mac = [2, 0, 0, 0, 0, 7];
            set_mac("a0", mac).unwrap();
            set_address("a0", Ipv4Addr::new(10, 7, 0, 2), 24).unwrap();
            up_for_packet_socket("b0").unwrap();
            let a = link("a0").unwrap();
            assert!(a.up && a.running && a.mac == Some(mac), "{a:?}");
            let config = IpConfig::read(a.index).unwrap();
            let address = (Ipv4Addr::new(10, 7, 0, 2).into(), 24);
            assert_eq!(crate::ip_config::tests::addresses(&config), [address]);
            assert!(exists("b0") && !exists("c0"));
            add_bridge("br0").unwrap();
            add_port("br0", "b0").unwrap();
            let bridge = link("br0").unwrap();
            assert_eq!(bridge.kind.as_deref(), Some("bridge"));
            assert_eq!(link("b0").unwrap().master, Some(bridge.index));
        });
    }
}
