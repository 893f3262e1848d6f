// SPDX-License-Identifier: Apache-2.0
//! The unix socket of a running lab, for `viola-lab sh`, `list` and `down`.
//!
//! Each side sends one JSON object per line. After the answer to `shell` the connection carries the
//! terminal's bytes. Only root can connect.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::lab::Lab;
use crate::wire::{Command, MAX_LINE_BYTES, Reply};

/// Name of the socket in the lab's folder.
pub(crate) const SOCKET: &str = "control.sock";

/// A client's request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub(crate) enum Ask {
    /// Answers a list of [`GuestStatus`].
    List,
    /// Passes a command to a guest and answers the guest's answer.
    Guest { guest: String, command: Command },
    /// Restarts a guest.
    Reboot { guest: String },
    /// Powers one guest off.
    Shutdown { guest: String },
    /// Connects the client with a guest's shell.
    Shell { guest: String },
    /// Ends the lab.
    Down,
}

/// State of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestStatus {
    /// Its name.
    pub name: String,
    /// Process id of its kernel.
    pub pid: u32,
    /// Whether its kernel is running.
    pub alive: bool,
    /// Memory in bytes.
    pub memory: u64,
    /// Host cores on which it may run; empty: any.
    pub cores: Vec<usize>,
    /// Addresses of its NICs.
    pub addresses: Vec<std::net::Ipv4Addr>,
    /// Running workloads.
    pub workloads: Vec<String>,
}

/// Serves the lab's socket until the process ends. Sends to `down` when a client asks to end the
/// lab.
pub(crate) fn serve(lab: &Arc<Lab>, down: &Sender<()>) -> Result<()> {
    let path = lab.folder().join(SOCKET);
    let listener = UnixListener::bind(&path).map_err(Error::io("listen on", &path))?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600))
        .map_err(Error::io("restrict", &path))?;
    let (lab, down) = (Arc::downgrade(lab), down.clone());
    let accept = move || {
        for client in listener.incoming() {
            // a client holds the lab only while it is served
            let (Ok(client), Some(lab)) = (client, lab.upgrade()) else {
                continue;
            };
            let down = down.clone();
            std::thread::spawn(move || answer(&lab, &client, &down));
        }
    };
    std::thread::Builder::new()
        .name("viola-lab-ctl".into())
        .spawn(accept)
        .map_err(Error::io("serve", &path))?;
    Ok(())
}

fn answer(lab: &Lab, client: &UnixStream, down: &Sender<()>) {
    let mut line = String::new();
    // the buffer never reads ahead: a client waits for its answer before it sends more
    if BufReader::new(client.take(MAX_LINE_BYTES as u64))
        .read_line(&mut line)
        .is_err()
    {
        return;
    }
    let result = match serde_json::from_str::<Ask>(&line) {
        Ok(Ask::Shell { guest }) => match lab.guest(&guest) {
            Ok(guest) => return shell(guest, client),
            Err(error) => Err(error),
        },
        Ok(ask) => run(lab, ask, down),
        Err(error) => Err(Error::Refused(format!("the request is not valid: {error}"))),
    };
    reply(client, result);
}

fn run(lab: &Lab, ask: Ask, down: &Sender<()>) -> Result<Value> {
    match ask {
        Ask::List => {
            let lines: Vec<GuestStatus> = std::thread::scope(|scope| {
                let lines: Vec<_> = lab
                    .guests()
                    .iter()
                    .map(|guest| scope.spawn(|| line(guest)))
                    .collect();
                lines
                    .into_iter()
                    .filter_map(|line| line.join().ok())
                    .collect()
            });
            serde_json::to_value(lines).map_err(|e| Error::Refused(e.to_string()))
        }
        Ask::Guest { guest, command } => lab.guest(&guest)?.forward(command),
        Ask::Reboot { guest } => lab.guest(&guest)?.reboot().map(|()| Value::Null),
        Ask::Shutdown { guest } => lab.guest(&guest)?.shutdown().map(|()| Value::Null),
        Ask::Down | Ask::Shell { .. } => {
            let _ = down.send(());
            Ok(Value::Null)
        }
    }
}

fn line(guest: &crate::Guest) -> GuestStatus {
    let alive = guest.alive();
    GuestStatus {
        name: guest.name().into(),
        pid: guest.pid(),
        alive,
        memory: guest.spec().memory,
        cores: guest.spec().cores.clone(),
        addresses: guest.spec().taps.iter().map(|tap| tap.address).collect(),
        workloads: if alive {
            guest.workloads().unwrap_or_default()
        } else {
            Vec::new()
        },
    }
}

fn shell(guest: &crate::Guest, client: &UnixStream) {
    if !guest.alive() {
        return reply(client, Err(Error::guest(guest.name(), "it is powered off")));
    }
    reply(client, Ok(Value::Null));
    if let Err(error) = guest.shell().attach(client) {
        let mut client = client;
        let _ = client.write_all(format!("{error}\r\n").as_bytes());
    }
    let _ = client.shutdown(std::net::Shutdown::Both);
}

fn reply(mut client: &UnixStream, result: Result<Value>) {
    let reply = match result {
        Ok(value) => Reply {
            ok: Some(value),
            ..Reply::default()
        },
        Err(error) => Reply {
            error: Some(error.full()),
            ..Reply::default()
        },
    };
    let line = serde_json::to_string(&reply).unwrap_or_default();
    let _ = client.write_all(format!("{line}\n").as_bytes());
}

/// Connects to the socket of a running lab.
pub(crate) fn connect(run: &Path, lab: &str) -> Result<UnixStream> {
    let path = run.join(lab).join(SOCKET);
    match UnixStream::connect(&path) {
        Ok(stream) => Ok(stream),
        Err(_)
            if !crate::state::labs(run)
                .iter()
                .any(|(name, running)| name == lab && *running) =>
        {
            Err(Error::NotRunning { name: lab.into() })
        }
        Err(e) => Err(Error::io("connect to", &path)(e)),
    }
}

/// Sends a request to a lab and waits at most `limit` for the answer.
pub(crate) fn ask(mut lab: &UnixStream, ask: &Ask, limit: Duration) -> Result<Value> {
    let failed = |what: String| Error::Refused(format!("the lab did not answer: {what}"));
    let line = serde_json::to_string(ask).map_err(|e| failed(e.to_string()))?;
    lab.write_all(format!("{line}\n").as_bytes())
        .map_err(|e| failed(e.to_string()))?;
    lab.set_read_timeout(Some(limit))
        .map_err(|e| failed(e.to_string()))?;
    // byte by byte: the bytes after the line belong to the shell
    let mut answer = Vec::new();
    let mut byte = [0_u8];
    while answer.last() != Some(&b'\n') && answer.len() < MAX_LINE_BYTES {
        match lab.read(&mut byte) {
            Ok(0) => return Err(failed("it closed the connection".into())),
            Ok(_) => answer.push(byte[0]),
            Err(e) => return Err(failed(e.to_string())),
        }
    }
    lab.set_read_timeout(None)
        .map_err(|e| failed(e.to_string()))?;
    let reply: Reply = serde_json::from_slice(&answer).map_err(|e| failed(e.to_string()))?;
    match reply.error {
        Some(sentence) => Err(Error::Refused(sentence)),
        None => Ok(reply.ok.unwrap_or(Value::Null)),
    }
}
