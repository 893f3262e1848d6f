// SPDX-License-Identifier: Apache-2.0
//! A service on a thread of its own, with a report for `viola-agent status`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

/// A running service with a report of type `R`. Dropping it stops the service and waits for its thread.
#[derive(Debug)]
pub struct Service<R> {
    report: Published<R>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// The latest report of a service.
#[derive(Debug)]
pub struct Published<R>(Arc<Mutex<R>>);

impl<R> Published<R> {
    /// Replaces the report.
    pub fn set(&self, report: R) {
        *self.lock() = report;
    }

    fn lock(&self) -> MutexGuard<'_, R> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: Clone + Send + 'static> Service<R> {
    /// Starts a thread that runs `body`. `body` gets the place for its reports, and a descriptor
    /// that is readable when the service has to stop.
    ///
    /// # Errors
    /// When no descriptor or no thread can be made.
    pub fn start(
        name: &str,
        report: R,
        body: impl FnOnce(&Published<R>, &OwnedFd) + Send + 'static,
    ) -> io::Result<Self> {
        let report = Arc::new(Mutex::new(report));
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let (published, stop_there) = (Published(Arc::clone(&report)), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || body(&published, &stop_there))?;
        Ok(Self {
            report: Published(report),
            stop,
            thread: Some(thread),
        })
    }

    /// The latest report.
    pub fn report(&self) -> R {
        self.report.lock().clone()
    }
}

impl<R> Drop for Service<R> {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
