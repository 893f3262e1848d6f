// SPDX-License-Identifier: Apache-2.0
//! What a host does with a connection that it is given.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use viola_handover::{drop_quietly, from_wire, outstanding, put, take, to_wire};
use viola_proto::pipe::{Connection, FromGuest, PipeId, ToGuest};

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
        FromGuest::Give {
            pipe,
            connection,
            next_hop,
            map,
            offset,
            length,
            ..
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
    let ready = put(socket.as_fd(), &state).unwrap();
    bed.wire.lead(Way::Host);
    ready.go().unwrap();
    socket
}

/// The host gives it back, and lets packets go to the guest when the guest has it.
pub fn give_back(bed: &Bed, pipe: PipeId, socket: OwnedFd, sent: u64, errno: i32) {
    while outstanding(socket.as_fd()).unwrap() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    bed.wire.lead(Way::Nowhere);
    let state = take(socket.as_fd()).unwrap().keep();
    bed.wire.settle();
    drop_quietly(socket.as_fd()).unwrap();
    bed.host.say(ToGuest::Back {
        pipe,
        connection: Some(Box::new(to_wire(state).unwrap())),
        sent,
        errno,
    });
    assert_eq!(bed.host.hear(), FromGuest::Taken { pipe });
    bed.wire.lead(Way::Guest);
}
