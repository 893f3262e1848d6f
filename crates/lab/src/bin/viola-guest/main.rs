// SPDX-License-Identifier: Apache-2.0
//! The init of a lab guest: it mounts file systems, sets up the network, serves the command channel
//! on one serial line and a shell on another, and runs the built-in workloads. It is one static
//! program; the guest's root has little else.
//!
//! | module | does |
//! |---|---|
//! | `init` | process 1: set-up, restarts of shell and channel |
//! | `serve`, `exec`, `halt` | commands of the channel |
//! | `shell` | the shell |
//! | `work` | the process of a built-in workload: `hog`, `forker`, `echo_sink`, `media` |
//! | `nginx`, `apache`, `agent` | workloads that are programs of the image |
//! | `counters` | what a workload reports: its counters, and that it is ready |

mod agent;
mod apache;
mod counters;
mod echo_sink;
mod exec;
mod halt;
mod init;
mod media;
mod nginx;
mod serve;
mod shell;
mod work;

use std::path::Path;
use std::process::ExitCode;

/// Serial line of the command channel (UML's ssl0).
const CHANNEL: &str = "/dev/ttyS0";
/// Virtio-serial port of the command channel in a QEMU guest.
const CHANNEL_PORT: &str = "/dev/virtio-ports/org.viola.lab.0";
/// Serial line of the shell (UML's ssl1).
const SHELL: &str = "/dev/ttyS1";
/// Console of the shell in a QEMU guest of a lab, and the name by which its port shows that there is one.
const SHELL_CONSOLE: &str = "/dev/hvc0";
const SHELL_PORT: &str = "/dev/virtio-ports/org.viola.shell.0";
/// Serial line of the guest agent (UML's ssl2).
const AGENT: &str = "/dev/ttyS2";
/// Virtio-serial port of the guest agent in a QEMU guest.
const AGENT_PORT: &str = "/dev/virtio-ports/org.viola.agent.0";
/// Folder of the workloads' counters and files.
const RUN: &str = "/run/viola";

/// Whether this is a QEMU guest, which has virtio-serial ports instead of serial lines.
fn has_ports() -> bool {
    Path::new(CHANNEL_PORT).exists()
}

/// The terminal of the shell, if there is one.
fn shell_terminal() -> Option<&'static str> {
    match has_ports() {
        false => Some(SHELL),
        true => Path::new(SHELL_PORT).exists().then_some(SHELL_CONSOLE),
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.get(1..).unwrap_or_default() {
        _ if std::process::id() == 1 => init::run(),
        ["serve"] => serve::run(),
        ["shell", terminal] => shell::run(terminal),
        ["work", name, json] => work::run(name, json),
        _ => Err("viola-guest is the init of a lab guest; it does nothing on a host".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(sentence) => {
            eprintln!("viola-guest: {sentence}");
            ExitCode::FAILURE
        }
    }
}
