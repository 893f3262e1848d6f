// SPDX-License-Identifier: Apache-2.0
//! Writing a recording.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use viola_proto::Event;

use super::{Begin, FORMAT, Line, Moment};
use viola_cli::log::now_ms;

/// A file that a recording is written to. Each line is one write, so that what is there is whole.
#[derive(Debug)]
pub struct Writer {
    file: File,
}

impl Writer {
    /// Begins a recording, or goes on with one that is there. Another file is not touched.
    pub fn open(path: &Path, host: &str) -> io::Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)?;
        let length = file.metadata()?.len();
        if length > 0 {
            let mut head = [0; 9];
            let known = file.read_exact(&mut head).is_ok() && head == *b"{\"begin\":";
            if !known {
                return Err(io::Error::other(
                    "it is there and is no recording; name another file",
                ));
            }
            file.seek(SeekFrom::Start(length - 1))?;
            let mut last = [0];
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                // The last line was cut short: what comes is a line of its own.
                file.write_all(b"\n")?;
            }
        }
        let mut writer = Self { file };
        writer.line(&Line::Begin(Begin {
            format: FORMAT,
            viola: env!("CARGO_PKG_VERSION").into(),
            host: host.into(),
            at_ms: now_ms(),
        }))?;
        Ok(writer)
    }

    /// What there was, and what was said since the last time.
    pub fn moment(&mut self, moment: &Moment, events: &[Event]) -> io::Result<()> {
        for event in events {
            self.line(&Line::Event(event.clone()))?;
        }
        self.line(&Line::Moment(moment.clone()))
    }

    /// The daemon does not answer.
    pub fn gap(&mut self, why: &str) -> io::Result<()> {
        self.line(&Line::Gap {
            at_ms: now_ms(),
            why: why.into(),
        })
    }

    fn line(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        let before = self.file.metadata()?.len();
        self.file.write_all(&text).inspect_err(|_| {
            // A disk that is full took a part of it.
            let _ = self.file.set_len(before);
        })
    }
}
