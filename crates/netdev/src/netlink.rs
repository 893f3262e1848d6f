// SPDX-License-Identifier: Apache-2.0
//! Requests by rtnetlink.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{
    AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Makes what the message describes, which must not be there yet, in the calling thread's network namespace.
///
/// # Errors
/// What the kernel answers; [`io::ErrorKind::AlreadyExists`] where it is there.
pub fn ask(message: RouteNetlinkMessage) -> io::Result<()> {
    let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    match request(message, flags)? {
        NetlinkPayload::Error(e) if e.code.is_some() => Err(e.to_io()),
        _ => Ok(()),
    }
}

/// An interface of the calling thread's network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interface {
    /// Its number.
    pub index: u32,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// For one end of a veth: the number of the other end, if that is in the same namespace.
    pub other_end: Option<u32>,
}

/// Looks at an interface.
///
/// # Errors
/// What the kernel answers; [`io::ErrorKind::NotFound`] or ENODEV where there is none of this name.
pub fn interface(name: &str) -> io::Result<Interface> {
    let mut message = LinkMessage::default();
    message
        .attributes
        .push(LinkAttribute::IfName(name.to_owned()));
    let found = match look_up(RouteNetlinkMessage::GetLink(message))? {
        RouteNetlinkMessage::NewLink(found) => found,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let mut interface = Interface {
        index: found.header.index,
        mtu: 0,
        other_end: None,
    };
    let mut elsewhere = false;
    for attribute in &found.attributes {
        match attribute {
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Link(other) if *other != interface.index => {
                interface.other_end = Some(*other);
            }
            LinkAttribute::LinkNetNsId(_) => elsewhere = true,
            _ => {}
        }
    }
    if elsewhere {
        interface.other_end = None;
    }
    Ok(interface)
}

/// One question to the kernel about the calling thread's network namespace, and its answer.
///
/// # Errors
/// What the kernel answers.
pub fn look_up(message: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    match request(message, NLM_F_REQUEST)? {
        NetlinkPayload::InnerMessage(found) => Ok(found),
        NetlinkPayload::Error(e) => Err(e.to_io()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// All there is of what the message asks for.
///
/// # Errors
/// What the kernel answers.
pub fn dump(message: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
    let socket = send(message, NLM_F_REQUEST | NLM_F_DUMP)?;
    let mut found = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let answer = read(rest)?;
            let length = answer.header.length as usize;
            match answer.payload {
                NetlinkPayload::InnerMessage(message) => found.push(message),
                NetlinkPayload::Done(_) => return Ok(found),
                NetlinkPayload::Error(e) => return Err(e.to_io()),
                _ => {}
            }
            // messages begin at multiples of four bytes
            let next = length.next_multiple_of(4).max(4);
            rest = rest.get(next..).unwrap_or_default();
        }
    }
}

/// Sends a request; the first answer.
pub(crate) fn request(
    message: RouteNetlinkMessage,
    flags: u16,
) -> io::Result<NetlinkPayload<RouteNetlinkMessage>> {
    let (answer, _) = send(message, flags)?.recv_from_full()?;
    Ok(read(&answer)?.payload)
}

fn read(bytes: &[u8]) -> io::Result<NetlinkMessage<RouteNetlinkMessage>> {
    NetlinkMessage::deserialize(bytes)
        .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))
}

fn send(message: RouteNetlinkMessage, flags: u16) -> io::Result<Socket> {
    let mut request = NetlinkMessage::from(message);
    request.header.flags = flags;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);

    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&bytes, 0)?;
    Ok(socket)
}

/// Gives a device, by its index, one more address, which is not looked for on the network first.
///
/// # Errors
/// What the kernel answers; [`io::ErrorKind::AlreadyExists`] where it has it.
pub fn add_address(device: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
    let mut message = AddressMessage::default();
    message.header.family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    message.header.prefix_len = prefix;
    message.header.scope = AddressScope::Universe;
    message.header.index = device;
    message.header.flags = AddressHeaderFlags::Nodad;
    message.attributes = vec![
        AddressAttribute::Local(address),
        AddressAttribute::Address(address),
    ];
    ask(RouteNetlinkMessage::NewAddress(message))
}
