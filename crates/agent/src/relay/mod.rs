// SPDX-License-Identifier: Apache-2.0
//! The mount in which a VM without shared memory reads the blocks of other VMs: a FUSE mount whose requests go over a
//! byte stream to the host. See [`viola_proto::fuse_stream`].
//!
//! | module | contents |
//! |---|---|
//! | [`settings`] | `[mount]` in the configuration |
//! | [`session`] | pending requests, and whether the host answers |
//! | [`mount`] | the FUSE device |
//! | `pump` | the thread that joins them |
//! | [`report`] | what `viola-agent status` shows |
//!
//! A lost host never blocks a reader. Pending requests fail with EIO at once when the stream ends, within [five
//! seconds](session) when the host is silent; new ones fail until it is back. The mount stays. A worker that knows
//! the mount continues to serve its open files. A new worker knows none of the kernel's inode numbers and answers
//! ESTALE, so the kernel looks the names up again.

pub mod mount;
mod pump;
pub mod report;
pub mod session;
pub mod settings;
mod shared;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::{StartError, start_error};
use crate::io::channel::Address;
use report::MountReport;
use settings::Settings;
use shared::Shared;

/// The mount, kept by a thread of its own. Dropping it unmounts.
#[derive(Debug)]
pub struct Relay {
    path: PathBuf,
    address: Address,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Starts the relay. It mounts as soon as the host has answered; until then the directory is empty.
    ///
    /// # Errors
    /// When another file system is mounted at the path, or no thread can be started.
    pub fn start(settings: &Settings) -> Result<Self, StartError> {
        let what = format!("mount {}", settings.path.display());
        start_error(what, Self::try_start(settings))
    }

    fn try_start(settings: &Settings) -> io::Result<Self> {
        let address = Address::parse(&settings.port).map_err(io::Error::other)?;
        let path = settings.path.clone();
        mount::remove_stale(&path)?;
        let shared = Arc::new(Shared {
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            state: Mutex::default(),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
        });
        let pump = pump::Pump::new(path.clone(), address.clone(), shared.clone());
        let thread = std::thread::Builder::new()
            .name("viola-relay".into())
            .spawn(move || pump.run())?;
        Ok(Self {
            path,
            address,
            shared,
            thread: Some(thread),
        })
    }

    /// The report for `viola-agent status`.
    #[must_use]
    pub fn report(&self) -> MountReport {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let state = &self.shared.state;
        MountReport {
            path: self.path.display().to_string(),
            port: self.address.to_string(),
            state: state.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            requests: get(&self.shared.requests),
            bytes: get(&self.shared.bytes),
            failed: get(&self.shared.failed),
            sessions: get(&self.shared.sessions),
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
