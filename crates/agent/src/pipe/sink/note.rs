// SPDX-License-Identifier: Apache-2.0
//! Notes of immutable files, for the next run of the agent.
//!
//! A note is an empty file in `MOUNT/.viola/uploads`, on the file system of the file itself. Its name has the agent's
//! run, the pipe, the file's handle (`name_to_handle_at`) and the file's size before. It is made before the flag is
//! set, so the file system's journal never has the flag without it.

use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::immutable;
use crate::io::AGENT_DIR;

/// Name of the notes' directory within [`AGENT_DIR`].
const NOTES_DIR: &str = "uploads";
/// `MAX_HANDLE_SZ`
const MAX_HANDLE_BYTES: usize = 128;

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
    pub fn remove(self) -> io::Result<()> {
        std::fs::remove_file(self.0)
    }
}

/// `struct file_handle`
#[repr(C)]
#[derive(Debug, Clone, PartialEq, Eq)]
struct Handle {
    size: u32,
    kind: i32,
    bytes: [u8; MAX_HANDLE_BYTES],
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
    /// One sentence about the last failure; the other files are restored all the same.
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
        let file = match name.handle.open(&top) {
            Ok(file) => file,
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
        let handle = &self.handle;
        let bytes = handle.bytes.iter().take(handle.size as usize);
        let bytes: String = bytes.map(|b| format!("{b:02x}")).collect();
        format!("{:x}-{:x}-{bytes}-{:x}", self.run, handle.kind, self.size)
    }

    fn read(name: &str) -> Option<Self> {
        let mut parts = name.split('-');
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let (run, kind) = (number()?, number()?);
        let digits = parts.next()?;
        let mut bytes = [0; MAX_HANDLE_BYTES];
        for (at, byte) in bytes.iter_mut().enumerate().take(digits.len() / 2) {
            *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        let size = u64::from_str_radix(parts.next()?, 16).ok()?;
        // the pipe's number only makes the name unique
        parts.next()?;
        let good =
            digits.len() <= 2 * MAX_HANDLE_BYTES && digits.len() % 2 == 0 && parts.next().is_none();
        good.then_some(Self {
            run,
            handle: Handle {
                size: digits.len() as u32 / 2,
                kind: i32::try_from(kind).ok()?,
                bytes,
            },
            size,
        })
    }
}

impl Handle {
    fn of(file: &File) -> io::Result<Self> {
        let mut handle = Self {
            size: MAX_HANDLE_BYTES as u32,
            kind: 0,
            bytes: [0; MAX_HANDLE_BYTES],
        };
        let (mut mount, empty) = (0_i32, c"");
        // SAFETY: the path is empty and ends in NUL; the kernel writes at most `size` bytes behind the head of `handle`, for
        // which it has room, and one int to `mount`.
        let done = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                file.as_raw_fd(),
                empty.as_ptr(),
                &raw mut handle,
                &raw mut mount,
                libc::AT_EMPTY_PATH,
            )
        };
        match done {
            0 => Ok(handle),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn open(&self, top: &File) -> io::Result<File> {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOFOLLOW;
        // SAFETY: the kernel reads a struct file_handle of `size` bytes, which `self` is laid out as and has room for.
        let raw = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                top.as_raw_fd(),
                std::ptr::from_ref(self),
                flags,
            )
        };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        Ok(unsafe { File::from_raw_fd(raw as i32) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_name_is_read_back() {
        let mut bytes = [0; MAX_HANDLE_BYTES];
        bytes[..3].copy_from_slice(&[1, 0xff, 7]);
        let (size, kind) = (3, 1);
        let handle = Handle { size, kind, bytes };
        let (run, size) = (u64::MAX, 4097);
        let note = NoteName { run, handle, size };
        let name = format!("{}-9", note.name());
        assert_eq!(NoteName::read(&name), Some(note));
        for odd in ["", "1-1-0-5-9", "1-1-00-5", "1-1-00-5-9-9", "1-x-00-5-9"] {
            assert_eq!(NoteName::read(odd), None, "{odd}");
        }
    }
}
