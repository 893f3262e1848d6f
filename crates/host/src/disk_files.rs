// SPDX-License-Identifier: Apache-2.0
//! Opens the files of a VM's disks.
//!
//! A path from the hypervisor is not enough: it may belong to another mount namespace, may name another file by now, and the
//! VM's process chose it. So these functions open only a file that this process has open itself.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::paths::through_root;
use crate::vm::Vm;

/// Device and inode number of a file.
pub type FileId = (u64, u64);

/// Opens a file of one of the VM's disks for reading.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] when the VM's process does not have the file open.
pub fn open(vm: &Vm, path: &Path) -> io::Result<(File, FileId)> {
    let file = File::open(find_descriptor(vm, path)?)?;
    let id = file_id(&file.metadata()?);
    Ok((file, id))
}

/// As [`open`], for reading and writing.
///
/// # Errors
/// Those of [`open`]; [`io::ErrorKind::PermissionDenied`] when the VM has it open read-only.
pub fn open_for_writing(vm: &Vm, path: &Path) -> io::Result<File> {
    let fd = find_descriptor(vm, path)?;
    if !is_writable(&fd)? {
        let what = format!("{}: the VM has it open read-only", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    File::options().read(true).write(true).open(fd)
}

/// The descriptor in `/proc/PID/fd` through which the VM's process has the file open.
fn find_descriptor(vm: &Vm, path: &Path) -> io::Result<PathBuf> {
    let wanted = path
        .to_str()
        .and_then(|p| fs::metadata(through_root(vm.pid, p)).ok())
        .map(|m| file_id(&m));
    let mut by_name = None;
    for entry in fs::read_dir(format!("/proc/{}/fd", vm.pid))?.flatten() {
        let fd = entry.path();
        let is_named = fs::read_link(&fd).is_ok_and(|target| target == path);
        let Ok(meta) = fs::metadata(&fd) else {
            continue;
        };
        if !(meta.is_file() || is_block_device(&meta)) {
            continue;
        }
        // The name that the kernel knows takes precedence over what lies at that path now.
        if is_named {
            by_name = Some(fd);
            break;
        }
        if by_name.is_none() && wanted == Some(file_id(&meta)) {
            by_name = Some(fd);
        }
    }
    by_name.ok_or_else(|| {
        let what = format!("{}: the VM does not have this file open", path.display());
        io::Error::new(io::ErrorKind::NotFound, what)
    })
}

/// Whether the process has this descriptor open for writing.
fn is_writable(fd: &Path) -> io::Result<bool> {
    let number = fd.file_name().unwrap_or_default();
    let info = fd
        .parent()
        .and_then(Path::parent)
        .map(|process| process.join("fdinfo").join(number))
        .ok_or(io::ErrorKind::InvalidInput)?;
    let text = fs::read_to_string(info)?;
    // Octal; the last two bits are the access mode.
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    let mode = flags.ok_or(io::ErrorKind::InvalidData)? & libc::O_ACCMODE as u32;
    Ok(mode != libc::O_RDONLY as u32)
}

/// Device and inode number of a file; 0 and the device number of a block device.
pub fn file_id(meta: &fs::Metadata) -> FileId {
    if is_block_device(meta) {
        (0, meta.rdev())
    } else {
        (meta.dev(), meta.ino())
    }
}

fn is_block_device(meta: &fs::Metadata) -> bool {
    meta.file_type().is_block_device()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::tests::own_process;

    #[test]
    fn only_files_that_the_vm_has_open_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        fs::write(&path, "x").unwrap();
        assert_eq!(
            open(&own_process(), &path).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let held = File::open(&path).unwrap();
        let (_, id) = open(&own_process(), &path).unwrap();
        assert_eq!(id, file_id(&held.metadata().unwrap()));
        // By another name of the same file, too.
        let link = dir.path().join("link.img");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(open(&own_process(), &link).unwrap().1, id);
        // Another file at that path is not the VM's.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "y").unwrap();
        let other = file_id(&fs::metadata(&path).unwrap());
        assert!(open(&own_process(), &path).is_err() || other == id);
    }
}
