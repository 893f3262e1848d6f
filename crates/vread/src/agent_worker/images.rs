// SPDX-License-Identifier: Apache-2.0
//! The images of a VM's disks, and which of them holds a file system.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use viola_extents::Extent;
use viola_extents::host::{Format, Image, ImageError, Layer};
use viola_proto::agent::{DiskName, FileMap, PROOF_BYTES};

use crate::control::{self, ImageSpec};

/// An image that is open.
#[derive(Debug)]
pub struct Disk {
    /// What the daemon says about it.
    pub spec: ImageSpec,
    /// Its bytes.
    pub image: Arc<Image>,
}

/// Opens images by their descriptors, all layers of all of them in order.
///
/// # Errors
/// The path of the first that cannot be used, and why.
pub fn open(specs: Vec<ImageSpec>, fds: Vec<OwnedFd>) -> Result<Vec<Disk>, (String, ImageError)> {
    let mut fds = fds.into_iter();
    let mut disks = Vec::with_capacity(specs.len());
    for spec in specs {
        let layers: Vec<Layer> = spec
            .layers
            .iter()
            .zip(fds.by_ref())
            .map(|(format, file)| Layer {
                format: match format {
                    control::Format::Raw => Format::Raw,
                    control::Format::Qcow2 => Format::Qcow2,
                },
                file,
            })
            .collect();
        let image = Image::open(layers).map_err(|e| (spec.path.clone(), e))?;
        let image = Arc::new(image);
        disks.push(Disk { spec, image });
    }
    Ok(disks)
}

/// The agent's extents as this side checks them.
pub fn extents(map: &FileMap) -> Vec<Extent> {
    map.extents
        .iter()
        .map(|e| Extent {
            logical: e.logical,
            physical: e.physical,
            length: e.length,
            zero: e.zero,
        })
        .collect()
}

/// The disk on which a file with this content lies at these extents. One that is called as the guest calls it is
/// looked at first.
///
/// # Errors
/// Why it is none of them, in a sentence.
pub fn find_proved_disk<'a>(
    disks: &'a [Disk],
    name: &DiskName,
    content: &[u8],
    map: &FileMap,
) -> Result<&'a Disk, String> {
    if map.size != PROOF_BYTES as u64 || content.len() != PROOF_BYTES {
        return Err(format!(
            "the file for the proof has to have {PROOF_BYTES} bytes"
        ));
    }
    let extents = extents(map);
    if extents.iter().any(|e| e.zero) || extents.iter().map(|e| e.length).sum::<u64>() != map.size {
        return Err("the file for the proof has to be written, without holes".into());
    }
    let is_named = |disk: &Disk| {
        disk.spec.device == name.name
            || (disk.spec.serial.is_some() && disk.spec.serial == name.serial)
    };
    let (named, others): (Vec<&Disk>, Vec<&Disk>) = disks.iter().partition(|d| is_named(d));
    let mut why = "the VM has no disk that the host can read".to_owned();
    for disk in named.into_iter().chain(others) {
        match disk_holds(disk, content, &extents) {
            Ok(true) => return Ok(disk),
            Ok(false) => {
                // An error of another disk says more about what is wrong.
                if !why.starts_with('/') {
                    why =
                        "no disk of the VM has the bytes of the proof where they should be".into();
                }
            }
            Err(e) => why = format!("{}: {e}", disk.spec.path),
        }
    }
    Err(why)
}

fn disk_holds(disk: &Disk, content: &[u8], extents: &[Extent]) -> Result<bool, String> {
    // What the guest has just written may need tables that were not there when the image was opened.
    disk.image.refresh().map_err(|e| e.to_string())?;
    let Ok(map) = disk.image.check(extents, content.len() as u64) else {
        return Ok(false);
    };
    let mut bytes = vec![0; content.len()];
    let mut read = 0;
    while read < bytes.len() {
        match disk.image.read_at(&map, read as u64, &mut bytes[read..]) {
            Ok(0) => return Ok(false),
            Ok(n) => read += n,
            Err(e) => return Err(e.to_string()),
        }
    }
    Ok(bytes == content)
}
