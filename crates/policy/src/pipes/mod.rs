// SPDX-License-Identifier: Apache-2.0
//! How much the host sends on behalf of a VM (vPipe, paper section 2: credits by weight).
//!
//! Each VM has a worker process of its own, so the kernel's scheduler shares the host's CPU time between the VMs:
//! [`nice`] turns a VM's weight into the worker's nice value. The worker itself keeps the VM's cap in bytes per second
//! with a [`TokenBucket`].

mod nice;
mod token_bucket;

pub use nice::nice;
pub use token_bucket::TokenBucket;
