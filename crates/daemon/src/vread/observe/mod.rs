// SPDX-License-Identifier: Apache-2.0
//! What vread reads of its host: image files of disks, and addresses of other hosts.

pub mod addresses;
pub mod block_disks;
pub mod disks;
