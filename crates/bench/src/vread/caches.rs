// SPDX-License-Identifier: Apache-2.0
//! Cold reads: drops an image's pages from the host's cache and checks that they are gone.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::{Path, PathBuf};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use viola_cli::error::{Failure, Outcome};

/// Maximum part of an image that may stay in the host's cache.
const MAX_RESIDENT: f64 = 0.01;
/// Maximum attempts; pages that another program uses at that moment stay.
const MAX_TRIES: usize = 5;

/// Writes back and drops the host's cached pages of a file or block device.
///
/// # Errors
/// More than 1 % stays cached, which would invalidate a cold figure.
pub fn drop_caches(path: &Path) -> Outcome {
    let failed = |e: std::io::Error| Failure::run(format!("{}: {e}", path.display()));
    let mut file = File::open(path).map_err(failed)?;
    let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
    let mut left = 0.0;
    for _ in 0..MAX_TRIES {
        // Dirty pages would stay.
        file.sync_all().map_err(failed)?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)
            .map_err(|e| failed(e.into()))?;
        left = resident(&file, size).map_err(failed)?;
        if left <= MAX_RESIDENT {
            return Ok(());
        }
    }
    Err(Failure::run(format!(
        "{}: {:.0} % stays in the host's cache, so reads are not cold; check whether another program uses it",
        path.display(),
        left * 100.0
    )))
}

/// Part of a file's pages in the host's cache, 0 to 1.
fn resident(file: &File, size: u64) -> std::io::Result<f64> {
    let length = usize::try_from(size).map_err(std::io::Error::other)?;
    if length == 0 {
        return Ok(0.0);
    }
    let mut pages = vec![0_u8; length.div_ceil(rustix::param::page_size())];
    // SAFETY: a new mapping at an address that the kernel chooses; it is only passed to mincore, never read.
    let at = unsafe {
        mmap(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ,
            MapFlags::SHARED,
            file,
            0,
        )?
    };
    // SAFETY: `at` and `length` describe the mapping, and `pages` has one byte per page.
    let result = match unsafe { libc::mincore(at, length, pages.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: the mapping from above, without remaining references.
    unsafe { munmap(at, length)? };
    result?;
    let held = pages.iter().filter(|page| *page & 1 != 0).count();
    Ok(held as f64 / pages.len() as f64)
}

/// All files below a folder.
pub fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => found.extend(files(&entry.path())?),
            false => found.push(entry.path()),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_pages_stay_cached_until_dropped() {
        // On a disk: pages of a memory file system cannot be dropped.
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, vec![7; 4 << 20]).unwrap();
        let part = || resident(&File::open(&path).unwrap(), 4 << 20).unwrap();
        assert!(part() > 0.9);
        drop_caches(&path).unwrap();
        assert!(part() <= MAX_RESIDENT);
    }
}
