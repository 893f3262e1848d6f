// SPDX-License-Identifier: Apache-2.0
//! Finds the disk below a device number through sysfs.

use std::fs;
use std::path::{Path, PathBuf};

use super::refusal::Refusal;
use crate::extent::DiskName;

/// The unit of sizes in sysfs, independent of the disk's block size.
const SECTOR_BYTES: u64 = 512;

/// Maximum length of a serial number that the guest reports to the host.
const MAX_SERIAL_BYTES: usize = 64;

/// A file system's place on its disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Partition {
    pub(super) start: u64,
    pub(super) size: u64,
}

/// A block device with a file system, and the disk that it is or belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    /// Kernel name of the device itself (`vda1`).
    pub(super) name: String,
    pub(super) partition: Partition,
    pub(super) disk: DiskName,
}

/// Returns the device with this number if it is a disk or a partition of one.
pub(super) fn device(sys: &Path, major: u32, minor: u32) -> Result<Device, Refusal> {
    if major == 0 {
        return Err(Refusal::NoDevice);
    }
    let link = sys.join(format!("dev/block/{major}:{minor}"));
    let folder = link
        .canonicalize()
        .map_err(|_| Refusal::Sysfs { path: link })?;
    let is_partition = folder.join("partition").exists();
    let top = match folder.parent() {
        Some(parent) if is_partition => parent,
        _ => &folder,
    };
    refuse_virtual(top)?;

    let disk_size = bytes(&top.join("size"))?;
    let partition = match is_partition {
        true => Partition {
            start: bytes(&folder.join("start"))?,
            size: bytes(&folder.join("size"))?,
        },
        false => Partition {
            start: 0,
            size: disk_size,
        },
    };
    if partition
        .start
        .checked_add(partition.size)
        .is_none_or(|end| end > disk_size)
    {
        return Err(Refusal::Sysfs {
            path: folder.join("start"),
        });
    }
    Ok(Device {
        name: name_of(&folder)?,
        partition,
        disk: DiskName {
            name: name_of(top)?,
            serial: serial(top),
            size: disk_size,
        },
    })
}

/// Refuses a device that the guest's kernel builds from others.
fn refuse_virtual(top: &Path) -> Result<(), Refusal> {
    let name = name_of(top)?;
    if top.join("dm").is_dir() {
        // The prefix of the UUID names the creator: LVM-..., CRYPT-LUKS2-..., mpath-..., part1-mpath-...
        let uuid = fs::read_to_string(top.join("dm/uuid")).unwrap_or_default();
        let kind = match uuid.trim().split_once('-') {
            Some((kind, _)) => kind.to_owned(),
            None => "of unknown kind".to_owned(),
        };
        return Err(Refusal::DeviceMapper { name, kind });
    }
    if top.join("md").is_dir() {
        return Err(Refusal::Raid(name));
    }
    if top.join("loop").is_dir() {
        return Err(Refusal::Loop(name));
    }
    // A disk is on a bus; a device under virtual/block comes from a driver. An NVMe disk with several paths is in
    // virtual/nvme-subsystem and counts as a disk.
    let is_virtual = top
        .parent()
        .is_some_and(|above| above.ends_with("virtual/block"));
    let stacked = fs::read_dir(top.join("slaves")).is_ok_and(|mut below| below.next().is_some());
    if is_virtual || stacked {
        return Err(Refusal::NotADisk(name));
    }
    Ok(())
}

fn name_of(folder: &Path) -> Result<String, Refusal> {
    folder
        .file_name()
        .and_then(|name| name.to_str())
        .map(str::to_owned)
        .ok_or_else(|| Refusal::Sysfs {
            path: folder.to_owned(),
        })
}

/// Reads a number of sectors from a sysfs file and returns it in bytes.
fn bytes(path: &Path) -> Result<u64, Refusal> {
    fs::read_to_string(path)
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .and_then(|sectors| sectors.checked_mul(SECTOR_BYTES))
        .ok_or_else(|| Refusal::Sysfs { path: path.into() })
}

/// Reads the serial number of a virtio, NVMe or SCSI disk.
fn serial(top: &Path) -> Option<String> {
    let text = |path: PathBuf| fs::read(path).ok().and_then(|raw| printable(&raw));
    text(top.join("serial"))
        .or_else(|| text(top.join("device/serial")))
        .or_else(|| {
            // The vital product data page has a header of four bytes before the number.
            let page = fs::read(top.join("device/vpd_pg80")).ok()?;
            printable(page.get(4..)?)
        })
}

fn printable(raw: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(raw)
        .ok()?
        .trim_matches(|c: char| c.is_whitespace() || c == '\0');
    // UML reports "(null)" for a disk without a serial number.
    let good = !text.is_empty()
        && text != "(null)"
        && text.len() <= MAX_SERIAL_BYTES
        && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    good.then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs with one disk (200 MiB) that has one partition of 100 MiB at 1 MiB, numbers 8:0 and 8:1.
    struct Tree {
        top: tempfile::TempDir,
        disk: PathBuf,
    }

    fn tree(disk: &str) -> Tree {
        let top = tempfile::tempdir().unwrap();
        let disk = top.path().join("devices").join(disk);
        let name = disk.file_name().unwrap().to_str().unwrap().to_owned();
        let part = disk.join(format!("{name}1"));
        fs::create_dir_all(&part).unwrap();
        fs::create_dir_all(top.path().join("dev/block")).unwrap();
        fs::write(disk.join("size"), "409600\n").unwrap();
        fs::write(part.join("partition"), "1\n").unwrap();
        fs::write(part.join("start"), "2048\n").unwrap();
        fs::write(part.join("size"), "204800\n").unwrap();
        symlink(&disk, top.path().join("dev/block/8:0")).unwrap();
        symlink(&part, top.path().join("dev/block/8:1")).unwrap();
        Tree { top, disk }
    }

    impl Tree {
        fn device(&self, minor: u32) -> Result<Device, Refusal> {
            device(self.top.path(), 8, minor)
        }

        fn put(&self, file: &str, text: &[u8]) {
            let path = self.disk.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn a_partition_leads_to_its_disk_and_its_start() {
        let tree = tree("pci0000:00/virtio3/block/vda");
        tree.put("serial", b"disk-7\n");
        let disk = DiskName {
            name: "vda".into(),
            serial: Some("disk-7".into()),
            size: 200 << 20,
        };
        let found = tree.device(1).unwrap();
        assert_eq!(
            (found.name.as_str(), found.partition, &found.disk),
            (
                "vda1",
                Partition {
                    start: 1 << 20,
                    size: 100 << 20
                },
                &disk
            )
        );
        let found = tree.device(0).unwrap();
        assert_eq!(
            (found.name.as_str(), found.partition, &found.disk),
            (
                "vda",
                Partition {
                    start: 0,
                    size: 200 << 20
                },
                &disk
            )
        );
    }

    #[test]
    fn serials_of_nvme_and_scsi_are_found_and_unprintable_ones_left_out() {
        let nvme = tree("virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
        nvme.put("device/serial", b"S1 A          \n");
        assert_eq!(nvme.device(0).unwrap().disk.serial.as_deref(), Some("S1 A"));
        let scsi = tree("pci0000:00/host0/block/sda");
        assert_eq!(scsi.device(0).unwrap().disk.serial, None);
        scsi.put("device/vpd_pg80", b"\0\x80\0\x04ab12");
        assert_eq!(scsi.device(0).unwrap().disk.serial.as_deref(), Some("ab12"));
        scsi.put("serial", b"\x01\x02");
        assert_eq!(scsi.device(0).unwrap().disk.serial.as_deref(), Some("ab12"));
        scsi.put("serial", b"(null)\n");
        assert_eq!(scsi.device(0).unwrap().disk.serial.as_deref(), Some("ab12"));
        scsi.put("serial", &[b'x'; 65]);
        assert_eq!(scsi.device(0).unwrap().disk.serial.as_deref(), Some("ab12"));
    }

    #[test]
    fn devices_made_of_others_are_refused_by_what_they_are() {
        let cases: [(&str, &str, &[u8], &str); 6] = [
            (
                "dm-0",
                "dm/uuid",
                b"LVM-abc\n",
                "device-mapper device (LVM)",
            ),
            ("dm-1", "dm/uuid", b"CRYPT-LUKS2-abc\n", "(CRYPT)"),
            ("dm-2", "dm/uuid", b"", "(of unknown kind)"),
            ("md0", "md/level", b"raid1\n", "software RAID"),
            ("loop0", "loop/backing_file", b"/x\n", "loop device"),
            ("zram0", "comp_algorithm", b"lzo\n", "not a disk"),
        ];
        for (name, file, text, word) in cases {
            let tree = tree(&format!("virtual/block/{name}"));
            tree.put(file, text);
            for minor in [0, 1] {
                let error = tree.device(minor).unwrap_err().to_string();
                assert!(error.contains(word) && error.contains(name), "{error}");
            }
        }
        let stacked = tree("pci0000:00/block/new0");
        stacked.put("slaves/sda/x", b"");
        assert!(matches!(stacked.device(0), Err(Refusal::NotADisk(_))));
    }

    #[test]
    fn missing_or_inconsistent_sysfs_files_are_refused() {
        let tree = tree("pci0000:00/block/sda");
        assert!(matches!(
            device(tree.top.path(), 0, 41),
            Err(Refusal::NoDevice)
        ));
        assert!(matches!(tree.device(7), Err(Refusal::Sysfs { .. })));
        tree.put("sda1/start", b"204801");
        assert!(matches!(tree.device(1), Err(Refusal::Sysfs { .. })));
        tree.put("sda1/start", b"99999999999999999999");
        assert!(matches!(tree.device(1), Err(Refusal::Sysfs { .. })));
        fs::remove_file(tree.disk.join("size")).unwrap();
        assert!(matches!(tree.device(0), Err(Refusal::Sysfs { .. })));
    }
}
