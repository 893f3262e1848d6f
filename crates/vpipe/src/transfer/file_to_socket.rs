// SPDX-License-Identifier: Apache-2.0
//! Sends a part of a VM's file from its disk image to a socket.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::fs::sendfile;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use viola_extents::CheckedMap;
use viola_extents::host::{Image, Source};

use super::StepOutcome;

/// Most bytes of one system call: between two of these the thread serves other pipes.
const MAX_SENDFILE_BYTES: u64 = 1 << 20;
/// Buffer size for bytes that the image does not store as they are: zeros and compressed clusters.
const COPY_BYTES: usize = 64 << 10;

const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

static ZEROS: [u8; COPY_BYTES] = [0; COPY_BYTES];

/// A range of a file that is being sent.
#[derive(Debug)]
pub struct FileToSocket {
    image: Arc<Image>,
    map: CheckedMap,
    at: u64,
    end: u64,
}

impl FileToSocket {
    /// A transfer of `length` bytes from `offset`, or up to the file's end where that comes first.
    pub fn new(image: Arc<Image>, map: CheckedMap, offset: u64, length: u64) -> Self {
        let end = offset.saturating_add(length).min(map.len());
        Self {
            image,
            map,
            at: offset.min(end),
            end,
        }
    }

    /// Bytes that the socket has not accepted yet.
    pub fn left(&self) -> u64 {
        self.end - self.at
    }

    /// Sends up to `budget` bytes to a non-blocking socket. Returns how many, and the result.
    ///
    /// # Errors
    /// Of the socket, or of reading the image. [`io::ErrorKind::UnexpectedEof`]: the image ends before the file does.
    /// [`FileToSocket::left`] counts the bytes sent before the error.
    pub fn step(&mut self, socket: BorrowedFd<'_>, budget: u64) -> io::Result<(u64, StepOutcome)> {
        let begun = self.at;
        let stop = self.end.min(self.at.saturating_add(budget));
        let image = Arc::clone(&self.image);
        while self.at < stop {
            let before = self.at;
            let wanted = (stop - before).min(MAX_SENDFILE_BYTES);
            for source in image.sources(&self.map, before, wanted)? {
                if !self.send_source(socket, source)? {
                    return Ok((self.at - begun, StepOutcome::SinkFull));
                }
            }
            if self.at == before {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let turn = if self.at == self.end {
            StepOutcome::Done
        } else {
            StepOutcome::BudgetUsed
        };
        Ok((self.at - begun, turn))
    }

    /// Sends all bytes of a source and counts each system call; false when the socket accepts no more.
    fn send_source(&mut self, socket: BorrowedFd<'_>, source: Source<'_>) -> io::Result<bool> {
        let begun = self.at;
        let (Source::File { len, .. } | Source::Zero { len } | Source::Encoded { len }) = source;
        while self.at < begun + len {
            let left = begun + len - self.at;
            let some = left.min(COPY_BYTES as u64) as usize;
            let sent = match source {
                Source::File { fd, offset, .. } => {
                    let mut offset = offset + (self.at - begun);
                    sendfile(socket, fd, Some(&mut offset), left as usize)
                }
                Source::Zero { .. } => send(socket, &ZEROS[..some], SEND_FLAGS),
                Source::Encoded { .. } => {
                    let mut bytes = [0; COPY_BYTES];
                    let got = self.image.read_at(&self.map, self.at, &mut bytes[..some])?;
                    send(socket, &bytes[..got], SEND_FLAGS)
                }
            };
            match sent {
                // the file's end
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(sent) => self.at += sent as u64,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use viola_extents::Extent;
    use viola_extents::host::Layer;

    const SIZE: usize = 8 << 20;

    fn noise(size: usize) -> Vec<u8> {
        let mut word: u32 = 7;
        (0..size)
            .map(|_| {
                word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (word >> 24) as u8
            })
            .collect()
    }

    fn image(bytes: &[u8]) -> Arc<Image> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Arc::new(Image::open(vec![Layer::raw(file)]).unwrap())
    }

    fn extent(logical: u64, physical: u64, length: u64, zero: bool) -> Extent {
        Extent {
            logical,
            physical,
            length,
            zero,
        }
    }

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (writer, _) = listener.accept().unwrap();
        writer.set_nonblocking(true).unwrap();
        (writer, reader)
    }

    #[test]
    fn unordered_extents_holes_and_zeros_are_sent_as_the_file_has_them() {
        let disk = noise(SIZE);
        let image = image(&disk);
        let (m, k) = (1 << 20, 1 << 10);
        let len = 4 * m + 200 * k + 77;
        // 2 MiB from behind, 1 MiB unwritten, a hole of 300 KiB, the rest from the beginning; the file ends in a
        // block
        let extents = [
            extent(0, 5 * m, 2 * m, false),
            extent(2 * m, m, m, true),
            extent(3 * m + 300 * k, 4096, len - 3 * m - 300 * k, false),
        ];
        let mut file = disk[5 << 20..7 << 20].to_vec();
        file.resize((3 << 20) + (300 << 10), 0);
        file.extend_from_slice(&disk[4096..4096 + (1 << 20)]);
        file.truncate(len as usize);
        for (offset, length) in [
            (0, u64::MAX),
            (1, 2 * m),
            (3 * m - 5, 400 * k),
            (len, 10),
            (len + 9, 1),
        ] {
            let map = image.check(&extents, len).unwrap();
            let mut sending = FileToSocket::new(image.clone(), map, offset, length);
            let (writer, mut reader) = sockets();
            let from = (offset as usize).min(file.len());
            let to = (offset.saturating_add(length)).min(len) as usize;
            let wanted = file[from..to.max(from)].to_vec();
            assert_eq!(sending.left(), wanted.len() as u64);
            let got = std::thread::spawn(move || {
                let mut got = Vec::new();
                reader.read_to_end(&mut got).unwrap();
                got
            });
            let mut sum = 0;
            loop {
                let (moved, turn) = sending.step(writer.as_fd(), 300_000).unwrap();
                assert!(moved <= 300_000);
                sum += moved;
                match turn {
                    StepOutcome::Done => break,
                    StepOutcome::SinkFull => std::thread::yield_now(),
                    StepOutcome::BudgetUsed => assert_eq!(moved, 300_000),
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!((sum, sending.left()), (wanted.len() as u64, 0));
            drop(writer);
            assert!(got.join().unwrap() == wanted, "{offset} {length}");
        }
    }

    #[test]
    fn a_full_socket_loses_no_bytes() {
        let disk = noise(SIZE);
        let image = image(&disk);
        let map = image
            .check(&[extent(0, 0, SIZE as u64, false)], SIZE as u64)
            .unwrap();
        let mut sending = FileToSocket::new(image, map, 0, u64::MAX);
        let (writer, mut reader) = sockets();
        let mut turns = 0;
        let mut got = Vec::new();
        let mut some = vec![0; 500_000];
        while sending.left() > 0 {
            let (_, turn) = sending.step(writer.as_fd(), u64::MAX).unwrap();
            turns += usize::from(turn == StepOutcome::SinkFull);
            let count = reader.read(&mut some).unwrap();
            got.extend_from_slice(&some[..count]);
        }
        drop(writer);
        reader.read_to_end(&mut got).unwrap();
        assert!(got == disk);
        assert!(turns > 0, "it was never full");
    }

    #[test]
    fn a_truncated_image_is_an_error() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&noise(1 << 20)).unwrap();
        let image = Arc::new(Image::open(vec![Layer::raw(file.reopen().unwrap())]).unwrap());
        let map = image
            .check(&[extent(0, 0, 1 << 20, false)], 1 << 20)
            .unwrap();
        file.as_file().set_len(4096).unwrap();
        let (writer, _reader) = sockets();
        let mut sending = FileToSocket::new(image, map, 0, u64::MAX);
        assert_eq!(
            sending.step(writer.as_fd(), 4096).unwrap(),
            (4096, StepOutcome::BudgetUsed)
        );
        let error = sending.step(writer.as_fd(), 4096).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_closed_peer_is_an_error() {
        let image = image(&noise(SIZE));
        let map = image
            .check(&[extent(0, 0, SIZE as u64, false)], SIZE as u64)
            .unwrap();
        let mut sending = FileToSocket::new(image, map, 0, u64::MAX);
        let (writer, reader) = sockets();
        drop(reader);
        let error = loop {
            match sending.step(writer.as_fd(), 64 << 10) {
                Ok(_) => std::thread::yield_now(),
                Err(e) => break e,
            }
        };
        assert!(
            matches!(
                error.kind(),
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
            ),
            "{error}"
        );
    }
}
