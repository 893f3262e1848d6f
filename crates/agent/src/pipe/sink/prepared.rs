// SPDX-License-Identifier: Apache-2.0
//! The steps of a sink file, before and after the host writes it.
//!
//! 1. `fill` writes zeros where there is no written block: a hole or the end of the file has no place that the host
//!    could write.
//! 2. A note is written, and the file is made immutable: the kernel lets no process write, free or move its blocks.
//! 3. The extents are read, and their cached pages dropped.
//! 4. The host writes.
//! 5. The flag is cleared; pages that were cached meanwhile are refreshed, bytes that the agent received are written,
//!    and the file is cut to its size.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use viola_extents::guest::{Mapper, Refusal};
use viola_proto::agent::FileMap;
use viola_proto::pipe::PipeId;

use super::fill::{self, ByteRange};
use super::note::{Note, Notes};
use super::{cache, immutable};
use crate::io::extents::to_wire;
use crate::pipe::counters::Counters;
use crate::pipe::reason::Reason;

const EXT4_SUPER_MAGIC: u64 = 0xEF53;

/// A file whose blocks stay in place until it is settled.
#[derive(Debug)]
pub struct Prepared {
    file: File,
    /// The same file with O_DIRECT.
    direct: File,
    part: ByteRange,
    /// The file's size in bytes before the pipe.
    size: u64,
    note: Option<Note>,
}

impl Prepared {
    /// Prepares a range of a program's file.
    ///
    /// # Errors
    /// The [`Reason`] why the host may not write the file. The file is as it was, except for zeros
    /// where it had no written blocks.
    pub fn prepare(
        program_file: OwnedFd,
        part: ByteRange,
        notes: &Notes,
        pipe: PipeId,
        stop: &AtomicBool,
        counters: &Counters,
    ) -> Result<(Self, FileMap), Reason> {
        let open = |flags: OFlags| -> io::Result<File> {
            let path = format!("/proc/self/fd/{}", program_file.as_raw_fd());
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | flags;
            Ok(rustix::fs::open(path, flags, Mode::empty())?.into())
        };
        let file = open(OFlags::empty()).map_err(|_| Reason::UnfitSink)?;
        check_sink(&file)?;
        let mut ready = Self {
            direct: open(OFlags::DIRECT).map_err(|_| Reason::UnfitSink)?,
            size: file.metadata().map_err(|_| Reason::SystemError)?.len(),
            file,
            part,
            note: None,
        };
        drop(program_file);
        match ready.freeze(notes, pipe, stop, counters) {
            Ok(map) => Ok((ready, map)),
            Err(reason) => {
                if let Err(e) = ready.end(0, &[]) {
                    counters.set_last_detail(format!("a file that could not be prepared: {e}"));
                }
                Err(reason)
            }
        }
    }

    fn freeze(
        &mut self,
        notes: &Notes,
        pipe: PipeId,
        stop: &AtomicBool,
        counters: &Counters,
    ) -> Result<FileMap, Reason> {
        let system = |_| Reason::SystemError;
        let (file, part) = (&self.file, self.part);
        let there = rustix::fs::fstatvfs(file).map_err(|_| Reason::SystemError)?;
        let block = there.f_bsize;
        let map = self.map(counters)?;
        let unwritten_ranges = fill::unwritten_ranges(&map.extents, part, map.size, block);
        let wanted: u64 = unwritten_ranges.iter().map(|(from, to)| to - from).sum();
        // root's reserve is not for programs of other users
        if wanted > there.f_bavail.saturating_mul(there.f_frsize) {
            return Err(Reason::NoSpace);
        }
        fill::write_zeros(file, &self.direct, &unwritten_ranges, block, stop)?;
        if stop.load(Ordering::Relaxed) {
            return Err(Reason::NoSession);
        }
        self.note = Some(notes.note(file, pipe, self.size).map_err(system)?);
        immutable::set(file).map_err(|_| Reason::UnfitSink)?;
        let mut map = self.map(counters)?;
        if !fill::unwritten_ranges(&map.extents, part, map.size, block).is_empty() {
            return Err(Reason::HasWriter);
        }
        // after the flag: from now on only what is on the disk can be cached
        match cache::drop_cached(file, part.0, part.1) {
            Ok(0) => {}
            Ok(left) => {
                counters.set_last_detail(format!("{left} pages of the file are in use"));
                return Err(Reason::UnfitSink);
            }
            Err(e) => {
                counters.set_last_detail(format!("cachestat (Linux 6.5): {e}"));
                return Err(Reason::UnfitSink);
            }
        }
        let of_part =
            |e: &viola_proto::agent::Extent| e.logical < part.1 && e.logical + e.length > part.0;
        map.extents.retain(of_part);
        Ok(map)
    }

    /// The file's extents. The host writes only to raw images, so nothing has to be flushed first: the host may
    /// overwrite what the guest's kernel has not written back yet, mostly zeros.
    fn map(&self, counters: &Counters) -> Result<FileMap, Reason> {
        let map = Mapper::new()
            .file_extents_without_fsync(&self.file)
            .map_err(|refusal| {
                counters.set_last_detail(refusal.to_string());
                match refusal {
                    Refusal::Io { source, .. } => fill::reason(&source),
                    Refusal::Changed => Reason::HasWriter,
                    _ => Reason::Unmappable,
                }
            })?;
        Ok(to_wire(map).0)
    }

    /// Returns the file to the program: `bytes` bytes have come in all, of which the agent has the first, `kept`.
    ///
    /// # Errors
    /// The first error; the later steps are done too.
    pub fn settle(mut self, bytes: u64, kept: &[u8]) -> io::Result<()> {
        self.end(bytes, kept)
    }

    fn end(&mut self, bytes: u64, kept: &[u8]) -> io::Result<()> {
        let (from, to) = self.part;
        let fixed = match self.note {
            Some(_) => immutable::clear(&self.file).map(drop),
            None => Ok(()),
        };
        let got = from + bytes.min(to - from);
        let by_host = (from + kept.len() as u64).min(got);
        let fresh = match by_host < got {
            true => cache::refresh(&self.file, &self.direct, by_host, got),
            false => Ok(()),
        };
        let put = self.file.write_all_at(kept, from);
        let cut = self.cut(if bytes > 0 { got } else { 0 });
        let touched = match bytes > 0 {
            true => touch(&self.file),
            false => Ok(()),
        };
        let struck = match (&fixed, self.note.take()) {
            (Ok(()), Some(note)) => note.remove(),
            _ => Ok(()),
        };
        fixed.and(fresh).and(put).and(cut).and(touched).and(struck)
    }

    /// Truncates what the file was grown by beyond `end`.
    fn cut(&self, end: u64) -> io::Result<()> {
        let is = self.file.metadata()?.len();
        let wanted = self.size.max(end);
        match is > wanted && is <= self.part.1 {
            true => self.file.set_len(wanted),
            false => Ok(()),
        }
    }
}

/// Refuses files that the host must not write.
fn check_sink(file: &File) -> Result<(), Reason> {
    let stat = rustix::fs::fstatfs(file).map_err(|_| Reason::SystemError)?;
    // on XFS an immutable file can still be truncated through a descriptor that was open before
    if stat.f_type as u64 & 0xFFFF_FFFF != EXT4_SUPER_MAGIC {
        return Err(Reason::Unmappable);
    }
    if immutable::is_write_protected(file).map_err(|_| Reason::UnfitSink)? {
        return Err(Reason::UnfitSink);
    }
    // a write would clear the set-uid bits and the capabilities
    let mode = rustix::fs::fstat(file)
        .map_err(|_| Reason::SystemError)?
        .st_mode;
    let mut nothing = [0_u8; 0];
    let capable = rustix::fs::fgetxattr(file, "security.capability", &mut nothing[..]).is_ok();
    match mode & 0o6000 == 0 && !capable {
        true => Ok(()),
        false => Err(Reason::UnfitSink),
    }
}

/// Sets the modification time, as a write does.
fn touch(file: &File) -> io::Result<()> {
    let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps {
        last_access: time(UTIME_OMIT),
        last_modification: time(UTIME_NOW),
    };
    Ok(rustix::fs::futimens(file, &times)?)
}
