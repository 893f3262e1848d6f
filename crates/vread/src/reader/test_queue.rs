// SPDX-License-Identifier: Apache-2.0
//! Sends requests from plain bytes through a virtqueue in memory of its own: for tests and fuzzing.

use fuse_backend_rs::api::server::Server;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use super::byte_queue::{MAX_BUFFERS, serve_buffers};
use super::fs::BlockFs;

const REQUEST: u64 = 0x10_0000;
const ANSWER: u64 = 0x20_0000;
const MEMORY: usize = 0x40_0000;

/// A VM that sends one request at a time.
pub struct TestQueue {
    server: Server<BlockFs>,
    kept: std::sync::Arc<super::nodes::Nodes>,
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
}

impl TestQueue {
    /// Sends requests to this file system.
    pub fn new(fs: BlockFs) -> Self {
        let ranges = [(GuestAddress(0), MEMORY)];
        // The arguments are constant; this fails only without 4 MiB of memory.
        #[allow(clippy::unwrap_used)]
        let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
        Self {
            kept: fs.nodes(),
            server: Server::new(fs),
            memory: GuestMemoryAtomic::new(memory),
        }
    }

    /// Number of nodes that the server keeps.
    pub fn kept(&self) -> usize {
        self.kept.len()
    }

    /// Sends `request` with `room` bytes for the answer, both split into descriptors of at most `cut` bytes. Returns
    /// the answer, or `None` when the request is malformed or has no answer.
    pub fn send(&self, request: &[u8], room: usize, cut: usize) -> Option<Vec<u8>> {
        let memory = self.memory.memory();
        let request = &request[..request.len().min(MEMORY / 8)];
        let room = room.min(MEMORY - ANSWER as usize);
        // The queue has a limited number of descriptors.
        let least = (request.len() + room) / usize::from(MAX_BUFFERS / 2) + 1;
        let cut = cut.max(least);
        memory.write_slice(request, GuestAddress(REQUEST)).ok()?;
        memory
            .write_slice(&vec![0xa5; room], GuestAddress(ANSWER))
            .ok()?;
        let pieces = |at: u64, length: usize, is_written: bool| {
            (0..length).step_by(cut).map(move |offset| {
                let length = cut.min(length - offset);
                (at + offset as u64, length as u32, is_written)
            })
        };
        let buffers: Vec<_> = pieces(REQUEST, request.len(), false)
            .chain(pieces(ANSWER, room, true))
            .collect();
        let length = serve_buffers(&self.server, &self.memory, &buffers)?;
        let mut answer = vec![0; length.min(room)];
        memory.read_slice(&mut answer, GuestAddress(ANSWER)).ok()?;
        (!answer.is_empty()).then_some(answer)
    }
}
