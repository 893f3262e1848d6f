// SPDX-License-Identifier: Apache-2.0
//! The keeper's thread.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;

use super::journal::Journal;
use super::keeper::Keeper;
use super::plan::Goal;
use super::report::Report;
use super::restore::{boot_id, restore, restore_leftovers};
use super::settings::{DEFAULT_JOURNAL, Settings};
use super::system::RealSystem;
use super::uevents::{DeviceEvents, Uevents};
use crate::io::service::{Published, Service};

/// Between two rounds without an event: new threads and changes by others send none.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};
/// Time between the first event and the next round: events come in groups, and a driver sets its device up after the
/// first one.
const UEVENT_SETTLE_TIME: Duration = Duration::from_millis(300);

/// Starts the keeper, if it is configured. Otherwise restores what an earlier, configured agent has left.
///
/// # Errors
/// When another agent has the journal, the journal is not usable, or no thread can be started.
pub fn start(settings: Option<&Settings>) -> io::Result<Option<Turbo>> {
    match settings {
        Some(settings) => start_keeper(settings).map(Some),
        None => {
            match restore_leftovers(&RealSystem::new(Path::new("/")), Path::new(DEFAULT_JOURNAL)) {
                Ok(Some(restored)) => eprintln!("viola-agent: {restored}"),
                Ok(None) => {}
                // the journal is not needed here, and stays for `viola-agent restore`
                Err(e) => eprintln!("viola-agent: {DEFAULT_JOURNAL}: {e}"),
            }
            Ok(None)
        }
    }
}

/// A running keeper. Dropping it restores everything.
pub type Turbo = Service<Report>;

/// Restores what an earlier agent has left, and starts the thread.
fn start_keeper(settings: &Settings) -> io::Result<Turbo> {
    let system = RealSystem::new(Path::new("/"));
    let journal = Journal::open(&settings.journal, &boot_id(&system));
    let mut journal = journal.map_err(|e| match e.kind() {
        ErrorKind::WouldBlock => io::Error::other("another viola-agent has the journal"),
        _ => e,
    })?;
    restore(&system, &mut journal)?;
    let mut keeper = Keeper::new(Box::new(system), Goal::from(settings), journal);
    let uevents = Uevents::open().ok();
    let first = keeper.report();
    let run = move |report: &Published<Report>, stop: &OwnedFd| {
        loop {
            keeper.round();
            report.set(keeper.report());
            let Some(events) = wait(stop, uevents.as_ref()) else {
                break;
            };
            if events.cpus {
                keeper.cpus_changed(Instant::now());
            }
        }
        keeper.end();
    };
    Service::start("viola-turbo", first, run)
}

/// Waits for an event or the next round; `None` when the keeper ends.
fn wait(stop: &OwnedFd, uevents: Option<&Uevents>) -> Option<DeviceEvents> {
    let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
    fds.extend(uevents.map(|events| PollFd::new(events, PollFlags::IN)));
    loop {
        // an interrupted wait is harmless
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
