// SPDX-License-Identifier: Apache-2.0
//! An open block.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::{Error, Result};

/// What [`Block::seek`] counts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whence {
    /// The block's begin.
    Start,
    /// Where the next read begins.
    Current,
    /// The block's end.
    End,
}

/// An open block. May be used by several threads at once; [`Block::read`] and [`Block::seek`] share one
/// position, [`Block::pread`] has none.
#[derive(Debug)]
pub struct Block {
    path: PathBuf,
    name: String,
    open: RwLock<Arc<Open>>,
    position: Mutex<u64>,
}

#[derive(Debug)]
struct Open {
    file: File,
    size: u64,
}

impl Open {
    fn new(path: &PathBuf, name: &str) -> Result<Self> {
        let absent = |e: io::Error| match e.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => Error::Absent(name.into()),
            _ => Error::Io(e),
        };
        let file = File::open(path).map_err(absent)?;
        let size = file.metadata().map_err(absent)?.len();
        Ok(Self { file, size })
    }
}

impl Block {
    pub(crate) fn open(path: PathBuf, name: &str) -> Result<Self> {
        Ok(Self {
            open: RwLock::new(Arc::new(Open::new(&path, name)?)),
            path,
            name: name.into(),
            position: Mutex::new(0),
        })
    }

    /// Length in bytes.
    pub fn size(&self) -> u64 {
        self.now().size
    }

    /// Reads from the position on, and moves it. Fewer bytes than asked for come only at the end.
    ///
    /// # Errors
    /// [`Error::Withdrawn`] or [`Error::Io`]; the position stays then.
    pub fn read(&self, bytes: &mut [u8]) -> Result<usize> {
        let mut position = self.position();
        let n = self.pread(bytes, *position)?;
        *position += n as u64;
        Ok(n)
    }

    /// Reads from `offset` on. Fewer bytes than asked for come only at the end.
    ///
    /// # Errors
    /// [`Error::Withdrawn`] or [`Error::Io`].
    pub fn pread(&self, bytes: &mut [u8], offset: u64) -> Result<usize> {
        let open = self.now();
        let mut done = 0;
        while done < bytes.len() {
            let at = offset.saturating_add(done as u64);
            if at >= open.size {
                break;
            }
            match open.file.read_at(&mut bytes[done..], at) {
                // shorter than it was: then it is not the block that was opened
                Ok(0) => return Err(Error::Withdrawn),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::reading(e)),
            }
        }
        Ok(done)
    }

    /// Moves the position; the new one. It may be beyond the end, where nothing is read.
    ///
    /// # Errors
    /// [`Error::Io`] with `EINVAL` when it would be before the begin.
    pub fn seek(&self, offset: i64, whence: Whence) -> Result<u64> {
        let mut position = self.position();
        let from = match whence {
            Whence::Start => 0,
            Whence::Current => *position,
            Whence::End => self.size(),
        };
        let new = from.checked_add_signed(offset);
        let new = new.filter(|new| i64::try_from(*new).is_ok());
        *position = new.ok_or_else(|| Error::Io(io::Error::from_raw_os_error(libc::EINVAL)))?;
        Ok(*position)
    }

    /// Opens the block anew: after it was withdrawn it may have been named again. The position stays.
    ///
    /// # Errors
    /// [`Error::Absent`] when it is not there any more; the old one stays open.
    pub fn update(&self) -> Result<()> {
        let new = Arc::new(Open::new(&self.path, &self.name)?);
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    fn now(&self) -> Arc<Open> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone()
    }

    fn position(&self) -> MutexGuard<'_, u64> {
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
