// SPDX-License-Identifier: Apache-2.0
//! Helper processes of the daemon: the watchdog and the controller of slots, and the one that follows libvirt.

use std::process::{Command, ExitCode};

use viola_host::libvirt::{self, StreamEnd};
use viola_sched::slots::watchdog::{self, HelperArgs};

use crate::PROGRAM;
use crate::args::Internal;
use viola_cli::error::Failure;

/// Runs one of them; the exit status of the watchdog is the reason of its end.
pub fn internal(what: &Internal) -> ExitCode {
    let (name, json) = match what {
        Internal::SlotsWatchdog { json } => (c"viola-watchdog", json),
        Internal::SlotsController { json } => (c"viola-slots", json),
        Internal::Libvirt => return libvirt(),
    };
    // The name that ps shows.
    let _ = rustix::thread::set_name(name);
    let args: HelperArgs = match serde_json::from_str(json) {
        Ok(args) => args,
        Err(e) => {
            return Failure::usage(format!("only the daemon runs this command ({e})"))
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

/// Follows libvirt until its connection or the daemon ends.
fn libvirt() -> ExitCode {
    let _ = rustix::thread::set_name(c"viola-libvirt");
    // The kernel ends this process with the daemon's thread, even while the library waits.
    let kill = Some(rustix::process::Signal::KILL);
    if let Err(e) = rustix::process::set_parent_process_death_signal(kill) {
        return Failure::run(format!(
            "the kernel does not end this process with the daemon: {e}"
        ))
        .report(PROGRAM);
    }
    match libvirt::stream_events(libvirt::URI, &mut std::io::stdout().lock()) {
        StreamEnd::ReaderGone => ExitCode::SUCCESS,
        StreamEnd::Disconnected | StreamEnd::NoLibrary => ExitCode::FAILURE,
    }
}
