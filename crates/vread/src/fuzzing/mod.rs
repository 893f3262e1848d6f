// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets: one function for each interface that a guest, another host or a compromised worker can reach.
//!
//! `scripts/fuzz.sh` runs them with generated inputs; the tests replay the inputs kept in `fuzz/corpus`.

mod agent_messages;
mod fuse_requests;
mod peer_frames;
mod stream_frames;
mod vhost_user;
mod worker_datagrams;

pub use agent_messages::agent_messages;
pub use fuse_requests::fuse_requests;
pub use peer_frames::peer_frames;
pub use stream_frames::stream_frames;
pub use vhost_user::vhost_user;
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
    fn the_corpus_of_agent_messages_violates_no_invariant() {
        replay("agent_messages", agent_messages);
    }

    #[test]
    fn the_beginning_of_agent_messages_opens_a_session() {
        agent_messages(&[2]);
    }

    #[test]
    fn the_corpus_of_fuse_requests_violates_no_invariant() {
        replay("fuse_requests", fuse_requests);
    }

    #[test]
    fn the_corpus_of_worker_datagrams_violates_no_invariant() {
        replay("worker_datagrams", worker_datagrams);
    }

    #[test]
    fn the_corpus_of_stream_frames_violates_no_invariant() {
        replay("stream_frames", stream_frames);
    }

    #[test]
    fn the_corpus_of_vhost_user_messages_violates_no_invariant() {
        replay("vhost_user", vhost_user);
    }

    #[test]
    fn the_corpus_of_peer_frames_violates_no_invariant() {
        replay("peer_frames", peer_frames);
    }
}
