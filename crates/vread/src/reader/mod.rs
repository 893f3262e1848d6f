// SPDX-License-Identifier: Apache-2.0
//! The reader worker: a read-only virtio-fs device for one VM, whose files are blocks of other VMs. A VM without
//! shared memory gets the same file system by a byte stream.
//!
//! The worker parses untrusted input (vhost-user messages of the VMM, virtqueues, FUSE requests), so it runs without
//! privileges; the daemon passes it all descriptors. One system call reads bytes from the image into the VM's memory,
//! without a copy.
//!
//! A VM can make the worker keep only a bounded amount of memory: 32,768 files and directories
//! (`nodes::MAX_NODES`), 16,384 blocks, 2^20 extents, and the requests in its queues.

mod block;
mod byte_queue;
mod cache;
mod device;
mod file_read;
mod fs;
mod gate;
mod guest_buffers;
mod local_file;
mod local_read;
mod nodes;
mod pool;
mod remote;
mod service;
mod slots;
mod stream;
mod worker;

pub use fs::BlockFs;
#[cfg(test)]
pub(crate) use guest_buffers::without_waiting;
pub(crate) use local_read::{BlockHandle, ReadError};
pub(crate) use pool::Pool;
pub use service::Service;
pub use stream::StreamServer;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use worker::serve_connection;
pub use worker::{Params, run, serve_vm};
pub(crate) use worker::{change_datanodes, end_on_panic, two};

#[cfg(any(test, feature = "fuzzing"))]
pub mod test_queue;

#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;
