// SPDX-License-Identifier: Apache-2.0
//! Files that a host writes.
#![allow(dead_code)]

use std::fs::File;
use std::path::Path;

use rustix::fs::{IFlags, ioctl_getflags};

use super::Bed;

/// Bytes, none of them zero.
pub fn bytes(count: usize) -> Vec<u8> {
    (0..count)
        .map(|at| ((at as u32).wrapping_mul(2_654_435_761) >> 24) as u8 | 1)
        .collect()
}

pub fn new(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false);
    options.open(path).unwrap()
}

pub fn is_fixed(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    ioctl_getflags(&file).unwrap().contains(IFlags::IMMUTABLE)
}

/// Whether no note is left.
pub fn is_clean(bed: &Bed) -> bool {
    match std::fs::read_dir(bed.path("srv/.viola/uploads")) {
        Ok(mut notes) => notes.next().is_none(),
        Err(_) => true,
    }
}
