// SPDX-License-Identifier: Apache-2.0
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use proptest::prelude::*;

use super::*;

/// A file of `len` bytes, each of which depends on its place.
fn image(len: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let bytes: Vec<u8> = (0..len as u64)
        .map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1)
        .collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    (file, bytes)
}

fn raw(file: &tempfile::NamedTempFile) -> Image {
    Image::open(vec![Layer::raw(File::open(file.path()).unwrap())]).unwrap()
}

/// Opened with `O_DIRECT`, which the folder of temporary files has to know.
fn direct(file: &tempfile::NamedTempFile) -> Image {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(file.path())
        .unwrap();
    Image::open(vec![Layer::raw(file)]).unwrap()
}

fn extent(logical: u64, physical: u64, length: u64, zero: bool) -> Extent {
    Extent {
        logical,
        physical,
        length,
        zero,
    }
}

/// The bytes of a file of `len` bytes, as the extents describe it.
fn model(disk: &[u8], extents: &[Extent], len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    for e in extents.iter().filter(|e| !e.zero) {
        for i in 0..e.length as usize {
            out[e.logical as usize + i] = disk[e.physical as usize + i];
        }
    }
    out
}

#[test]
fn bytes_holes_and_zeros_go_into_scattered_buffers() {
    let (file, disk) = image(64 << 10);
    let extents = [
        extent(0, 40_000, 10_000, false),
        extent(10_000, 0, 5_000, true),
        extent(20_000, 3, 7_000, false),
    ];
    for image in [raw(&file), direct(&file)] {
        let map = image.check(&extents, 30_000).unwrap();
        let (mut a, mut b, mut c) = (vec![7; 9_999], vec![7; 1], vec![7; 40_000]);
        let n = image
            .read(
                &map,
                5,
                &mut [&mut a[..], &mut b[..], &mut c[..]].map(IoSliceMut::new),
            )
            .unwrap();
        let all = [a, b, c].concat();
        assert_eq!(n, 29_995);
        assert!(all[..n] == model(&disk, &extents, 30_000)[5..]);
        assert!(all[n..].iter().all(|b| *b == 7), "behind the file's end");
        assert_eq!(image.read_at(&map, 30_000, &mut [0; 8]).unwrap(), 0);
        assert_eq!(image.read_at(&map, u64::MAX, &mut [0; 8]).unwrap(), 0);
    }
}

#[test]
fn direct_reads_of_aligned_buffers_give_the_same_bytes() {
    const LEN: usize = 64 << 10;
    #[repr(align(4096))]
    struct Aligned([u8; LEN]);
    let (file, disk) = image(LEN + 512);
    let image = direct(&file);
    let len = LEN as u64 + 512;
    let map = image.check(&[extent(0, 0, len, false)], len).unwrap();
    let mut memory = Box::new(Aligned([0; LEN]));
    assert_eq!(image.read_at(&map, 0, &mut memory.0).unwrap(), LEN);
    assert!(memory.0 == disk[..LEN]);
    // the last bytes of an image whose size is no multiple of a page
    let (from, rest) = (LEN / 2, LEN / 2 + 512);
    assert_eq!(
        image.read_at(&map, from as u64, &mut memory.0).unwrap(),
        rest
    );
    assert!(memory.0[..rest] == disk[from..]);
}

#[test]
fn sources_give_the_bytes_that_a_read_gives() {
    let (file, disk) = image(8192);
    let image = raw(&file);
    let extents = [
        extent(0, 100, 50, false),
        extent(50, 0, 10, true),
        extent(70, 150, 10, false),
    ];
    let map = image.check(&extents, 100).unwrap();
    let mut out = Vec::new();
    for source in image.sources(&map, 0, 1000).unwrap() {
        match source {
            Source::Zero { len } => out.resize(out.len() + len as usize, 0),
            Source::File { fd, offset, len } => {
                let mut bytes = vec![0; len as usize];
                let owned = File::from(fd.try_clone_to_owned().unwrap());
                owned.read_exact_at(&mut bytes, offset).unwrap();
                out.extend(bytes);
            }
            Source::Encoded { .. } => panic!("a raw image has nothing encoded"),
        }
    }
    assert_eq!(out, model(&disk, &extents, 100));
    // unwritten bytes and the hole behind them are one run
    assert_eq!(image.sources(&map, 0, 1000).unwrap().len(), 4);
}

#[test]
fn an_image_that_became_shorter_is_an_error_and_not_zeros() {
    let (file, _) = image(16384);
    for image in [raw(&file), direct(&file)] {
        file.as_file().set_len(16384).unwrap();
        let map = image.check(&[extent(0, 0, 16384, false)], 16384).unwrap();
        file.as_file().set_len(8192).unwrap();
        let error = image.read_at(&map, 0, &mut [0; 16384]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(image.read_at(&map, 0, &mut [0; 8192]).unwrap(), 8192);
        image.refresh().unwrap();
        assert_eq!(image.size(), 8192);
        let error = image.read_at(&map, 0, &mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}

#[test]
fn a_map_of_another_larger_disk_is_refused() {
    let (small, _) = image(4096);
    let (large, _) = image(8192);
    let map = raw(&large)
        .check(&[extent(0, 4096, 4096, false)], 4096)
        .unwrap();
    let error = raw(&small).read_at(&map, 0, &mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    assert!(raw(&small).sources(&map, 0, 1).is_err());
    raw(&small).prefetch(&map, 0..4096);
}

#[test]
fn what_is_no_image_is_refused() {
    let open = |layers| Image::open(layers).unwrap_err();
    let null = || File::open("/dev/null").unwrap();
    assert!(matches!(open(vec![]), ImageError::Empty));
    assert!(matches!(
        open(vec![Layer::raw(null())]),
        ImageError::NotAFile(0)
    ));
    let (file, _) = image(8192);
    let file = || File::open(file.path()).unwrap();
    assert!(matches!(
        open(vec![Layer::raw(file()), Layer::raw(file())]),
        ImageError::RawNotLast(0)
    ));
    assert!(matches!(
        open(vec![Layer::qcow2(file())]),
        ImageError::Io { layer: 0, .. }
    ));
    let folder = File::open(std::env::temp_dir()).unwrap();
    assert!(matches!(
        open(vec![Layer::raw(folder)]),
        ImageError::NotAFile(0)
    ));
}

#[test]
fn prefetch_brings_the_files_bytes_into_the_page_cache() {
    let mib = 1 << 20;
    let (file, disk) = image(4 * mib);
    file.as_file().sync_all().unwrap();
    rustix::fs::fadvise(file.as_file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let image = raw(&file);
    let extents = [
        extent(0, 3 * mib as u64, mib as u64, false),
        extent(mib as u64, mib as u64, mib as u64, false),
    ];
    let map = image.check(&extents, 2 * mib as u64).unwrap();
    image.prefetch(&map, 0..2 * mib as u64);
    let mut bytes = vec![0; 2 * mib];
    // RWF_NOWAIT reads only what is in memory; the disk may take its time.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    for place in [3 * mib as u64, mib as u64] {
        let mut done = 0;
        while done < mib {
            let mut rest = vec![0; mib - done];
            let slice = &mut [IoSliceMut::new(&mut rest)];
            let flags = rustix::io::ReadWriteFlags::NOWAIT;
            match rustix::io::preadv2(file.as_file(), slice, place + done as u64, flags) {
                Ok(n) => done += n,
                Err(rustix::io::Errno::AGAIN) => {
                    assert!(
                        std::time::Instant::now() < end,
                        "{place} was not brought in"
                    );
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    assert_eq!(image.read_at(&map, 0, &mut bytes).unwrap(), 2 * mib);
    assert!(bytes == model(&disk, &extents, 2 * mib));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_read_of_any_map_equals_the_model(
        list in prop::collection::vec((0u64..5000, 1u64..9000, 0u64..20_000, any::<bool>()), 0..8),
        tail in 0u64..5000, offset in 0u64..60_000,
        sizes in prop::collection::vec(0usize..20_000, 0..5),
    ) {
        let (file, disk) = image(29_184);
        let (mut at, mut extents) = (0, Vec::new());
        for (gap, length, physical, zero) in list {
            extents.push(extent(at + gap, physical, length, zero));
            at += gap + length;
        }
        let expected = model(&disk, &extents, (at + tail) as usize);
        for image in [raw(&file), direct(&file)] {
            let map = image.check(&extents, at + tail).unwrap();
            let mut buffers: Vec<Vec<u8>> = sizes.iter().map(|n| vec![0xAA; *n]).collect();
            let mut slices: Vec<_> = buffers.iter_mut().map(|b| IoSliceMut::new(b)).collect();
            let n = image.read(&map, offset, &mut slices).unwrap();
            let all = buffers.concat();
            let from = expected.len().min(offset as usize);
            prop_assert_eq!(n, all.len().min(expected.len() - from));
            prop_assert!(all[..n] == expected[from..from + n]);
            prop_assert!(all[n..].iter().all(|b| *b == 0xAA));
        }
    }
}
