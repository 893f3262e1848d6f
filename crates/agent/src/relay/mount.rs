// SPDX-License-Identifier: Apache-2.0
//! The FUSE device and its mount.

use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, unmount};

use crate::io::mounts;

/// File system type in mount(2) and `/proc/mounts`.
const FS_TYPE: &str = "fuse.viola";
/// Size of the buffer for requests: the kernel demands room for its longest write, also on a read-only mount.
const READ_BUFFER_BYTES: usize = (1 << 20) + 4096;

/// A FUSE mount and its device. Dropping it unmounts, and blocked readers get an error.
#[derive(Debug)]
pub struct Fuse {
    device: std::fs::File,
    path: PathBuf,
    buffer: Vec<u8>,
    mounted: bool,
}

/// What was read from the device.
#[derive(Debug)]
pub enum FuseEvent<'a> {
    /// A request.
    Request(&'a [u8]),
    /// Nothing is waiting.
    Idle,
    /// The mount was unmounted by somebody else.
    Unmounted,
}

/// Unmounts what a killed agent has left at `path`.
///
/// # Errors
/// When another file system is mounted there.
pub fn remove_stale(path: &Path) -> io::Result<()> {
    // a bound, so that a mount that does not go away is reported
    for _ in 0..16 {
        let text = std::fs::read_to_string("/proc/self/mountinfo")?;
        let all = mounts::parse(&text);
        match all.iter().rev().find(|m| m.point == path) {
            None => return Ok(()),
            Some(mount) if mount.kind == FS_TYPE => detach(path)?,
            Some(mount) => {
                return Err(io::Error::other(format!(
                    "a file system of type {} is mounted there",
                    mount.kind
                )));
            }
        }
    }
    Err(io::Error::other("it stays mounted after 16 unmounts"))
}

fn detach(path: &Path) -> io::Result<()> {
    Ok(unmount(
        path,
        UnmountFlags::DETACH | UnmountFlags::NOFOLLOW,
    )?)
}

impl Fuse {
    /// Mounts at `path`, which is created if missing: read only, for all users as far as owner and mode of the
    /// files allow, as a virtio-fs mount.
    ///
    /// # Errors
    /// The kernel's: no `/dev/fuse`, no CAP_SYS_ADMIN.
    pub fn mount(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        remove_stale(path)?;
        std::fs::create_dir_all(path)?;
        let device = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/fuse")
            .map_err(|e| io::Error::new(e.kind(), format!("/dev/fuse: {e}")))?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
            device.as_raw_fd()
        );
        let flags =
            MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        rustix::mount::mount(
            "viola",
            path,
            FS_TYPE,
            flags,
            CString::new(options)?.as_c_str(),
        )?;
        Ok(Self {
            device,
            path: path.to_owned(),
            buffer: vec![0; READ_BUFFER_BYTES],
            mounted: true,
        })
    }

    /// Reads the next request without blocking.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_request(&mut self) -> io::Result<FuseEvent<'_>> {
        loop {
            match self.device.read(&mut self.buffer) {
                Ok(count) => return Ok(FuseEvent::Request(&self.buffer[..count])),
                Err(e) => match e.raw_os_error() {
                    // ENOENT: the process that asked was killed just now
                    Some(libc::EINTR | libc::ENOENT) => {}
                    Some(libc::EAGAIN) => return Ok(FuseEvent::Idle),
                    Some(libc::ENODEV) => {
                        self.mounted = false;
                        return Ok(FuseEvent::Unmounted);
                    }
                    _ => return Err(e),
                },
            }
        }
    }

    /// Writes a reply; `false` when the kernel rejects it as malformed. A reply whose request was interrupted is
    /// no error.
    pub fn reply(&mut self, reply: &[u8]) -> bool {
        // The kernel takes a reply as a whole or not at all.
        match self.device.write_all(reply) {
            Ok(()) => true,
            Err(e) => e.raw_os_error() != Some(libc::EINVAL),
        }
    }
}

impl AsFd for Fuse {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        if self.mounted {
            let _ = detach(&self.path);
        }
    }
}
