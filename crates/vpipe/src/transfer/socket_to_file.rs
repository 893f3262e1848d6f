// SPDX-License-Identifier: Apache-2.0
//! Writes received bytes of a socket to a VM's file on its disk image.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use viola_extents::CheckedMap;
use viola_extents::host::Image;

use super::splice_pipe::SplicePipe;
use super::{StepOutcome, TransferError};

/// A transfer from a socket to a file.
#[derive(Debug)]
pub struct SocketToFile {
    pipe: SplicePipe,
    image: Arc<Image>,
    map: CheckedMap,
    begin: u64,
    at: u64,
    end: u64,
}

impl SocketToFile {
    /// A transfer of `length` bytes to the file at `offset`, or up to the source's end where that comes first.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`]: the file has no blocks for all of it.
    /// [`io::ErrorKind::PermissionDenied`]: the image is not writable ([`Image::sinks`]). Otherwise
    /// no descriptor is left.
    pub fn new(image: Arc<Image>, map: CheckedMap, offset: u64, length: u64) -> io::Result<Self> {
        image.sinks(&map, offset, length)?;
        Ok(Self {
            pipe: SplicePipe::new()?,
            image,
            map,
            begin: offset,
            at: offset,
            end: offset + length,
        })
    }

    /// Bytes written so far.
    pub fn moved(&self) -> u64 {
        self.at - self.begin
    }

    /// Bytes still to come.
    pub fn left(&self) -> u64 {
        self.end - self.at
    }

    /// Receives up to `budget` bytes from a non-blocking socket.
    ///
    /// # Errors
    /// Of the connection or of the image.
    pub fn step(
        &mut self,
        source: BorrowedFd<'_>,
        budget: u64,
    ) -> Result<StepOutcome, TransferError> {
        let begun = self.at;
        while self.at < self.end {
            if self.at - begun >= budget {
                return Ok(StepOutcome::BudgetUsed);
            }
            match self.pipe.fill(source, self.end - self.at) {
                Ok(0) => return Ok(StepOutcome::SourceEnded),
                Ok(_) => self.write().map_err(TransferError::Image)?,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(StepOutcome::SourceEmpty);
                }
                Err(e) => return Err(TransferError::Source(e)),
            }
        }
        Ok(StepOutcome::Done)
    }

    /// Writes all bytes of the pipe.
    fn write(&mut self) -> io::Result<()> {
        while self.pipe.len() > 0 {
            let sinks = self.image.sinks(&self.map, self.at, self.pipe.len())?;
            let first = sinks.first().ok_or(io::ErrorKind::InvalidInput)?;
            // the pipe holds bytes of later extents, which must not go into this one
            self.at += self.pipe.drain_to_file(first.fd, first.offset, first.len)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use viola_extents::Extent;
    use viola_extents::host::Layer;

    const SIZE: u64 = 8 << 20;

    fn extent(logical: u64, physical: u64, length: u64, zero: bool) -> Extent {
        Extent {
            logical,
            physical,
            length,
            zero,
        }
    }

    #[test]
    fn bytes_are_written_to_the_files_blocks_only() {
        let mut disk = tempfile::tempfile().unwrap();
        let before = vec![0xee; SIZE as usize];
        disk.write_all(&before).unwrap();
        let image = Arc::new(Image::open(vec![Layer::raw(disk.try_clone().unwrap())]).unwrap());
        let m = 1 << 20;
        // 1 MiB from behind, then 2 MiB from the beginning
        let extents = [extent(0, 6 * m, m, false), extent(m, 4096, 2 * m, false)];
        let map = image.check(&extents, 3 * m).unwrap();
        let (offset, length) = (100, 3 * m - 300);
        let mut receiving = SocketToFile::new(image.clone(), map.clone(), offset, length).unwrap();

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        let bytes: Vec<u8> = (0..length).map(|at| (at * 13 / 11) as u8).collect();
        let sent = bytes.clone();
        let writer = std::thread::spawn(move || {
            far.write_all(&sent).unwrap();
            far.write_all(b"next").unwrap();
        });
        loop {
            match receiving.step(near.as_fd(), 100_000).unwrap() {
                StepOutcome::Done => break,
                StepOutcome::SourceEmpty => std::thread::yield_now(),
                turn => assert_eq!(turn, StepOutcome::BudgetUsed),
            }
        }
        assert_eq!((receiving.moved(), receiving.left()), (length, 0));
        writer.join().unwrap();
        near.set_nonblocking(false).unwrap();
        let mut next = [0; 4];
        (&near).read_exact(&mut next).unwrap();
        assert_eq!(&next, b"next");

        let mut got = vec![0; length as usize];
        assert_eq!(image.read_at(&map, offset, &mut got).unwrap(), got.len());
        assert!(got == bytes);
        let mut whole = Vec::new();
        disk.rewind().unwrap();
        disk.read_to_end(&mut whole).unwrap();
        let own = |at: u64| (4096..4096 + 2 * m).contains(&at) || (6 * m..7 * m).contains(&at);
        let strange = (0..SIZE).find(|at| !own(*at) && whole[*at as usize] != 0xee);
        assert_eq!(strange, None, "a byte of somebody else");
    }

    #[test]
    fn holes_and_read_only_images_are_refused() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        disk.as_file().set_len(SIZE).unwrap();
        let extents = [extent(0, 0, 4096, false), extent(8192, 8192, 4096, true)];
        let refused = |file: std::fs::File, offset| {
            let image = Arc::new(Image::open(vec![Layer::raw(file)]).unwrap());
            let map = image.check(&extents, 12288).unwrap();
            SocketToFile::new(image, map, offset, 4096)
                .err()
                .map(|e| e.kind())
        };
        let invalid = Some(io::ErrorKind::InvalidInput);
        let both = || disk.reopen().unwrap();
        assert_eq!(refused(both(), 0), None);
        for hole in [1, 4096, 8192, 12288, u64::MAX] {
            assert_eq!(refused(both(), hole), invalid, "{hole}");
        }
        let only_read = std::fs::File::open(disk.path()).unwrap();
        assert_eq!(refused(only_read, 0), Some(io::ErrorKind::PermissionDenied));
    }
}
