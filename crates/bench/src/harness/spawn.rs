// SPDX-License-Identifier: Apache-2.0
//! Starts the daemon and other programs as children of a benchmark.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

/// Starts the daemon with a configuration, in `netns` if given. Its log goes to `log`. The kernel
/// ends it with SIGTERM when the calling thread ends.
///
/// # Errors
/// The program `viola` is missing, `log` cannot be created, or as [`spawn_bound`].
pub fn daemon(config: &Path, log: &Path, netns: Option<BorrowedFd<'_>>) -> io::Result<Child> {
    let mut command = Command::new(
        crate::harness::program::viola().map_err(|e| io::Error::other(e.to_string()))?,
    );
    command
        .arg("run")
        .arg("-c")
        .arg(config)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(log)?);
    spawn_bound(&mut command, Signal::TERM, netns)
}

/// Starts a program, in `netns` if given. The kernel sends it the signal `end` when the calling thread ends for any
/// reason.
///
/// # Errors
/// As [`Command::spawn`].
pub fn spawn_bound(
    command: &mut Command,
    end: Signal,
    netns: Option<BorrowedFd<'_>>,
) -> io::Result<Child> {
    // Ctrl-C must reach only this process.
    command.process_group(0);
    let netns = netns.map(|fd| fd.as_raw_fd());
    // SAFETY: the closure makes only system calls between fork and exec, and the descriptor is open until `spawn` returns.
    unsafe {
        command.pre_exec(move || {
            if let Some(fd) = netns
                && libc::setns(fd, libc::CLONE_NEWNET) != 0
            {
                return Err(io::Error::last_os_error());
            }
            rustix::process::set_parent_process_death_signal(Some(end)).map_err(Into::into)
        });
    }
    command.spawn()
}
