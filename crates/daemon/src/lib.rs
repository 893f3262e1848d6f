// SPDX-License-Identifier: Apache-2.0
//! `viola run`: the control loop.
//!
//! | module | does |
//! |---|---|
//! | `lock`, `leftover` | one daemon per host; what an earlier one left behind |
//! | `server`, `http`, `view`, `metrics` | the control socket, on a thread of its own |
//! | `control` | the loop: look, measure, decide, act, tell |
//! | `settings`, `classes` | what holds for each VM: by the operator, or as the meter finds it |
//! | `totals` | what each VM spent so far |
//! | `pools` | how many turbo cores there are |
//! | `placement`, `plan` | which core runs which threads; `plan` is pure |
//! | `aside` | the daemon itself stays off the VMs' cores |
//! | `lanes` | VFs of SR-IOV NICs, on a thread of its own |
//! | `vread` | blocks past their DataNode VM: workers and their descriptors, on a thread of its own |
//! | `libvirt` | what libvirt tells of its VMs, on a thread and by a process of its own |
//! | `engine`, `pins`, `trouble` | carrying it out, and what to do when that fails |

pub mod api;
mod control;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod host;
pub mod lanes;
mod prometheus;
mod retry;
pub mod slices;
mod supervisor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod turbo;
pub mod vms;
mod vpipe;
pub mod vread;
pub mod workers;

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Instant;

use viola_host::facts::HostFacts;

use api::http::{self, Shared};
use api::server;
use control::Control;
use host::affinity;
use host::lock::{self, Lock, LockError};
use slices::restore;
use viola_cli::error::{Failure, Outcome};
use viola_cli::log::{self, Level};
use viola_config::Config;

/// Requests that may wait for the control loop.
const QUEUE: usize = 32;

/// Runs until SIGTERM or SIGINT.
pub fn run(config: &Path, dry_run: bool) -> Outcome {
    keep_to_itself();
    log::use_fields();
    let config = Config::read(config)?;
    let facts = HostFacts::read().map_err(|e| Failure::run(e.one_line()))?;
    config.check_host(&facts.online())?;
    if !dry_run && config.slices.enabled && !facts.privilege.sys_nice {
        return Err(Failure::run(
            "run needs root: it changes how other users' processes are scheduled; --dry-run only looks",
        ));
    }
    let run_dir = &config.daemon.run_dir;
    lock::make_dir(run_dir, 0o755)
        .map_err(|e| Failure::run(format!("{}: {e}", run_dir.display())))?;
    let lock = Lock::take(run_dir).map_err(|e| match e {
        LockError::Held { .. } => Failure::usage(e),
        LockError::Io { .. } => Failure::run(e),
    })?;
    if !dry_run {
        put_back(run_dir);
    }
    step_aside(&config, &facts);
    let socket = config.daemon.socket.clone();
    let listener = server::bind(&socket, &config.daemon.group)?;
    greet(&config, dry_run);
    let (requests, inbox) = mpsc::sync_channel(QUEUE);
    let mut control = Control::new(config, facts, dry_run)?;
    let shared = Arc::new(Shared::new(control.view(Instant::now()), requests));
    server::start(listener, shared.clone())?;
    control.greet();
    work(&mut control, &shared, &inbox);
    // Everything is back before the socket and the lock tell others so.
    drop(control);
    let _ = std::fs::remove_file(&socket);
    drop(lock);
    Ok(())
}

/// What whoever has started this daemon has left open is not for the processes that it starts. No socket is passed to it (`LISTEN_FDS`):
/// it makes its own.
fn keep_to_itself() {
    let (first, last, flags) = (3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: a plain system call on numbers, which closes nothing in this process.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } < 0 {
        let why = std::io::Error::last_os_error();
        let what = format!("what was open at the start is open in its workers, too: {why}");
        log::line(Level::Warning, what);
    }
}

/// The first line in the journal, before the kernel verifies programs, which can take seconds.
fn greet(config: &Config, dry_run: bool) {
    let dry = match dry_run {
        true => ", changing nothing (--dry-run)",
        false => "",
    };
    let (version, config) = (env!("CARGO_PKG_VERSION"), config.path.display());
    log::line(
        Level::Info,
        format!("viola {version} runs by {config}{dry}"),
    );
}

/// Before any thread is made, so that all of them follow.
fn step_aside(config: &Config, facts: &HostFacts) {
    let mut cores = config.slices.cores.clone();
    if config.turbo.budget.is_none() {
        cores.extend(&config.turbo.cores);
    }
    if let Err(why) = affinity::step(&cores, &facts.online()) {
        log::line(
            Level::Warning,
            format!("this daemon cannot leave the VMs' cores: {why}"),
        );
    }
}

fn put_back(run_dir: &Path) {
    let (done, error) = restore::put_back(run_dir);
    if !done.is_nothing() {
        log::line(
            Level::Notice,
            format!("an earlier run was cut short: {done}"),
        );
    }
    if let Some(e) = error {
        log::line(Level::Error, viola_cli::error::chain(&e));
    }
}

/// The loop: requests as they come, a look at the host each interval.
fn work(control: &mut Control, shared: &Shared, inbox: &mpsc::Receiver<http::Request>) {
    let mut next = Instant::now();
    loop {
        let now = Instant::now();
        if now >= next {
            control.tick(now);
            if control.should_publish(now) {
                shared.publish(control.view(now));
            }
            // After a stall the loop goes on from now; it does not make up for lost looks.
            next = (next + control.interval()).max(Instant::now());
        }
        match inbox.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(http::Request::Quit(signal)) => {
                log::line(Level::Info, format!("{signal}: putting everything back"));
                return;
            }
            Ok(http::Request::Reload) => {
                control.reload();
                shared.publish(control.view(Instant::now()));
            }
            Ok(http::Request::Set {
                name,
                change,
                peer,
                reply,
            }) => {
                let answer = control.set(&name, &change, peer);
                shared.publish(control.view(Instant::now()));
                // Whoever asked may have gone.
                let _ = reply.send(answer);
            }
            Ok(http::Request::Lane {
                name,
                change,
                peer,
                reply,
            }) => {
                let _ = reply.send(control.lane(&name, change, peer));
            }
            Ok(http::Request::Pause { stop, peer, reply }) => {
                let answer = control.pause(stop, peer);
                shared.publish(control.view(Instant::now()));
                let _ = reply.send(answer);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
