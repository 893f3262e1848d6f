// SPDX-License-Identifier: Apache-2.0
//! The init of a lab guest: mounts, network, a command channel on a serial line, a shell on
//! another, and the built-in workloads. One static program; the guest's root has little else.

mod agent;
mod apache;
mod counters;
mod exec;
mod halt;
mod init;
mod media;
mod net_workloads;
mod nginx;
mod serve;
mod shell;
mod work;

use std::process::ExitCode;

/// Serial line of the command channel (UML's ssl0).
const CHANNEL: &str = "/dev/ttyS0";
/// The same in a QEMU guest: a virtio-serial port.
const CHANNEL_PORT: &str = "/dev/virtio-ports/org.viola.lab.0";
/// Serial line of the shell (UML's ssl1).
const SHELL: &str = "/dev/ttyS1";
/// Serial line of the guest agent (UML's ssl2).
const AGENT: &str = "/dev/ttyS2";
/// The same in a QEMU guest.
const AGENT_PORT: &str = "/dev/virtio-ports/org.viola.agent.0";
/// Folder of the workloads' counters and files.
const RUN: &str = "/run/viola";

/// Whether this is a guest of QEMU, which has ports instead of serial lines, and no shell.
fn has_ports() -> bool {
    std::path::Path::new(CHANNEL_PORT).exists()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.get(1..).unwrap_or_default() {
        _ if std::process::id() == 1 => init::run(),
        ["serve"] => serve::run(),
        ["shell"] => shell::run(),
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
