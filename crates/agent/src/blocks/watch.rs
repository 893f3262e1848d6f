// SPDX-License-Identifier: Apache-2.0
//! fanotify(7) over whole file systems, with the directory and the name of each event.

use std::ffi::CString;
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::io::handle::Handle;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventMask(u64);

impl EventMask {
    /// A file was created or linked.
    pub fn is_created(self) -> bool {
        self.0 & libc::FAN_CREATE != 0
    }
    /// A name was removed.
    pub fn is_deleted(self) -> bool {
        self.0 & libc::FAN_DELETE != 0
    }
    /// A name was changed.
    pub fn is_renamed(self) -> bool {
        self.0 & (FAN_RENAME | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO) != 0
    }
    /// A file was closed after it was open for writing.
    pub fn is_written(self) -> bool {
        self.0 & libc::FAN_CLOSE_WRITE != 0
    }
    /// The object is a directory.
    pub fn is_directory(self) -> bool {
        self.0 & libc::FAN_ONDIR != 0
    }
    /// The queue overflowed; events are lost.
    pub fn is_overflow(self) -> bool {
        self.0 & libc::FAN_Q_OVERFLOW != 0
    }
}

/// Which end of a rename an entry names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenameEnd {
    /// Not a rename, or a kernel that reports each end as an event of its own.
    Here,
    /// The old name.
    Old,
    /// The new name.
    New,
}

/// A directory entry: the directory's file handle and a name in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Which end of a rename it is.
    pub end: RenameEnd,
    /// The file system.
    pub fsid: [u8; 8],
    /// The name; empty when the kernel gives none.
    pub name: String,
    /// Handle of the directory.
    handle: Handle,
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub mask: EventMask,
    /// The process that caused it.
    pub pid: i32,
    /// The directory entries concerned.
    pub entries: Vec<DirEntry>,
}

/// A fanotify group.
#[derive(Debug)]
pub struct Watch {
    queue: File,
    renames: bool,
    buffer: Vec<u8>,
}

const FAN_RENAME: u64 = 0x1000_0000;
/// `FAN_REPORT_DIR_FID` and `FAN_REPORT_NAME`.
const REPORT_DFID_NAME: u32 = 0xc00;
const COMMON_EVENTS: u64 =
    libc::FAN_CREATE | libc::FAN_DELETE | libc::FAN_CLOSE_WRITE | libc::FAN_ONDIR;
/// `struct fanotify_event_metadata`.
const METADATA_BYTES: usize = 24;
/// `struct fanotify_event_info_header` and the fsid.
const INFO_HEADER_BYTES: usize = 12;

impl Watch {
    /// Opens a group that watches nothing yet.
    ///
    /// # Errors
    /// The kernel's error: no CAP_SYS_ADMIN, or Linux before 5.9.
    pub fn new() -> Result<Self> {
        let flags =
            libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK | REPORT_DFID_NAME;
        // SAFETY: plain system call; the result is checked.
        let raw = unsafe { libc::fanotify_init(flags, (libc::O_RDONLY | libc::O_CLOEXEC) as u32) };
        if raw < 0 {
            return Err(Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let queue = unsafe { OwnedFd::from_raw_fd(raw) };
        Ok(Self {
            queue: queue.into(),
            renames: true,
            buffer: vec![0; 256 << 10],
        })
    }

    /// Watches the whole file system that holds `path`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add(&mut self, path: &Path) -> Result<()> {
        if self.renames {
            match self.mark(path, COMMON_EVENTS | FAN_RENAME) {
                // kernels before 5.17 report the two ends of a rename as two events
                Err(e) if e.kind() == ErrorKind::InvalidInput => self.renames = false,
                other => return other,
            }
        }
        self.mark(
            path,
            COMMON_EVENTS | libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO,
        )
    }

    fn mark(&self, path: &Path, mask: u64) -> Result<()> {
        let path = CString::new(path.as_os_str().as_bytes())?;
        let how = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
        let fd = self.queue.as_raw_fd();
        // SAFETY: the path is a string that ends in NUL and lives over the call.
        let done = unsafe { libc::fanotify_mark(fd, how, mask, libc::AT_FDCWD, path.as_ptr()) };
        if done < 0 {
            return Err(Error::last_os_error());
        }
        Ok(())
    }

    /// Reads the events in the queue; empty when there are none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(&mut self) -> Result<Vec<Event>> {
        match self.queue.read(&mut self.buffer) {
            Ok(n) => Ok(parse(&self.buffer[..n])),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Ok(Vec::new())
            }
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

impl DirEntry {
    /// Present path of the directory; `mount` is any open directory of the same file system.
    ///
    /// # Errors
    /// The kernel's error; `ESTALE` when the directory is gone.
    pub fn directory(&self, mount: BorrowedFd<'_>) -> Result<PathBuf> {
        let folder = self.handle.open(mount, OFlags::PATH | OFlags::DIRECTORY)?;
        std::fs::read_link(format!("/proc/self/fd/{}", folder.as_raw_fd()))
    }
}

/// Parses the kernel's records and skips those of unknown kinds.
fn parse(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(length) = u32_at(bytes, 0).map(|n| n as usize) {
        if length < METADATA_BYTES || length > bytes.len() {
            break;
        }
        let (event, rest) = bytes.split_at(length);
        bytes = rest;
        let fields = u16_at(event, 6)
            .zip(u32_at(event, 8))
            .zip(u32_at(event, 12));
        let (Some(((head, low), high)), Some(pid)) = (fields, u32_at(event, 20)) else {
            break;
        };
        let mask = u64::from(low.to_le()) | u64::from(high.to_le()) << 32;
        events.push(Event {
            mask: EventMask(mask),
            pid: pid.cast_signed(),
            entries: event
                .get(usize::from(head)..)
                .map(entries)
                .unwrap_or_default(),
        });
    }
    events
}

fn entries(mut bytes: &[u8]) -> Vec<DirEntry> {
    let mut entries = Vec::new();
    while let Some(length) = u16_at(bytes, 2).map(usize::from) {
        if length < 4 || length > bytes.len() {
            break;
        }
        let (info, rest) = bytes.split_at(length);
        bytes = rest;
        // FAN_EVENT_INFO_TYPE_DFID_NAME, _DFID, _OLD_DFID_NAME and _NEW_DFID_NAME
        let end = match info[0] {
            2 | 3 => RenameEnd::Here,
            10 => RenameEnd::Old,
            12 => RenameEnd::New,
            _ => continue,
        };
        let (Some(fsid), Some(size)) = (
            info.get(4..INFO_HEADER_BYTES),
            u32_at(info, INFO_HEADER_BYTES),
        ) else {
            continue;
        };
        let name_at = (INFO_HEADER_BYTES + 8).saturating_add(size as usize);
        let content = info.get(INFO_HEADER_BYTES + 8..name_at);
        let kind = u32_at(info, INFO_HEADER_BYTES + 4).map(u32::cast_signed);
        let handle = content.zip(kind).and_then(|(c, kind)| Handle::new(kind, c));
        let (Ok(fsid), Some(handle)) = (fsid.try_into(), handle) else {
            continue;
        };
        let name = info[name_at..]
            .split(|b| *b == 0)
            .next()
            .unwrap_or_default();
        entries.push(DirEntry {
            end,
            fsid,
            name: String::from_utf8_lossy(name).into_owned(),
            handle,
        });
    }
    entries
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let two = bytes.get(at..at + 2)?;
    Some(u16::from_ne_bytes(two.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four = bytes.get(at..at + 4)?;
    Some(u32::from_ne_bytes(four.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn info(kind: u8, name: &str) -> Vec<u8> {
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend([1, 2, 3, 4, 5, 6, 7, 8]);
        bytes.extend(8_u32.to_ne_bytes());
        bytes.extend(1_i32.to_ne_bytes());
        bytes.extend([9; 8]);
        bytes.extend(name.as_bytes());
        bytes.push(0);
        while bytes.len() % 4 != 0 {
            bytes.push(0);
        }
        let length = bytes.len() as u16;
        bytes[2..4].copy_from_slice(&length.to_ne_bytes());
        bytes
    }

    fn event(mask: u64, infos: &[Vec<u8>]) -> Vec<u8> {
        let rest: Vec<u8> = infos.concat();
        let mut bytes = ((METADATA_BYTES + rest.len()) as u32)
            .to_ne_bytes()
            .to_vec();
        bytes.extend([3, 0]);
        bytes.extend((METADATA_BYTES as u16).to_ne_bytes());
        bytes.extend(mask.to_ne_bytes());
        bytes.extend((-1_i32).to_ne_bytes());
        bytes.extend(77_i32.to_ne_bytes());
        bytes.extend(rest);
        bytes
    }

    #[test]
    fn a_rename_has_two_ends() {
        let bytes = [
            event(FAN_RENAME, &[info(10, "blk_7.unlinked"), info(12, "blk_7")]),
            event(libc::FAN_Q_OVERFLOW, &[]),
        ]
        .concat();
        let events = parse(&bytes);
        assert_eq!(events.len(), 2);
        assert!(events[0].mask.is_renamed() && !events[0].mask.is_directory());
        assert_eq!(events[0].pid, 77);
        let ends: Vec<_> = events[0]
            .entries
            .iter()
            .map(|s| (s.end, &*s.name))
            .collect();
        assert_eq!(
            ends,
            [
                (RenameEnd::Old, "blk_7.unlinked"),
                (RenameEnd::New, "blk_7")
            ]
        );
        assert_eq!(events[0].entries[0].fsid, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(events[0].entries[0].handle.content().len(), 8);
        assert!(events[1].mask.is_overflow());
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }

        #[test]
        fn a_cut_event_is_left_out(cut in 1usize..60) {
            let whole = event(libc::FAN_CREATE, &[info(2, "blk_1")]);
            let cut = cut.min(whole.len());
            let events = parse(&whole[..whole.len() - cut]);
            prop_assert!(events.is_empty());
        }
    }
}
