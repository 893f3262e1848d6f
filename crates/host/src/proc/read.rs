// SPDX-License-Identifier: Apache-2.0
//! Reads files of procfs with a bound on their size.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::error::HostError;
use crate::thread::Tid;

/// Most bytes read from one file. A command line may be 2 MiB on a stock kernel.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Whether an error only means that the process has ended.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// The file's bytes, up to 4 MiB; `None` when the file or its process is gone.
///
/// # Errors
/// [`HostError::Read`] for any other failure, such as missing privilege.
pub fn read(path: impl AsRef<Path>) -> Result<Option<Vec<u8>>, HostError> {
    let path = path.as_ref();
    let mut bytes = Vec::new();
    match File::open(path).and_then(|f| f.take(MAX_FILE_BYTES).read_to_end(&mut bytes)) {
        Ok(_) => Ok(Some(bytes)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(HostError::read(path, e)),
    }
}

/// As [`read`], as text.
///
/// # Errors
/// As [`read`].
pub fn read_text(path: impl AsRef<Path>) -> Result<Option<String>, HostError> {
    Ok(read(path)?.map(|b| String::from_utf8_lossy(&b).into_owned()))
}

/// The target of a symbolic link such as `/proc/PID/exe`; `None` without one.
///
/// # Errors
/// As [`read`].
pub fn read_link(path: impl AsRef<Path>) -> Result<Option<PathBuf>, HostError> {
    let path = path.as_ref();
    match fs::read_link(path) {
        Ok(target) => Ok(Some(target)),
        Err(e) if is_gone(&e) => Ok(None),
        Err(e) => Err(HostError::read(path, e)),
    }
}

/// Entries of a folder whose names are numbers, in the kernel's order.
pub(super) fn numbers(dir: &Path) -> Result<Vec<Tid>, HostError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if is_gone(&e) => return Ok(Vec::new()),
        Err(e) => return Err(HostError::read(dir, e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) => found.extend(
                entry
                    .file_name()
                    .to_str()
                    .and_then(|n| n.parse::<Tid>().ok()),
            ),
            Err(e) if is_gone(&e) => break,
            Err(e) => return Err(HostError::read(dir, e)),
        }
    }
    Ok(found)
}

/// Value of one line `key:\tvalue` of `/proc/TID/status`.
pub(crate) fn status_field<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()))
}
