// SPDX-License-Identifier: Apache-2.0
//! A connection to a QMP server (QEMU Machine Protocol; docs/interop/qmp-spec in QEMU).
//!
//! Own code rather than the `qapi` crate: viola sends a dozen commands, while `qapi` brings generated types for the whole
//! schema, whose strictness turns answers of other QEMU versions into errors, and leaves bounds on line length and time to the
//! caller. This client ignores what it does not need.
//!
//! QEMU serves one client per socket at a time, so the inventory keeps its sessions to a few milliseconds.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::line_stream::LineStream;
use super::message::{MAX_ITEMS, Message, parse_message};
pub use super::message::{QmpError, QmpFailure};

/// Default timeout for one answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// Timeout for a whole series of commands.
pub(super) const SESSION_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection to one QMP server.
pub(crate) struct Connection {
    lines: LineStream,
    deadline: Instant,
    /// Timeout for one answer.
    answer_timeout: Duration,
    last_id: u64,
    /// Names of events that came between answers; bounded.
    events: Vec<String>,
}

impl Connection {
    /// Negotiates on a connected stream. Each answer has `answer_timeout`.
    pub(crate) fn start(stream: UnixStream, answer_timeout: Duration) -> Result<Self, QmpFailure> {
        let lines = LineStream::new(stream, ANSWER_TIMEOUT, "the server closed the connection");
        let mut connection = Self {
            lines: lines.map_err(QmpFailure::Io)?,
            deadline: Instant::now() + SESSION_TIMEOUT.max(answer_timeout),
            answer_timeout,
            last_id: 0,
            events: Vec::new(),
        };
        connection.negotiate()?;
        Ok(connection)
    }

    /// Starts a new series of commands.
    pub(crate) fn restart_deadline(&mut self) {
        self.deadline = Instant::now() + SESSION_TIMEOUT;
    }

    /// For poll(2).
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.lines.as_fd()
    }

    /// Names of the events that came since the last call, as far as they have been read.
    pub(crate) fn take_events(&mut self) -> Vec<String> {
        std::mem::take(&mut self.events)
    }

    /// Reads the events that have come. Does not wait.
    pub(crate) fn read_events(&mut self) -> Result<(), QmpFailure> {
        self.restart_deadline();
        self.lines.read_available()?;
        while let Some(line) = self.lines.next() {
            if let Message::Event(name) = parse_message(&line)? {
                self.keep_event(name);
            }
        }
        Ok(())
    }

    fn keep_event(&mut self, event: String) {
        if self.events.len() < MAX_ITEMS {
            self.events.push(event);
        }
    }

    fn negotiate(&mut self) -> Result<(), QmpFailure> {
        match self.message()? {
            Message::Greeting => {}
            _ => {
                return Err(QmpFailure::Malformed(
                    "the first line is not a greeting".to_owned(),
                ));
            }
        }
        self.command("qmp_capabilities").map(|_| ())
    }

    pub(super) fn command(&mut self, command: &'static str) -> Result<Value, QmpFailure> {
        self.command_with(command, None, self.answer_timeout)
    }

    /// Runs a command with arguments and a timeout of its own.
    pub(super) fn command_with(
        &mut self,
        command: &'static str,
        arguments: Option<Value>,
        limit: Duration,
    ) -> Result<Value, QmpFailure> {
        self.last_id += 1;
        let mut line = json!({"execute": command, "id": self.last_id});
        if let Some(arguments) = arguments {
            line["arguments"] = arguments;
        }
        self.lines.send(&line.to_string())?;
        let until = Instant::now() + limit;
        self.deadline = self.deadline.max(until);
        loop {
            match self.message_before(until, limit)? {
                Message::Event(name) => self.keep_event(name),
                Message::Return { id, value } if id == self.last_id => return Ok(value),
                Message::Error { id, reason } if id == self.last_id => {
                    let command = command.to_owned();
                    return Err(QmpFailure::Refused { command, reason });
                }
                _ => {
                    return Err(QmpFailure::Malformed(format!(
                        "an answer to another command than {command}"
                    )));
                }
            }
        }
    }

    fn message(&mut self) -> Result<Message, QmpFailure> {
        self.message_before(Instant::now() + self.answer_timeout, self.answer_timeout)
    }

    /// The next message before `until`, which is `limit` after the command.
    fn message_before(&mut self, until: Instant, limit: Duration) -> Result<Message, QmpFailure> {
        let until = until.min(self.deadline);
        parse_message(&self.lines.wait(until, limit)?)
    }
}
