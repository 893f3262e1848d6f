// SPDX-License-Identifier: Apache-2.0
//! Opens disk images by the daemon's description, and converts maps from and to the protocol's type.

use std::os::fd::OwnedFd;

use viola_extents::host::{self, Image, Layer};
use viola_extents::{CheckedMap, Extent};
use viola_proto::agent::{self, FileMap};

use crate::control::{Format, ImageSpec};

/// Opens an image with the next descriptors, one for each layer. An error names the image's path.
pub(crate) fn open(
    spec: &ImageSpec,
    fds: &mut impl Iterator<Item = OwnedFd>,
) -> Result<Image, String> {
    let mut layers = Vec::with_capacity(spec.layers.len());
    for format in &spec.layers {
        let file = fds.next().ok_or("the order lacks descriptors")?;
        let format = match format {
            Format::Raw => host::Format::Raw,
            Format::Qcow2 => host::Format::Qcow2,
        };
        layers.push(Layer { format, file });
    }
    Image::open(layers).map_err(|e| format!("{}: {e}", spec.path))
}

/// Converts an agent's extents to the type that checks them.
pub(crate) fn extents(map: &FileMap) -> Vec<Extent> {
    let convert = |e: &agent::Extent| Extent {
        logical: e.logical,
        physical: e.physical,
        length: e.length,
        zero: e.zero,
    };
    map.extents.iter().map(convert).collect()
}

/// Converts a checked map to the type for look-ups.
pub(crate) fn file_map(map: &CheckedMap) -> FileMap {
    let convert = |e: &Extent| agent::Extent {
        logical: e.logical,
        physical: e.physical,
        length: e.length,
        zero: e.zero,
    };
    FileMap {
        size: map.len(),
        extents: map.extents().iter().map(convert).collect(),
    }
}
