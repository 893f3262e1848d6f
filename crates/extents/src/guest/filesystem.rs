// SPDX-License-Identifier: Apache-2.0
//! Checks the file system's kind, its journal mode and the file's attributes.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::refusal::Refusal;

const EXT4: u64 = 0xEF53;
const XFS: u64 = 0x5846_5342;

/// Names of other file systems by their statfs magic number, for the refusal.
const OTHERS: [(u64, &str); 14] = [
    (0x9123_683E, "btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58F6, "ramfs"),
    (0x794C_7630, "overlayfs"),
    (0x6969, "NFS"),
    (0x6573_5546, "FUSE"),
    (0xF2F5_2010, "F2FS"),
    (0x2FC1_2FC1, "ZFS"),
    (0xCA45_1A4E, "bcachefs"),
    (0x0102_1997, "9p"),
    (0x00C0_FFEE, "hostfs"),
    (0x4D44, "FAT"),
    (0x7371_7368, "squashfs"),
    (0xFF53_4D42, "CIFS"),
];

/// Attributes of `FS_IOC_GETFLAGS` (kernel `include/uapi/linux/fs.h`) with which the bytes are
/// encoded or not where FIEMAP says.
const COMPRESSED: u32 = 0x4;
const ENCRYPTED: u32 = 0x800;
const JOURNAL_DATA: u32 = 0x4000;
const INLINE_DATA: u32 = 0x1000_0000;

/// `FS_IOC_FSGETXATTR`, `_IOR('X', 31, struct fsxattr)`.
const FS_IOC_FSGETXATTR: u32 = 0x801C_581F;
const XFLAG_REALTIME: u32 = 0x1;

/// The supported file systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ext4,
    Xfs,
}

pub(super) fn kind(file: &File) -> Result<Kind, Refusal> {
    let stat = rustix::fs::fstatfs(file).map_err(|error| failed("fstatfs", error))?;
    // The field is signed or shorter on some architectures.
    kind_of(stat.f_type as u64 & 0xFFFF_FFFF)
}

fn kind_of(magic: u64) -> Result<Kind, Refusal> {
    match magic {
        EXT4 => Ok(Kind::Ext4),
        XFS => Ok(Kind::Xfs),
        _ => Err(Refusal::FileSystem(
            OTHERS
                .iter()
                .find(|(other, _)| *other == magic)
                .map_or_else(
                    || format!("of unknown type {magic:#x}"),
                    |(_, name)| (*name).to_owned(),
                ),
        )),
    }
}

/// Refuses a file whose attributes say that its bytes are elsewhere or encoded.
pub(super) fn refuse_attributes(file: &File, kind: Kind) -> Result<(), Refusal> {
    let flags =
        rustix::fs::ioctl_getflags(file).map_err(|error| failed("FS_IOC_GETFLAGS", error))?;
    check_attributes(flags.bits())?;
    if kind == Kind::Xfs && xflags(file)? & XFLAG_REALTIME != 0 {
        return Err(Refusal::Realtime);
    }
    Ok(())
}

fn check_attributes(flags: u32) -> Result<(), Refusal> {
    let refused = [
        (JOURNAL_DATA, Refusal::JournalledFile),
        (ENCRYPTED, Refusal::Encrypted),
        (COMPRESSED, Refusal::Compressed),
        (INLINE_DATA, Refusal::Inline),
    ];
    for (bit, refusal) in refused {
        if flags & bit != 0 {
            return Err(refusal);
        }
    }
    Ok(())
}

/// Reads `fsx_xflags` of a file.
fn xflags(file: &File) -> Result<u32, Refusal> {
    /// `struct fsxattr`: five numbers and padding.
    #[repr(C)]
    #[derive(Default)]
    struct FsXattr {
        xflags: u32,
        rest: [u32; 6],
    }
    let mut attributes = FsXattr::default();
    // SAFETY: the descriptor is open and the kernel writes one `struct fsxattr` of these 28 bytes.
    let done = unsafe {
        libc::ioctl(
            file.as_raw_fd(),
            FS_IOC_FSGETXATTR as _,
            std::ptr::from_mut(&mut attributes),
        )
    };
    match done {
        0 => Ok(attributes.xflags),
        _ => Err(Refusal::Io {
            call: "FS_IOC_FSGETXATTR",
            source: io::Error::last_os_error(),
        }),
    }
}

/// Refuses an ext4 file system that journals data.
///
/// /proc/mounts does not show the mode when it is the default in the superblock (`tune2fs -o journal_data`).
/// /proc/fs/ext4/DEVICE/options always does.
pub(super) fn refuse_data_journal(proc: &Path, device: &str) -> Result<(), Refusal> {
    let path = proc.join("fs/ext4").join(device).join("options");
    let options =
        fs::read_to_string(&path).map_err(|source| Refusal::JournalMode { path, source })?;
    match options.split_whitespace().any(|o| o == "data=journal") {
        true => Err(Refusal::DataJournal),
        false => Ok(()),
    }
}

pub(super) fn failed(call: &'static str, error: rustix::io::Errno) -> Refusal {
    Refusal::Io {
        call,
        source: error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ext4_and_xfs_are_accepted() {
        assert_eq!(kind_of(EXT4).unwrap(), Kind::Ext4);
        assert_eq!(kind_of(XFS).unwrap(), Kind::Xfs);
        let says = |magic| kind_of(magic).unwrap_err().to_string();
        assert!(says(0x9123_683E).contains("is btrfs;"));
        assert!(says(0x1234).contains("of unknown type 0x1234"));
    }

    #[test]
    fn attributes_that_hide_bytes_are_refused() {
        const IMMUTABLE: u32 = 0x10;
        const EXTENTS: u32 = 0x8_0000;
        assert!(check_attributes(IMMUTABLE | EXTENTS).is_ok());
        for (flag, word) in [
            (0x4000, "chattr +j"),
            (0x800, "encrypted"),
            (0x4, "compressed"),
            (0x1000_0000, "inline"),
        ] {
            let error = check_attributes(flag | EXTENTS).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_journal_mode_is_in_ext4s_own_list() {
        let proc = tempfile::tempdir().unwrap();
        let folder = proc.path().join("fs/ext4/vda1");
        fs::create_dir_all(&folder).unwrap();
        let check = |text: &str| {
            fs::write(folder.join("options"), text).unwrap();
            refuse_data_journal(proc.path(), "vda1")
        };
        assert!(check("rw\nbarrier\ndata=ordered\n").is_ok());
        assert!(check("rw\ndelalloc\n").is_ok());
        assert!(matches!(
            check("rw\ndata=journal\nbarrier\n"),
            Err(Refusal::DataJournal)
        ));
        let error = refuse_data_journal(proc.path(), "vdb").unwrap_err();
        assert!(error.to_string().contains("fs/ext4/vdb/options"), "{error}");
    }
}
