// SPDX-License-Identifier: Apache-2.0
//! Copies a part of a VM's file to another file of the VM.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::fs::copy_file_range;
use rustix::io::Errno;
use viola_extents::CheckedMap;
use viola_extents::host::{Image, Sink, Source};

use super::StepOutcome;
use super::writeback::Writeback;

/// Buffer size where the kernel does not copy between the two files itself.
const COPY_BYTES: u64 = 256 << 10;

/// A part of a file on a disk image.
#[derive(Debug)]
pub struct FileRange {
    /// The image of the file's disk.
    pub image: Arc<Image>,
    /// The file's extents.
    pub map: CheckedMap,
    /// Offset of the first byte.
    pub offset: u64,
}

/// A copy in progress.
#[derive(Debug)]
pub struct FileToFile {
    from: FileRange,
    to: FileRange,
    moved: u64,
    length: u64,
    /// Whether the kernel cannot copy between these two files itself.
    through_memory: bool,
    writeback: Writeback,
}

impl FileToFile {
    /// A copy of `length` bytes, all of which the source must have.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`]: a file does not have these bytes, or no blocks for them.
    /// [`io::ErrorKind::PermissionDenied`]: the image of `to` is not writable ([`Image::sinks`]).
    pub fn new(from: FileRange, to: FileRange, length: u64) -> io::Result<Self> {
        if (from.offset.checked_add(length)).is_none_or(|end| end > from.map.len()) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        to.image.sinks(&to.map, to.offset, length)?;
        Ok(Self {
            from,
            to,
            moved: 0,
            length,
            through_memory: false,
            writeback: Writeback::default(),
        })
    }

    /// Bytes copied so far.
    pub fn moved(&self) -> u64 {
        self.moved
    }

    /// Bytes to copy.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Copies up to `budget` bytes; waits for the disks.
    ///
    /// # Errors
    /// Those of reading and writing the images. [`io::ErrorKind::UnexpectedEof`]: the source's
    /// image ends before the file does.
    pub fn step(&mut self, budget: u64) -> io::Result<StepOutcome> {
        let stop = self.length.min(self.moved.saturating_add(budget));
        while self.moved < stop {
            let done = self.copy_next(stop - self.moved)?;
            if done == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.moved += done;
        }
        Ok(match self.moved == self.length {
            true => StepOutcome::Done,
            false => StepOutcome::BudgetUsed,
        })
    }

    /// Copies bytes that are contiguous in both files.
    fn copy_next(&mut self, most: u64) -> io::Result<u64> {
        let to = &self.to;
        let sinks = to.image.sinks(&to.map, to.offset + self.moved, most)?;
        let sink = *sinks.first().ok_or(io::ErrorKind::InvalidInput)?;
        let done = Self::copy_contiguous(&self.from, self.moved, &sink, &mut self.through_memory)?;
        self.writeback.add(sink.fd, sink.offset, done);
        if self.moved + done == self.length {
            self.writeback.flush(sink.fd);
        }
        Ok(done)
    }

    fn copy_contiguous(
        from: &FileRange,
        moved: u64,
        sink: &Sink<'_>,
        through_memory: &mut bool,
    ) -> io::Result<u64> {
        let at = from.offset + moved;
        let sources = from.image.sources(&from.map, at, sink.len)?;
        if let (Some(Source::File { fd, offset, len }), false) = (sources.first(), *through_memory)
        {
            match copy_range(*fd, *offset, (sink.fd, sink.offset), *len) {
                // the kernel copies neither devices, nor between file systems, nor within overlapping ranges of a
                // file
                Err(Errno::INVAL | Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => {
                    *through_memory = true;
                }
                done => return Ok(done? as u64),
            }
        }
        let mut bytes = vec![0; sink.len.min(COPY_BYTES) as usize];
        let got = from.image.read_at(&from.map, at, &mut bytes)?;
        let mut written = 0;
        while written < got {
            let at = sink.offset + written as u64;
            match rustix::io::pwrite(sink.fd, &bytes[written..got], at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => written += n,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(got as u64)
    }
}

fn copy_range(
    from: BorrowedFd<'_>,
    mut at: u64,
    (to, mut there): (BorrowedFd<'_>, u64),
    len: u64,
) -> Result<usize, Errno> {
    loop {
        match copy_file_range(from, Some(&mut at), to, Some(&mut there), len as usize) {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use viola_extents::Extent;
    use viola_extents::host::Layer;

    const M: u64 = 1 << 20;

    fn extent(logical: u64, physical: u64, length: u64) -> Extent {
        Extent {
            logical,
            physical,
            length,
            zero: false,
        }
    }

    #[test]
    fn extents_of_both_files_are_matched_on_one_disk_and_on_two() {
        let noise: Vec<u8> = (0..16 * M).map(|at| (at * 31 / 29) as u8).collect();
        let disk = || {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&noise).unwrap();
            Arc::new(Image::open(vec![Layer::raw(file)]).unwrap())
        };
        for (same, through_memory) in [(true, false), (true, true), (false, false), (false, true)] {
            let image = disk();
            let other = if same { image.clone() } else { disk() };
            // with a hole of 1 MiB in the middle
            let from = [extent(0, 3 * M, M), extent(2 * M, M, 2 * M)];
            let to = [extent(0, 12 * M, 3 * M), extent(3 * M, 8 * M, 2 * M)];
            let mut file = noise[3 * M as usize..4 * M as usize].to_vec();
            file.resize(2 * M as usize, 0);
            file.extend_from_slice(&noise[M as usize..3 * M as usize]);
            let part = |image: &Arc<Image>, extents: &[Extent], size, offset| FileRange {
                map: image.check(extents, size).unwrap(),
                image: image.clone(),
                offset,
            };
            let (offset, length, there) = (5, 4 * M - 77, M / 2 + 3);
            let source = part(&image, &from, 4 * M, offset);
            let sink = part(&other, &to, 5 * M, there);
            let map = sink.map.clone();
            let mut copying = FileToFile::new(source, sink, length).unwrap();
            copying.through_memory = through_memory;
            while copying.step(700_000).unwrap() == StepOutcome::BudgetUsed {}
            assert_eq!((copying.moved(), copying.length()), (length, length));
            let mut got = vec![0; length as usize];
            other.read_at(&map, there, &mut got).unwrap();
            assert!(
                got == file[5..5 + length as usize],
                "{same} {through_memory}"
            );
        }
    }

    #[test]
    fn ranges_outside_of_a_file_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(16 * M).unwrap();
        let image = Arc::new(Image::open(vec![Layer::raw(file)]).unwrap());
        let part = |at: u64, offset| FileRange {
            map: image.check(&[extent(0, at, M)], M).unwrap(),
            image: image.clone(),
            offset,
        };
        assert!(FileToFile::new(part(0, 0), part(M, 0), M).is_ok());
        for (from, to, length) in [(1, 0, M), (0, 1, M), (u64::MAX, 0, 2), (0, u64::MAX, 2)] {
            let refused = FileToFile::new(part(0, from), part(M, to), length).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
