// SPDX-License-Identifier: Apache-2.0
//! What the host does with a connection.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use viola_handover::{
    disconnect_silently, extract, from_wire, restore, to_wire, unacknowledged_bytes,
};
use viola_proto::agent::Bytes;
use viola_proto::pipe::library::{LibraryReply, LostConnections};
use viola_proto::pipe::{Connection, Endpoint, MAX_QUEUE_BYTES, PipeId, PipeReply, PipeRequest};

use super::Bed;
use super::wire::{CLIENT, Route};

/// A pipe that was handed to the host.
pub struct Given {
    pub pipe: PipeId,
    pub connection: Box<Connection>,
    pub bytes: Vec<u8>,
}

/// Receives a hand-over, and reads its bytes from the image.
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

/// Restores the connection at the host.
pub fn restore_at_host(bed: &Bed, given: &Given) -> OwnedFd {
    bed.wire.redirect(Route::Nowhere);
    bed.wire.settle();
    let state = from_wire(*given.connection.clone());
    let socket = bed.wire.host.tcp_socket(state.local.ip()).unwrap();
    let ready = restore(socket.as_fd(), &state).unwrap();
    bed.wire.redirect(Route::Host);
    ready.activate().unwrap();
    socket
}

/// Returns the connection, and redirects its packets to the guest when the guest has it.
pub fn return_connection(bed: &Bed, pipe: PipeId, socket: OwnedFd, sent: u64, errno: i32) {
    while unacknowledged_bytes(socket.as_fd()).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.wire.redirect(Route::Nowhere);
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
    bed.wire.redirect(Route::Guest);
}

/// Receives a hold, and holds the connection.
pub fn hold(bed: &Bed) -> PipeId {
    let heard = bed.host.hear_in_time();
    let Some(PipeRequest::Hold { pipe, local, peer }) = heard else {
        panic!("not held: {heard:?}, {:?}", bed.status());
    };
    assert_eq!(peer.ip().to_string(), CLIENT.1);
    bed.wire.redirect_port(local.port(), Route::Held);
    bed.wire.settle();
    bed.host.say(PipeReply::Held { pipe });
    pipe
}

/// Redirects the packets of a held or returned connection to the guest.
pub fn release(bed: &Bed, port: u16) {
    bed.wire.redirect_port(port, Route::Guest);
}

/// Restores one connection of a pipe at the host. Only the client sends on it before that.
pub fn restore_one(bed: &Bed, end: Endpoint) -> OwnedFd {
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
    bed.wire.redirect_port(state.local.port(), Route::Host);
    ready.activate().unwrap();
    socket
}

/// Extracts a connection from the host; its client's packets are held from now on.
pub fn extract_one(bed: &Bed, socket: OwnedFd, port: u16) -> Box<Connection> {
    while unacknowledged_bytes(socket.as_fd()).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.wire.redirect_port(port, Route::Held);
    bed.wire.settle();
    let state = extract(socket.as_fd()).unwrap().detach();
    disconnect_silently(socket.as_fd()).unwrap();
    Box::new(to_wire(state).unwrap())
}

/// Number of segments that the peer has retransmitted.
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

/// The program's last answer.
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
