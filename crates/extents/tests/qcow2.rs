// SPDX-License-Identifier: Apache-2.0
//! qcow2 images made by QEMU's own tools (qemu-utils): what they hold, and which are refused.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use viola_extents::Extent;
use viola_extents::host::{Image, ImageError, Layer, Source};

const MIB: u64 = 1 << 20;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str) -> File {
        File::open(self.path(name)).unwrap()
    }

    /// Runs a tool in the folder.
    fn run(&self, tool: &str, args: &[&str]) {
        let output = self.tool(tool, args);
        assert!(
            output.status.success(),
            "{tool} {args:?}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }

    fn tool(&self, tool: &str, args: &[&str]) -> std::process::Output {
        Command::new(tool)
            .args(args)
            .current_dir(self.0.path())
            .output()
            .unwrap_or_else(|error| panic!("{tool} (package qemu-utils): {error}"))
    }

    fn img(&self, args: &str) {
        self.run("qemu-img", &args.split(' ').collect::<Vec<_>>());
    }

    /// Commands of qemu-io on an image.
    fn io(&self, image: &str, commands: &[&str]) {
        let mut args = vec!["-f", "qcow2"];
        for command in commands {
            args.extend(["-c", command]);
        }
        args.push(image);
        self.run("qemu-io", &args);
    }

    /// What the disk of an image holds, by QEMU.
    fn raw(&self, image: &str) -> Vec<u8> {
        self.img(&format!("convert -O raw {image} raw.out"));
        std::fs::read(self.path("raw.out")).unwrap()
    }
}

/// The whole disk as one file.
fn whole(image: &Image) -> viola_extents::CheckedMap {
    let extent = Extent {
        logical: 0,
        physical: 0,
        length: image.size(),
        zero: false,
    };
    image.check(&[extent], image.size()).unwrap()
}

fn read_all(image: &Image) -> Vec<u8> {
    let map = whole(image);
    let mut bytes = vec![0xEE; map.len() as usize + 1];
    let n = image.read_at(&map, 0, &mut bytes).unwrap();
    assert_eq!(n as u64, map.len());
    bytes.truncate(n);
    bytes
}

/// The bytes by what [`Image::sources`] says, and how many of them are compressed.
fn by_sources(image: &Image) -> (Vec<u8>, u64) {
    let map = whole(image);
    let (mut out, mut encoded) = (Vec::new(), 0);
    for source in image.sources(&map, 0, u64::MAX).unwrap() {
        match source {
            Source::Zero { len } => out.resize(out.len() + len as usize, 0),
            Source::File { fd, offset, len } => {
                let mut bytes = vec![0; len as usize];
                File::from(fd.try_clone_to_owned().unwrap())
                    .read_exact_at(&mut bytes, offset)
                    .unwrap();
                out.extend(bytes);
            }
            Source::Encoded { len } => {
                let mut bytes = vec![0; len as usize];
                image.read_at(&map, out.len() as u64, &mut bytes).unwrap();
                out.extend(bytes);
                encoded += len;
            }
        }
    }
    (out, encoded)
}

/// A base (raw) and two layers on it with data, zeros, compressed and free clusters; the top one larger.
fn chain(folder: &Folder) -> Vec<Layer> {
    let base: Vec<u8> = (0..3 * MIB + 512).map(|i| (i / 512) as u8 | 1).collect();
    std::fs::write(folder.path("base.raw"), base).unwrap();
    folder.img("create -q -f qcow2 -b base.raw -F raw mid.qcow2 4M");
    folder.io(
        "mid.qcow2",
        &[
            "write -P 0x11 100k 300k",
            "write -z 1M 64k",
            "write -P 0x12 -c 2M 64k",
        ],
    );
    folder.img("create -q -f qcow2 -o cluster_size=4k -b mid.qcow2 -F qcow2 top.qcow2 6M");
    folder.io(
        "top.qcow2",
        &[
            "write -P 0x21 200k 10k",
            "write -z 3M 8k",
            "write -P 0x22 5M 3k",
            "write -P 0x23 -c 4M 4k",
        ],
    );
    vec![
        Layer::qcow2(folder.file("top.qcow2")),
        Layer::qcow2(folder.file("mid.qcow2")),
        Layer::raw(folder.file("base.raw")),
    ]
}

#[test]
fn a_backing_chain_reads_as_qemu_reads_it() {
    let folder = Folder::new();
    let image = Image::open(chain(&folder)).unwrap();
    assert_eq!(image.size(), 6 * MIB);
    let expected = folder.raw("top.qcow2");
    assert!(read_all(&image) == expected);
    let (bytes, encoded) = by_sources(&image);
    assert!(bytes == expected);
    assert_eq!(encoded, (64 << 10) + 4096);
    image.prefetch(&whole(&image), 0..u64::MAX);
}

#[test]
fn any_part_of_a_chain_reads_as_qemu_reads_it() {
    let folder = Folder::new();
    let image = Image::open(chain(&folder)).unwrap();
    let expected = folder.raw("top.qcow2");
    let map = whole(&image);
    proptest!(ProptestConfig::with_cases(300), |(offset in 0..7 * MIB, len in 0usize..300_000)| {
        let mut bytes = vec![0xEE; len];
        let n = image.read_at(&map, offset, &mut bytes).unwrap();
        let from = expected.len().min(offset as usize);
        let to = expected.len().min(from + len);
        prop_assert!(bytes[..n] == expected[from..to]);
    });
}

#[test]
fn images_with_other_options_read_as_qemu_reads_them() {
    for options in [
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=2M",
        "preallocation=metadata",
        "preallocation=falloc",
        "refcount_bits=1",
    ] {
        let folder = Folder::new();
        folder.img(&format!("create -q -f qcow2 -o {options} a.qcow2 9M"));
        folder.io("a.qcow2", &["write -P 7 700k 1500k", "write -P 8 8191k 1"]);
        let image = Image::open(vec![Layer::qcow2(folder.file("a.qcow2"))]).unwrap();
        assert!(read_all(&image) == folder.raw("a.qcow2"), "{options}");
    }
}

#[test]
fn what_a_vmm_writes_later_is_there_after_a_refresh() {
    let folder = Folder::new();
    folder.img("create -q -f qcow2 live.qcow2 8M");
    folder.io("live.qcow2", &["write -P 1 0 64k"]);
    let image = Image::open(vec![Layer::qcow2(folder.file("live.qcow2"))]).unwrap();
    assert_eq!(read_all(&image)[0], 1);
    folder.io("live.qcow2", &["write -P 2 1M 64k", "write -P 3 0 4k"]);
    // an allocated cluster is rewritten in its place, a new one is not known yet
    let stale = read_all(&image);
    assert_eq!((stale[0], stale[MIB as usize]), (3, 0));
    image.refresh().unwrap();
    let fresh = read_all(&image);
    assert_eq!((fresh[0], fresh[MIB as usize]), (3, 2));
    folder.img("resize -q live.qcow2 16M");
    image.refresh().unwrap();
    assert_eq!(image.size(), 16 * MIB);
}

#[test]
fn an_image_whose_tables_become_bad_goes_on_with_the_old_ones() {
    let folder = Folder::new();
    folder.img("create -q -f qcow2 a.qcow2 1M");
    folder.io("a.qcow2", &["write -P 5 0 1M"]);
    let image = Image::open(vec![Layer::qcow2(folder.file("a.qcow2"))]).unwrap();
    assert_eq!(read_all(&image)[9], 5);
    let file = File::options()
        .write(true)
        .open(folder.path("a.qcow2"))
        .unwrap();
    file.write_all_at(b"bad!", 0).unwrap();
    assert!(matches!(
        image.refresh(),
        Err(ImageError::Io { layer: 0, .. })
    ));
    assert_eq!(read_all(&image)[9], 5);
}

#[test]
fn a_raw_image_is_raw_even_if_a_guest_wrote_a_qcow2_header_into_it() {
    let folder = Folder::new();
    std::fs::write(folder.path("secret"), [0x5E; 65536]).unwrap();
    folder.img("create -q -f qcow2 -b secret -F raw trap.img 64M");
    let image = Image::open(vec![Layer::raw(folder.file("trap.img"))]).unwrap();
    assert!(read_all(&image) == std::fs::read(folder.path("trap.img")).unwrap());
}

#[test]
fn no_file_is_opened_that_was_not_given() {
    let folder = Folder::new();
    std::fs::write(folder.path("secret"), [0x5E; 65536]).unwrap();
    folder.img("create -q -f qcow2 -b secret -F raw top.qcow2 1M");
    let open = |layers| Image::open(layers).unwrap_err();
    let error = open(vec![Layer::qcow2(folder.file("top.qcow2"))]);
    assert!(
        matches!(error, ImageError::BackingMismatch { layer: 0 }),
        "{error}"
    );
    folder.img("create -q -f qcow2 alone.qcow2 1M");
    let error = open(vec![
        Layer::qcow2(folder.file("alone.qcow2")),
        Layer::raw(folder.file("secret")),
    ]);
    assert!(
        matches!(error, ImageError::BackingMismatch { layer: 0 }),
        "{error}"
    );
    folder.img("create -q -f qcow2 -o data_file=data.raw,data_file_raw=on ext.qcow2 1M");
    let error = open(vec![Layer::qcow2(folder.file("ext.qcow2"))]);
    assert!(matches!(error, ImageError::DataFile(0)), "{error}");
}

#[test]
fn images_that_cannot_be_read_rightly_are_refused() {
    let folder = Folder::new();
    let open = |name: &str| {
        let layers = vec![Layer::qcow2(folder.file(name))];
        Image::open(layers).unwrap_err().to_string()
    };
    // the header's encryption method: LUKS (qemu-img needs a good clock to make one)
    folder.img("create -q -f qcow2 luks.qcow2 1M");
    let file = File::options()
        .write(true)
        .open(folder.path("luks.qcow2"))
        .unwrap();
    file.write_all_at(&2u32.to_be_bytes(), 32).unwrap();
    assert_eq!(
        open("luks.qcow2"),
        "layer 0 is encrypted, which is not supported"
    );

    // a table of feature names that ends within an entry, at which imago panics
    folder.img("create -q -f qcow2 names.qcow2 1M");
    let file = File::options()
        .read(true)
        .write(true)
        .open(folder.path("names.qcow2"))
        .unwrap();
    let number = |at: u64| {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, at).unwrap();
        u32::from_be_bytes(bytes)
    };
    let extension = u64::from(number(100));
    assert_eq!(number(extension), 0x6803_f857, "no feature names");
    file.write_all_at(&1u32.to_be_bytes(), extension + 4)
        .unwrap();
    assert!(open("names.qcow2").contains("makes no sense"));

    // in use by a VMM that postpones its reference counts
    folder.img("create -q -f qcow2 -o lazy_refcounts=on lazy.qcow2 1M");
    let crashed = folder.tool(
        "qemu-io",
        &[
            "-f",
            "qcow2",
            "-c",
            "write 0 64k",
            "-c",
            "abort",
            "lazy.qcow2",
        ],
    );
    assert!(!crashed.status.success());
    assert!(
        open("lazy.qcow2").contains("dirty"),
        "{}",
        open("lazy.qcow2")
    );

    folder.img("create -q -f qcow2 -o extended_l2=on sub.qcow2 1M");
    assert!(
        open("sub.qcow2").contains("incompatible"),
        "{}",
        open("sub.qcow2")
    );

    std::fs::write(folder.path("short"), b"QFI\xfb").unwrap();
    assert!(open("short").starts_with("layer 0"));
}

#[test]
fn an_image_is_read_by_descriptors_alone() {
    let folder = Folder::new();
    let layers = chain(&folder);
    let expected = folder.raw("top.qcow2");
    for name in ["top.qcow2", "mid.qcow2", "base.raw"] {
        std::fs::remove_file(folder.path(name)).unwrap();
    }
    assert!(!Path::new(&folder.path("base.raw")).exists());
    let image = Image::open(layers).unwrap();
    image.refresh().unwrap();
    assert!(read_all(&image) == expected);
}
