// SPDX-License-Identifier: Apache-2.0
//! Processes of the slot mechanism, started by the daemon and by each other, and those of test beds.

use std::process::{Command, ExitCode};

use viola_sched::slots::watchdog::{self, Args};

use crate::cli::Internal;
use crate::error::Failure;

/// Runs one of them; the exit status of the watchdog says why it ended.
pub fn internal(what: &Internal) -> ExitCode {
    let (name, json) = match what {
        Internal::SlotsWatchdog { json } => (c"viola-watchdog", json),
        Internal::SlotsController { json } => (c"viola-slots", json),
        Internal::Stand { words } => {
            return match crate::bench::stand(words) {
                Ok(()) => ExitCode::SUCCESS,
                Err(e) => e.tell(),
            };
        }
    };
    // What ps shows; the file of the program may be called otherwise.
    let _ = rustix::thread::set_name(name);
    let args: Args = match serde_json::from_str(json) {
        Ok(args) => args,
        Err(e) => {
            return Failure::usage(format!(
                "this command is for the daemon, not for people ({e})"
            ))
            .tell();
        }
    };
    let ended = match what {
        Internal::SlotsWatchdog { .. } => {
            let mut controller = Command::new("/proc/self/exe");
            controller.args(["internal", "slots-controller"]);
            watchdog::watchdog(&args, &mut controller).map(|end| ExitCode::from(end as u8))
        }
        Internal::SlotsController { .. } | Internal::Stand { .. } => {
            watchdog::controller(&args).map(|()| ExitCode::SUCCESS)
        }
    };
    ended.unwrap_or_else(|e| Failure::run(format!("{}: {e}", name.to_string_lossy())).tell())
}
