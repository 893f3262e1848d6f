// SPDX-License-Identifier: Apache-2.0
//! Reads HDFS blocks through viola's mount.
//!
//! A VM that may read blocks of DataNodes on its host has a mount that contains them as `/POOL/blk_ID_STAMP`. This
//! library opens a block by its name and manages descriptors. Its errors tell a block that is not in the mount (read
//! it from its DataNode) from one that was withdrawn during a read. [`ffi`] is the C interface, described in
//! `vread(3)`.
//!
//! The library does not verify bytes: a caller that needs this reads the block's checksums, `NAME.meta`, too.
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

pub use block::Block;
pub use library::{DEFAULT_MOUNT, Library};

use std::io;

/// Why a block cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is not `POOL/blk_ID_STAMP`, with or without `.meta`.
    #[error("`{0}` is not a block name; expected POOL/blk_ID_STAMP or the same with .meta")]
    InvalidName(String),
    /// The mount does not contain the block: it is on another host, not finished, or not allowed.
    #[error("block `{0}` is not in the mount; read it from its DataNode")]
    NotFound(String),
    /// The block was withdrawn since it was opened: it was deleted, appended to or moved, or its VM is gone.
    #[error("the block was withdrawn; open it again or read it from its DataNode")]
    Withdrawn,
    /// Another error, for example because the mount does not answer.
    #[error("cannot read a block: {0}")]
    Io(#[source] io::Error),
}

impl Error {
    /// The value for `errno`: `EINVAL`, `ENOENT`, `ESTALE` or that of the I/O error.
    pub fn errno(&self) -> i32 {
        match self {
            Self::InvalidName(_) => libc::EINVAL,
            Self::NotFound(_) => libc::ENOENT,
            Self::Withdrawn => libc::ESTALE,
            Self::Io(e) => e.raw_os_error().unwrap_or(libc::EIO),
        }
    }

    fn from_read(e: io::Error) -> Self {
        match e.raw_os_error() {
            Some(libc::ESTALE) => Self::Withdrawn,
            _ => Self::Io(e),
        }
    }
}

/// Result of this library's calls.
pub type Result<T> = std::result::Result<T, Error>;
