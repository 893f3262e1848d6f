// SPDX-License-Identifier: Apache-2.0
//! TestQueue from plain bytes, through a virtqueue in a memory of its own: for tests and fuzzing.

use fuse_backend_rs::api::server::Server;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use super::device::serve_chain;
use super::fs::BlockFs;

const QUEUE: u16 = 256;
const RINGS: u64 = 0x8000;
const REQUEST: u64 = 0x10_0000;
const ANSWER: u64 = 0x20_0000;
const MEMORY: usize = 0x40_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

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
        let least = (request.len() + room) / usize::from(QUEUE / 2) + 1;
        let cut = cut.max(least);
        memory.write_slice(request, GuestAddress(REQUEST)).ok()?;
        memory
            .write_slice(&vec![0xa5; room], GuestAddress(ANSWER))
            .ok()?;
        let pieces = |at: u64, length: usize, flags: u16| {
            (0..length).step_by(cut).map(move |offset| {
                let length = cut.min(length - offset);
                (at + offset as u64, length as u32, flags)
            })
        };
        let all: Vec<_> = pieces(REQUEST, request.len(), 0)
            .chain(pieces(ANSWER, room, WRITE))
            .collect();
        for (index, (at, length, flags)) in all.iter().enumerate() {
            let more = index + 1 < all.len();
            let flags = if more { flags | NEXT } else { *flags };
            let descriptor = Descriptor::new(*at, *length, flags, index as u16 + 1);
            let place = GuestAddress(index as u64 * 16);
            memory
                .write_obj(RawDescriptor::from(descriptor), place)
                .ok()?;
        }
        let mut queue = Queue::new(QUEUE).ok()?;
        queue.set_size(QUEUE);
        queue.try_set_desc_table_address(GuestAddress(0)).ok()?;
        queue.try_set_avail_ring_address(GuestAddress(RINGS)).ok()?;
        queue
            .try_set_used_ring_address(GuestAddress(2 * RINGS))
            .ok()?;
        queue.set_ready(true);
        // available: flags, index 1, head 0
        memory.write_obj(1u16, GuestAddress(RINGS + 2)).ok()?;
        memory.write_obj(0u16, GuestAddress(RINGS + 4)).ok()?;
        let chain = queue.iter(memory.clone()).ok()?.next()?;
        let length = serve_chain(&self.server, &chain)?;
        let mut answer = vec![0; length.min(room)];
        memory.read_slice(&mut answer, GuestAddress(ANSWER)).ok()?;
        (!answer.is_empty()).then_some(answer)
    }
}
