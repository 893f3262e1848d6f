// SPDX-License-Identifier: Apache-2.0
//! Starts writeback of written bytes while later bytes are written.
//!
//! Otherwise all bytes wait for the VM's flush, which writes them during the VM's own time: for a copy of 256 MiB
//! that took as much of the VM's CPU time as all the rest.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes after which writeback starts.
const WRITEBACK_BYTES: u64 = 8 << 20;

/// The last contiguous written range whose writeback has not started.
#[derive(Debug, Default)]
pub(super) struct Writeback {
    from: u64,
    to: u64,
}

impl Writeback {
    /// Adds `len` bytes written at `offset`.
    pub(super) fn add(&mut self, file: BorrowedFd<'_>, offset: u64, len: u64) {
        if offset != self.to {
            self.flush(file);
            (self.from, self.to) = (offset, offset);
        }
        self.to += len;
        if self.to - self.from >= WRITEBACK_BYTES {
            self.flush(file);
        }
    }

    /// Starts writeback of the rest.
    pub(super) fn flush(&mut self, file: BorrowedFd<'_>) {
        if self.from < self.to {
            let (from, len) = (self.from as i64, (self.to - self.from) as i64);
            // SAFETY: numbers only, and a descriptor that is borrowed for the call. A hint: the kernel reports write
            // errors to the process that flushes the file.
            let _ = unsafe {
                libc::sync_file_range(file.as_raw_fd(), from, len, libc::SYNC_FILE_RANGE_WRITE)
            };
            self.from = self.to;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn contiguous_writes_are_one_range() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 4096]).unwrap();
        let fd = file.as_fd();
        let mut writeback = Writeback::default();
        writeback.add(fd, 100, 50);
        writeback.add(fd, 150, 50);
        assert_eq!((writeback.from, writeback.to), (100, 200));
        writeback.add(fd, 1000, 1);
        assert_eq!((writeback.from, writeback.to), (1000, 1001));
        writeback.add(fd, 1001, WRITEBACK_BYTES);
        assert_eq!(
            (writeback.from, writeback.to),
            (1001 + WRITEBACK_BYTES, 1001 + WRITEBACK_BYTES)
        );
        writeback.add(fd, 1001 + WRITEBACK_BYTES, 9);
        writeback.flush(fd);
        assert_eq!(writeback.from, writeback.to);
    }
}
