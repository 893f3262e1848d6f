// SPDX-License-Identifier: Apache-2.0
//! Fuzz target: the tables of qcow2 images. Whoever can write an image, such as an emulator that a guest has taken over,
//! chooses them. `scripts/fuzz.sh` runs the target, and a test replays the corpus.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::extent::Extent;
use crate::host::{Image, Layer, Source};

/// Length of each part of the disk that is read, in bytes.
const PART_BYTES: u64 = 4096;

/// Runs one input; panics when a property does not hold.
///
/// Bits of the first byte: 1 a backing file, 2 a raw backing file, 4 the image is rewritten while it is open. The next two
/// bytes are the length of the backing file, little endian; then come the backing file and the image. A rewritten image
/// has the bytes of the input backwards behind its first half.
pub fn qcow2_images(input: &[u8]) {
    let [how, low, high, rest @ ..] = input else {
        return;
    };
    let length = usize::from(u16::from_le_bytes([*low, *high]));
    let (below, top) = match how & 1 {
        0 => (None, rest),
        _ => {
            let (below, top) = rest.split_at(rest.len().min(length));
            (Some(below), top)
        }
    };
    let is_raw = how & 2 != 0;
    let files: Vec<File> = [Some(top), below].into_iter().flatten().map(file).collect();
    let layers = files.iter().enumerate().map(|(layer, file)| {
        let file = file.try_clone().expect("a descriptor");
        match layer > 0 && is_raw {
            true => Layer::raw(file),
            false => Layer::qcow2(file),
        }
    });
    let Ok(image) = Image::open(layers.collect()) else {
        return;
    };
    read_parts(&image, &files);
    if how & 4 != 0 {
        let half = top.len() / 2;
        let other: Vec<u8> = top[half..].iter().rev().copied().collect();
        files[0].write_all_at(&other, half as u64).expect("bytes");
        read_parts(&image, &files);
        let _ = image.refresh();
        read_parts(&image, &files);
    }
}

/// A file in memory.
fn file(bytes: &[u8]) -> File {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create("fuzz", flags).expect("a file in memory"));
    file.write_all_at(bytes, 0).expect("bytes");
    file
}

/// Reads parts of the disk, and compares them with their sources.
fn read_parts(image: &Image, files: &[File]) {
    let size = image.size();
    for from in [0, size / 2, size.saturating_sub(PART_BYTES)] {
        let length = size.saturating_sub(from).min(PART_BYTES);
        let extent = Extent {
            logical: 0,
            physical: from,
            length,
            zero: false,
        };
        let Ok(map) = image.check(&[extent], length) else {
            assert!(length == 0 || length > i64::MAX as u64, "{extent:?}");
            continue;
        };
        let mut bytes = vec![0xA5; length as usize];
        let read = image.read_at(&map, 0, &mut bytes);
        let sources = image.sources(&map, 0, length);
        let (Ok(read), Ok(sources)) = (read, sources) else {
            continue;
        };
        assert_eq!(read as u64, length);
        assert!(sources.len() as u64 <= length);
        let mut at = 0;
        for source in sources {
            let part = |len: u64| &bytes[at..at + len as usize];
            at += match source {
                Source::Zero { len } => {
                    assert!(part(len).iter().all(|b| *b == 0), "zeros of {from}+{at}");
                    len
                }
                Source::File { fd, offset, len } => {
                    let whole = rustix::fs::fstat(fd).expect("a file").st_ino;
                    let file = files
                        .iter()
                        .find(|f| rustix::fs::fstat(f).expect("a file").st_ino == whole)
                        .unwrap_or_else(|| panic!("descriptor {} is no layer", fd.as_raw_fd()));
                    let mut same = vec![0; len as usize];
                    file.read_exact_at(&mut same, offset)
                        .expect("bytes of the layer");
                    assert!(part(len) == same, "bytes of {from}+{at}");
                    len
                }
                Source::Encoded { len } => len,
            } as usize;
        }
        assert_eq!(at as u64, length);
    }
}

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_breaks_no_property() {
        super::replay::replay("qcow2_images", super::qcow2_images);
    }
}
