// SPDX-License-Identifier: Apache-2.0
//! Requests by rtnetlink. Each request has a socket of its own, in the calling thread's network
//! namespace.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Creates the object that the message describes.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::AlreadyExists`] if the object exists.
pub fn create(message: RouteNetlinkMessage) -> io::Result<()> {
    execute(message, NLM_F_CREATE | NLM_F_EXCL)
}

/// Deletes the object that the message describes.
///
/// # Errors
/// The kernel's; [`io::ErrorKind::NotFound`] if there is none.
pub fn delete(message: RouteNetlinkMessage) -> io::Result<()> {
    execute(message, 0)
}

/// Sends a request with these further flags and waits for the kernel's acknowledgement.
pub(crate) fn execute(message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
    match request(message, NLM_F_REQUEST | NLM_F_ACK | flags)? {
        NetlinkPayload::Error(e) if e.code.is_some() => Err(e.to_io()),
        _ => Ok(()),
    }
}

/// Sends a request that has exactly one answer, and returns that.
///
/// # Errors
/// The kernel's.
pub fn look_up(message: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
    match request(message, NLM_F_REQUEST)? {
        NetlinkPayload::InnerMessage(found) => Ok(found),
        NetlinkPayload::Error(e) => Err(e.to_io()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Lists all objects of the message's kind.
///
/// # Errors
/// The kernel's.
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
            // messages are aligned to four bytes
            let next = length.next_multiple_of(4).max(4);
            rest = rest.get(next..).unwrap_or_default();
        }
    }
}

/// Sends a request and returns the first answer.
fn request(
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
