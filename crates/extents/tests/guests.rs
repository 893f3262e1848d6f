// SPDX-License-Identifier: Apache-2.0
//! Real guests name files of real file systems; the host reads the same bytes from the disks' images.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;

use support::{SECOND_PARTITION, TestBed};
use viola_extents::FileMap;

/// Numbers that look random and are the same each time.
struct Rng(u64);

impl Rng {
    fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

const MAX_OFFSET: u64 = 600_000;

/// Changes a file in the guest (commands of xfs_io) and a model of it alike.
fn change(rng: &mut Rng, noise: &[u8], noise_path: &str, model: &mut Vec<u8>) -> String {
    let (offset, len) = (rng.below(MAX_OFFSET), 1 + rng.below(60_000));
    let (from, to) = (offset as usize, (offset + len) as usize);
    match rng.below(10) {
        0..=4 => {
            let skip = rng.below(noise.len() as u64 - len) as usize;
            model.resize(model.len().max(to), 0);
            model[from..to].copy_from_slice(&noise[skip..skip + len as usize]);
            format!("pwrite -q -i {noise_path} -s {skip} {offset} {len}")
        }
        5 => {
            model.resize(model.len().max(to), 0);
            format!("falloc {offset} {len}")
        }
        6 => {
            let end = model.len();
            model[from.min(end)..to.min(end)].fill(0);
            format!("fpunch {offset} {len}")
        }
        7 => {
            model.resize(model.len().max(to), 0);
            model[from..to].fill(0);
            format!("fzero {offset} {len}")
        }
        8 => {
            model.resize(from, 0);
            format!("truncate {offset}")
        }
        _ => "fsync".into(),
    }
}

/// Writes noise for the guest's files into the bed's folder; gives it and its path in the guest.
fn noise(bed: &TestBed) -> (Vec<u8>, String) {
    let mut rng = Rng(7);
    let noise: Vec<u8> = (0..1 << 20).map(|_| rng.below(255) as u8 + 1).collect();
    let path = bed.folder().join("noise");
    fs::write(&path, &noise).unwrap();
    (noise, format!("/tmp/h{}", path.display()))
}

fn has_holes(map: &FileMap) -> bool {
    map.extents.iter().map(|e| e.length).sum::<u64>() < map.size
}

fn files_read_the_same(kind: &str, mkfs: &str) {
    let bed = TestBed::boot(&format!("ext-{kind}"), &[(400, "partition")]);
    bed.sh(&format!(
        "{} /dev/ubda2; mkdir /tmp/d; mount -t {kind} /dev/ubda2 /tmp/d",
        bed.program(mkfs)
    ));
    let io = bed.program("/usr/sbin/xfs_io");
    let (noise, noise_path) = noise(&bed);
    let mut rng = Rng(42);
    let (mut holes, mut unwritten, mut pieces) = (0, 0, 0);
    for file in 0..6 {
        let name = format!("/tmp/d/f{file}");
        let mut model = Vec::new();
        for _round in 0..4 {
            let mut script = format!("{io} -f");
            for _ in 0..8 {
                let command = change(&mut rng, &noise, &noise_path, &mut model);
                script += &format!(" -c '{command}'");
            }
            bed.sh(&format!("{script} {name}"));
            let map = bed.map(&name);
            assert!((map.size, map.disk.name.as_str()) == (model.len() as u64, "ubda"));
            assert!(map.extents.iter().all(|e| e.physical >= SECOND_PARTITION));
            assert!(bed.bytes(0, &map) == model, "{name}: {map:?}");
            holes += usize::from(has_holes(&map));
            unwritten += usize::from(map.extents.iter().any(|e| e.zero));
            pieces = pieces.max(map.extents.len());
        }
        let again = bed.ask("--compare /dev/ubda", &name).unwrap();
        assert!(bed.bytes(0, &again) == model);
    }
    assert!(
        holes > 3 && unwritten > 3 && pieces > 4,
        "the files were too simple: {holes} {unwritten} {pieces}"
    );
    // nothing has been synced by anybody but the mapper; the last word of a file counts
    for word in ["first", "second"] {
        bed.sh(&format!("printf '%9000s' {word} > /tmp/d/word"));
        let bytes = bed.bytes(0, &bed.map("/tmp/d/word"));
        assert!(bytes.ends_with(word.as_bytes()) && bytes.len() == 9000);
    }
    bed.sh("touch /tmp/d/empty");
    assert_eq!(bed.map("/tmp/d/empty").extents, []);
    assert_eq!(bed.refusal("/tmp/d"), "it is not a regular file");
}

#[test]
fn files_of_ext4_read_the_same_from_the_image() {
    files_read_the_same("ext4", "/usr/sbin/mkfs.ext4 -q");
}

#[test]
fn files_of_xfs_read_the_same_from_the_image() {
    files_read_the_same("xfs", "/usr/sbin/mkfs.xfs -q");
}

#[test]
fn a_file_in_hundreds_of_pieces_is_read_from_all_of_them() {
    let bed = TestBed::boot("ext-frag", &[(64, "mkfs.ext4 -q -F IMG")]);
    bed.sh("mkdir /tmp/d; mount -t ext4 /dev/ubda /tmp/d");
    let (noise, noise_path) = noise(&bed);
    let io = bed.program("/usr/sbin/xfs_io");
    // fill the disk with small files, free every second one, write into what is left
    bed.sh(&format!(
        "cd /tmp/d; i=0; while dd if={noise_path} of=s$i bs=16k count=1 2>/dev/null; do i=$((i+1)); done; \
         rm -f s*1 s*3 s*5 s*7 s*9; sync; {io} -f -c 'pwrite -q -i {noise_path} 0 1M' \
         -c 'pwrite -q -i {noise_path} 1M 1M' -c 'pwrite -q -i {noise_path} 2M 1M' big"
    ));
    let map = bed.ask("--compare /dev/ubda", "/tmp/d/big").unwrap();
    assert!(map.extents.len() > 100, "{} pieces", map.extents.len());
    assert!(bed.bytes(0, &map) == noise.repeat(3));
}

#[test]
fn what_ext4_does_not_keep_in_place_is_refused() {
    let bed = TestBed::boot(
        "ext-journal",
        &[
            (64, "mkfs.ext4 -q -F IMG"),
            (64, "mkfs.ext4 -q -F IMG"),
            (64, "mkfs.ext4 -q -F IMG; tune2fs -o journal_data IMG"),
            (64, "mkfs.ext4 -q -F -I 256 -O inline_data IMG"),
        ],
    );
    bed.sh(
        "mkdir /tmp/a /tmp/b /tmp/c /tmp/d; mount -t ext4 /dev/ubda /tmp/a; \
         mount -t ext4 -o data=journal /dev/ubdb /tmp/b; mount -t ext4 /dev/ubdc /tmp/c; \
         mount -t ext4 /dev/ubdd /tmp/d; for d in a b c d; do echo short > /tmp/$d/f; done; \
         dd if=/dev/zero of=/tmp/d/long bs=1k count=9",
    );
    let journal =
        "its file system is mounted with data=journal, so its bytes may be in the journal only";
    assert_eq!(bed.refusal("/tmp/b/f"), journal);
    // the mode from the superblock, which the mount table does not show
    assert!(!bed.sh("grep ubdc /proc/mounts").contains("journal"));
    assert_eq!(bed.refusal("/tmp/c/f"), journal);

    assert_eq!(bed.map("/tmp/a/f").size, 6);
    bed.sh(&format!("{} +j /tmp/a/f", bed.program("/usr/bin/chattr")));
    assert!(bed.refusal("/tmp/a/f").contains("chattr +j"));
    bed.sh(&format!("{} -j /tmp/a/f", bed.program("/usr/bin/chattr")));
    assert_eq!(bed.bytes(0, &bed.map("/tmp/a/f")), b"short\n");

    assert!(bed.refusal("/tmp/d/f").contains("inline data"));
    assert_eq!(bed.map("/tmp/d/long").size, 9216);
}

#[test]
fn files_of_xfs_on_a_realtime_device_are_refused_and_clones_are_read() {
    let bed = TestBed::boot("ext-xfs", &[(320, "mkfs.xfs -q IMG"), (320, ""), (64, "")]);
    let mkfs = bed.program("/usr/sbin/mkfs.xfs");
    let io = bed.program("/usr/sbin/xfs_io");
    bed.sh(&format!(
        "{mkfs} -q -m reflink=0 -d rtinherit=1 -r rtdev=/dev/ubdc /dev/ubdb; mkdir /tmp/x /tmp/r; \
         mount -t xfs /dev/ubda /tmp/x; mount -t xfs -o rtdev=/dev/ubdc /dev/ubdb /tmp/r; \
         dd if=/dev/urandom of=/tmp/x/a bs=1k count=100; dd if=/tmp/x/a of=/tmp/r/a; \
         {io} -f -c 'reflink /tmp/x/a' /tmp/x/b"
    ));
    assert!(bed.refusal("/tmp/r/a").contains("realtime"));

    let (a, b) = (bed.map("/tmp/x/a"), bed.map("/tmp/x/b"));
    assert_eq!(a.extents, b.extents);
    assert!(bed.bytes(0, &a) == bed.bytes(0, &b));
    bed.ask("--compare /dev/ubda", "/tmp/x/b").unwrap();
    assert!(
        bed.ask("--writing", "/tmp/x/b")
            .unwrap_err()
            .contains("clone")
    );

    bed.sh(&format!(
        "{io} -f -c 'pwrite -q 0 64k' /tmp/x/full; {io} -f -c 'pwrite -q 0 4k' -c 'truncate 64k' /tmp/x/hole; \
         {io} -f -c 'falloc 0 64k' /tmp/x/unwritten"
    ));
    assert_eq!(
        bed.ask("--writing", "/tmp/x/full").unwrap(),
        bed.map("/tmp/x/full")
    );
    for file in ["hole", "unwritten"] {
        let why = bed.ask("--writing", &format!("/tmp/x/{file}")).unwrap_err();
        assert!(why.contains("not all of its bytes are written"), "{why}");
    }
}

#[test]
fn what_is_not_straight_on_a_disk_is_refused_by_its_name() {
    let bed = TestBed::boot(
        "ext-stack",
        &[
            (128, "mkfs.btrfs -q IMG"),
            (64, "mkfs.ext4 -q -F IMG"),
            (64, "mkfs.ext4 -q -F IMG"),
        ],
    );
    bed.module("drivers/block/loop.ko");
    bed.module("drivers/block/brd.ko");
    bed.module("drivers/md/dm-mod.ko");
    let dmsetup = bed.program("/usr/sbin/dmsetup");
    bed.sh(&format!(
        "mkdir /tmp/b /tmp/e /tmp/l /tmp/m /tmp/r; mount -t btrfs /dev/ubda /tmp/b; \
         mount -t ext4 /dev/ubdb /tmp/e; dd if=/dev/zero of=/tmp/e/disk bs=1M count=16; \
         losetup /dev/loop0 /tmp/e/disk; mke2fs /dev/loop0; mount -t ext4 /dev/loop0 /tmp/l; \
         mke2fs /dev/ram0; mount -t ext4 /dev/ram0 /tmp/r; \
         {dmsetup} create --noudevsync -u LVM-test lv --table '0 131072 linear /dev/ubdc 0'; \
         mount -t ext4 /dev/dm-0 /tmp/m; for d in b e l m r; do echo data > /tmp/$d/f; done; echo data > /tmp/f"
    ));
    for (file, why) in [
        ("b/f", "its file system is btrfs; only"),
        ("f", "its file system is tmpfs; only"),
        ("h/etc/passwd", "its file system is hostfs; only"),
        ("l/f", "its file system is on loop0, a loop device;"),
        (
            "m/f",
            "its file system is on dm-0, a device-mapper device (LVM);",
        ),
        ("r/f", "its file system is on ram0, which is not a disk of"),
    ] {
        let refusal = bed.refusal(&format!("/tmp/{file}"));
        assert!(refusal.starts_with(why), "{refusal}");
    }
    assert_eq!(bed.bytes(1, &bed.map("/tmp/e/f")), b"data\n");
}
