// SPDX-License-Identifier: Apache-2.0
//! Opens the files of a VM's disks.
//!
//! A path from the hypervisor is not enough: it may belong to another mount namespace, may name
//! another file by now, and the VM's process chose it. So these functions open only a file that the
//! VM's process has open, and only with the access that one of its descriptors gives. A descriptor
//! of O_PATH gives none, because opening it needs no right to the file; one for writing only gives
//! none either.
//!
//! viola fetches the descriptor out of the process (pidfd_getfd(2)), so that the process cannot
//! replace it between the check and the use. Where the kernel or a policy of ptrace(2) refuses
//! that, viola compares the descriptor's flags and file before and after.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::paths::through_root;
use crate::proc;
use crate::thread::Tid;
use crate::vm::Vm;

/// Device and inode number of a file.
pub type FileId = (u64, u64);

/// Who names the path of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedBy {
    /// The VM's hypervisor, in its own mount namespace.
    Vm,
    /// The operator, in the mount namespace of this program.
    Operator,
}

/// Opens a file of one of the VM's disks for reading.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] when the VM's process does not have the file open for reading, or has ended.
pub fn open(vm: &Vm, path: &Path, by: NamedBy) -> io::Result<(File, FileId)> {
    let file = open_as_vm(vm, path, by, Access::Read)?;
    let id = file_id(&file.metadata()?);
    Ok((file, id))
}

/// As [`open`], for reading and writing.
///
/// # Errors
/// Those of [`open`]; [`io::ErrorKind::PermissionDenied`] when the VM has it open read-only.
pub fn open_for_writing(vm: &Vm, path: &Path, by: NamedBy) -> io::Result<File> {
    open_as_vm(vm, path, by, Access::ReadAndWrite)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    ReadAndWrite,
}

impl Access {
    /// Whether a descriptor with these flags gives the access.
    fn is_given_by(self, flags: OFlags) -> bool {
        let mode = flags & OFlags::RWMODE;
        !flags.contains(OFlags::PATH)
            && (mode == OFlags::RDWR || mode == OFlags::RDONLY && self == Access::Read)
    }

    fn flags(self) -> OFlags {
        // A special file that took the image's place must not block the caller, nor become its terminal.
        let quiet = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        quiet
            | match self {
                Access::Read => OFlags::RDONLY,
                Access::ReadAndWrite => OFlags::RDWR,
            }
    }
}

/// A descriptor of the VM's process.
struct Descriptor {
    pid: Tid,
    number: Tid,
    flags: OFlags,
    id: FileId,
}

fn open_as_vm(vm: &Vm, path: &Path, by: NamedBy, access: Access) -> io::Result<File> {
    let gone = || io::Error::new(io::ErrorKind::NotFound, "the VM's process has ended");
    let pid = i32::try_from(vm.pid).ok().and_then(Pid::from_raw);
    let process = pidfd_open(pid.ok_or_else(gone)?, PidfdFlags::empty())?;
    let descriptor = find_descriptor(vm, path, by, access)?;
    // The start time shows that the pid is still the VM's. So it was the VM's when the pidfd was
    // opened and during the search.
    let stat = proc::stat(vm.pid).map_err(io::Error::other)?;
    if stat.is_none_or(|stat| stat.start_time != vm.start_time) {
        return Err(gone());
    }
    let number = descriptor.number as i32;
    let file = match pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) {
        Ok(fetched) => reopen_fetched(&fetched.into(), access)?,
        Err(Errno::PERM | Errno::ACCESS | Errno::NOSYS) => reopen_by_link(&descriptor, access)?,
        Err(Errno::BADF) => None,
        Err(error) => return Err(error.into()),
    };
    let file = file.filter(|file| {
        file.metadata()
            .is_ok_and(|meta| is_disk(&meta) && file_id(&meta) == descriptor.id)
    });
    let file = file.ok_or_else(|| {
        let what = format!(
            "{}: the VM has just changed this descriptor",
            path.display()
        );
        io::Error::new(io::ErrorKind::NotFound, what)
    })?;
    let flags = fcntl_getfl(&file)?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Opens anew what a descriptor out of the VM's process has open; `None` when it does not give the access.
fn reopen_fetched(fetched: &File, access: Access) -> io::Result<Option<File>> {
    if !access.is_given_by(fcntl_getfl(fetched)?) || !is_disk(&fetched.metadata()?) {
        return Ok(None);
    }
    let link = format!("/proc/self/fd/{}", fetched.as_raw_fd());
    let file = rustix::fs::open(link, access.flags(), Mode::empty())?;
    Ok(Some(file.into()))
}

/// The same through `/proc/PID/fd`; `None` when the process changed the descriptor meanwhile.
fn reopen_by_link(descriptor: &Descriptor, access: Access) -> io::Result<Option<File>> {
    let Descriptor { pid, number, .. } = *descriptor;
    let link = format!("/proc/{pid}/fd/{number}");
    let file = rustix::fs::open(link, access.flags(), Mode::empty())?;
    let after = flags_of(pid, number)?;
    Ok((after == descriptor.flags).then(|| file.into()))
}

/// The descriptor through which the VM's process has the file open.
fn find_descriptor(vm: &Vm, path: &Path, by: NamedBy, access: Access) -> io::Result<Descriptor> {
    let wanted = match by {
        NamedBy::Operator => Some(fs::metadata(path)?),
        NamedBy::Vm => path
            .to_str()
            .and_then(|p| fs::metadata(through_root(vm.pid, p)).ok()),
    };
    let wanted = wanted.map(|m| file_id(&m));
    let (mut found, mut is_read_only) = (None, false);
    let pid = vm.pid;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let link = entry.path();
        let Some(number) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let is_named = by == NamedBy::Vm && fs::read_link(&link).is_ok_and(|target| target == path);
        let Ok(meta) = fs::metadata(&link) else {
            continue;
        };
        let id = file_id(&meta);
        if !is_disk(&meta) || !(is_named || wanted == Some(id)) {
            continue;
        }
        let Ok(flags) = flags_of(pid, number) else {
            continue;
        };
        if !access.is_given_by(flags) {
            is_read_only |= Access::Read.is_given_by(flags);
            continue;
        }
        let descriptor = Descriptor {
            pid,
            number,
            flags,
            id,
        };
        // The name that the kernel knows takes precedence over what lies at that path now.
        if is_named {
            return Ok(descriptor);
        }
        found = found.or(Some(descriptor));
    }
    found.ok_or_else(|| {
        let (kind, how) = match (access, is_read_only) {
            (Access::ReadAndWrite, true) => {
                (io::ErrorKind::PermissionDenied, "has it open read-only")
            }
            _ => (io::ErrorKind::NotFound, "does not have this file open"),
        };
        io::Error::new(kind, format!("{}: the VM {how}", path.display()))
    })
}

/// The flags with which the process opened a descriptor, from `/proc/PID/fdinfo`.
fn flags_of(pid: Tid, number: Tid) -> io::Result<OFlags> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))?;
    let flags = proc::status_field(&text, "flags");
    let flags = flags.and_then(|octal| u32::from_str_radix(octal, 8).ok());
    let flags = flags.ok_or(io::ErrorKind::InvalidData)?;
    Ok(OFlags::from_bits_retain(flags))
}

fn is_disk(meta: &fs::Metadata) -> bool {
    meta.is_file() || is_block_device(meta)
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

    /// A file, gone with its folder.
    fn disk() -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        fs::write(&path, "x").unwrap();
        (dir, path)
    }

    #[test]
    fn only_files_that_the_vm_has_open_are_opened() {
        let (dir, path) = disk();
        assert_eq!(
            open(&own_process(), &path, NamedBy::Vm).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let held = File::open(&path).unwrap();
        let (_, id) = open(&own_process(), &path, NamedBy::Vm).unwrap();
        assert_eq!(id, file_id(&held.metadata().unwrap()));
        // By another name of the same file, too.
        let link = dir.path().join("link.img");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(open(&own_process(), &link, NamedBy::Vm).unwrap().1, id);
        // Another file at that path is not the VM's.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "y").unwrap();
        let other = file_id(&fs::metadata(&path).unwrap());
        assert!(open(&own_process(), &path, NamedBy::Vm).is_err() || other == id);
    }

    #[test]
    fn a_path_of_the_operator_is_opened_only_while_the_vm_has_the_file_open() {
        let (_dir, path) = disk();
        let vm = own_process();
        let open = |path: &Path| open(&vm, path, NamedBy::Operator);
        let refused = open(&path).unwrap_err();
        assert!(
            refused
                .to_string()
                .ends_with("the VM does not have this file open")
        );
        let held = File::open(&path).unwrap();
        let (_, id) = open(&path).unwrap();
        assert_eq!(id, file_id(&held.metadata().unwrap()));
        // The name that the VM's process has for another file means nothing.
        fs::rename(&path, path.with_extension("old")).unwrap();
        fs::write(&path, "y").unwrap();
        assert_eq!(open(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_descriptor_gives_only_the_access_that_the_vm_has() {
        let (_dir, path) = disk();
        let vm = own_process();
        let kind = |result: io::Result<File>| result.unwrap_err().kind();
        for flags in [OFlags::PATH, OFlags::WRONLY] {
            let held = rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
            let read = open(&vm, &path, NamedBy::Vm).map(|(file, _)| file);
            assert_eq!(kind(read), io::ErrorKind::NotFound);
            assert_eq!(
                kind(open_for_writing(&vm, &path, NamedBy::Vm)),
                io::ErrorKind::NotFound
            );
            drop(held);
        }
        let _read = File::open(&path).unwrap();
        assert_eq!(
            kind(open_for_writing(&vm, &path, NamedBy::Vm)),
            io::ErrorKind::PermissionDenied
        );
        // The one that may write is found beside others.
        let _written = File::options().read(true).write(true).open(&path).unwrap();
        let file = open_for_writing(&vm, &path, NamedBy::Vm).unwrap();
        assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        assert_eq!(fs::read(&path).unwrap(), b"x");
    }

    #[test]
    fn another_process_with_the_vms_number_opens_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let vm = Vm {
            start_time: own_process().start_time + 1,
            ..own_process()
        };
        let error = open(&vm, file.path(), NamedBy::Vm).unwrap_err();
        assert_eq!(error.to_string(), "the VM's process has ended");
    }

    #[test]
    fn a_descriptor_that_changes_between_look_and_use_gives_nothing() {
        let (_dir, path) = disk();
        let vm = own_process();
        let held = File::open(&path).unwrap();
        let found = find_descriptor(&vm, &path, NamedBy::Vm, Access::Read).unwrap();
        assert!(reopen_by_link(&found, Access::Read).unwrap().is_some());
        // The same number, opened without any right to the file.
        let by_path = rustix::fs::open(&path, OFlags::PATH, Mode::empty()).unwrap();
        let mut place = std::os::fd::OwnedFd::from(held);
        rustix::io::dup2(&by_path, &mut place).unwrap();
        assert!(reopen_by_link(&found, Access::Read).unwrap().is_none());
        assert!(
            reopen_fetched(&place.into(), Access::Read)
                .unwrap()
                .is_none()
        );
    }
}
