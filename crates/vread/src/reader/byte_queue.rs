// SPDX-License-Identifier: Apache-2.0
//! Serves FUSE requests that arrive as plain bytes, by the same parser as those of a virtqueue.
//!
//! Request and reply lie in memory of this process, described by one descriptor each, so the server does not know the
//! transport.

use fuse_backend_rs::api::server::Server;
use viola_proto::fuse_stream::{HEADER_BYTES, MAX_REPLY_BYTES, MAX_REQUEST_BYTES, TRAILER_BYTES};
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap, WriteVolatile,
};

use super::device::serve_chain;
use super::fs::BlockFs;

const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
/// First address behind the rings.
const BUFFERS: u64 = 0x3000;
const REQUEST: u64 = BUFFERS;
/// The frame of the reply; the reply follows the frame's header.
const FRAME: u64 = REQUEST + MAX_REQUEST_BYTES as u64;
const REPLY: u64 = FRAME + HEADER_BYTES as u64;
const SIZE: usize = FRAME as usize + HEADER_BYTES + MAX_REPLY_BYTES + TRAILER_BYTES;
/// Maximum number of buffers of a request; a power of two, as virtio demands of a queue's length.
pub(super) const MAX_BUFFERS: u16 = 256;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A buffer of a request: address, length, and whether the device writes it.
pub(super) type Buffer = (u64, u32, bool);

/// Serves the request with these buffers through a virtqueue at the start of `memory`. Returns the length of the
/// reply, 0 for none, or `None` when the request is malformed.
pub(super) fn serve_buffers(
    server: &Server<BlockFs>,
    memory: &GuestMemoryAtomic<GuestMemoryMmap>,
    buffers: &[Buffer],
) -> Option<usize> {
    let memory = memory.memory();
    for (index, (address, length, is_written)) in buffers.iter().enumerate() {
        let more = if index + 1 < buffers.len() { NEXT } else { 0 };
        let flags = more | if *is_written { WRITE } else { 0 };
        let descriptor = Descriptor::new(*address, *length, flags, index as u16 + 1);
        let place = GuestAddress(DESCRIPTORS + index as u64 * 16);
        memory
            .write_obj(RawDescriptor::from(descriptor), place)
            .ok()?;
    }
    let mut queue = Queue::new(MAX_BUFFERS).ok()?;
    queue.set_size(MAX_BUFFERS);
    queue
        .try_set_desc_table_address(GuestAddress(DESCRIPTORS))
        .ok()?;
    queue
        .try_set_avail_ring_address(GuestAddress(AVAILABLE))
        .ok()?;
    queue.try_set_used_ring_address(GuestAddress(USED)).ok()?;
    queue.set_ready(true);
    // The available ring: flags, index 1, head 0.
    memory.write_obj(1u16, GuestAddress(AVAILABLE + 2)).ok()?;
    memory.write_obj(0u16, GuestAddress(AVAILABLE + 4)).ok()?;
    let chain = queue.iter(memory.clone()).ok()?.next()?;
    serve_chain(server, &chain)
}

/// Memory for one request at a time; pages are allocated on first use.
pub(super) struct ByteQueue {
    memory: GuestMemoryAtomic<GuestMemoryMmap>,
}

impl ByteQueue {
    pub(super) fn new() -> std::io::Result<Self> {
        let size = SIZE.next_multiple_of(0x1000);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)])
            .map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(Self {
            memory: GuestMemoryAtomic::new(memory),
        })
    }

    /// Serves a request of at most [`MAX_REQUEST_BYTES`] bytes. Returns the length of the reply, 0 for none, or `None` when
    /// the request is malformed.
    pub(super) fn serve(&self, server: &Server<BlockFs>, request: &[u8]) -> Option<usize> {
        let place = GuestAddress(REQUEST);
        self.memory.memory().write_slice(request, place).ok()?;
        let request = (REQUEST, u32::try_from(request.len()).ok()?, false);
        let reply = (REPLY, MAX_REPLY_BYTES as u32, true);
        let length = serve_buffers(server, &self.memory, &[request, reply])?;
        (length <= MAX_REPLY_BYTES).then_some(length)
    }

    /// Writes the frame of the last reply completely.
    ///
    /// # Errors
    /// Errors of the stream.
    pub(super) fn send(
        &self,
        header: &[u8; HEADER_BYTES],
        length: usize,
        trailer: &[u8; TRAILER_BYTES],
        stream: &mut impl WriteVolatile,
    ) -> std::io::Result<()> {
        let memory = self.memory.memory();
        let other = |e: vm_memory::GuestMemoryError| match e {
            vm_memory::GuestMemoryError::IOError(e) => e,
            e => std::io::Error::other(e.to_string()),
        };
        memory
            .write_slice(header, GuestAddress(FRAME))
            .map_err(other)?;
        memory
            .write_slice(trailer, GuestAddress(REPLY + length as u64))
            .map_err(other)?;
        let whole = HEADER_BYTES + length + TRAILER_BYTES;
        let mut done = 0;
        while done < whole {
            let at = GuestAddress(FRAME + done as u64);
            match memory
                .write_volatile_to(at, stream, whole - done)
                .map_err(other)?
            {
                0 => return Err(std::io::ErrorKind::WriteZero.into()),
                some => done += some,
            }
        }
        Ok(())
    }

    /// Stores a reply that the server did not produce.
    pub(super) fn put(&self, reply: &[u8]) -> Option<usize> {
        let memory = self.memory.memory();
        memory.write_slice(reply, GuestAddress(REPLY)).ok()?;
        Some(reply.len())
    }

    /// Returns the first bytes of the last reply.
    pub(super) fn begin<const N: usize>(&self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let memory = self.memory.memory();
        memory
            .read_slice(&mut bytes, GuestAddress(REPLY))
            .ok()
            .map(|()| bytes)
    }
}
