// SPDX-License-Identifier: Apache-2.0
//! Reads a recording. The reader keeps an index of the moments in memory and reads each moment on
//! demand, so a recording of a day need not fit into memory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use viola_proto::Event;

use super::{FORMAT, Line, MAX_LINE_BYTES, Moment, gap};

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// It is not a recording that this version can read.
    #[error("{}: {what}", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// A recording.
#[derive(Debug)]
pub struct Recording {
    path: PathBuf,
    file: BufReader<File>,
    moments: Vec<Place>,
    /// All events, oldest first.
    pub events: Vec<Event>,
    /// Host on which it was made.
    pub host: String,
    /// Number of lines that could not be read.
    pub broken: usize,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    offset: u64,
    length: usize,
}

impl Recording {
    /// Reads the whole file once and builds the index.
    ///
    /// # Errors
    /// When the file cannot be read, is not a recording, is empty, or has a later format.
    pub fn open(path: &Path) -> Result<Self, ReplayError> {
        let failed = |source| ReplayError::Io {
            path: path.to_owned(),
            source,
        };
        let file = BufReader::with_capacity(1 << 20, File::open(path).map_err(failed)?);
        let mut recording = Self {
            path: path.to_owned(),
            file,
            moments: Vec::new(),
            events: Vec::new(),
            host: String::new(),
            broken: 0,
        };
        let (mut offset, mut line) = (0, Vec::new());
        loop {
            line.clear();
            let n = Read::take(&mut recording.file, MAX_LINE_BYTES)
                .read_until(b'\n', &mut line)
                .map_err(failed)?;
            if n == 0 {
                break;
            }
            recording.index(offset, &line)?;
            offset += n as u64;
        }
        if recording.moments.is_empty() {
            return Err(recording.other("the recording is empty"));
        }
        // Several recorders may have written to it, and clocks may have been set.
        recording.events.sort_by_key(|e| e.at_ms);
        Ok(recording)
    }

    fn other(&self, what: impl Into<String>) -> ReplayError {
        ReplayError::Other {
            path: self.path.clone(),
            what: what.into(),
        }
    }

    fn index(&mut self, offset: u64, line: &[u8]) -> Result<(), ReplayError> {
        if line.starts_with(b"{\"moment\":") {
            // Only the syntax is checked here; the content is read on demand.
            match serde_json::from_slice::<serde::de::IgnoredAny>(line) {
                Ok(_) => self.moments.push(Place {
                    offset,
                    length: line.len(),
                }),
                Err(_) => self.broken += 1,
            }
            return Ok(());
        }
        let parsed = serde_json::from_slice::<Line>(line);
        if offset == 0 && !matches!(parsed, Ok(Line::Begin(_))) {
            // A later format may have another first line, but names its number.
            return Err(match serde_json::from_slice::<OtherBegin>(line) {
                Ok(other) => self.newer(other.begin.format),
                Err(_) => self.other("not a recording of viola record"),
            });
        }
        match parsed {
            Ok(Line::Begin(begin)) if begin.format > FORMAT => {
                return Err(self.newer(begin.format));
            }
            Ok(Line::Begin(begin)) => self.host = begin.host,
            Ok(Line::Event(event)) => self.events.push(event),
            Ok(Line::Gap { at_ms, why }) => self.events.push(gap(at_ms, &why)),
            Ok(Line::Moment(_)) => self.moments.push(Place {
                offset,
                length: line.len(),
            }),
            Err(_) if line.trim_ascii().is_empty() => {}
            Err(_) => self.broken += 1,
        }
        Ok(())
    }

    fn newer(&self, format: u32) -> ReplayError {
        self.other(format!(
            "a recording of format {format}; this version reads formats up to {FORMAT}"
        ))
    }

    /// Number of moments; at least one.
    pub fn len(&self) -> usize {
        self.moments.len()
    }

    /// A moment, 0..len.
    ///
    /// # Errors
    /// [`ReplayError`] when the file has changed or cannot be read.
    pub fn moment(&mut self, at: usize) -> Result<Moment, ReplayError> {
        let Some(place) = self.moments.get(at).copied() else {
            return Err(self.other(format!("it has no moment {at}")));
        };
        let mut line = vec![0; place.length];
        let read = self
            .file
            .seek(SeekFrom::Start(place.offset))
            .and_then(|_| self.file.read_exact(&mut line));
        read.map_err(|source| ReplayError::Io {
            path: self.path.clone(),
            source,
        })?;
        match serde_json::from_slice(&line) {
            Ok(Line::Moment(moment)) => Ok(moment),
            Ok(_) => Err(self.other("it has changed since it was opened")),
            Err(e) => Err(self.other(format!("moment {at} cannot be read: {e}"))),
        }
    }
}

#[derive(Deserialize)]
struct OtherBegin {
    begin: OtherFormat,
}

#[derive(Deserialize)]
struct OtherFormat {
    format: u32,
}

#[cfg(test)]
mod tests {
    use super::super::Writer;
    use super::*;
    use crate::testing::{event, moment};
    use std::fs;

    fn written(dir: &tempfile::TempDir) -> PathBuf {
        let path = dir.path().join("r.jsonl");
        let mut writer = Writer::open(&path, "h1").unwrap();
        writer
            .moment(&moment(1000, &["a"]), &[event(500, Some("uml:a"), "x")])
            .unwrap();
        writer.gap("no daemon").unwrap();
        writer.moment(&moment(2000, &["a", "b"]), &[]).unwrap();
        path
    }

    #[test]
    fn what_was_written_is_read_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut r = Recording::open(&written(&dir)).unwrap();
        assert_eq!((r.len(), r.host.as_str(), r.broken), (2, "h1", 0));
        assert_eq!(r.moment(1).unwrap(), moment(2000, &["a", "b"]));
        assert_eq!(r.moment(0).unwrap(), moment(1000, &["a"]));
        assert!(r.moment(2).is_err());
        let said: Vec<&str> = r.events.iter().map(|e| e.what.as_str()).collect();
        assert_eq!(said, ["x", "not recorded: no daemon"]);
    }

    #[test]
    fn a_recording_that_was_cut_anywhere_is_read_as_far_as_it_goes_and_can_be_gone_on_with() {
        let dir = tempfile::tempdir().unwrap();
        let path = written(&dir);
        let whole = fs::read(&path).unwrap();
        let first = whole.iter().position(|b| *b == b'\n').unwrap();
        let cut = dir.path().join("cut.jsonl");
        for end in (first + 1)..whole.len() {
            fs::write(&cut, &whole[..end]).unwrap();
            let had = match Recording::open(&cut) {
                Ok(r) => {
                    assert!(r.broken <= 1, "{end}");
                    r.len()
                }
                Err(e) => {
                    assert!(e.to_string().contains("is empty"), "{end}: {e}");
                    0
                }
            };
            if end % 37 != 0 {
                continue;
            }
            let mut on = Writer::open(&cut, "h1").unwrap();
            on.moment(&moment(9000, &["z"]), &[]).unwrap();
            let mut r = Recording::open(&cut).unwrap();
            assert_eq!(r.len(), had + 1, "{end}");
            assert_eq!(r.moment(had).unwrap(), moment(9000, &["z"]));
        }
    }

    #[test]
    fn another_file_is_refused_by_reader_and_writer_and_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for text in ["root:x:0:0\n", "{}", "[1]\n", "{\"moment\"", "\u{1}\u{2}"] {
            fs::write(&path, text).unwrap();
            assert!(Recording::open(&path).is_err(), "{text}");
            assert!(Writer::open(&path, "h").is_err(), "{text}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, "{\"begin\":{\"format\":2,\"other\":true}}\n").unwrap();
        let said = Recording::open(&path).unwrap_err().to_string();
        assert!(
            said.contains("format 2; this version reads formats up to 1"),
            "{said}"
        );
        assert!(Recording::open(dir.path()).is_err());
        assert!(Recording::open(&dir.path().join("none")).is_err());
    }

    #[test]
    fn a_line_of_a_later_kind_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = written(&dir);
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("{\"weather\":{\"at_ms\":1}}\n\n");
        fs::write(&path, text).unwrap();
        let r = Recording::open(&path).unwrap();
        assert_eq!((r.len(), r.broken), (2, 1));
    }
}
