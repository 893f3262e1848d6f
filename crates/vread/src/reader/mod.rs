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

mod arena;
mod block;
mod cache;
mod device;
mod fill;
mod fs;
mod nodes;
mod plain;
mod pool;
mod remote;
mod run;
mod service;
mod slots;
mod stream;

pub use device::Shape;
#[cfg(test)]
pub(crate) use fill::hurried;
pub use fs::{BlockFs, Look};
pub(crate) use plain::{Failed, Handle};
pub(crate) use pool::Pool;
pub use run::{Start, run, serve_vm};
pub(crate) use run::{end_on_panic, open_images};
pub use service::Service;
pub use stream::Streams;

#[cfg(any(test, feature = "fuzzing"))]
pub mod wire;

#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;
