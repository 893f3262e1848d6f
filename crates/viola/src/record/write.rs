// SPDX-License-Identifier: Apache-2.0
//! Writing a recording.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use viola_proto::Event;

use super::{Begin, FORMAT, Line, Moment};
use viola_cli::log::now_ms;

/// A recording that is being written. Each line is one write(2), so the file holds only whole lines.
#[derive(Debug)]
pub struct Writer {
    file: File,
}

impl Writer {
    /// Begins a recording, or continues an existing one.
    ///
    /// # Errors
    /// When the file exists and is not a recording, or cannot be written.
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
                    "the file exists and is not a recording; name another file",
                ));
            }
            file.seek(SeekFrom::Start(length - 1))?;
            let mut last = [0];
            file.read_exact(&mut last)?;
            if last != *b"\n" {
                // The last line is truncated: begin a new line.
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

    /// Writes a moment, and the events since the last one.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn moment(&mut self, moment: &Moment, events: &[Event]) -> io::Result<()> {
        for event in events {
            self.line(&Line::Event(event.clone()))?;
        }
        self.line(&Line::Moment(moment.clone()))
    }

    /// Writes that the daemon does not answer.
    ///
    /// # Errors
    /// As [`Writer::moment`].
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
            // A full disk accepted only a part of the line.
            let _ = self.file.set_len(before);
        })
    }
}
