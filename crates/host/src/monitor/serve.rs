// SPDX-License-Identifier: Apache-2.0
//! The side of a session that reads what the emulator sends.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, poll};
use serde::Serialize;
use serde_json::Value;

use super::{Line, Request};
use crate::microvm;
use crate::qemu::devices;
use crate::qemu::disk_watch::{chains, invalidates_disks};
use crate::qemu::message::{Lines, QmpFailure};
use crate::qemu::qmp::Connection;
use crate::qemu::state;

/// Runs the requests that come from `daemon` on the connection to an emulator, until one of both closes.
///
/// # Errors
/// The kernel's, and [`io::ErrorKind::InvalidData`] for a request that is none.
pub fn serve(emulator: UnixStream, daemon: UnixStream) -> io::Result<()> {
    let mut server = Server {
        emulator: Some(emulator),
        qmp: None,
        is_watched: false,
        daemon,
    };
    let mut lines = Lines::default();
    let mut chunk = [0; 4096];
    loop {
        if server.wait()? {
            let read = rustix::io::retry_on_intr(|| rustix::io::read(&server.daemon, &mut chunk))?;
            if read == 0 {
                return Ok(());
            }
            lines.push(&chunk[..read]).map_err(io::Error::other)?;
        }
        while let Some(line) = lines.next() {
            let request: Request = serde_json::from_slice(&line)?;
            let answer = server.answer(request)?;
            server.pass_events()?;
            server.send(&Line::Answer(answer))?;
        }
        if let Err(lost) = server.read_events() {
            // Events may have been missed, so the daemon has to know.
            return server.send(&Line::Lost(lost.to_string()));
        }
        server.pass_events()?;
    }
}

struct Server {
    /// The connection before QMP is negotiated.
    emulator: Option<UnixStream>,
    qmp: Option<Connection>,
    /// Whether the daemon wants to know of events.
    is_watched: bool,
    daemon: UnixStream,
}

impl Server {
    /// Waits for a request or an event. Returns whether the daemon has sent something, or has closed.
    fn wait(&self) -> io::Result<bool> {
        let mut both = vec![PollFd::new(&self.daemon, PollFlags::IN)];
        if self.is_watched {
            both.extend(
                self.qmp
                    .as_ref()
                    .map(|qmp| PollFd::from_borrowed_fd(qmp.as_fd(), PollFlags::IN)),
            );
        }
        rustix::io::retry_on_intr(|| poll(&mut both, None))?;
        Ok(!both[0].revents().is_empty())
    }

    fn answer(&mut self, request: Request) -> io::Result<Value> {
        match request {
            Request::Open(answer_timeout) => {
                let Some(emulator) = self.emulator.take() else {
                    return Err(io::ErrorKind::InvalidData.into());
                };
                let opened = Connection::start(emulator, answer_timeout);
                encode(opened.map(|connection| self.qmp = Some(connection)))
            }
            Request::Page(page) => {
                let Some(mut emulator) = self.emulator.take() else {
                    return Err(io::ErrorKind::InvalidData.into());
                };
                encode(microvm::get(&mut emulator, page).map_err(QmpFailure::Io))
            }
            other => {
                self.is_watched |= matches!(other, Request::Chains);
                let Some(qmp) = &mut self.qmp else {
                    return Err(io::ErrorKind::InvalidData.into());
                };
                qmp.restart_deadline();
                on_qmp(qmp, other)
            }
        }
    }

    /// Reads the events that have come.
    fn read_events(&mut self) -> Result<(), QmpFailure> {
        match &mut self.qmp {
            Some(qmp) if self.is_watched => qmp.read_events(),
            _ => Ok(()),
        }
    }

    /// Passes on the events that concern the disks.
    fn pass_events(&mut self) -> io::Result<()> {
        let events = self.qmp.as_mut().map(Connection::take_events);
        for event in events.into_iter().flatten() {
            if self.is_watched && invalidates_disks(&event) {
                self.send(&Line::Event(event))?;
            }
        }
        Ok(())
    }

    fn send(&mut self, line: &Line) -> io::Result<()> {
        let mut line = serde_json::to_string(line)?;
        line.push('\n');
        self.daemon.write_all(line.as_bytes())
    }
}

fn on_qmp(qmp: &mut Connection, request: Request) -> io::Result<Value> {
    match request {
        Request::State => encode(state::query_all(qmp)),
        Request::Chains => encode(chains(qmp)),
        Request::Named => encode(devices::named(qmp)),
        Request::VirtioNics => encode(devices::virtio_nics(qmp)),
        Request::HasStandby(id) => encode(devices::has_standby(qmp, &id)),
        Request::FreePort => encode(devices::free_port(qmp)),
        Request::Memory => encode(devices::memory(qmp)),
        Request::Plug(arguments) => encode(devices::plug(qmp, arguments)),
        Request::Unplug(id) => encode(devices::unplug(qmp, &id)),
        Request::Open(_) | Request::Page(_) => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn encode<T: Serialize>(answer: Result<T, QmpFailure>) -> io::Result<Value> {
    Ok(serde_json::to_value(answer)?)
}
