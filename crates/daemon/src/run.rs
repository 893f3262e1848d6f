// SPDX-License-Identifier: Apache-2.0
//! Start and end of the daemon.

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use viola_host::facts::HostFacts;

use crate::api::http::Shared;
use crate::api::server;
use crate::control::Control;
use crate::control_loop;
use crate::host::affinity;
use crate::host::files;
use crate::host::lock::{Lock, LockError};
use crate::slices::restore;
use viola_cli::error::{Failure, Outcome};
use viola_cli::log::{self, Level};
use viola_config::Config;

/// Requests that may wait for the control loop.
const MAX_QUEUED_REQUESTS: usize = 32;

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// When the configuration is wrong, another daemon runs, or a privilege is missing.
pub fn run(config: &Path, dry_run: bool) -> Outcome {
    close_inherited_on_exec();
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
    files::make_dir(run_dir, 0o755)
        .map_err(|e| Failure::run(format!("{}: {e}", run_dir.display())))?;
    let lock = Lock::take(run_dir).map_err(|e| match e {
        LockError::Held { .. } => Failure::usage(e),
        LockError::Io { .. } => Failure::run(e),
    })?;
    if !dry_run {
        restore_earlier_run(run_dir);
    }
    affinity::leave_vm_cores(&config, &facts);
    let sockets = server::Sockets::bind(&config.daemon)?;
    let paths = sockets.paths();
    log_version(&config, dry_run);
    let (sender, requests) = mpsc::sync_channel(MAX_QUEUED_REQUESTS);
    let mut control = Control::new(config, facts, dry_run)?;
    let shared = Arc::new(Shared::new(control.view(Instant::now()), sender));
    server::start(sockets, shared.clone())?;
    control.slices.log_start(&control.inputs);
    control_loop::run(&mut control, &shared, &requests);
    // Everything is restored before sockets and lock are given up.
    drop(control);
    for path in &paths {
        let _ = std::fs::remove_file(path);
    }
    drop(lock);
    Ok(())
}

/// Lets workers inherit no descriptor that the daemon has inherited. The daemon needs none of them: it binds its own sockets.
fn close_inherited_on_exec() {
    let (first, last, flags) = (3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: a plain system call on numbers, which closes nothing in this process.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) } < 0 {
        let why = std::io::Error::last_os_error();
        let what = format!("workers inherit the descriptors that were open at the start: {why}");
        log::line(Level::Warning, what);
    }
}

/// The first log line, before the kernel verifies BPF programs, which can take seconds.
fn log_version(config: &Config, dry_run: bool) {
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

fn restore_earlier_run(run_dir: &Path) {
    let (done, error) = restore::restore_all(run_dir);
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
