// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets: one function for each interface that a guest, another host or a compromised worker can reach.
//!
//! `scripts/fuzz.sh` runs them with generated inputs; the tests replay the inputs kept in `fuzz/corpus`.

mod agent_messages;
mod fuse_requests;
mod peer_frames;
mod worker_datagrams;

pub use agent_messages::agent_messages;
pub use fuse_requests::fuse_requests;
pub use peer_frames::peer_frames;
pub use worker_datagrams::worker_datagrams;

/// Creates an empty file in memory.
fn memory_file() -> std::fs::File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    rustix::fs::memfd_create("fuzz", flags)
        .expect("a file in memory")
        .into()
}

#[cfg(test)]
#[path = "../../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;
    use super::*;

    #[test]
    fn no_message_of_an_agent_that_was_ever_found_breaks_a_promise() {
        replay("agent_messages", agent_messages);
    }

    #[test]
    fn no_request_of_a_vm_that_was_ever_found_breaks_a_promise() {
        replay("fuse_requests", fuse_requests);
    }

    #[test]
    fn no_datagram_of_a_worker_that_was_ever_found_breaks_a_promise() {
        replay("worker_datagrams", worker_datagrams);
    }

    #[test]
    fn no_frame_of_another_host_that_was_ever_found_breaks_a_promise() {
        replay("peer_frames", peer_frames);
    }
}
