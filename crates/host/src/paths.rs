// SPDX-License-Identifier: Apache-2.0
//! Paths as another process means them.

use std::path::PathBuf;

use crate::proc;
use crate::thread::Tid;

/// A path of the process as this program can open it: through the process's root or working directory in `/proc`.
pub(crate) fn through_root(pid: Tid, path: &str) -> PathBuf {
    match path.strip_prefix('/') {
        Some(inside) => PathBuf::from(format!("/proc/{pid}/root")).join(inside),
        None => PathBuf::from(format!("/proc/{pid}/cwd")).join(path),
    }
}

/// Completes a relative path with the process's working directory.
pub(crate) fn absolute(pid: Tid, path: PathBuf) -> PathBuf {
    match proc::read_link(format!("/proc/{pid}/cwd")) {
        Ok(Some(cwd)) if path.is_relative() => cwd.join(path),
        _ => path,
    }
}
