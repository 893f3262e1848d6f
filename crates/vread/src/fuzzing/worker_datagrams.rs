// SPDX-License-Identifier: Apache-2.0
//! Fuzzes the datagrams that a compromised worker sends to other workers and to the daemon.
//!
//! Input: a byte that selects the receiver; then datagrams, each after two bytes of length, little endian.

use std::time::Duration;

use rustix::net::{SendFlags, send};
use viola_proto::agent::{BlockKey, MAX_EXTENTS};

use crate::control::{Control, ControlError, Inbox, Report, socket_pair};
use crate::lookup::{Client, Incoming, Server, ask_all};

/// Runs one input; panics when an invariant is violated.
pub fn worker_datagrams(input: &[u8]) {
    let Some((who, mut rest)) = input.split_first() else {
        return;
    };
    let (here, there) = socket_pair().expect("sockets");
    let mut sent = 0;
    while let Some((length, after)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length));
        let (datagram, after) = after.split_at(after.len().min(length));
        rest = after;
        // A datagram that does not fit into the socket is not sent.
        if !datagram.is_empty() && send(&there, datagram, SendFlags::DONTWAIT).is_ok() {
            sent += 1;
        }
    }
    match who % 4 {
        // An agent worker receives questions of a reader worker.
        0 => {
            let mut server = Server::new(here);
            let heard = (0..=sent).filter(|_| matches!(server.receive(), Incoming::Question(..)));
            assert!(heard.count() <= sent);
        }
        // A reader worker receives answers of an agent worker.
        1 => {
            let client = Client::new(here);
            let key = BlockKey::new("BP-1", 7, 1001).expect("a key");
            if let Some((of, found)) = ask_all(&[&client], &key, Duration::ZERO) {
                assert_eq!(of, 0);
                assert!(found.data.extents.len() <= MAX_EXTENTS);
                assert!(found.meta.extents.len() <= MAX_EXTENTS);
            }
        }
        // The daemon receives reports of a worker.
        2 => {
            let control = Control::from_fd(here);
            for _ in 0..sent {
                match control.receive::<Report>() {
                    Ok(Some(_)) | Err(ControlError::Garbage(_)) => {}
                    other => panic!("a datagram is lost: {other:?}"),
                }
            }
        }
        // A worker receives orders from a process other than the daemon.
        _ => {
            let mut inbox = Inbox::single(Control::from_fd(here));
            while let Some((received, to)) = inbox.next() {
                assert_eq!(received.message.descriptors(), received.fds.len());
                inbox.answer(to, &Report::Done);
            }
        }
    }
}
