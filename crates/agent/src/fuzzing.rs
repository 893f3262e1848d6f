// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets: what other programs in the guest send to the agent. `scripts/fuzz.sh` runs them, and tests replay the corpora.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use viola_proto::pipe::library::{LibraryReply, LibraryRequest, PACKET_BYTES};

use crate::blocks::access::Probe;
use crate::blocks::datanode;
use crate::pipe::programs::{Incoming, receive};

/// Most descriptors that a program of this target sends with a packet: one more than a request has.
const MAX_DESCRIPTORS: usize = 3;

/// Sends packets to the agent's socket for programs; panics when a request is taken that is none.
///
/// Input: packets, each after a byte with the number of descriptors and a byte with the packet's length.
pub fn program_requests(input: &[u8]) {
    static NULL: OnceLock<OwnedFd> = OnceLock::new();
    let null = NULL.get_or_init(memory);
    let flags = SocketFlags::CLOEXEC;
    let (program, agent) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
    let mut rest = input;
    while let Some(([count, length], after)) = rest.split_first_chunk::<2>() {
        let count = usize::from(*count) % (MAX_DESCRIPTORS + 1);
        let (packet, after) = after.split_at(after.len().min(usize::from(*length)));
        rest = after;
        let fds = vec![null.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if count > 0 {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let from = [std::io::IoSlice::new(packet)];
        sendmsg(&program, &from, &mut control, SendFlags::empty()).expect("room in the socket");
        match receive(agent.as_fd()) {
            Incoming::Ask(ask, fds) => {
                assert_eq!(ask.encode()[..], *packet);
                let needs_none = matches!(
                    ask,
                    LibraryRequest::Stop { .. } | LibraryRequest::Reset { .. }
                );
                assert_eq!(fds.is_none(), needs_none, "{ask:?}");
                assert_eq!(count, if needs_none { 0 } else { 2 }, "{ask:?}");
            }
            Incoming::Gone => {}
            Incoming::Nothing => panic!("a packet is lost"),
        }
        // The library parses the agent's packets in the same way.
        if let Some(reply) = LibraryReply::decode(packet) {
            assert_eq!(packet.len(), PACKET_BYTES);
            assert_eq!(LibraryReply::decode(&reply.encode()), Some(reply));
        }
    }
}

fn memory() -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    rustix::fs::memfd_create("fuzz", flags).expect("a file in memory")
}

/// Takes `input` as a DataNode's response to a read without a token; panics when it counts as granted and has no field for
/// checksums.
pub fn datanode_answers(input: &[u8]) {
    match datanode::probe_of(input) {
        Some(Probe::Granted) => assert!(input.iter().any(|byte| byte & 0x7f == 0x22)),
        Some(Probe::Unknown(why)) => assert!(!why.contains(char::is_control), "{why:?}"),
        _ => {}
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn the_corpus_of_programs_requests_breaks_no_property() {
        replay("program_requests", super::program_requests);
    }

    #[test]
    fn the_corpus_of_a_datanodes_answers_breaks_no_property() {
        replay("datanode_answers", super::datanode_answers);
    }
}
