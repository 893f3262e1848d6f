// SPDX-License-Identifier: Apache-2.0
//! The reader worker: a read-only virtio-fs device for one VM, made of blocks of others. A VM whose memory
//! is not shared gets the same file system by a byte stream.
//!
//! It parses what the VM sends (vhost-user messages of the VMM, virtqueues, FUSE requests) and so runs
//! without rights of its own; all descriptors come from the daemon. Bytes go from the image's file
//! into the VM's memory by one system call, without a copy of ours.
//!
//! What a VM can make it keep is bounded: [`nodes::MAX_NODES`](self) files, none of which needs
//! memory for being open, 16,384 blocks, 2^20 extents, and the requests of its queues.

mod block;
mod byte_queue;
mod cache;
mod device;
mod fs;
mod guest_buffers;
mod local_read;
mod nodes;
mod pool;
mod remote;
mod service;
mod slots;
mod stream;
mod worker;

pub use device::DeviceConfig;
pub use fs::{BlockFs, MountOptions};
#[cfg(test)]
pub(crate) use guest_buffers::without_waiting;
pub(crate) use local_read::{BlockHandle, ReadError};
pub(crate) use pool::Pool;
pub use service::Service;
pub use stream::StreamServer;
pub use worker::{Params, run, serve_vm};
pub(crate) use worker::{end_on_panic, open_images};

#[cfg(any(test, feature = "fuzzing"))]
pub mod test_queue;

#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;
