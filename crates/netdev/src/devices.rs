// SPDX-License-Identifier: Apache-2.0
//! Devices by ioctl.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkInfo, LinkMessage,
};

use crate::netlink::ask;

/// Longest name of a device, in bytes.
pub const MAX_NAME: usize = libc::IFNAMSIZ - 1;

// of linux/sockios.h
const SIOCBRADDBR: libc::Ioctl = 0x89a0;
const SIOCBRADDIF: libc::Ioctl = 0x89a2;

/// A socket to ask about devices.
pub struct NetDevices(OwnedFd);

impl NetDevices {
    /// For the network namespace that the calling thread is in.
    pub fn here() -> io::Result<Self> {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
        Ok(Self(socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC,
            None,
        )?))
    }

    /// Gives the device an address and takes it up.
    pub fn set_address(&self, name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut request = ifreq(name)?;
        request.ifr_ifru.ifru_addr = inet(address);
        self.ioctl(libc::SIOCSIFADDR as libc::Ioctl, &mut request)?;
        let mut request = ifreq(name)?;
        request.ifr_ifru.ifru_netmask = inet(Ipv4Addr::from(netmask(prefix)));
        self.ioctl(libc::SIOCSIFNETMASK as libc::Ioctl, &mut request)?;
        self.up(name)
    }

    /// Takes the device up.
    pub fn up(&self, name: &str) -> io::Result<()> {
        self.add_flags(name, libc::IFF_UP)
    }

    /// Takes the device up as one whose packets are not for the kernel's own network stack: it answers no ARP
    /// (the kernel would, for the address of every other device) and has no IPv6 address.
    pub fn up_for_packet_socket(&self, name: &str) -> io::Result<()> {
        match fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1") {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => (), // a kernel without IPv6
        }
        self.add_flags(name, libc::IFF_UP | libc::IFF_NOARP)
    }

    fn add_flags(&self, name: &str, more: libc::c_int) -> io::Result<()> {
        let mut request = ifreq(name)?;
        self.ioctl(libc::SIOCGIFFLAGS as libc::Ioctl, &mut request)?;
        // SAFETY: SIOCGIFFLAGS has filled this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        request.ifr_ifru.ifru_flags = flags | more as i16;
        self.ioctl(libc::SIOCSIFFLAGS as libc::Ioctl, &mut request)
    }

    /// Sets the device's Ethernet address.
    pub fn set_mac(&self, name: &str, mac: [u8; 6]) -> io::Result<()> {
        let mut request = ifreq(name)?;
        let mut hw = libc::sockaddr {
            sa_family: libc::ARPHRD_ETHER,
            sa_data: [0; 14],
        };
        for (to, from) in hw.sa_data.iter_mut().zip(mac) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_hwaddr = hw;
        self.ioctl(libc::SIOCSIFHWADDR as libc::Ioctl, &mut request)
    }

    /// Makes a bridge (no spanning tree: its ports forward at once).
    pub fn add_bridge(&self, name: &str) -> io::Result<()> {
        let mut raw = [0_u8; libc::IFNAMSIZ];
        raw[..checked(name)?.len()].copy_from_slice(name.as_bytes());
        // SAFETY: the argument is a zero-terminated name of IFNAMSIZ bytes, which is only read.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), SIOCBRADDBR, raw.as_ptr()) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    /// Whether there is a device of this name.
    pub fn exists(&self, name: &str) -> bool {
        self.index(name).is_ok()
    }

    /// Interface index of the device.
    pub fn index(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(&self.0, name)?)
    }

    /// Makes the device a port of the bridge.
    pub fn add_port(&self, bridge: &str, port: &str) -> io::Result<()> {
        let mut request = ifreq(bridge)?;
        request.ifr_ifru.ifru_ifindex = self.index(port)? as i32;
        self.ioctl(SIOCBRADDIF, &mut request)
    }

    fn ioctl(&self, code: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: all codes used here take a struct ifreq that the kernel reads and may write.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), code, std::ptr::from_mut(request)) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// Makes two devices that are the ends of one cable; the second one in another network namespace, if one is given.
pub fn add_veth(name: &str, peer: &str, netns: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut other = LinkMessage::default();
    let peer = checked(peer)?.to_owned();
    other.attributes.push(LinkAttribute::IfName(peer));
    if let Some(netns) = netns {
        let netns = LinkAttribute::NetNsFd(netns.as_raw_fd());
        other.attributes.push(netns);
    }
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(checked(name)?.to_owned()),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(other))),
        ]),
    ];
    ask(RouteNetlinkMessage::NewLink(link))
}

/// Network mask of a prefix length, 0 to 32.
pub fn netmask(prefix: u8) -> u32 {
    u32::MAX
        .checked_shl(32 - u32::from(prefix.min(32)))
        .unwrap_or(0)
}

fn checked(name: &str) -> io::Result<&str> {
    if name.is_empty() || name.len() > MAX_NAME {
        let text = format!("device name `{name}` must have 1 to {MAX_NAME} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(name)
}

fn ifreq(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: struct ifreq is plain data for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(checked(name)?.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

fn inet(address: Ipv4Addr) -> libc::sockaddr {
    let mut sa = libc::sockaddr {
        sa_family: libc::AF_INET as u16,
        sa_data: [0; 14],
    };
    for (to, from) in sa.sa_data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    sa
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_becomes_its_mask() {
        assert_eq!(Ipv4Addr::from(netmask(24)), Ipv4Addr::new(255, 255, 255, 0));
        assert_eq!(netmask(0), 0);
        assert_eq!(netmask(32), u32::MAX);
    }

    #[test]
    fn a_name_that_the_kernel_would_cut_is_refused() {
        assert!(ifreq("sixteen-byte-nam").is_err());
        assert!(ifreq("fifteen-byte-na").is_ok());
    }
}
