// SPDX-License-Identifier: Apache-2.0
//! An open block.

use std::fs::File;
use std::io::{self, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::{Error, Result};

/// An open block. Threads may share it: [`Block::read`] and [`Block::seek`] use one common position,
/// [`Block::pread`] uses none.
#[derive(Debug)]
pub struct Block {
    path: PathBuf,
    name: String,
    open: RwLock<Arc<OpenFile>>,
    position: Mutex<u64>,
}

#[derive(Debug)]
struct OpenFile {
    file: File,
    size: u64,
}

impl OpenFile {
    fn new(path: &PathBuf, name: &str) -> Result<Self> {
        let not_found = |e: io::Error| match e.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => Error::NotFound(name.into()),
            _ => Error::Io(e),
        };
        let file = File::open(path).map_err(not_found)?;
        let size = file.metadata().map_err(not_found)?.len();
        Ok(Self { file, size })
    }
}

impl Block {
    pub(crate) fn open(path: PathBuf, name: &str) -> Result<Self> {
        Ok(Self {
            open: RwLock::new(Arc::new(OpenFile::new(&path, name)?)),
            path,
            name: name.into(),
            position: Mutex::new(0),
        })
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.current().size
    }

    /// Reads from the position and advances it. Returns fewer bytes than requested only at the end of the block.
    ///
    /// # Errors
    /// [`Error::Withdrawn`] or [`Error::Io`]; the position does not change then.
    pub fn read(&self, bytes: &mut [u8]) -> Result<usize> {
        let mut position = self.position();
        let n = self.pread(bytes, *position)?;
        *position += n as u64;
        Ok(n)
    }

    /// Reads from `offset`. Returns fewer bytes than requested only at the end of the block.
    ///
    /// # Errors
    /// [`Error::Withdrawn`] or [`Error::Io`].
    pub fn pread(&self, bytes: &mut [u8], offset: u64) -> Result<usize> {
        let open = self.current();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset.saturating_add(done as u64);
            if at >= open.size {
                break;
            }
            match open.file.read_at(&mut bytes[done..], at) {
                // The file has become shorter, so it is no longer the block that was opened.
                Ok(0) => return Err(Error::Withdrawn),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::from_read(e)),
            }
        }
        Ok(done)
    }

    /// Moves the position and returns the new one. A position beyond the end is valid; reads there return 0 bytes.
    ///
    /// # Errors
    /// [`Error::Io`] with `EINVAL` when the position would be negative or above `i64::MAX`.
    pub fn seek(&self, to: SeekFrom) -> Result<u64> {
        let mut position = self.position();
        let new = match to {
            SeekFrom::Start(offset) => Some(offset),
            SeekFrom::Current(offset) => position.checked_add_signed(offset),
            SeekFrom::End(offset) => self.size().checked_add_signed(offset),
        };
        let new = new.filter(|new| i64::try_from(*new).is_ok());
        *position = new.ok_or_else(|| Error::Io(io::Error::from_raw_os_error(libc::EINVAL)))?;
        Ok(*position)
    }

    /// Opens the block again by its name: the agent may have named a withdrawn block anew. The position does not
    /// change.
    ///
    /// # Errors
    /// [`Error::NotFound`] when the block is not in the mount, or [`Error::Io`]; the old file stays
    /// open.
    pub fn reopen(&self) -> Result<()> {
        let new = Arc::new(OpenFile::new(&self.path, &self.name)?);
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    fn current(&self) -> Arc<OpenFile> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone()
    }

    fn position(&self) -> MutexGuard<'_, u64> {
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
