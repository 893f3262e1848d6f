// SPDX-License-Identifier: Apache-2.0
//! Registrations: a launcher that runs as root says which process is which VM.
//!
//! The folder [`FOLDER`] belongs to root. The file `PID` in it has one line, `START_TIME NAME`: field 22 of `/proc/PID/stat`
//! (clock ticks after boot) and the VM's name. `viola register PID` writes it, and any program of root may. The start time
//! makes a file that was left behind harmless: it does not fit the next process of that number.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use super::{has_owner, is_owned};
use crate::proc;
use crate::thread::Tid;

/// The folder of this host's registrations.
pub const FOLDER: &str = "/run/viola/vms";

/// Longest file that is read.
const MAX_BYTES: u64 = 4096;

/// What a file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    /// Start time of the process, clock ticks after boot.
    pub(crate) start_time: u64,
    /// Name of the VM.
    pub(crate) name: String,
}

/// The registration of a process; `None` without one, or when anybody but `owner` and root could have written it.
pub(crate) fn read(folder: &Path, pid: Tid, owner: u32) -> Option<Registration> {
    if !is_owned(folder, owner) {
        return None;
    }
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(folder.join(pid.to_string()))
        .ok()?;
    let meta = file.metadata().ok()?;
    if !meta.is_file() || !has_owner(&meta, owner) {
        return None;
    }
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text).ok()?;
    parse(&text)
}

/// What a file's text says; `None` when it is not one line of two parts.
pub(crate) fn parse(text: &str) -> Option<Registration> {
    let (start_time, name) = text.strip_suffix('\n')?.split_once(' ')?;
    let is_name = !name.is_empty() && !name.contains(char::is_control);
    Some(Registration {
        start_time: start_time.parse().ok().filter(|_| is_name)?,
        name: name.to_owned(),
    })
}

/// Registers a process under the name of its VM, and removes the registrations of processes that have ended.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] when the process has ended, [`io::ErrorKind::InvalidInput`] for a name with control characters or
/// without any, and the kernel's errors for the folder and the file.
pub fn write(folder: &Path, pid: Tid, name: &str) -> io::Result<()> {
    let start_time = start_time(pid)?.ok_or(io::ErrorKind::NotFound)?;
    let text = format!("{start_time} {name}\n");
    if parse(&text).is_none() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if let Some(above) = folder.parent() {
        fs::create_dir_all(above)?;
    }
    match fs::DirBuilder::new().mode(0o755).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    remove_ended(folder)?;
    // A reader finds the whole line or no file.
    let new = folder.join(format!(".{pid}"));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&new, folder.join(pid.to_string()))
}

/// Removes the registration of a process, if it has one.
///
/// # Errors
/// The kernel's for the file.
pub fn remove(folder: &Path, pid: Tid) -> io::Result<()> {
    match fs::remove_file(folder.join(pid.to_string())) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn remove_ended(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        let pid = entry.file_name().to_str().and_then(|n| n.parse().ok());
        if let Some(pid) = pid
            && start_time(pid)?.is_none()
        {
            remove(folder, pid)?;
        }
    }
    Ok(())
}

fn start_time(pid: Tid) -> io::Result<Option<u64>> {
    let stat = proc::stat(pid).map_err(io::Error::other)?;
    Ok(stat.filter(|s| !s.is_dead()).map(|s| s.start_time))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

    fn me() -> (Tid, u64, u32) {
        let pid = std::process::id();
        let own = rustix::process::geteuid().as_raw();
        (pid, start_time(pid).unwrap().unwrap(), own)
    }

    #[test]
    fn a_registration_is_read_back_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("viola/vms");
        let (pid, start_time, own) = me();
        assert_eq!(read(&folder, pid, own), None);
        write(&folder, pid, "db 01").unwrap();
        let name = "db 01".to_owned();
        assert_eq!(
            read(&folder, pid, own),
            Some(Registration { start_time, name })
        );
        remove(&folder, pid).unwrap();
        remove(&folder, pid).unwrap();
        assert_eq!(read(&folder, pid, own), None);
    }

    #[test]
    fn a_file_that_others_may_write_or_name_counts_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("vms");
        let (pid, _, own) = me();
        write(&folder, pid, "db01").unwrap();
        let file = folder.join(pid.to_string());
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(&file, 0o666);
        assert_eq!(read(&folder, pid, own), None);
        mode(&file, 0o644);
        mode(&folder, 0o777);
        assert_eq!(read(&folder, pid, own), None);
        mode(&folder, 0o755);
        assert!(read(&folder, pid, own).is_some());
        // A link that leads out of the folder.
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(&file, &elsewhere).unwrap();
        symlink(&elsewhere, &file).unwrap();
        assert_eq!(read(&folder, pid, own), None);
    }

    #[test]
    fn registrations_of_ended_processes_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("vms");
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        write(&folder, child.id(), "gone").unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let (pid, _, own) = me();
        write(&folder, pid, "here").unwrap();
        assert!(!folder.join(child.id().to_string()).exists());
        assert!(read(&folder, pid, own).is_some());
        let ended = write(&folder, child.id(), "gone").unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn only_a_whole_line_with_a_name_is_a_registration() {
        for text in ["", "12 a", "12\n", "12 \n", " a\n", "x a\n", "12 a\nb\n"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse("12 a b\n").unwrap().name, "a b");
        let (pid, ..) = me();
        let dir = tempfile::tempdir().unwrap();
        for name in ["", "a\nb"] {
            let refused = write(&dir.path().join("vms"), pid, name).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
