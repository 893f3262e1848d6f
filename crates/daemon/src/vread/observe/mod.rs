// SPDX-License-Identifier: Apache-2.0
//! What vread reads of the host.

pub mod addresses;
pub mod disks;
