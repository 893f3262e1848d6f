// SPDX-License-Identifier: Apache-2.0
//! What a host does with a connection that it is given.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use viola_handover::{
    disconnect_silently, extract, from_wire, restore, to_wire, unacknowledged_bytes,
};
use viola_proto::agent::Bytes;
use viola_proto::pipe::library::{LibraryReply, LostConnections};
use viola_proto::pipe::{Connection, Endpoint, MAX_QUEUE_BYTES, PipeId, PipeReply, PipeRequest};

use super::Bed;
use super::wire::{CLIENT, Way};

/// What the host was given.
pub struct Given {
    pub pipe: PipeId,
    pub connection: Box<Connection>,
    pub bytes: Vec<u8>,
}

/// The host hears of a pipe, and reads its bytes from the image.
pub fn given(bed: &Bed) -> Given {
    match bed.host.hear() {
        PipeRequest::Start {
            pipe,
            source: Endpoint::File { map, offset, .. },
            sink:
                Endpoint::Connection {
                    connection,
                    next_hop,
                },
            length,
        } => {
            assert_eq!(next_hop, CLIENT.0);
            let bytes = bed.host.bytes(&map, offset, length);
            Given {
                pipe,
                connection,
                bytes,
            }
        }
        other => panic!("{other:?}"),
    }
}

/// The host has the connection.
pub fn put_there(bed: &Bed, given: &Given) -> OwnedFd {
    bed.wire.lead(Way::Nowhere);
    bed.wire.settle();
    let state = from_wire(*given.connection.clone());
    let socket = bed.wire.host.tcp_socket(state.local.ip()).unwrap();
    let ready = restore(socket.as_fd(), &state).unwrap();
    bed.wire.lead(Way::Host);
    ready.activate().unwrap();
    socket
}

/// The host gives it back, and lets packets go to the guest when the guest has it.
pub fn give_back(bed: &Bed, pipe: PipeId, socket: OwnedFd, sent: u64, errno: i32) {
    while unacknowledged_bytes(socket.as_fd()).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.wire.lead(Way::Nowhere);
    let mut state = extract(socket.as_fd()).unwrap().detach();
    bed.wire.settle();
    disconnect_silently(socket.as_fd()).unwrap();
    while state.unread.len() > MAX_QUEUE_BYTES {
        let rest = state.unread.split_off(MAX_QUEUE_BYTES);
        let bytes = Bytes(std::mem::replace(&mut state.unread, rest));
        bed.host.say(PipeReply::Unread {
            pipe,
            source: false,
            bytes,
        });
    }
    bed.host.say(PipeReply::Finished {
        pipe,
        source: None,
        sink: Some(Box::new(to_wire(state).unwrap())),
        sent,
        errno,
        host_us: 0,
    });
    assert_eq!(bed.host.hear(), PipeRequest::Restored { pipe });
    bed.wire.lead(Way::Guest);
}

/// The host is told to hold a connection, and does.
pub fn hold(bed: &Bed) -> PipeId {
    let heard = bed.host.hear_in_time();
    let Some(PipeRequest::Hold { pipe, local, peer }) = heard else {
        panic!("not held: {heard:?}, {:?}", bed.status());
    };
    assert_eq!(peer.ip().to_string(), CLIENT.1);
    bed.wire.lead_one(local.port(), Way::Kept);
    bed.wire.settle();
    bed.host.say(PipeReply::Held { pipe });
    pipe
}

/// The host lets a connection go that it has held, or the guest has taken back.
pub fn let_go(bed: &Bed, port: u16) {
    bed.wire.lead_one(port, Way::Guest);
}

/// The host has one connection of a pipe. Nobody but the client speaks on it before that.
pub fn put_one(bed: &Bed, end: Endpoint) -> OwnedFd {
    let Endpoint::Connection {
        connection,
        next_hop,
    } = end
    else {
        panic!("a file");
    };
    assert_eq!(next_hop, CLIENT.0);
    let state = from_wire(*connection);
    let socket = bed.wire.host.tcp_socket(state.local.ip()).unwrap();
    let ready = restore(socket.as_fd(), &state).unwrap();
    bed.wire.lead_one(state.local.port(), Way::Host);
    ready.activate().unwrap();
    socket
}

/// The host has it no more; what the peer says from now on is kept.
pub fn take_one(bed: &Bed, socket: OwnedFd, port: u16) -> Box<Connection> {
    while unacknowledged_bytes(socket.as_fd()).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.wire.lead_one(port, Way::Kept);
    bed.wire.settle();
    let state = extract(socket.as_fd()).unwrap().detach();
    disconnect_silently(socket.as_fd()).unwrap();
    Box::new(to_wire(state).unwrap())
}

/// A connection to this end was sent so many segments again.
pub fn sent_again(stream: &std::net::TcpStream) -> u32 {
    use std::os::fd::AsRawFd;
    let mut info = [0_u32; 60];
    let mut size = size_of_val(&info) as libc::socklen_t;
    let (to, length) = (info.as_mut_ptr().cast(), &raw mut size);
    let (level, name) = (libc::IPPROTO_TCP, libc::TCP_INFO);
    // SAFETY: the kernel writes at most `size` bytes to `info`.
    let done = unsafe { libc::getsockopt(stream.as_raw_fd(), level, name, to, length) };
    assert_eq!(done, 0);
    // tcpi_total_retrans
    info[25]
}

/// What a program hears at the end.
pub fn over(id: u64, sent: u64, lost: LostConnections) -> LibraryReply {
    let errno = match lost {
        LostConnections::NONE => 0,
        _ => libc::ECONNRESET,
    };
    LibraryReply::Finished {
        id,
        sent,
        errno,
        lost,
        host_us: 0,
    }
}
