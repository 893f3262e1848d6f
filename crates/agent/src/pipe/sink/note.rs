// SPDX-License-Identifier: Apache-2.0
//! Notes of immutable files, for the next run of the agent.
//!
//! A note is an empty file in `MOUNT/.viola/uploads`, on the file system of the file itself. Its name has the agent's
//! run, the pipe, the file's handle (`name_to_handle_at`) and the file's size before. It is made before the flag is
//! set, so the file system's journal never has the flag without it.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::immutable;
use crate::io::AGENT_DIR;
use crate::io::handle::Handle;

/// Name of the notes' directory within [`AGENT_DIR`].
const NOTES_DIR: &str = "uploads";

/// The notes of one file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notes {
    point: PathBuf,
    run: u64,
}

/// A note. It stays unless it is removed.
#[derive(Debug)]
pub struct Note(PathBuf);

impl Note {
    /// Removes the note: the file is not immutable any more.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove(self) -> io::Result<()> {
        std::fs::remove_file(self.0)
    }
}

/// The content of a note's name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NoteName {
    run: u64,
    handle: Handle,
    size: u64,
}

impl Notes {
    /// The notes of a mounted file system; `run` identifies this run of the agent.
    pub fn new(point: &Path, run: u64) -> Self {
        let point = point.into();
        Self { point, run }
    }

    /// Writes a note for a file.
    ///
    /// # Errors
    /// The kernel's, or when others may write to the directory.
    pub fn note(&self, file: &File, pipe: u64, size: u64) -> io::Result<Note> {
        let dir = self.dir(true)?;
        let (run, handle) = (self.run, Handle::of(file)?);
        let name = format!("{}-{pipe:x}", NoteName { run, handle, size }.name());
        let path = dir.join(name);
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        options.open(&path)?;
        Ok(Note(path))
    }

    /// Restores all files that earlier, dead runs have noted: clears the flag, and truncates a file to the size
    /// that it had, since its program was told of no byte. The host must have ended those sessions.
    ///
    /// # Errors
    /// One sentence about the last failure; the other files are restored.
    pub fn restore_earlier(&self) -> Result<usize, String> {
        let dir = match self.dir(false) {
            Ok(dir) => dir,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(0),
            Err(e) => return Err(e.to_string()),
        };
        let names = std::fs::read_dir(&dir).map_err(|e| e.to_string())?;
        let (mut done, mut failed) = (0, None);
        for file in names.flatten().map(|entry| entry.file_name()) {
            let Some(name) = file.to_str().and_then(NoteName::read) else {
                continue;
            };
            if name.run == self.run {
                continue;
            }
            let path = dir.join(&file);
            match self
                .restore_file(&name)
                .and_then(|()| std::fs::remove_file(&path))
            {
                Ok(()) => done += 1,
                Err(e) => failed = Some(format!("{}: {e}", path.display())),
            }
        }
        failed.map_or(Ok(done), Err)
    }

    fn restore_file(&self, name: &NoteName) -> io::Result<()> {
        let top = File::open(&self.point)?;
        let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
        let file = match name.handle.open(&top, flags) {
            Ok(file) => File::from(file),
            // the file was deleted
            Err(e) if e.raw_os_error() == Some(libc::ESTALE) => return Ok(()),
            Err(e) => return Err(e),
        };
        // a file without the flag may have been written by others since
        if immutable::clear(&file)? && file.metadata()?.len() > name.size {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let mut options = std::fs::OpenOptions::new();
            let file = options.write(true).open(path)?;
            file.set_len(name.size)?;
        }
        Ok(())
    }

    /// The notes' directory. Fails when others may write to it.
    fn dir(&self, make: bool) -> io::Result<PathBuf> {
        let mut dir = self.point.clone();
        for name in [AGENT_DIR, NOTES_DIR] {
            dir.push(name);
            if make {
                match DirBuilder::new().mode(0o700).create(&dir) {
                    Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                    other => other?,
                }
            }
            let found = std::fs::symlink_metadata(&dir)?;
            let own = rustix::process::geteuid().as_raw();
            if !found.is_dir() || found.uid() != own || found.mode() & 0o022 != 0 {
                let text = format!("{} is not the agent's own directory", dir.display());
                return Err(io::Error::other(text));
            }
        }
        Ok(dir)
    }
}

impl NoteName {
    fn name(&self) -> String {
        let content = self.handle.content().iter();
        let bytes: String = content.map(|b| format!("{b:02x}")).collect();
        let (run, kind, size) = (self.run, self.handle.kind(), self.size);
        format!("{run:x}-{kind:x}-{bytes}-{size:x}")
    }

    fn read(name: &str) -> Option<Self> {
        let mut parts = name.split('-');
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let (run, kind) = (number()?, number()?);
        let digits = parts.next()?;
        let bytes = (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok())
            .collect::<Option<Vec<u8>>>()?;
        let size = u64::from_str_radix(parts.next()?, 16).ok()?;
        // the pipe's number only makes the name unique
        parts.next()?;
        parts.next().is_none().then_some(Self {
            run,
            handle: Handle::new(i32::try_from(kind).ok()?, &bytes)?,
            size,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_name_is_read_back() {
        let handle = Handle::new(1, &[1, 0xff, 7]).unwrap();
        let (run, size) = (u64::MAX, 4097);
        let note = NoteName { run, handle, size };
        let name = format!("{}-9", note.name());
        assert_eq!(NoteName::read(&name), Some(note));
        for odd in ["", "1-1-0-5-9", "1-1-00-5", "1-1-00-5-9-9", "1-x-00-5-9"] {
            assert_eq!(NoteName::read(odd), None, "{odd}");
        }
    }
}
