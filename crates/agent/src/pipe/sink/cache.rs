// SPDX-License-Identifier: Apache-2.0
//! Keeps the guest's page cache of a sink file coherent with what the host writes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{Advice, fadvise};

/// The largest page size. A larger folio is dropped with the whole file.
const MAX_PAGE_BYTES: u64 = 64 << 10;
/// Bytes read and written at a time.
const COPY_CHUNK_BYTES: usize = 1 << 20;
/// cachestat(2), Linux 6.5; the same number on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// A buffer aligned for O_DIRECT.
#[derive(Debug)]
pub struct Aligned {
    bytes: Vec<u8>,
    from: usize,
    size: usize,
}

impl Aligned {
    const TO: usize = 4096;

    /// A buffer of `size` zeros.
    pub fn new(size: usize) -> Self {
        let bytes = vec![0; size + Self::TO];
        let from = bytes.as_ptr().align_offset(Self::TO);
        Self { bytes, from, size }
    }

    /// The aligned bytes.
    pub fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.from..self.from + self.size]
    }
}

/// Drops the cached pages of `from..to`. Returns how many are left, because they are mapped or being written.
///
/// # Errors
/// The kernel's error; ENOSYS before Linux 6.5.
pub fn drop_cached(file: &File, from: u64, to: u64) -> io::Result<u64> {
    let (from, to) = (
        from / MAX_PAGE_BYTES * MAX_PAGE_BYTES,
        to.next_multiple_of(MAX_PAGE_BYTES),
    );
    let length = std::num::NonZeroU64::new(to - from);
    fadvise(file, from, length, Advice::DontNeed)?;
    let left = cached(file, from, to)?;
    if left == 0 {
        return Ok(0);
    }
    // a folio that reaches beyond the range
    fadvise(file, 0, None, Advice::DontNeed)?;
    cached(file, from, to)
}

/// Number of cached pages.
fn cached(file: &File, from: u64, to: u64) -> io::Result<u64> {
    let range = [from, to - from];
    let mut counts = [0_u64; 5];
    // SAFETY: the kernel reads a struct cachestat_range, two numbers of 64 bits, and writes a struct cachestat, five of them.
    let done = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            file.as_raw_fd(),
            range.as_ptr(),
            counts.as_mut_ptr(),
            0,
        )
    };
    match done {
        0 => Ok(counts[0]),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the cached pages of `from..to` equal to the disk; `direct` is the file opened with O_DIRECT. Pages that
/// cannot be dropped, because they are mapped, are rewritten.
///
/// # Errors
/// The kernel's error.
pub fn refresh(file: &File, direct: &File, from: u64, to: u64) -> io::Result<()> {
    if drop_cached(file, from, to)? == 0 {
        return Ok(());
    }
    let mut buffer = Aligned::new(COPY_CHUNK_BYTES);
    let mut at = from / COPY_CHUNK_BYTES as u64 * COPY_CHUNK_BYTES as u64;
    while at < to {
        let got = direct.read_at(buffer.get(), at)?;
        let end = to.min(at + got as u64);
        let begin = from.max(at);
        if begin < end {
            let bytes = &buffer.get()[(begin - at) as usize..(end - at) as usize];
            file.write_all_at(bytes, begin)?;
        }
        at += COPY_CHUNK_BYTES as u64;
    }
    Ok(())
}
