// SPDX-License-Identifier: Apache-2.0
//! QMP's messages: lines of JSON, of bounded length.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::vm::printable;

/// Longest line accepted.
pub(super) const MAX_LINE_BYTES: usize = 1 << 20;

/// Most vCPUs, disks or iothreads accepted in one answer, and most events kept.
pub(crate) const MAX_ITEMS: usize = 4096;

/// A failed query, with the VM and its socket.
#[derive(Debug, thiserror::Error)]
#[error("{vm}: QMP socket {}: {cause}", socket.display())]
pub struct QmpError {
    /// The VM's name.
    pub vm: String,
    /// The socket as QEMU names it.
    pub socket: PathBuf,
    /// The failure.
    pub cause: QmpFailure,
}

/// What failed on a QMP socket.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum QmpFailure {
    /// Another client holds the socket.
    #[error("another client is using it")]
    Busy,
    /// No complete line came within this time.
    #[error("no answer within {} ms; QEMU is stopped or serves another client", .0.as_millis())]
    Timeout(Duration),
    /// The server's answer is not QMP.
    #[error("the server does not speak QMP: {0}")]
    Malformed(String),
    /// QEMU refused a command.
    #[error("QEMU refused {command}: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's reason.
        reason: String,
    },
    /// The socket cannot be reached, or has failed.
    #[error("{0}")]
    Io(#[serde(with = "as_text")] io::Error),
}

/// An error of the kernel as its text.
mod as_text {
    use std::io;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(error: &io::Error, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(error)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<io::Error, D::Error> {
        String::deserialize(from).map(io::Error::other)
    }
}

/// Splits bytes into lines of bounded length.
#[derive(Default)]
pub(crate) struct Lines {
    bytes: Vec<u8>,
    /// No line ends before this byte.
    searched: usize,
    /// Bytes of the line that has not ended.
    unfinished: usize,
}

impl Lines {
    pub(crate) fn push(&mut self, more: &[u8]) -> Result<(), QmpFailure> {
        self.bytes.extend_from_slice(more);
        // Only new bytes are searched: a long line comes in many pieces.
        self.unfinished = match more.iter().rposition(|&b| b == b'\n') {
            Some(last) => more.len() - last - 1,
            None => self.unfinished + more.len(),
        };
        if self.unfinished > MAX_LINE_BYTES {
            return Err(QmpFailure::Malformed(format!(
                "a line of more than {MAX_LINE_BYTES} bytes"
            )));
        }
        Ok(())
    }

    /// The next complete line that is not blank.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            let Some(length) = self.bytes[self.searched..].iter().position(|&b| b == b'\n') else {
                self.searched = self.bytes.len();
                return None;
            };
            let rest = self.bytes.split_off(self.searched + length + 1);
            let line = std::mem::replace(&mut self.bytes, rest);
            self.searched = 0;
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(line);
            }
        }
    }
}

#[derive(Debug, PartialEq)]
pub(super) enum Message {
    Greeting,
    Return { id: u64, value: Value },
    Error { id: u64, reason: String },
    Event(String),
}

pub(super) fn parse_message(line: &[u8]) -> Result<Message, QmpFailure> {
    let shown = || printable(&String::from_utf8_lossy(&line[..line.len().min(80)]));
    let mut message: Value = serde_json::from_slice(line)
        .map_err(|_| QmpFailure::Malformed(format!("{:?}", shown().trim_end())))?;
    // Only answers to malformed commands lack the number, and viola sends none.
    let id = message["id"].as_u64().unwrap_or(0);
    if message["QMP"].is_object() {
        Ok(Message::Greeting)
    } else if let Some(value) = message.get_mut("return") {
        Ok(Message::Return {
            id,
            value: value.take(),
        })
    } else if let Some(error) = message.get("error") {
        let reason = printable(error["desc"].as_str().unwrap_or("no reason given"));
        Ok(Message::Error { id, reason })
    } else if let Some(event) = message["event"].as_str() {
        Ok(Message::Event(printable(event)))
    } else {
        Err(QmpFailure::Malformed(format!("{:?}", shown().trim_end())))
    }
}

pub(super) fn list<'v>(command: &'static str, value: &'v Value) -> Result<&'v [Value], QmpFailure> {
    match value.as_array() {
        Some(items) if items.len() <= MAX_ITEMS => Ok(items),
        _ => Err(QmpFailure::Malformed(format!(
            "{command} gave no list of up to {MAX_ITEMS}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_line_parses_without_a_panic(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_message(&line);
        }

        #[test]
        fn any_json_parses_without_a_panic(
            key in "QMP|return|error|event|id|desc",
            value in "\\{\\}|\\[\\]|1|-1|null|\"x\"|\\{\"desc\":1\\}",
        ) {
            let _ = parse_message(format!("{{\"{key}\": {value}}}").as_bytes());
        }

        #[test]
        fn lines_do_not_depend_on_the_size_of_the_reads(
            text in "([a-z{}]{0,5}\r?\n){0,10}[a-z]{0,3}",
            cuts in proptest::collection::vec(1usize..7, 0..80),
        ) {
            let mut lines = Lines::default();
            let mut got = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                lines.push(now).unwrap();
                rest = later;
                got.extend(std::iter::from_fn(|| lines.next()));
            }
            let complete = text.rfind('\n').map_or("", |end| &text[..=end]);
            let expected: Vec<Vec<u8>> = complete
                .split_inclusive('\n')
                .filter(|line| !line.trim().is_empty())
                .map(|line| line.as_bytes().to_vec())
                .collect();
            prop_assert_eq!(got, expected);
        }
    }
}
