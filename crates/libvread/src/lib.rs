// SPDX-License-Identifier: Apache-2.0
//! Reading HDFS blocks through viola's mount.
//!
//! A VM that may read blocks of DataNodes on its host has them in a mount: `/POOL/blk_ID_STAMP`. This
//! library opens a block there by its name, keeps the descriptors, and tells a block that is not there
//! (read it from its DataNode) from one that was withdrawn while it was being read. [`ffi`] is the same
//! for C, described in `vread(3)`.
//!
//! Bytes are not verified here: whoever needs that reads the block's checksums, `NAME.meta`, too.
//!
//! ```no_run
//! let library = vread::Library::new("/run/viola/vread");
//! let block = library.open("BP-1204-10.0.0.1-1763718000000/blk_7_1001", None)?;
//! let mut bytes = [0; 4096];
//! let n = block.pread(&mut bytes, 0)?;
//! # Ok::<(), vread::Error>(())
//! ```

mod block;
pub mod ffi;
mod library;

pub use block::{Block, Whence};
pub use library::{DEFAULT_MOUNT, Library};

use std::io;

/// Why a block cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is not `POOL/blk_ID_STAMP`, with or without `.meta`.
    #[error("`{0}` is not the name of a block")]
    Name(String),
    /// It is not here: not on this host, not finished, or not allowed.
    #[error("block `{0}` is not here")]
    Absent(String),
    /// It was withdrawn since it was opened: deleted, appended to, moved, or its VM is gone.
    #[error("block was withdrawn")]
    Withdrawn,
    /// The mount does not answer, or something else went wrong.
    #[error("cannot read a block: {0}")]
    Io(#[source] io::Error),
}

impl Error {
    /// The number that `errno` gets.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Name(_) => libc::EINVAL,
            Self::Absent(_) => libc::ENOENT,
            Self::Withdrawn => libc::ESTALE,
            Self::Io(e) => e.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn reading(e: io::Error) -> Self {
        match e.raw_os_error() {
            Some(libc::ESTALE) => Self::Withdrawn,
            _ => Self::Io(e),
        }
    }
}

/// What this library's calls return.
pub type Result<T> = std::result::Result<T, Error>;
