// SPDX-License-Identifier: Apache-2.0
//! The keeper's thread in a running agent.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;

use super::journal::Journal;
use super::keeper::Keeper;
use super::plan::Goal;
use super::report::Report;
use super::restore::{boot_id, restore, restore_leftovers};
use super::settings::{DEFAULT_JOURNAL, Settings};
use super::system::RealSystem;
use super::uevents::{DeviceEvents, Uevents};

/// It looks so often without being told to: for what no event tells of, as new threads and settings of others.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};
/// Events come in groups; a driver sets its device up after the first one.
const UEVENT_SETTLE_TIME: Duration = Duration::from_millis(300);

/// Begins, where it is configured; where it is not, puts back what an agent has left that was.
///
/// # Errors
/// Those of [`Turbo::start`].
pub fn begin(settings: Option<&Settings>) -> io::Result<Option<Turbo>> {
    match settings {
        Some(settings) => Turbo::start(settings).map(Some),
        None => {
            match restore_leftovers(&RealSystem::new(Path::new("/")), Path::new(DEFAULT_JOURNAL)) {
                Ok(Some(restored)) => eprintln!("viola-agent: {restored}"),
                Ok(None) => {}
                // it is of no use here, and stays for `viola-agent restore`
                Err(e) => eprintln!("viola-agent: {DEFAULT_JOURNAL}: {e}"),
            }
            Ok(None)
        }
    }
}

/// A turbo vCPU that is kept. Everything is put back when this is dropped.
pub struct Turbo {
    report: Arc<Mutex<Report>>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Turbo {
    /// Puts back what an agent before has left, and begins.
    ///
    /// # Errors
    /// When another agent does the same, the journal is not usable or there can be no thread.
    pub fn start(settings: &Settings) -> io::Result<Self> {
        let system = RealSystem::new(Path::new("/"));
        let journal = Journal::open(&settings.journal, &boot_id(&system));
        let mut journal = journal.map_err(|e| match e.kind() {
            ErrorKind::WouldBlock => io::Error::other("another viola-agent has it"),
            _ => e,
        })?;
        restore(&system, &mut journal)?;
        let mut keeper = Keeper::new(Box::new(system), Goal::from(settings), journal);
        let report = Arc::new(Mutex::new(keeper.report()));
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let uevents = Uevents::open().ok();
        let (report_there, stop_there) = (Arc::clone(&report), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("viola-turbo".into())
            .spawn(move || {
                loop {
                    keeper.round();
                    *lock(&report_there) = keeper.report();
                    let Some(events_seen) = wait(&stop_there, uevents.as_ref()) else {
                        break;
                    };
                    if events_seen.cpus {
                        keeper.cpus_changed(Instant::now());
                    }
                }
                keeper.end();
                *lock(&report_there) = keeper.report();
            })?;
        Ok(Self {
            report,
            stop,
            thread: Some(thread),
        })
    }

    /// How it is.
    pub fn report(&self) -> Report {
        lock(&self.report).clone()
    }
}

impl Drop for Turbo {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(report: &Mutex<Report>) -> std::sync::MutexGuard<'_, Report> {
    report.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Until there is events_seen, or it is time to look; none: this is the end.
fn wait(stop: &OwnedFd, uevents: Option<&Uevents>) -> Option<DeviceEvents> {
    let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
    fds.extend(uevents.map(|events| PollFd::new(events, PollFlags::IN)));
    loop {
        // an interrupted wait is as good as a short one
        let count = poll(&mut fds, Some(&POLL_INTERVAL));
        if !fds[0].revents().is_empty() {
            return None;
        }
        let Some(events) = uevents else {
            return Some(DeviceEvents::default());
        };
        if count == Ok(0) {
            return Some(DeviceEvents::default());
        }
        let events_seen = events.drain();
        if events_seen.relevant {
            std::thread::sleep(UEVENT_SETTLE_TIME);
            let cpus = events_seen.cpus | events.drain().cpus;
            return Some(DeviceEvents {
                cpus,
                ..events_seen
            });
        }
    }
}
