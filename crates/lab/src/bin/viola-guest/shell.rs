// SPDX-License-Identifier: Apache-2.0
//! The interactive shell on the second serial line, or on a console of QEMU.

use std::os::unix::process::CommandExt;
use std::process::Command;

pub fn run(terminal: &str) -> Result<(), String> {
    let text = |e: &dyn std::fmt::Display| format!("{terminal}: {e}");
    rustix::process::setsid().map_err(|e| text(&e))?;
    let tty = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(terminal)
        .map_err(|e| text(&e))?;
    rustix::process::ioctl_tiocsctty(&tty).map_err(|e| text(&e))?;
    rustix::stdio::dup2_stdin(&tty).map_err(|e| text(&e))?;
    rustix::stdio::dup2_stdout(&tty).map_err(|e| text(&e))?;
    rustix::stdio::dup2_stderr(&tty).map_err(|e| text(&e))?;
    drop(tty);
    let host = rustix::system::uname();
    let prompt = format!("{}:\\w\\$ ", host.nodename().to_string_lossy());
    let error = Command::new("/bin/sh")
        .arg0("-sh")
        .env("PS1", prompt)
        .env("TERM", "vt220")
        .current_dir("/root")
        .exec();
    Err(format!("/bin/sh: {error}"))
}
