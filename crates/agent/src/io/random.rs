// SPDX-License-Identifier: Apache-2.0
//! Random numbers for sessions and runs.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::clock::now;

/// Fills `bytes` from the kernel's random number generator. Every kernel with fanotify by name has getrandom(2).
fn fill_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        match getrandom(&mut bytes[have..], GetRandomFlags::empty()) {
            Ok(n) => have += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// A random number that identifies a session or a run of the agent.
pub fn random() -> u64 {
    let mut bytes = [0; 8];
    match fill_random(&mut bytes) {
        Ok(()) => u64::from_ne_bytes(bytes),
        Err(_) => u64::from(std::process::id()) << 32 | now(),
    }
}
