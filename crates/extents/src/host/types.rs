// SPDX-License-Identifier: Apache-2.0
//! The layers of an image, its sources and sinks, and its errors.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use thiserror::Error;

/// How an image stores its disk. libvirt, QMP or the configuration state it; the crate never probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Byte for byte, in a file or a block device.
    Raw,
    /// qcow2, version 2 or 3, read-only.
    Qcow2,
}

/// One file of an image.
#[derive(Debug)]
pub struct Layer {
    /// Its format.
    pub format: Format,
    /// Open for reading, or for reading and writing; with `O_DIRECT` to bypass the page cache.
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

/// Why an image cannot be used. Layers are numbered from 0, which is the top.
#[derive(Debug, Error)]
pub enum ImageError {
    /// No layer.
    #[error("an image needs at least one file")]
    Empty,
    /// A raw layer that is not the last one.
    #[error("layer {0} is raw and cannot have a backing file")]
    RawNotLast(usize),
    /// A qcow2 layer whose header names a backing file that was not given, or none although one was given.
    #[error("layer {layer}: its header and the given backing chain disagree about a backing file")]
    BackingMismatch {
        /// Number of the layer.
        layer: usize,
    },
    /// A qcow2 image with an external data file.
    #[error("layer {0} has an external data file, which is not supported")]
    DataFile(usize),
    /// An encrypted qcow2 image.
    #[error("layer {0} is encrypted, which is not supported")]
    Encrypted(usize),
    /// Neither a regular file nor a block device.
    #[error("layer {0} is neither a file nor a block device")]
    NotAFile(usize),
    /// A read failed, or the header is invalid.
    #[error("layer {layer}: {source}")]
    Io {
        /// Number of the layer.
        layer: usize,
        /// Why.
        source: io::Error,
    },
}

/// The source of a run of a file's bytes, for callers that move the bytes themselves.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Zeros.
    Zero {
        /// Length in bytes.
        len: u64,
    },
    /// Bytes of an image file, stored unchanged.
    File {
        /// The image file; valid as long as the image.
        fd: BorrowedFd<'a>,
        /// Offset in the image file, in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Compressed bytes: only [`Image::read`](super::Image::read) can return them.
    Encoded {
        /// Length in bytes.
        len: u64,
    },
}

/// A place to which bytes of a file can be written.
#[derive(Clone, Copy, Debug)]
pub struct Sink<'a> {
    /// The image's file; valid as long as the image.
    pub fd: BorrowedFd<'a>,
    /// Offset in the image's file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}
