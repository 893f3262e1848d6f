// SPDX-License-Identifier: Apache-2.0
//! Whether the host should send a VM's files, and how much it sends on behalf of a VM (vPipe, paper section 2: credits by
//! weight).
//!
//! Each VM has a worker process of its own, so the kernel's scheduler shares the host's CPU time between the VMs:
//! [`nice`] turns a VM's weight into the worker's nice value. The worker itself keeps the VM's cap in bytes per second
//! with a [`TokenBucket`]. [`FileSender`] finds VMs that are worth it.

mod files;
mod nice;
mod token_bucket;

pub use files::{FileSender, Thresholds as FileThresholds, Window as FileWindow};
pub use nice::nice;
pub use token_bucket::TokenBucket;
