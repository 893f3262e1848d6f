// SPDX-License-Identifier: Apache-2.0
//! What the relay's thread shares with the reports: its state and counters.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

/// Shared by the thread and the handle of a relay.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) stop: OwnedFd,
    pub(super) state: Mutex<String>,
    pub(super) requests: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) sessions: AtomicU64,
}

impl Shared {
    /// Sets the state for `viola-agent status`, and logs a change.
    pub(super) fn set_state(&self, state: &str) {
        let mut old = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *old != state {
            eprintln!("viola-agent: mount: {state}");
            *old = state.to_owned();
        }
    }
}
