// SPDX-License-Identifier: Apache-2.0
//! Opens the images of a VM's disks and finds the one that holds a file system.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use viola_extents::Extent;
use viola_extents::host::Image;
use viola_proto::agent::{DiskName, FileMap};

use crate::control::ImageSpec;
use crate::images;

/// An open disk image.
#[derive(Debug)]
pub struct Disk {
    /// The daemon's description of the image.
    pub spec: ImageSpec,
    /// The open image.
    pub image: Arc<Image>,
}

/// Opens images from descriptors, which come in the order of all layers of all images.
///
/// # Errors
/// The path of the first image that cannot be opened, and the reason.
pub fn open(specs: Vec<ImageSpec>, fds: Vec<OwnedFd>) -> Result<Vec<Disk>, String> {
    let mut fds = fds.into_iter();
    let open = |spec: ImageSpec| {
        let image = Arc::new(images::open(&spec, &mut fds)?);
        Ok(Disk { spec, image })
    };
    specs.into_iter().map(open).collect()
}

/// Finds the disk on which a file with this content has these extents. The search begins with the
/// disk that has the name or serial number that the guest reported.
///
/// # Errors
/// The reason why no disk matches, as a sentence.
pub fn find_proved_disk<'a>(
    disks: &'a [Disk],
    name: &DiskName,
    content: &[u8],
    map: &FileMap,
) -> Result<&'a Disk, String> {
    if map.size != content.len() as u64 {
        return Err(format!("the proof file must have {} bytes", content.len()));
    }
    let extents = images::extents(map);
    if extents.iter().any(|e| e.zero) || extents.iter().map(|e| e.length).sum::<u64>() != map.size {
        return Err("the proof file must be written completely, without holes".into());
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
                // An I/O error is the more useful reason.
                if !why.starts_with('/') {
                    why = "no disk of the VM has this session's proof at the extents of the file"
                        .into();
                }
            }
            Err(e) => why = format!("{}: {e}", disk.spec.path),
        }
    }
    Err(why)
}

fn disk_holds(disk: &Disk, content: &[u8], extents: &[Extent]) -> Result<bool, String> {
    // The guest has just written the file, so its extents may be in tables that are newer than the open ones.
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
