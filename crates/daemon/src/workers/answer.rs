// SPDX-License-Identifier: Apache-2.0
//! Processes that read what guests and emulators answer. They enter their sandbox before they read anything.

use std::os::fd::OwnedFd;
use std::time::Duration;

use viola_host::monitor;
use viola_lanes::answers;
pub use viola_lanes::answers::Question;
use viola_vread::sandbox::{self, Profile};

use super::entry::take_stdin;
use viola_cli::error::{Failure, Outcome, chain};

/// User and group of the process: nobody. Not a number of `worker_uids`: it serves one session, and signals nobody.
const NOBODY: u32 = 65534;

/// Reads a guest's answer about a VF on standard input within `timeout`, and writes it for the daemon on standard output
/// ([`answers`]).
///
/// # Errors
/// When the sandbox cannot be entered, or the daemon is gone.
pub fn run(question: Question, timeout: Duration) -> Outcome {
    let way = enter(c"viola-answer-w")?;
    let answer = answers::read(question, way, timeout);
    answers::write(&answer, &mut std::io::stdout()).map_err(Failure::run)
}

/// Runs the daemon's requests, which come by standard output, on the connection to an emulator on standard input
/// ([`monitor`]).
///
/// # Errors
/// As [`run`].
pub fn run_monitor() -> Outcome {
    let emulator = enter(c"viola-monitor-w")?;
    let daemon = rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3).map_err(Failure::run)?;
    monitor::serve(emulator.into(), daemon.into()).map_err(Failure::run)
}

/// Enters the sandbox. Returns what standard input was. `name` is what ps shows.
fn enter(name: &std::ffi::CStr) -> Outcome<OwnedFd> {
    let _ = rustix::thread::set_name(name);
    let input = take_stdin().map_err(|e| Failure::usage(format!("standard input: {e}")))?;
    let is_root = rustix::process::geteuid().is_root();
    let user = is_root.then_some((NOBODY, NOBODY));
    sandbox::enter(user, Profile::Agent, &[]).map_err(|e| Failure::run(chain(&e)))?;
    Ok(input)
}
