// SPDX-License-Identifier: Apache-2.0
//! Random numbers for sessions and nodes.

use rustix::rand::{GetRandomFlags, getrandom};

/// A random number.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    // getrandom(2) never returns fewer than 8 bytes, and its pool is initialised long before VMs run.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
