// SPDX-License-Identifier: Apache-2.0
//! Reads qcow2 and its backing chain with the library imago, on descriptors that the caller passes.

use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use imago::io_buffers::{IoVector, IoVectorMut};
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::storage::drivers::CommonStorageHelper;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, Mapping, Storage};

use super::buffers::Buffers;
use super::file::ImageFile;
use super::{Format, ImageError};

/// Header offset of the encryption method. imago does not check it.
const CRYPT_METHOD_OFFSET: u64 = 32;

/// A run of the disk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    Zero {
        len: u64,
    },
    /// Bytes of the file with this number.
    File {
        file: usize,
        offset: u64,
        len: u64,
    },
    /// Compressed bytes at this offset of the disk.
    Encoded {
        disk: u64,
        len: u64,
    },
}

impl Run {
    pub(super) fn len(&self) -> u64 {
        match *self {
            Self::Zero { len } | Self::File { len, .. } | Self::Encoded { len, .. } => len,
        }
    }
}

/// The tables of an image and its backing files, as of opening.
#[derive(Debug)]
pub(super) struct Tables {
    access: FormatAccess<Store>,
    files: Vec<Arc<ImageFile>>,
    sizes: Vec<u64>,
}

impl Tables {
    /// Reads the tables of all layers; the top layer comes first.
    pub(super) fn open(layers: &[(Format, Arc<ImageFile>)]) -> Result<Self, ImageError> {
        let mut below: Option<FormatAccess<Store>> = None;
        let mut sizes = vec![0; layers.len()];
        for (layer, (format, file)) in layers.iter().enumerate().rev() {
            let at = |source| ImageError::Io { layer, source };
            sizes[layer] = file.size().map_err(at)?;
            let store = Store {
                number: layer,
                file: Arc::clone(file),
                helper: CommonStorageHelper::default(),
            };
            let access = match format {
                Format::Raw => FormatAccess::new(
                    Raw::builder(store)
                        .open(DenyImplicitOpenGate::default())
                        .map_err(at)?,
                ),
                Format::Qcow2 => open_one(store, layer, below.take())?,
            };
            below = Some(access);
        }
        Ok(Self {
            access: below.ok_or(ImageError::Empty)?,
            files: layers.iter().map(|(_, file)| Arc::clone(file)).collect(),
            sizes,
        })
    }

    pub(super) fn size(&self) -> u64 {
        self.access.size()
    }

    /// Returns the run at `disk`, at most `len` bytes.
    pub(super) fn run(&self, disk: u64, len: u64) -> io::Result<Run> {
        let (mapping, found) = guarded(|| self.access.get_mapping(disk, len))?;
        let len = found.min(len);
        if len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the disk is shorter than it was",
            ));
        }
        match mapping {
            Mapping::Raw {
                storage, offset, ..
            } => self.within_file(storage.number, offset, len),
            Mapping::Zero { .. } => Ok(Run::Zero { len }),
            Mapping::Special { .. } => Ok(Run::Encoded { disk, len }),
            other => Err(io::Error::other(format!(
                "the image's tables contain an unsupported mapping: {other:?}"
            ))),
        }
    }

    /// A VMM need not write a cluster to its end: bytes beyond the end of the file read as zeros.
    fn within_file(&self, file: usize, offset: u64, len: u64) -> io::Result<Run> {
        let mut end = self.sizes[file];
        if offset.checked_add(len).is_none_or(|wanted| wanted > end) {
            end = self.files[file].size()?;
        }
        Ok(match end.saturating_sub(offset) {
            0 => Run::Zero { len },
            left => Run::File {
                file,
                offset,
                len: len.min(left),
            },
        })
    }

    /// Reads compressed bytes through imago.
    pub(super) fn decode(
        &self,
        mut disk: u64,
        mut len: u64,
        buffers: &mut Buffers<'_, '_>,
    ) -> io::Result<()> {
        while len > 0 {
            let slices = buffers.next(len);
            let mut n = 0;
            let mut vector = IoVectorMut::with_capacity(slices.len());
            for slice in slices {
                n += slice.len();
                vector.push_ioslice(slice);
            }
            guarded(|| self.access.readv(vector, disk))?;
            buffers.advance(n);
            disk += n as u64;
            len -= n as u64;
        }
        Ok(())
    }
}

/// Calls imago, which may panic at metadata that no program writes: an error of this image then, and no end of a worker
/// that reads other images too.
fn guarded<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let done = catch_unwind(AssertUnwindSafe(call));
    done.unwrap_or_else(|_| {
        let what = "the image's metadata makes no sense to the library that reads it";
        Err(io::Error::new(io::ErrorKind::InvalidData, what))
    })
}

fn open_one(
    store: Store,
    layer: usize,
    backing: Option<FormatAccess<Store>>,
) -> Result<FormatAccess<Store>, ImageError> {
    let at = |source| ImageError::Io { layer, source };
    let mut crypt = [0; 4];
    store
        .file
        .read(
            CRYPT_METHOD_OFFSET,
            4,
            &mut Buffers::new(&mut [io::IoSliceMut::new(&mut crypt)]),
        )
        .map_err(at)?;

    let backed = backing.is_some();
    let image = Qcow2::<Store>::builder(store)
        .backing(backing)
        .data_file(None);
    let image = guarded(|| image.open(DenyImplicitOpenGate::default())).map_err(at)?;
    if crypt != [0; 4] {
        return Err(ImageError::Encrypted(layer));
    }
    if image.requires_external_data_file() {
        return Err(ImageError::DataFile(layer));
    }
    if image.implicit_backing_file().is_some() != backed {
        return Err(ImageError::BackingMismatch { layer });
    }
    Ok(FormatAccess::new(image))
}

/// A file of the image for imago, read-only.
#[derive(Debug)]
struct Store {
    number: usize,
    file: Arc<ImageFile>,
    helper: CommonStorageHelper,
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.number)
    }
}

impl Storage for Store {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    unsafe fn pure_readv(&self, vector: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        let len = vector.len();
        let mut slices = vector.into_inner();
        let mut buffers = Buffers::new(&mut slices);
        let there = len.min(self.file.size()?.saturating_sub(offset));
        self.file.read(offset, there, &mut buffers)?;
        buffers.zero(len - there);
        Ok(())
    }

    unsafe fn pure_writev(&self, _: IoVector<'_>, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}
