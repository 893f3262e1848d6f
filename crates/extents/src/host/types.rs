// SPDX-License-Identifier: Apache-2.0
//! What an image consists of, and what can be wrong with it.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use thiserror::Error;

/// How an image stores its disk. Told by libvirt, QMP or the configuration, never found by looking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte: a file or a block device.
    Raw,
    /// qcow2, version 2 or 3, read-only.
    Qcow2,
}

/// One file of an image.
#[derive(Debug)]
pub struct Layer {
    /// Its format.
    pub format: Format,
    /// Opened for reading, or for both; with `O_DIRECT` where the page cache is not wanted.
    pub file: OwnedFd,
}

impl Layer {
    /// A raw file or block device.
    pub fn raw(file: impl Into<OwnedFd>) -> Self {
        Self {
            format: Format::Raw,
            file: file.into(),
        }
    }

    /// A qcow2 file.
    pub fn qcow2(file: impl Into<OwnedFd>) -> Self {
        Self {
            format: Format::Qcow2,
            file: file.into(),
        }
    }
}

/// Why an image cannot be used.
#[derive(Debug, Error)]
pub enum ImageError {
    /// No layer.
    #[error("an image needs at least one file")]
    Empty,
    /// A raw layer that is not the last one.
    #[error("layer {0} is raw and cannot have a backing file")]
    RawNotLast(usize),
    /// qcow2 with a backing file that was not given, or without one that was.
    #[error(
        "layer {layer}: its header and the given backing chain do not agree on whether there is a backing file"
    )]
    BackingMismatch {
        /// Counted from the top, from 0.
        layer: usize,
    },
    /// A qcow2 image whose data are in another file.
    #[error("layer {0} keeps its data in a file of its own, which is not supported")]
    DataFile(usize),
    /// An encrypted qcow2 image.
    #[error("layer {0} is encrypted, which is not supported")]
    Encrypted(usize),
    /// Neither a regular file nor a block device.
    #[error("layer {0} is neither a file nor a block device")]
    NotAFile(usize),
    /// Reading it failed, or its header is not good.
    #[error("layer {layer}: {source}")]
    Io {
        /// Counted from the top, from 0.
        layer: usize,
        /// Why.
        source: io::Error,
    },
}

/// Where a run of a file's bytes comes from, for readers that move bytes themselves.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Zeros.
    Zero {
        /// How many.
        len: u64,
    },
    /// Bytes of a file as they are.
    File {
        /// The file; good for as long as the image is.
        fd: BorrowedFd<'a>,
        /// Where in it.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Compressed: only [`Image::read`](super::Image::read) can give them.
    Encoded {
        /// How many.
        len: u64,
    },
}

/// A place for bytes of a file.
#[derive(Clone, Copy, Debug)]
pub struct Sink<'a> {
    /// The image's file; good for as long as the image is.
    pub fd: BorrowedFd<'a>,
    /// Where in it.
    pub offset: u64,
    /// For how many.
    pub len: u64,
}
