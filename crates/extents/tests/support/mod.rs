// SPDX-License-Identifier: Apache-2.0
//! A lab guest with disks whose file systems were made on the host. Needs root, the lab's image, e2fsprogs,
//! xfsprogs, btrfs-progs and dmsetup.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use viola_extents::FileMap;
use viola_extents::host::{Image, Layer};
pub use viola_lab::testing::host;
use viola_lab::testing::{GuestPermit, core, guest_permit, host_program, paths, up};
use viola_lab::{Lab, Paths};

/// A guest; `/h` in it is the host's root, its disks are `/dev/ubda` and so on.
pub struct TestBed {
    lab: Option<Lab>,
    paths: Paths,
    folder: tempfile::TempDir,
    _turn: GuestPermit,
}

/// Writes a partition table (MBR) with two partitions: one MiB at 1 MiB, and the rest from [`SECOND_PARTITION`].
fn partition(image: &Path, size: u64) {
    let mut sector = [0; 512];
    for (entry, start, end) in [(0, 1 << 20, 2 << 20), (1, SECOND_PARTITION, size)] {
        let at = 446 + entry * 16;
        sector[at + 4] = 0x83;
        sector[at + 8..at + 12].copy_from_slice(&((start / 512) as u32).to_le_bytes());
        sector[at + 12..at + 16].copy_from_slice(&(((end - start) / 512) as u32).to_le_bytes());
    }
    sector[510..].copy_from_slice(&[0x55, 0xAA]);
    let file = File::options().write(true).open(image).unwrap();
    file.write_all_at(&sector, 0).unwrap();
}

/// Where the second partition begins, in bytes.
pub const SECOND_PARTITION: u64 = 3 << 20;

impl TestBed {
    /// Boots a guest with disks of these sizes in MiB, made by commands in which `IMG` is the image; the
    /// command `partition` makes partitions.
    pub fn boot(name: &str, disks: &[(u64, &str)]) -> Self {
        let turn = guest_permit();
        let folder = tempfile::tempdir().unwrap();
        let mut list = Vec::new();
        for (number, (mib, make)) in disks.iter().enumerate() {
            let image = folder.path().join(format!("{number}.img"));
            File::create(&image).unwrap().set_len(mib << 20).unwrap();
            for command in make.split(';').map(str::trim).filter(|c| !c.is_empty()) {
                match command {
                    "partition" => partition(&image, mib << 20),
                    _ => host(&command.replace("IMG", image.to_str().unwrap())),
                }
            }
            list.push(format!("{{image='{number}.img'}}"));
        }
        let core = core();
        let text = format!(
            "[lab]\nname='{name}'\n[[guest]]\nname='a'\ncores=[{core}]\ndisks=[{}]\n",
            list.join(",")
        );
        let paths = paths(env!("CARGO_MANIFEST_DIR"), &folder.path().join("run"));
        let lab = up(&text, name, folder.path(), &paths);
        let bed = Self {
            lab: Some(lab),
            paths,
            folder,
            _turn: turn,
        };
        bed.sh("mkdir /tmp/h && mount -t hostfs none /tmp/h");
        bed
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a shell script in the guest and gives its output, whatever its status.
    pub fn try_sh(&self, script: &str) -> (i32, String) {
        let output = self
            .lab
            .as_ref()
            .unwrap()
            .guest("a")
            .unwrap()
            .exec_for(&["sh", "-ec", script], "", Duration::from_secs(120))
            .unwrap();
        assert!(!output.timed_out, "{script}");
        (output.status, output.stdout + &output.stderr)
    }

    /// Runs a shell script in the guest, which must succeed.
    pub fn sh(&self, script: &str) -> String {
        let (status, output) = self.try_sh(script);
        assert_eq!(status, 0, "{script}: {output}");
        output
    }

    /// The words that run a program of the host in the guest, with the host's own loader and libraries.
    pub fn program(&self, path: &str) -> String {
        host_program("/tmp/h", path)
    }

    /// Loads a module of the guest's kernel, which the lab's image leaves out, from its package.
    pub fn module(&self, path: &str) {
        let debs = self.paths.image.parent().unwrap().with_file_name("debs");
        let deb = fs::read_dir(&debs)
            .unwrap()
            .map(|e| e.unwrap().path())
            .find(|p| {
                p.file_name()
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .starts_with("user-mode-linux_")
            })
            .unwrap();
        let out = self.folder().join("modules");
        if !out.exists() {
            host(&format!("dpkg-deb -x {} {}", deb.display(), out.display()));
        }
        let modules = out.join("usr/lib/uml/modules");
        let version = fs::read_dir(modules)
            .unwrap()
            .next()
            .unwrap()
            .unwrap()
            .path();
        let file = version.join("kernel").join(path);
        self.sh(&format!("insmod /tmp/h{}", file.display()));
    }

    /// What the guest says about a file; see the program for the options.
    pub fn ask(&self, options: &str, file: &str) -> Result<FileMap, String> {
        let program = self.program(env!("CARGO_BIN_EXE_viola-extents"));
        let (_, line) = self.try_sh(&format!("{program} {options} {file}"));
        serde_json::from_str(&line).map_err(|_| {
            let refusal: serde_json::Value =
                serde_json::from_str(&line).unwrap_or_else(|_| panic!("{file}: {line}"));
            refusal["refused"].as_str().unwrap().to_owned()
        })
    }

    pub fn map(&self, file: &str) -> FileMap {
        self.ask("", file)
            .unwrap_or_else(|why| panic!("{file}: {why}"))
    }

    /// Why the guest does not name a file.
    pub fn refusal(&self, file: &str) -> String {
        self.ask("", file)
            .expect_err(&format!("{file} must not be named"))
    }

    pub fn image(&self, disk: usize) -> Image {
        let path = self.folder().join(format!("{disk}.img"));
        Image::open(vec![Layer::raw(File::open(path).unwrap())]).unwrap()
    }

    /// The bytes of a mapped file, read from the image of a disk.
    pub fn bytes(&self, disk: usize, map: &FileMap) -> Vec<u8> {
        let image = self.image(disk);
        assert_eq!(map.disk.size, image.size());
        let checked = image.check(&map.extents, map.size).unwrap();
        let mut bytes = vec![0xEE; map.size as usize];
        assert_eq!(
            image.read_at(&checked, 0, &mut bytes).unwrap() as u64,
            map.size
        );
        bytes
    }
}

impl Drop for TestBed {
    fn drop(&mut self) {
        if let (Some(lab), false) = (self.lab.take(), std::thread::panicking()) {
            lab.down().unwrap();
        }
    }
}
