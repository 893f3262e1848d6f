// SPDX-License-Identifier: Apache-2.0
//! Commands and shells in a guest, and host programs in a lab's network.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command as Process;
use std::time::Duration;

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

use super::{LAB_REPLY_TIMEOUT, resolve_guest, resolve_lab};
use crate::error::{Error, Result};
use crate::run_folder;
use crate::server::{Ask, ask, connect};
use crate::state;
use crate::wire::{Command, Output};

/// Time limit of a command in a guest.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(3600);
/// Ctrl-], the key that leaves a shell.
const LEAVE: u8 = 0x1d;

/// Runs a command in a guest (`GUEST` or `LAB/GUEST`), prints its output and returns its exit
/// status. Opens a shell if there is no command.
///
/// # Errors
/// [`Error::NotRunning`], [`Error::NoGuest`]; [`Error::Refused`] if the lab refuses or the name is
/// ambiguous.
pub fn sh(guest: &str, command: &[String]) -> Result<u8> {
    let run = run_folder();
    let (lab, guest) = resolve_guest(&run, guest)?;
    if command.is_empty() {
        let socket = connect(&run, &lab)?;
        let size = tcgetwinsize(std::io::stdin())
            .ok()
            .filter(|size| size.ws_row > 0);
        if let Some(size) = size {
            let command = Command::Winsize {
                rows: size.ws_row,
                cols: size.ws_col,
            };
            ask(
                &connect(&run, &lab)?,
                &Ask::Guest {
                    guest: guest.clone(),
                    command,
                },
                LAB_REPLY_TIMEOUT,
            )?;
        }
        ask(&socket, &Ask::Shell { guest }, LAB_REPLY_TIMEOUT)?;
        return interact(&socket)
            .map(|()| 0)
            .map_err(Error::io("use", "the terminal"));
    }
    let timeout_ms = u64::try_from(COMMAND_TIMEOUT.as_millis()).unwrap_or(u64::MAX);
    let command = Command::Exec {
        argv: command.to_vec(),
        timeout_ms,
        stdin: String::new(),
    };
    let answer = ask(
        &connect(&run, &lab)?,
        &Ask::Guest { guest, command },
        COMMAND_TIMEOUT + LAB_REPLY_TIMEOUT,
    )?;
    let output: Output =
        serde_json::from_value(answer).map_err(|e| Error::Refused(e.to_string()))?;
    let _ = std::io::stdout().write_all(output.stdout.as_bytes());
    let _ = std::io::stderr().write_all(output.stderr.as_bytes());
    Ok(u8::try_from(output.status).unwrap_or(255))
}

/// Replaces this process by a program of this host in the network namespace of a lab (the only one
/// if no name is given). Returns only on failure.
///
/// # Errors
/// [`Error::NotRunning`], [`Error::NoGuest`]; [`Error::Refused`] if the lab refuses or the name is
/// ambiguous.
pub fn net(lab: Option<&str>, command: &[String]) -> Result<std::convert::Infallible> {
    let run = run_folder();
    let lab = resolve_lab(&run, lab)?;
    let not_running = || Error::NotRunning { name: lab.clone() };
    let state = state::read(&run, &lab).ok_or_else(not_running)?;
    if !state
        .supervisor
        .is_some_and(crate::process::ProcessId::alive)
    {
        return Err(not_running());
    }
    let netns = std::fs::File::open(&state.netns).map_err(Error::io("open", &state.netns))?;
    rustix::thread::move_into_link_name_space(
        netns.as_fd(),
        Some(rustix::thread::LinkNameSpaceType::Network),
    )
    .map_err(|e| Error::net("entering its namespace")(e.into()))?;
    let shell = ["/bin/sh".to_owned()];
    let (program, arguments) = match command.split_first() {
        Some(words) => words,
        None => (&shell[0], &[][..]),
    };
    Err(Error::io("run", program)(
        Process::new(program).args(arguments).exec(),
    ))
}

/// Standard input in raw mode; dropping it restores the mode.
struct Raw(Termios);

impl Raw {
    fn new() -> std::io::Result<Self> {
        let old = tcgetattr(std::io::stdin())?;
        let mut raw = old.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self(old))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}

/// Copies between the terminal and the guest's shell until either closes or Ctrl-] is typed.
fn interact(socket: &UnixStream) -> std::io::Result<()> {
    let terminal = isatty(std::io::stdin());
    if terminal {
        eprintln!("(Ctrl-] leaves)");
    }
    let raw = if terminal { Some(Raw::new()?) } else { None };
    let (mut input, mut output) = (socket.try_clone()?, socket.try_clone()?);
    std::thread::spawn(move || {
        let mut bytes = [0_u8; 4096];
        while let Ok(count) = std::io::stdin().read(&mut bytes)
            && count > 0
        {
            let typed = &bytes[..count];
            let leave = terminal
                .then(|| typed.iter().position(|b| *b == LEAVE))
                .flatten();
            let typed = &typed[..leave.unwrap_or(count)];
            if output.write_all(typed).is_err() || leave.is_some() {
                break;
            }
        }
        if !terminal {
            // the input of a script has ended: let the shell print its answers
            std::thread::sleep(Duration::from_secs(1));
        }
        let _ = output.shutdown(std::net::Shutdown::Both);
    });
    let mut bytes = [0_u8; 4096];
    let mut out = std::io::stdout();
    while let Ok(count) = input.read(&mut bytes)
        && count > 0
    {
        out.write_all(&bytes[..count])?;
        out.flush()?;
    }
    drop(raw);
    if terminal {
        eprintln!();
    }
    Ok(())
}
