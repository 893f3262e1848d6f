// SPDX-License-Identifier: Apache-2.0
//! Random numbers for sessions, nodes and challenges.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

/// Random bytes that nobody can predict.
///
/// # Errors
/// The kernel's error. The bytes must not be replaced by predictable ones then.
pub(crate) fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(bytes)
}

/// A random number.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    // getrandom(2) never returns fewer than 8 bytes, and its pool is initialised long before VMs run.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}
