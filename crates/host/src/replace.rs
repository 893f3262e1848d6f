// SPDX-License-Identifier: Apache-2.0
//! Replaces a file: whoever reads it, also after a crash, finds the old or the new content.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What the new content has to survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Survives {
    /// The end of this process, at any moment.
    Process,
    /// A loss of power as well.
    Reboot,
}

/// Replaces the file at `path`, or makes it, with mode 0600. The new content lies beside it for a moment, in a file with the
/// extension `new`.
///
/// # Errors
/// The kernel's. The old content is there then.
pub fn replace(path: &Path, content: &[u8], survives: Survives) -> io::Result<()> {
    let new = path.with_extension("new");
    crash_point(path);
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(content)?;
    if survives == Survives::Reboot {
        file.sync_all()?;
    }
    crash_point(path);
    fs::rename(&new, path)?;
    if survives == Survives::Reboot {
        fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()?;
    }
    crash_point(path);
    Ok(())
}

/// Where a test lets the process die.
#[cfg(not(feature = "crash-points"))]
fn crash_point(_: &Path) {}

/// Where a test lets the process die, as by SIGKILL: at the point number `VIOLA_CRASH_POINT`, counted from 1, of the file
/// called `VIOLA_CRASH_FILE`. The process notes that in the file `VIOLA_CRASH_LOG`.
#[cfg(feature = "crash-points")]
fn crash_point(path: &Path) {
    use std::sync::atomic::{AtomicU32, Ordering};
    static PASSED: AtomicU32 = AtomicU32::new(0);
    let is_it = std::env::var_os("VIOLA_CRASH_FILE").is_some_and(|f| path.ends_with(&f));
    let number = std::env::var("VIOLA_CRASH_POINT")
        .ok()
        .and_then(|n| n.parse().ok());
    if !is_it || number != Some(PASSED.fetch_add(1, Ordering::Relaxed) + 1) {
        return;
    }
    if let Some(log) = std::env::var_os("VIOLA_CRASH_LOG") {
        let _ = fs::write(log, format!("process {}", std::process::id()));
    }
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_new_content_replaces_the_old_for_the_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        for survives in [Survives::Process, Survives::Reboot] {
            for content in ["long content", "short"] {
                replace(&path, content.as_bytes(), survives).unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), content);
            }
        }
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let nowhere = dir.path().join("none/state.json");
        assert!(replace(&nowhere, b"", Survives::Process).is_err());
    }
}
