// SPDX-License-Identifier: Apache-2.0
//! `viola restore`

use viola_proto::Done;

use crate::args;
use viola_cli::client::Client;
use viola_cli::error::{Failure, Outcome, chain};
use viola_cli::table::print;
use viola_daemon::host::lock::Lock;
use viola_daemon::lanes;
use viola_daemon::slices;
use viola_daemon::workers::run_dir;

/// Restores what an earlier daemon left behind. A running daemon is told to stop first, because it would apply its plan
/// again; if it does not answer, its helper processes are ended all the same.
pub fn restore(args: &args::Restore) -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::run(
            "restore needs root, because it changes the scheduling of other users' processes",
        ));
    }
    let mut text = String::new();
    if let Some(pid) = Lock::holder(&args.run_dir) {
        let who = pid.map_or_else(
            || "a daemon".to_owned(),
            |p| format!("the daemon (process {p})"),
        );
        let line = match Client::new(&args.socket.path()).post::<Done>("/stop") {
            Ok(_) => format!("{who} was told to stop; viola start resumes it\n"),
            Err(e) => format!("{who} could not be told to stop: {e}\n"),
        };
        text.push_str(&line);
    }
    let (mut done, error) = slices::restore::restore_all(&args.run_dir);
    if !args.keep_workers {
        let run_dir = std::path::absolute(&args.run_dir).unwrap_or_else(|_| args.run_dir.clone());
        done.processes += run_dir::remove(&run_dir::folder(&run_dir));
        for what in lanes::restore::take_back(&run_dir) {
            text.push_str(&format!("{what}\n"));
        }
    }
    text.push_str(&format!("{done}\n"));
    print(&text)?;
    match error {
        None => Ok(()),
        Some(e) => Err(Failure::run(chain(&e))),
    }
}
