// SPDX-License-Identifier: Apache-2.0
//! The daemon's side of a session.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Line, Request, serve};
use crate::answer_process::{self, AnswerProcess};
use crate::microvm::{Answer, Page};
use crate::qemu::line_stream::LineStream;
use crate::qemu::message::{MAX_ITEMS, QmpFailure};
use crate::thread::Tid;
use crate::unix_connect;
use crate::vm::printable;

/// Time for the process to start and to pass an answer on, beside the time that the emulator has.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(2);

/// What it means when the process closes its stream.
const CLOSED: &str = "its monitor's process: it has ended";

/// A session with one emulator.
pub(crate) struct Session {
    lines: LineStream,
    /// Names of events that came before an answer; bounded.
    events: Vec<String>,
    /// Killed on drop; `None` where a thread of this program reads, which ends with the stream.
    _process: Option<AnswerProcess>,
}

impl Session {
    /// Starts a session on a connection to an emulator.
    fn start(emulator: UnixStream) -> io::Result<Self> {
        let (stream, theirs) = UnixStream::pair()?;
        let process = if answer_process::are_used() {
            Some(AnswerProcess::start(
                &["monitor"],
                emulator.into(),
                theirs.into(),
            )?)
        } else {
            let run = move || drop(serve(emulator, theirs));
            std::thread::Builder::new()
                .name("monitor".into())
                .spawn(run)?;
            None
        };
        Ok(Self {
            lines: LineStream::new(stream, PROCESS_TIMEOUT, CLOSED)?,
            events: Vec::new(),
            _process: process,
        })
    }

    /// Connects to a QMP server and negotiates. `owner` is the process that has to listen there; `None` for a socket that the
    /// operator has named. Each answer has `answer_timeout`.
    pub(crate) fn open(
        reach: &Path,
        owner: Option<Tid>,
        answer_timeout: Duration,
    ) -> Result<Self, QmpFailure> {
        let emulator = unix_connect::connect(reach, owner).map_err(|e| match e.kind() {
            // The queue is full of other clients.
            io::ErrorKind::WouldBlock => QmpFailure::Busy,
            _ => QmpFailure::Io(e),
        })?;
        let mut session = Self::start(emulator).map_err(QmpFailure::Io)?;
        session.ask::<()>(&Request::Open(answer_timeout), 2 * answer_timeout)?;
        Ok(session)
    }

    /// Asks, and waits for the answer, which the emulator gives within `limit`.
    pub(crate) fn ask<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        limit: Duration,
    ) -> Result<T, QmpFailure> {
        let line = serde_json::to_string(request).map_err(|e| QmpFailure::Io(e.into()))?;
        self.lines.send(&line)?;
        let until = Instant::now() + limit + PROCESS_TIMEOUT;
        loop {
            let line = self.lines.wait(until, limit)?;
            if let Some(answer) = self.take(&line)? {
                return decode(answer)?;
            }
        }
    }

    /// Names of the events that have come and concern the disks. Does not wait.
    ///
    /// # Errors
    /// When the connection is lost: events may have been missed.
    pub(crate) fn events(&mut self) -> Result<Vec<String>, QmpFailure> {
        let read = self.lines.read_available();
        while let Some(line) = self.lines.next() {
            if self.take(&line)?.is_some() {
                return Err(unexpected("an answer without a request"));
            }
        }
        read.map(|()| std::mem::take(&mut self.events))
    }

    /// Takes a line. Returns the answer in it.
    fn take(&mut self, line: &[u8]) -> Result<Option<Value>, QmpFailure> {
        match serde_json::from_slice(line) {
            Ok(Line::Event(name)) => {
                if self.events.len() < MAX_ITEMS {
                    self.events.push(printable(&name));
                }
                Ok(None)
            }
            Ok(Line::Answer(answer)) => Ok(Some(answer)),
            Ok(Line::Lost(why)) => Err(QmpFailure::Io(io::Error::other(printable(&why)))),
            Err(_) => Err(unexpected("a line of another kind")),
        }
    }
}

/// Gets a page of an emulator's HTTP interface. `owner` is the process that has to listen at `socket`.
pub(crate) fn page(socket: &Path, owner: Tid, page: Page, limit: Duration) -> io::Result<Answer> {
    let mut session = Session::start(unix_connect::connect(socket, Some(owner))?)?;
    session
        .ask(&Request::Page(page), limit)
        .map_err(io::Error::other)
}

/// What an answer of the process says. It has no control characters, and no list is longer than [`MAX_ITEMS`].
pub(crate) fn decode<T: DeserializeOwned>(
    mut answer: Value,
) -> Result<Result<T, QmpFailure>, QmpFailure> {
    check(&mut answer)?;
    serde_json::from_value(answer).map_err(|_| unexpected("an answer of another shape"))
}

fn check(value: &mut Value) -> Result<(), QmpFailure> {
    match value {
        Value::String(text) => *text = printable(text),
        Value::Array(items) if items.len() > MAX_ITEMS => {
            return Err(unexpected("a list that is too long"));
        }
        Value::Array(items) => items.iter_mut().try_for_each(check)?,
        Value::Object(items) if items.keys().any(|key| key.contains(char::is_control)) => {
            return Err(unexpected("a key with control characters"));
        }
        Value::Object(items) => items.values_mut().try_for_each(check)?,
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    Ok(())
}

fn unexpected(what: &str) -> QmpFailure {
    QmpFailure::Malformed(format!("its monitor's process: {what}"))
}
