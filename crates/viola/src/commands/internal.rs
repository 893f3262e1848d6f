// SPDX-License-Identifier: Apache-2.0
//! Processes of the slot mechanism, started by the daemon and by each other, the one that asks libvirt, and those of test
//! beds.

use std::process::{Command, ExitCode};

use viola_host::libvirt::{self, StreamEnd};
use viola_sched::slots::watchdog::{self, HelperArgs};

use crate::PROGRAM;
use crate::args::Internal;
use viola_cli::error::Failure;

/// Runs one of them; the exit status of the watchdog says why it ended.
pub fn internal(what: &Internal) -> ExitCode {
    let (name, json) = match what {
        Internal::SlotsWatchdog { json } => (c"viola-watchdog", json),
        Internal::SlotsController { json } => (c"viola-slots", json),
        Internal::Libvirt => return libvirt(),
    };
    // What ps shows; the file of the program may be called otherwise.
    let _ = rustix::thread::set_name(name);
    let args: HelperArgs = match serde_json::from_str(json) {
        Ok(args) => args,
        Err(e) => {
            return Failure::usage(format!(
                "this command is for the daemon, not for people ({e})"
            ))
            .report(PROGRAM);
        }
    };
    let ended = match what {
        Internal::SlotsWatchdog { .. } => {
            let mut controller = Command::new("/proc/self/exe");
            controller.args(["internal", "slots-controller"]);
            watchdog::run_watchdog(&args, &mut controller).map(|end| ExitCode::from(end as u8))
        }
        Internal::SlotsController { .. } | Internal::Libvirt => {
            watchdog::run_controller(&args).map(|()| ExitCode::SUCCESS)
        }
    };
    ended.unwrap_or_else(|e| {
        Failure::run(format!("{}: {e}", name.to_string_lossy())).report(PROGRAM)
    })
}

/// Asks libvirt until its connection ends, or the daemon does.
fn libvirt() -> ExitCode {
    let _ = rustix::thread::set_name(c"viola-libvirt");
    // It ends with the thread of the daemon that has started it, whatever the library waits for.
    let kill = Some(rustix::process::Signal::KILL);
    if let Err(e) = rustix::process::set_parent_process_death_signal(kill) {
        return Failure::run(format!("the end of the daemon cannot be watched: {e}"))
            .report(PROGRAM);
    }
    match libvirt::stream_events(libvirt::URI, &mut std::io::stdout().lock()) {
        StreamEnd::ReaderGone => ExitCode::SUCCESS,
        StreamEnd::Disconnected | StreamEnd::NoLibrary => ExitCode::FAILURE,
    }
}
