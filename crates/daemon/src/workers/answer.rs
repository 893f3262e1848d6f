// SPDX-License-Identifier: Apache-2.0
//! A process for one answer of a guest: it enters its sandbox before it reads anything ([`viola_lanes::answers`]).

use std::time::Duration;

use viola_lanes::answers;
pub use viola_lanes::answers::Question;
use viola_vread::sandbox::{self, Profile};

use super::entry::take_stdin;
use viola_cli::error::{Failure, Outcome, chain};

/// User and group of the process: nobody. Not a number of `worker_uids`: it lives for one answer, and signals nobody.
const NOBODY: u32 = 65534;

/// Reads the answer on standard input within `timeout`, and writes it for the daemon on standard output.
///
/// # Errors
/// When the sandbox cannot be entered, or the daemon is gone.
pub fn run(question: Question, timeout: Duration) -> Outcome {
    // The name that ps shows.
    let _ = rustix::thread::set_name(c"viola-answer-w");
    let way = take_stdin().map_err(|e| Failure::usage(format!("standard input: {e}")))?;
    let is_root = rustix::process::geteuid().is_root();
    let user = is_root.then_some((NOBODY, NOBODY));
    sandbox::enter(user, Profile::Agent, &[]).map_err(|e| Failure::run(chain(&e)))?;
    let answer = answers::read(question, way, timeout);
    answers::write(&answer, &mut std::io::stdout()).map_err(Failure::run)
}
