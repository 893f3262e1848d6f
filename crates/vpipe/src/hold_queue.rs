// SPDX-License-Identifier: Apache-2.0
//! Packets of peers whose connection is held: the host keeps them and delivers them afterwards.
//!
//! For example, a client that has received its file requests the next one at once. If that request were dropped, the
//! client would send it again only after the retransmission timeout of 200 ms or more. So the steering program sends
//! packets of held connections to this queue.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recvfrom, send, socket_with,
};
use viola_handover::set_option;

use crate::{Error, Flow, FlowTable, Result, VmNetns};

/// Most bytes in the queue of one VM; further packets are dropped, as on a full link. A connection in full flow has
/// up to its receive buffer under way (`/proc/sys/net/ipv4/tcp_rmem`, 6 MiB).
const MAX_HELD_BYTES: usize = 8 << 20;
/// Size of `struct virtio_net_hdr` before each packet: pending segmentation and checksums.
const VNET_HEADER_BYTES: usize = 10;
const ETHERNET_HEADER_BYTES: usize = 14;
/// Longest packet with its headers.
const MAX_PACKET_BYTES: usize = VNET_HEADER_BYTES + ETHERNET_HEADER_BYTES + 65_536;
/// Packets of one read, so that a flood does not keep the thread from other work.
const MAX_PACKETS_PER_READ: usize = 256;

/// Rounds of delivery before the connection is switched anyway: other connections wait meanwhile.
const MAX_FLUSH_ROUNDS: usize = 64;

// include/uapi/linux/if_packet.h
const PACKET_VNET_HDR: i32 = 15;
const PACKET_OUTGOING: u8 = 4;

/// The queue of one VM. Its descriptor works in any process.
///
/// It is a packet socket at the inner end of the veth for held packets, in the VM's [`VmNetns`]. The steering program at
/// the outer end sends what the socket sends to the VM, or to the host's socket that has the connection.
#[derive(Debug)]
pub struct HoldQueue {
    socket: OwnedFd,
    hold_veth: u32,
    held: VecDeque<(SocketAddr, SocketAddr, Vec<u8>)>,
    bytes: usize,
    buffer: Vec<u8>,
}

impl HoldQueue {
    /// Opens the packet socket in a VM's namespace. Needs CAP_NET_RAW and CAP_NET_ADMIN.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn new(space: &VmNetns) -> Result<Self> {
        let inside = space.hold_inner()?;
        let socket = space.run(|| packet_socket(inside))?;
        let socket = socket.map_err(Error::kernel("making a packet socket"))?;
        // the kernel counts its own structures too
        let _ =
            rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, 2 * MAX_HELD_BYTES);
        Ok(Self::from_descriptor(socket, space.hold_veth()))
    }

    /// Uses the descriptor of another queue. `hold_veth` is the interface index of the outer end of its veth.
    pub fn from_descriptor(socket: OwnedFd, hold_veth: u32) -> Self {
        Self {
            socket,
            hold_veth,
            held: VecDeque::new(),
            bytes: 0,
            buffer: vec![0; MAX_PACKET_BYTES],
        }
    }

    /// Its descriptor.
    pub fn into_descriptor(self) -> OwnedFd {
        self.socket
    }

    /// Readable when packets have arrived.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives the packets that have arrived.
    pub fn receive(&mut self) {
        for _ in 0..MAX_PACKETS_PER_READ {
            let Ok((got, outgoing)) = receive_packet(self.socket.as_fd(), &mut self.buffer) else {
                return;
            };
            let packet = &self.buffer[..got.min(MAX_PACKET_BYTES)];
            if outgoing || self.bytes + packet.len() > MAX_HELD_BYTES {
                continue;
            }
            if let Some((peer, guest)) = packet.get(VNET_HEADER_BYTES..).and_then(parse_endpoints) {
                self.bytes += packet.len();
                self.held.push_back((guest, peer, packet.to_vec()));
            }
        }
    }

    /// Delivers the packets of a connection to the VM and releases the connection. Returns how many packets arrived
    /// between the last delivery and the release; later packets may have overtaken them.
    ///
    /// # Errors
    /// Of the release; the packets are delivered nevertheless.
    pub fn release(&mut self, flows: &FlowTable, flow: &Flow) -> Result<usize> {
        // a connection whose hand-over failed half way may still lead to the host's socket
        let held = flows.hold(flow, None, Some(self.hold_veth));
        let released = self.flush_and_switch(flow, || flows.release(flow));
        held.and(released)
    }

    /// Delivers the packets of a connection, which [`FlowTable::hold_incoming`] holds, to the host's socket behind
    /// `veth` and redirects the connection. Returns as [`Self::release`].
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn redirect(&mut self, flows: &FlowTable, flow: &Flow, veth: u32) -> Result<usize> {
        self.flush_and_switch(flow, || flows.redirect(flow, veth))
    }

    /// Delivers packets until none is left, and only then switches the connection: a peer in full flow sends more
    /// during the delivery. Only packets that arrive between the last delivery and the switch, or that another core
    /// is delivering just then, can be overtaken.
    fn flush_and_switch(
        &mut self,
        flow: &Flow,
        switch: impl FnOnce() -> Result<()>,
    ) -> Result<usize> {
        self.flush_all(flow);
        let switched = switch();
        let late = self.flush_all(flow);
        switched.map(|()| late)
    }

    fn flush_all(&mut self, flow: &Flow) -> usize {
        let rounds = (0..MAX_FLUSH_ROUNDS).map(|_| self.flush(flow));
        rounds.take_while(|&packets| packets > 0).sum()
    }

    fn flush(&mut self, flow: &Flow) -> usize {
        let packets = self.remove(flow);
        for packet in &packets {
            // TCP retransmits a packet that is lost here
            let _ = send(&self.socket, packet, SendFlags::DONTWAIT);
        }
        packets.len()
    }

    /// Drops the packets of a connection.
    pub fn discard(&mut self, flow: &Flow) {
        drop(self.remove(flow));
    }

    /// Removes the packets of a connection from the queue.
    fn remove(&mut self, flow: &Flow) -> Vec<Vec<u8>> {
        self.receive();
        let held = std::mem::take(&mut self.held);
        let (removed, others) = held
            .into_iter()
            .partition::<VecDeque<_>, _>(|(guest, peer, _)| {
                *guest == flow.guest && *peer == flow.peer
            });
        self.held = others;
        let removed: Vec<Vec<u8>> = removed.into_iter().map(|(_, _, packet)| packet).collect();
        self.bytes -= removed.iter().map(Vec::len).sum::<usize>();
        removed
    }
}

/// Sender and receiver of a TCP packet with Ethernet header.
fn parse_endpoints(packet: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    let ip = packet.get(ETHERNET_HEADER_BYTES..)?;
    let kind = u16::from_be_bytes(packet.get(12..14)?.try_into().ok()?);
    let port = |at: usize| Some(u16::from_be_bytes(ip.get(at..at + 2)?.try_into().ok()?));
    let (source, destination, tcp) = match kind {
        0x0800 if ip.get(9)? == &6 => {
            let at = |at: usize| <[u8; 4]>::try_from(ip.get(at..at + 4)?).ok();
            let length = usize::from(ip.first()? & 15) * 4;
            (IpAddr::from(at(12)?), IpAddr::from(at(16)?), length)
        }
        0x86dd if ip.get(6)? == &6 => {
            let at = |at: usize| <[u8; 16]>::try_from(ip.get(at..at + 16)?).ok();
            (IpAddr::from(at(8)?), IpAddr::from(at(24)?), 40)
        }
        _ => return None,
    };
    Some((
        SocketAddr::new(source, port(tcp)?),
        SocketAddr::new(destination, port(tcp + 2)?),
    ))
}

/// `struct sockaddr_ll`: all packets of an interface.
struct LinkAddress(libc::sockaddr_ll);

impl LinkAddress {
    fn new(interface: u32) -> Self {
        // SAFETY: all zeros is a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = interface as i32;
        Self(address)
    }
}

// SAFETY: the pointer is valid for the structure's size during the call.
unsafe impl SocketAddrArg for LinkAddress {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        let size = size_of_val(&self.0) as SocketAddrLen;
        f((&raw const self.0).cast(), size)
    }
}

/// Opens a packet socket on one interface of the calling thread's namespace.
fn packet_socket(interface: u32) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // without a protocol it receives no packets of other interfaces before it is bound
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    set_option(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, &[1_i32])?;
    bind(&socket, &LinkAddress::new(interface))?;
    Ok(socket)
}

/// Length of a packet, and whether this end sent it.
fn receive_packet(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, bool)> {
    let (_, got, from) = recvfrom(socket, buffer, RecvFlags::DONTWAIT)?;
    let Some(from) = from.filter(|from| from.address_family() == AddressFamily::PACKET) else {
        return Ok((got, false));
    };
    // SAFETY: the family says that the kernel wrote a sockaddr_ll, for which the storage has room and alignment.
    let from = unsafe { from.as_ptr().cast::<libc::sockaddr_ll>().read() };
    Ok((got, from.sll_pkttype == PACKET_OUTGOING))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_ports_of_a_packet_are_parsed() {
        let mut v4 = vec![0; 14 + 20 + 4];
        v4[12..14].copy_from_slice(&[8, 0]);
        v4[14] = 0x45;
        v4[23] = 6;
        v4[26..34].copy_from_slice(&[10, 0, 0, 9, 10, 0, 0, 2]);
        v4[34..38].copy_from_slice(&[0x12, 0x34, 0, 80]);
        let both = ("10.0.0.9:4660", "10.0.0.2:80").map_both();
        assert_eq!(parse_endpoints(&v4), Some(both));
        for length in 0..v4.len() {
            assert_eq!(parse_endpoints(&v4[..length]), None);
        }
        let mut v6 = vec![0; 14 + 40 + 4];
        v6[12..14].copy_from_slice(&[0x86, 0xdd]);
        v6[20] = 6;
        v6[22] = 0xfd;
        v6[37] = 9;
        v6[38] = 0xfd;
        v6[53] = 2;
        v6[54..58].copy_from_slice(&[0x12, 0x34, 0, 80]);
        let both = ("[fd00::9]:4660", "[fd00::2]:80").map_both();
        assert_eq!(parse_endpoints(&v6), Some(both));
    }

    trait MapBoth {
        fn map_both(self) -> (SocketAddr, SocketAddr);
    }

    impl MapBoth for (&str, &str) {
        fn map_both(self) -> (SocketAddr, SocketAddr) {
            (self.0.parse().unwrap(), self.1.parse().unwrap())
        }
    }
}
